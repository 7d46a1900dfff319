// Text as bytes: what `--data` takes; and which tokens a step or an evaluation reads.
#ifndef GNOMON_TEXT_TEXT_DATA_H_
#define GNOMON_TEXT_TEXT_DATA_H_

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace gnomon::models {

struct TextData {
  std::string path;    // as it was given
  int64_t files = 0;   // how many files were read
  std::string train;   // bytes
  std::string valid;   // bytes
  std::string sha256;  // of the training bytes followed by the validation bytes
};

// Reads a file, or every text file below a folder in the order of their paths. Files whose name or
// folder begins with a dot are left out, and so are files with a zero byte in their first 8,192. A
// mark of UTF-8's byte order at the beginning of a file is no part of it.
// The last tenth of the bytes is the validation part, unless the folder holds an entry called
// train (a folder, or a file train.*) and one called valid, validation, val or dev: then those two
// are the parts. Throws Error where nothing can be read, or a part is empty.
TextData ReadText(const std::filesystem::path& path);

// Where the windows of one training step begin: `batch` numbers in [0, tokens - length), each a
// function of (seed, step, row) alone, so that every model sees the same data in the same order.
std::vector<int64_t> TrainingStarts(int64_t tokens, int64_t length, uint64_t seed, int64_t step,
                                    int64_t batch);

// The segments of one training step that reads a text as `batch` streams side by side.
struct StreamStep {
  std::vector<int64_t> starts;  // one a stream
  bool begins = false;          // the streams begin: the segments before were from elsewhere
};

// How many segments of `length` a stream has; 0: the text is too short.
int64_t StreamSegments(int64_t tokens, int64_t length, int64_t batch);

// Stream n is the n-th of `batch` equal parts of the text, read in segments of `length` one after
// the other. At its end all begin again, each time shifted by a number in [0, length) that is a
// function of (seed, round) alone. StreamSegments must be at least 1.
StreamStep TrainingStream(int64_t tokens, int64_t length, uint64_t seed, int64_t step,
                          int64_t batch);

// Where the evaluation windows of `length` begin. Stretches of `longest` tokens, `budget` tokens in
// all (at least one stretch), stand evenly over the text, each cut into windows of `length`: every
// length that divides the longest predicts exactly the same tokens.
std::vector<int64_t> EvaluationStarts(int64_t tokens, int64_t length, int64_t longest,
                                      int64_t budget);

}  // namespace gnomon::models

#endif  // GNOMON_TEXT_TEXT_DATA_H_
