// Sentences and their translations: reading two files with corresponding lines per part of the
// data, tokenizing them, and selecting the pairs of a training step.
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
  std::string name;  // "train", "valid", or that of its files
  // Equally many in both languages, none empty, without line feeds.
  std::vector<std::string> source;
  std::vector<std::string> target;
};

struct ParallelText {
  std::string path;  // as it was given
  std::string source_language;
  std::string target_language;
  int64_t files = 0;
  std::vector<ParallelPart> parts;  // train and valid before others, these by name
  std::string sha256;               // of all names and lines

  // nullptr if there is no such part.
  const ParallelPart* Find(std::string_view name) const;
};

// Reads the files PART.LANGUAGE of a folder, plain or compressed by gzip (PART.LANGUAGE.gz). The
// parts are `train`; `valid`, also called validation, val or dev; and all names that begin with
// `test`. An empty language is determined from the files: the other one if there are two, or source
// and target for files named src and tgt. Throws an Error that names the file and the line if a
// line is missing, empty or not UTF-8, or if the numbers of lines of a part differ.
ParallelText ReadParallelText(const std::filesystem::path& folder,
                              const std::string& source_language,
                              const std::string& target_language);

// The lines of a file, plain or compressed by gzip, or of the standard input (`path` is "-"),
// without line ends, including blank lines. Throws an Error that names the file, and the line if it
// is not UTF-8.
std::vector<std::string> ReadSentences(const std::filesystem::path& path);

// Whether there are only spaces.
bool IsBlank(std::string_view line);

// The tokens of a line of text, and the token of a line end.
using Sentence = std::vector<int32_t>;

// The token that ends sentences.
int64_t EndOfSentence(const Tokenizer& tokenizer);
Sentence EncodeSentence(const Tokenizer& tokenizer, std::string_view line);
// The text of tokens without the end token, in UTF-8.
std::string DecodeSentence(const Tokenizer& tokenizer, const std::vector<int64_t>& tokens);

// The order in which training reads pairs of sentences. In each pass, pairs of similar lengths form
// a batch: the pairs are shuffled, sorted by the length of the target and then of the source, and
// split into batches, which are shuffled. A remainder smaller than a batch is left out of that
// pass. The order depends only on lengths, seed and batch.
class SentenceBatches {
 public:
  SentenceBatches() = default;
  SentenceBatches(std::vector<int64_t> source_lengths, std::vector<int64_t> target_lengths,
                  uint64_t seed, int64_t batch);

  // The `batch` pairs of a step; there must be at least as many pairs.
  std::vector<int64_t> Pairs(int64_t step);

 private:
  void Shuffle(int64_t pass);

  std::vector<int64_t> source_lengths_;
  std::vector<int64_t> target_lengths_;
  uint64_t seed_ = 0;
  int64_t batch_ = 1;
  int64_t pass_ = -1;           // the pass of `order_`
  std::vector<int64_t> order_;  // consecutive batches
};

}  // namespace gnomon::lab

#endif  // GNOMON_TEXT_PARALLEL_TEXT_H_
