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

enum class Element { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

// A (batch, head, row, column) array of elements, whose columns are contiguous; strides in
// elements.
struct ConstTensor {
  const void* data = nullptr;
  std::array<int64_t, 3> stride = {0, 0, 0};
};
struct Tensor {
  void* data = nullptr;
  std::array<int64_t, 3> stride = {0, 0, 0};
};

struct RelativeTables {
  const TableLayout* layout = nullptr;  // null: neither
  ConstTensor query;                    // (B, H, Lq, dim), of the input's element type
  int64_t dim = 0;
  float factor = 1;
  const float* keys = nullptr;  // (1 or H, size, dim), contiguous; null: none
  bool key_heads = false;
  const float* values = nullptr;  // (1 or H, size, Dv), contiguous; null: none
  bool value_heads = false;
  // Each query has up to four tables of `size` numbers. Of each of them, so many are held at a
  // time, unless the heads that share one of keys have more; results do not depend on it.
  int64_t most_numbers = int64_t{1} << 24;
};

struct Input {
  Element element = Element::kFloat32;
  AttentionShape shape;
  ConstTensor x;  // (B, H, Lq, D)
  ConstTensor y;  // (B, Hkv, Lk, D)
  ConstTensor v;  // (B, Hkv, Lk, Dv)
  const float* row_scalars = nullptr;
  const float* column_scalars = nullptr;
  const float* head_scalars = nullptr;
  const float* factor = nullptr;
  Bias<const float> bias;  // the table on the device, the layout on the host
  const float* key_bias = nullptr;
  const float* key_bias_low = nullptr;
  const float* key_bias_base = nullptr;
  View<const float> pair_bias;
  RelativeTables relative;
  const float* temperature = nullptr;
  Dropout dropout;
  Mask mask;  // its pointers are the device's
  // (Lq + 1), ascending, on the device: of what the mask leaves, query i of every batch sees the
  // keys from key_rows[i] to key_rows[i + 1] - 1. Null: all.
  const int64_t* key_rows = nullptr;
  int64_t query_offset = 0;
  const int64_t* query_offsets = nullptr;  // (B), on the device
};

struct Output {
  Tensor o;
  // (B, H, Lq, Dv), contiguous: o before it is rounded to the element type; null: not kept.
  float* exact_o = nullptr;
  float* lse = nullptr;         // (B, H, Lq)
  float* statistics = nullptr;  // (3, B, H, Lq); null: not kept
};

// What the forward pass gave, and the gradients to its outputs.
struct Saved {
  ConstTensor o;
  const float* exact_o = nullptr;  // null: o is taken
  ConstTensor d_o;
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
