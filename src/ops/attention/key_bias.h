// Key biases, and sums of biases.
#ifndef GNOMON_OPS_ATTENTION_KEY_BIAS_H_
#define GNOMON_OPS_ATTENTION_KEY_BIAS_H_

#include <ATen/core/Tensor.h>

#include <optional>

#include "ops/attention/call.h"
#include "ops/attention/call_positions.h"
#include "ops/coordinates/offset_range.h"

namespace gnomon {

// Adds a bias to the (possibly absent) sum of the previous ones.
void AddBias(OptionalTensor& sum, const at::Tensor& term);

// The products of weights (H, D) with the keys (B, Hkv, Lk, D) of each head: (B, H, Lk).
at::Tensor KeyProducts(const at::Tensor& weights, const at::Tensor& k);

// A key bias in the form that the operator reads.
struct KeyBias {
  at::Tensor bias;
  OptionalTensor low = {};
  OptionalTensor base = {};
};

// Adds `sums`, which are sums over previous keys in float64, to `given`, and splits the result for
// float32 scores into a high and a low part. Each row first subtracts `base`, the sum at its own
// position, because a sum over a long past would otherwise leave no precision for differences
// between keys.
KeyBias SplitKeyBias(const at::Tensor& given, const at::Tensor& sums, at::ScalarType computing,
                     const OffsetRange& range, const std::optional<KeyOrder>& order);

}  // namespace gnomon

#endif  // GNOMON_OPS_ATTENTION_KEY_BIAS_H_
