// Synthetic problems from the literature on generalisation to longer inputs, generated from a seed.
// A row is an input, a mark and the answer. `length` is the number of symbols in the input.
#ifndef GNOMON_MODELS_PROBLEMS_H_
#define GNOMON_MODELS_PROBLEMS_H_

#include <torch/torch.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace gnomon::lab {

// Random numbers that are the same on all platforms.
class Draws {
 public:
  // Different arguments give independent streams. `purpose` distinguishes uses of the same seed.
  Draws(uint32_t purpose, int64_t seed, int64_t step);

  // Returns a number from 0 to `count` - 1.
  int64_t Below(int64_t count);

 private:
  std::mt19937_64 generator_;
};

struct ProblemRow {
  std::vector<int64_t> tokens;
  std::vector<bool> is_answer;  // whether the model must predict each token

  void Add(int64_t token, bool answers = false);
};

struct Problem {
  const char* name;
  const char* summary;
  // Default, minimum and maximum number of distinct symbols.
  int64_t symbols;
  int64_t fewest_symbols;
  int64_t most_symbols;
  // The name of each token. The last token is the mark between input and answer.
  std::vector<std::string> (*vocabulary)(int64_t symbols);
  // Maximum number of tokens per row, including the answer.
  int64_t (*tokens)(int64_t length);
  // Maximum input length for a number of symbols.
  int64_t (*longest)(int64_t symbols);
  void (*make)(int64_t symbols, int64_t length, Draws* draws, ProblemRow* row);
};

const std::vector<Problem>& Problems();
std::vector<std::string> ProblemNames();
// Throws an Error that lists all problem names if no problem has this name.
const Problem& FindProblem(const std::string& name);

struct ProblemRows {
  torch::Tensor tokens;     // (count, tokens), int64; padded with the mark after the answer
  torch::Tensor is_answer;  // the same shape, bool
};

ProblemRows MakeRows(const Problem& problem, int64_t symbols, int64_t length, int64_t count,
                     Draws* draws);

// Returns `count` random subsets, each with `size` numbers from 0 to `limit` - 1 in ascending
// order: (count, size), int64.
torch::Tensor RandomSubsets(int64_t limit, int64_t size, int64_t count, Draws* draws);

}  // namespace gnomon::lab

#endif  // GNOMON_MODELS_PROBLEMS_H_
