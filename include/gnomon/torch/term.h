// Similarities and positions as arguments of attention, and sums of positions.
#ifndef GNOMON_TORCH_TERM_H_
#define GNOMON_TORCH_TERM_H_

#include <torch/types.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace gnomon {

// A number that applies to all heads, or a tensor, which may require grad: (H,) with one value per
// query head, or () if shared by all heads. Its dtype is that of q, or float32 if q is float16 or
// bfloat16.
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

// A similarity or a position in the form that the operator reads: a specification in the grammar of
// gnomon/catalogue.h, and the tensors of the parameters written as "name=tensor", in the order of
// the catalogue. The functions of gnomon/torch/terms.h create terms; a specification string such as
// "penumbral:gamma=0.5" is also a term. Omitted parameters take the initial values of a module.
struct Term {
  std::string spec;
  std::vector<torch::Tensor> tensors;
};
struct Similarity : Term {
  Similarity(std::string text) : Term{std::move(text), {}} {}  // NOLINT: implicit
  Similarity(const char* text) : Term{text, {}} {}             // NOLINT: implicit
  explicit Similarity(Term term) : Term(std::move(term)) {}
};
// A position or a sum of positions.
struct Position : Term {
  Position() = default;
  Position(std::string text) : Term{std::move(text), {}} {}  // NOLINT: implicit
  Position(const char* text) : Term{text, {}} {}             // NOLINT: implicit
  explicit Position(Term term) : Term(std::move(term)) {}
};
// Also supports "rope" + ALiBi(slopes) and ALiBi(slopes) + "rope".
Position operator+(const Position& a, const Position& b);

namespace position {

// The sum of one bias per axis of a grid; each reads the coordinates along its axis instead of p_i
// and p_j. Tokens are in row-major order, after `prefix` tokens (such as a class token) that have
// no bias, neither as queries nor as keys. Without query_offset, queries and keys are all tokens:
// Lq = Lk = prefix + the product of the shape. With it, row i is token query_offset + i and column
// j is token j; keys beyond the grid (memory keys) have no bias.
Position Grid(const std::vector<int64_t>& shape, const std::vector<Position>& axes,
              int64_t prefix = 0);

}  // namespace position

}  // namespace gnomon

#endif  // GNOMON_TORCH_TERM_H_
