// Attention on a GPU. Runs the operator of gnomon/attention.h by selecting kernels, ordering their
// launches and allocating their memory. All terms have the same meaning as in gnomon/attention.h;
// pointers are device pointers.
//
// Tokens, values and outputs share one element type; scalars, biases, statistics and their
// gradients are fp32. Results are bitwise reproducible.
#ifndef GNOMON_SRC_CUDA_ATTENTION_H_
#define GNOMON_SRC_CUDA_ATTENTION_H_

#include <cstdint>
#include <string>

#include "cuda/backend.h"
#include "gnomon/attention.h"

namespace gnomon::cuda {

using Element = TokenType;

// An array of the call's element type.
using Tensor = View<void>;

// The operator's input. Pointers are device pointers; layouts are host objects. Tokens and values
// have the element type of x. relative.query and relative.key, arrays of floats, are ignored in
// favour of relative_query and relative_key.
struct Input : AttentionInput<float> {
  Input() = default;
  explicit Input(const AttentionInput<float>& input) : AttentionInput<float>(input) {}

  Tokens relative_query;  // (B, H, Lq, relative.dim)
  Tokens relative_key;    // (B, Hkv, Lk, relative.key_dim)
  // (Lq + 1), ascending. If the mask allows them, query i of every batch element attends to keys
  // [key_rows[i], key_rows[i + 1]). If null, only the mask applies.
  const int64_t* key_rows = nullptr;
  // If its table is set, y and v are arrays of pages (count, Hkv, size, columns), and only
  // Forward() supports this: key j of batch element b is row j % size of page table[b, j / size].
  // Entries outside [0, count) are clamped.
  struct Pages {
    const int64_t* table = nullptr;  // (B, shape.keys / size), contiguous
    int64_t count = 0;
    int64_t size = 1;  // a power of 2
  };
  Pages pages;
  // Whether the heads are key heads, and the queries are query heads that share one, at the
  // position of query 0. The factor then has an element per query head. Forward() packs calls with
  // one query.
  bool packed = false;
  // Queries and keys have several kinds of tables, each with the size of relative.layout. This is
  // the maximum number of elements of each kind in memory at once; only the query heads of a single
  // key head may exceed it. Results do not depend on this limit.
  int64_t most_table_numbers = int64_t{1} << 24;
  // The least number of keys for which negligible weights are skipped. With fewer keys, the kernels
  // that find them would take a larger part of the time.
  int64_t least_skipping_keys = 4096;
};

struct Output {
  Tensor o;  // if null, only exact_o is written
  // (B, H, Lq, Dv), contiguous: o before rounding to the element type. Not stored if null.
  float* exact_o = nullptr;
  float* lse = nullptr;         // (B, H, Lq)
  float* statistics = nullptr;  // (3, B, H, Lq); not stored if null
  // Whether a backward pass will use exact_o. For pair functions with row or column scalars and
  // 16-bit tokens, exact_o is then as precise as for fp32 tokens, which takes more time.
  bool precise = false;
};

// The results of the forward pass and the gradients of its outputs.
struct Saved {
  Tokens o;                        // ignored if exact_o is set
  const float* exact_o = nullptr;  // if null, o is used
  Tokens d_o;
  const float* d_lse = nullptr;       // null means 0
  const float* statistics = nullptr;  // if null, the forward pass is repeated
  bool precise = false;               // Output::precise
};

// Gradients with null pointers are not computed.
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
  Tensor relative_key;
  float* relative_queries = nullptr;
  float* temperature = nullptr;
};

// The tangents of the forward pass's results, (B, H, Lq, Dv) and (B, H, Lq), contiguous.
struct OutputTangents {
  float* o = nullptr;
  float* lse = nullptr;  // 0 for a row without keys; not stored if null
};
// The tangents of Saved::d_o and d_lse; null means 0.
struct CotangentTangents {
  Tokens d_o;
  const float* d_lse = nullptr;
};

// These functions throw Error for invalid arguments and for arguments that the kernels do not
// support (see Unsupported()). Arguments must have passed the checks of AttentionForward and
// AttentionBackward.
void Forward(const PairFunction& function, const Input& input, const Output& output,
             Backend& backend);
void Backward(const PairFunction& function, const Input& input, const Saved& saved,
              const Gradient& gradient, Backend& backend);

// The derivatives of Forward and Backward in the direction of the tangents of the inputs. `tangent`
// contains these tangents, in the layouts of the inputs except for strides; null means 0, and its
// other members are ignored. `saved` must contain the statistics and, for the results' tangents,
// exact_o. `gradient` receives the tangents of the gradients.
void ForwardTangents(const PairFunction& function, const Input& input, const Input& tangent,
                     const Saved& saved, const OutputTangents& output, Backend& backend);
void BackwardTangents(const PairFunction& function, const Input& input, const Input& tangent,
                      const Saved& saved, const CotangentTangents& cotangent,
                      const Gradient& gradient, Backend& backend);

// Returns the first unsupported argument and the reason ("head_dim is 320; expected at most 256"),
// or an empty string.
std::string Unsupported(const PairFunction& function, const Input& input);

}  // namespace gnomon::cuda

#endif  // GNOMON_SRC_CUDA_ATTENTION_H_
