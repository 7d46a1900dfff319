// Biases of keys, and sums of biases.
#ifndef GNOMON_OPS_ATTENTION_KEY_BIAS_H_
#define GNOMON_OPS_ATTENTION_KEY_BIAS_H_

#include <ATen/core/Tensor.h>

#include <optional>

#include "ops/attention/call.h"
#include "ops/attention/token_places.h"
#include "ops/coordinates/offset_range.h"

namespace gnomon {

// Adds a bias to a sum of those before it, of which there may be none.
void AddBias(OptionalTensor& sum, const at::Tensor& term);

// weights (H, D) times each key (B, Hkv, Lk, D) of their head: (B, H, Lk).
at::Tensor KeyProducts(const at::Tensor& weights, const at::Tensor& k);

// A bias of the keys as the operator takes it.
struct KeyBias {
  at::Tensor bias;
  OptionalTensor low = {};
  OptionalTensor base = {};
};

// `given` and sums over the keys before in float64, where scores are computed in float32: in two
// parts, and each row takes off the sum at its own position first, or what a long past has added up
// would leave no digits.
KeyBias SplitKeyBias(const at::Tensor& given, const at::Tensor& sums, at::ScalarType computing,
                     const OffsetRange& range, const std::optional<KeyOrder>& order);

}  // namespace gnomon

#endif  // GNOMON_OPS_ATTENTION_KEY_BIAS_H_
