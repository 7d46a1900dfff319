// The operator of gnomon/attention.h on a GPU: which kernels run, in which order, with which
// memory. The terms and their meaning are those of gnomon/attention.h; pointers are the device's.
//
// Tokens, values and outputs are of one element type; scalars, biases, statistics and their
// gradients are fp32. Results are bitwise the same from run to run.
#ifndef GNOMON_SRC_CUDA_ATTENTION_H_
#define GNOMON_SRC_CUDA_ATTENTION_H_

#include <array>
#include <cstdint>
#include <string>

#include "cuda/backend.h"
#include "gnomon/attention.h"

namespace gnomon::cuda {

using Element = TokenType;

// A (batch, head, row, column) array of elements, whose columns are contiguous; strides in
// elements.
struct Tensor {
  void* data = nullptr;
  std::array<int64_t, 3> stride = {0, 0, 0};
};

// The operator's input, its pointers the device's and its layouts the host's. Tokens and values are
// of the element type of x; relative.query, an array of floats, is not read.
struct Input : AttentionInput<float> {
  Input() = default;
  explicit Input(const AttentionInput<float>& input) : AttentionInput<float>(input) {}

  Tokens relative_query;  // (B, H, Lq, relative.dim)
  // (Lq + 1), ascending: of what the mask leaves, query i of every batch sees the keys from
  // key_rows[i] to key_rows[i + 1] - 1. Null: all.
  const int64_t* key_rows = nullptr;
  // Each query has up to four tables of relative.layout's size. Of each of them, so many numbers
  // are held at a time, unless the heads that share one of keys have more; results do not depend
  // on it.
  int64_t most_table_numbers = int64_t{1} << 24;
};

struct Output {
  Tensor o;  // null: exact_o alone
  // (B, H, Lq, Dv), contiguous: o before it is rounded to the element type; null: not kept.
  float* exact_o = nullptr;
  float* lse = nullptr;         // (B, H, Lq)
  float* statistics = nullptr;  // (3, B, H, Lq); null: not kept
};

// What the forward pass gave, and the gradients to its outputs.
struct Saved {
  Tokens o;                        // not read where there is exact_o
  const float* exact_o = nullptr;  // null: o is taken
  Tokens d_o;
  const float* d_lse = nullptr;       // null: zero
  const float* statistics = nullptr;  // null: the forward pass is run anew
};

// Null pointers are not computed.
struct Gradient {
  Tensor x;
  Tensor y;
  Tensor v;
  float* row_scalars = nullptr;
  float* column_scalars = nullptr;
  float* head_scalars = nullptr;
  float* factor = nullptr;
  Bias<float> bias;
  float* key_bias = nullptr;
  View<float> pair_bias;
  Tensor relative_query;
  float* relative_keys = nullptr;
  float* relative_values = nullptr;
  float* temperature = nullptr;
};

// Throw Error for what is wrong, and for what these kernels do not compute (Unsupported() says what
// that is). The arguments have been checked as those of AttentionForward and AttentionBackward are.
void Forward(const PairFunction& function, const Input& input, const Output& output,
             Backend& backend);
void Backward(const PairFunction& function, const Input& input, const Saved& saved,
              const Gradient& gradient, Backend& backend);

// Empty, or the first argument that the kernels do not compute, and why
// ("head_dim: is 320, at most 256").
std::string Unsupported(const PairFunction& function, const Input& input);

}  // namespace gnomon::cuda

#endif  // GNOMON_SRC_CUDA_ATTENTION_H_
