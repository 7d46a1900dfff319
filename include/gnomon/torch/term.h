// What a similarity and a position are to attention, and sums of positions.
#ifndef GNOMON_TORCH_TERM_H_
#define GNOMON_TORCH_TERM_H_

#include <torch/types.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace gnomon {

// One number for all heads, or a tensor, which may require grad: (H,) with one for each query head,
// or () with one for all. Its dtype is that of q, or float32 where q is float16 or bfloat16.
class HeadValue {
 public:
  HeadValue(double number) : number_(number) {}                                // NOLINT: implicit
  HeadValue(torch::Tensor tensor) : number_(0), tensor_(std::move(tensor)) {}  // NOLINT: implicit
  bool is_number() const { return !tensor_.defined(); }
  double number() const { return number_; }
  const torch::Tensor& tensor() const { return tensor_; }

 private:
  double number_;
  torch::Tensor tensor_;
};

// A similarity or a position, as the operator reads it: a specification in the grammar of
// gnomon/catalogue.h, and the tensors of those of its parameters that are "name=tensor" there, in
// the order of the catalogue. The functions of gnomon/torch/terms.h make them, and a specification
// alone is one, too: "penumbral:gamma=0.5". What it leaves out has the value that a module starts
// with.
struct Term {
  std::string spec;
  std::vector<torch::Tensor> tensors;
};
struct Similarity : Term {
  Similarity(std::string text) : Term{std::move(text), {}} {}  // NOLINT: implicit
  Similarity(const char* text) : Term{text, {}} {}             // NOLINT: implicit
  explicit Similarity(Term term) : Term(std::move(term)) {}
};
// Also the sum of several.
struct Position : Term {
  Position() = default;
  Position(std::string text) : Term{std::move(text), {}} {}  // NOLINT: implicit
  Position(const char* text) : Term{text, {}} {}             // NOLINT: implicit
  explicit Position(Term term) : Term(std::move(term)) {}
};
// "rope" + ALiBi(slopes) and ALiBi(slopes) + "rope", too.
Position operator+(const Position& a, const Position& b);

namespace position {

// One bias for each axis of a grid, summed; each reads the coordinates along its axis instead of
// p_i and p_j. Tokens are in row-major order, after `prefix` tokens (a class token) that have no
// bias, neither as queries nor as keys. Self-attention of all tokens only: Lq = Lk = prefix + the
// product of the shape, query_offset nullopt or 0.
Position Grid(const std::vector<int64_t>& shape, const std::vector<Position>& axes,
              int64_t prefix = 0);

}  // namespace position

}  // namespace gnomon

#endif  // GNOMON_TORCH_TERM_H_
