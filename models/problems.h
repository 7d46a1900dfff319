// The problems that the literature measures generalisation to longer inputs by, made from a seed:
// an input, a mark, and the answer. `length` counts the symbols of the input.
#ifndef GNOMON_MODELS_PROBLEMS_H_
#define GNOMON_MODELS_PROBLEMS_H_

#include <torch/torch.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace gnomon::models {

// Draws that are the same on every platform.
class Draws {
 public:
  // Streams of other numbers are others. The first says what they are for.
  Draws(uint32_t purpose, int64_t seed, int64_t step);

  // From 0 to `count` - 1.
  int64_t Below(int64_t count);

 private:
  std::mt19937_64 generator_;
};

struct ProblemRow {
  std::vector<int64_t> tokens;
  std::vector<bool> is_answer;  // which of them are to be told from those before

  void Add(int64_t token, bool answers = false);
};

struct Problem {
  const char* name;
  const char* summary;
  // Different symbols: by default, and how many there may be.
  int64_t symbols;
  int64_t fewest_symbols;
  int64_t most_symbols;
  // Words of the vocabulary; the mark between input and answer is the last one.
  std::vector<std::string> (*vocabulary)(int64_t symbols);
  // Tokens of a row, with the answer, at the most.
  int64_t (*tokens)(int64_t length);
  // The longest input that there is with so many symbols.
  int64_t (*longest)(int64_t symbols);
  void (*make)(int64_t symbols, int64_t length, Draws* draws, ProblemRow* row);
};

const std::vector<Problem>& Problems();
std::vector<std::string> ProblemNames();
// Throws Error that lists all where there is none of that name.
const Problem& FindProblem(const std::string& name);

struct ProblemRows {
  torch::Tensor tokens;     // (count, tokens), int64; what follows an answer is the mark
  torch::Tensor is_answer;  // the same shape, bool
};

ProblemRows MakeRows(const Problem& problem, int64_t symbols, int64_t length, int64_t count,
                     Draws* draws);

// For each of `count` rows a sorted random subset, of `size`, of the numbers from 0 to `limit` - 1:
// (count, size), int64.
torch::Tensor RandomSubsets(int64_t limit, int64_t size, int64_t count, Draws* draws);

}  // namespace gnomon::models

#endif  // GNOMON_MODELS_PROBLEMS_H_
