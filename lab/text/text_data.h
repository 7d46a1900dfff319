// Text as bytes (the argument of `--data`), and the windows that a training step or an evaluation
// reads.
#ifndef GNOMON_TEXT_TEXT_DATA_H_
#define GNOMON_TEXT_TEXT_DATA_H_

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace gnomon::lab {

struct TextData {
  std::string path;    // as it was given
  int64_t files = 0;   // number of files
  std::string train;   // bytes
  std::string valid;   // bytes
  std::string sha256;  // of the training bytes followed by the validation bytes
};

// Reads a file, or all text files in a folder and its subfolders in the order of their paths. Skips
// hidden files and folders, and files with a zero byte in the first 8,192 bytes. A UTF-8 byte order
// mark at the beginning of a file is removed. If the folder contains an entry named train (a
// folder, or a file train.*) and one named valid, validation, val or dev, these are the two splits.
// Otherwise, the last tenth of the bytes is the validation split. Throws Error if nothing can be
// read or a split is empty.
TextData ReadText(const std::filesystem::path& path);

// Returns the start of each window of a training step: `batch` numbers in [0, tokens - length).
// Each is a function of (seed, step, row) only, so that all models are trained on the same data in
// the same order.
std::vector<int64_t> TrainingStarts(int64_t tokens, int64_t length, uint64_t seed, int64_t step,
                                    int64_t batch);

// The segments of one training step that reads a text as `batch` parallel streams.
struct StreamStep {
  std::vector<int64_t> starts;  // one per stream
  bool begins = false;          // whether the streams restart at this segment
};

// Number of segments of `length` per stream; 0 if the text is too short.
int64_t StreamSegments(int64_t tokens, int64_t length, int64_t batch);

// Stream n is the n-th of `batch` equal sections of the text, read in consecutive segments of
// `length`. After the last segment, all streams restart, shifted by a number in [0, length) that
// depends only on the seed and the number of restarts. StreamSegments() must be at least 1.
StreamStep TrainingStream(int64_t tokens, int64_t length, uint64_t seed, int64_t step,
                          int64_t batch);

// Returns the start of each evaluation window of `length`. Stretches of `longest` tokens are spread
// evenly over the text and split into windows of `length`. There are as many stretches as fit into
// `budget` tokens, but at least one. All lengths that divide `longest` therefore predict the same
// tokens.
std::vector<int64_t> EvaluationStarts(int64_t tokens, int64_t length, int64_t longest,
                                      int64_t budget);

}  // namespace gnomon::lab

#endif  // GNOMON_TEXT_TEXT_DATA_H_
