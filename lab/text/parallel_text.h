// Sentences and their translations. Each split has two files whose lines correspond. This code
// reads and tokenizes them, and selects the pairs of each training step.
#ifndef GNOMON_TEXT_PARALLEL_TEXT_H_
#define GNOMON_TEXT_PARALLEL_TEXT_H_

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokens.h"

namespace gnomon::lab {

inline constexpr const char* kTrainPart = "train";
inline constexpr const char* kValidPart = "valid";

struct ParallelPart {
  std::string name;  // "train", "valid", or the name of a test set
  // Both languages have the same number of sentences. Sentences are not empty and contain no line
  // feeds.
  std::vector<std::string> source;
  std::vector<std::string> target;
};

struct ParallelText {
  std::string path;  // as it was given
  std::string source_language;
  std::string target_language;
  int64_t files = 0;
  std::vector<ParallelPart> parts;  // train, valid, then the others by name
  std::string sha256;               // of all names and lines

  // Returns nullptr if there is no such split.
  const ParallelPart* Find(std::string_view name) const;
};

// Reads the files PART.LANGUAGE of a folder, plain or gzipped (PART.LANGUAGE.gz). PART is `train`,
// `valid` (or validation, val, dev) or any name that begins with `test`. If a language is empty, it
// is determined from the files. If both are empty, they are src and tgt, or source and target. If
// one is given and the files have two languages, the other language is used. Throws an Error that
// names the file and the line if a line is empty or not UTF-8. Throws an Error that names both
// files of a split if their numbers of lines differ.
ParallelText ReadParallelText(const std::filesystem::path& folder,
                              const std::string& source_language,
                              const std::string& target_language);

// Reads the lines of a plain or gzipped file, or of standard input (`path` is "-"). Returns them
// without line ends, including blank lines. Throws an Error that names the file and, if a line is
// not UTF-8, the line.
std::vector<std::string> ReadSentences(const std::filesystem::path& path);

// Whether a line is empty or contains only white space.
bool IsBlank(std::string_view line);

// The tokens of a line of text, including the end token.
using Sentence = std::vector<int32_t>;

// The token at the end of each sentence.
int64_t EndOfSentence(const Tokenizer& tokenizer);
Sentence EncodeSentence(const Tokenizer& tokenizer, std::string_view line);
// Decodes tokens without the end token to UTF-8.
std::string DecodeSentence(const Tokenizer& tokenizer, const std::vector<int64_t>& tokens);

// The order in which training reads pairs of sentences. Batches contain pairs of similar lengths.
// In each pass, the pairs are shuffled, sorted by target length and then source length, and split
// into batches, which are shuffled. Pairs that do not fill a batch are left out of that pass. The
// order depends only on lengths, seed and batch size.
class SentenceBatches {
 public:
  SentenceBatches() = default;
  SentenceBatches(std::vector<int64_t> source_lengths, std::vector<int64_t> target_lengths,
                  uint64_t seed, int64_t batch);

  // Returns the `batch` pairs of a step. There must be at least `batch` pairs in total.
  std::vector<int64_t> Pairs(int64_t step);

 private:
  void Shuffle(int64_t pass);

  std::vector<int64_t> source_lengths_;
  std::vector<int64_t> target_lengths_;
  uint64_t seed_ = 0;
  int64_t batch_ = 1;
  int64_t pass_ = -1;           // the pass to which `order_` belongs
  std::vector<int64_t> order_;  // consecutive batches
};

}  // namespace gnomon::lab

#endif  // GNOMON_TEXT_PARALLEL_TEXT_H_
