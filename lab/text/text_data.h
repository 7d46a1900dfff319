// Text as bytes (the argument of `--data`), and the tokens that a step or an evaluation reads.
#ifndef GNOMON_TEXT_TEXT_DATA_H_
#define GNOMON_TEXT_TEXT_DATA_H_

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace gnomon::lab {

struct TextData {
  std::string path;    // as it was given
  int64_t files = 0;   // how many files were read
  std::string train;   // bytes
  std::string valid;   // bytes
  std::string sha256;  // of the training bytes followed by the validation bytes
};

// Reads a file, or every text file below a folder in the order of their paths. Files whose name or
// folder begins with a dot are skipped, as are files with a zero byte in the first 8,192 bytes. A
// UTF-8 byte order mark at the beginning of a file is removed. The last tenth of the bytes is the
// validation part, unless the folder contains an entry named train (a folder, or a file train.*)
// and one named valid, validation, val or dev, which are then the two parts. Throws Error if
// nothing can be read or a part is empty.
TextData ReadText(const std::filesystem::path& path);

// Start of each window of a training step: `batch` numbers in [0, tokens - length), each a function
// of only (seed, step, row), so that every model is trained on the same data in the same order.
std::vector<int64_t> TrainingStarts(int64_t tokens, int64_t length, uint64_t seed, int64_t step,
                                    int64_t batch);

// The segments of one training step that reads a text as `batch` parallel streams.
struct StreamStep {
  std::vector<int64_t> starts;  // one a stream
  bool begins = false;          // the streams begin: the segments before were from elsewhere
};

// Number of segments of `length` per stream; 0 if the text is too short.
int64_t StreamSegments(int64_t tokens, int64_t length, int64_t batch);

// Stream n is the n-th of `batch` equal parts of the text, read in consecutive segments of
// `length`. At the end, all streams restart, each time shifted by a number in [0, length) that
// depends only on (seed, round). StreamSegments must be at least 1.
StreamStep TrainingStream(int64_t tokens, int64_t length, uint64_t seed, int64_t step,
                          int64_t batch);

// Start of each evaluation window of `length`. Stretches of `longest` tokens, `budget` tokens in
// total (at least one stretch), are spread evenly over the text and split into windows of `length`.
// All lengths that divide the longest thus predict the same tokens.
std::vector<int64_t> EvaluationStarts(int64_t tokens, int64_t length, int64_t longest,
                                      int64_t budget);

}  // namespace gnomon::lab

#endif  // GNOMON_TEXT_TEXT_DATA_H_
