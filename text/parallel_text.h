// Sentences and their translations: two files for each part of the data, whose lines correspond;
// as tokens; and which of them a training step reads.
#ifndef GNOMON_TEXT_PARALLEL_TEXT_H_
#define GNOMON_TEXT_PARALLEL_TEXT_H_

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokens.h"

namespace gnomon::models {

inline constexpr const char* kTrainPart = "train";
inline constexpr const char* kValidPart = "valid";

struct ParallelPart {
  std::string name;  // "train", "valid", or that of its files
  // As many of the one as of the other, none of them empty; without their line feeds.
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

  // nullptr where there is no such part.
  const ParallelPart* Find(std::string_view name) const;
};

// Reads the files PART.LANGUAGE of a folder, each as it is or in gzip (PART.LANGUAGE.gz): the parts
// are `train`; `valid`, also called validation, val or dev; and all whose name begins with `test`.
// Of the languages, an empty one is told by the files: where there are two, from the other one,
// and source and target where the files are called so (src and tgt). Throws Error naming the file
// and the line that is wrong: one that is missing, or empty, or not UTF-8; parts of which the
// languages differ in their lines.
ParallelText ReadParallelText(const std::filesystem::path& folder,
                              const std::string& source_language,
                              const std::string& target_language);

// The lines of a file, as it is or in gzip, or of the standard input (`path` is "-"), without their
// ends; blank ones are there too. Throws Error naming the file, and a line that is not UTF-8.
std::vector<std::string> ReadSentences(const std::filesystem::path& path);

// Whether there is nothing but spaces.
bool IsBlank(std::string_view line);

// The tokens of a line of text, and that of a line's end.
using Sentence = std::vector<int32_t>;

// The token that ends sentences.
int64_t EndOfSentence(const Tokenizer& tokenizer);
Sentence EncodeSentence(const Tokenizer& tokenizer, std::string_view line);
// The text of tokens without that of the end, in UTF-8.
std::string DecodeSentence(const Tokenizer& tokenizer, const std::vector<int64_t>& tokens);

// The order in which training reads pairs of sentences. In each pass over them, pairs of like
// lengths are in one batch: they are shuffled, brought into the order of their target's lengths,
// and of their source's where these are the same, and cut into batches, which are shuffled. What
// is left over, less than a batch, is left out in that pass. A function of lengths, seed and batch
// alone.
class SentenceBatches {
 public:
  SentenceBatches() = default;
  SentenceBatches(std::vector<int64_t> source_lengths, std::vector<int64_t> target_lengths,
                  uint64_t seed, int64_t batch);

  // The pairs of a step, `batch` of them; there must be as many.
  std::vector<int64_t> Pairs(int64_t step);

 private:
  void Shuffle(int64_t pass);

  std::vector<int64_t> source_lengths_;
  std::vector<int64_t> target_lengths_;
  uint64_t seed_ = 0;
  int64_t batch_ = 1;
  int64_t pass_ = -1;           // that `order_` is of
  std::vector<int64_t> order_;  // batches one after the other
};

}  // namespace gnomon::models

#endif  // GNOMON_TEXT_PARALLEL_TEXT_H_
