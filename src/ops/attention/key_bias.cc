#include "ops/attention/key_bias.h"

#include <ATen/ATen.h>

#include "base/most_bias.h"
#include "ops/operators/tensors.h"

namespace gnomon {
namespace {

// Clamps values as the kernels do (kMostBias): the sum of two biases that both equal the lowest
// float would be -inf, which would mask the key in all rows.
at::Tensor AsBias(const at::Tensor& bias) {
  return at::where(bias.isinf(), bias, bias.clamp(-kMostBias, kMostBias));
}

}  // namespace

void AddBias(OptionalTensor& sum, const at::Tensor& term) {
  sum = sum ? AsBias(*sum) + AsBias(term) : term;
}

at::Tensor KeyProducts(const at::Tensor& weights, const at::Tensor& k) {
  const at::Tensor by_key_head = weights.unflatten(0, {SizeOf(k, 1), -1}).transpose(1, 2);
  return at::matmul(k, by_key_head).transpose(2, 3).flatten(1, 2);
}

KeyBias SplitKeyBias(const at::Tensor& given, const at::Tensor& sums, at::ScalarType computing,
                     const OffsetRange& range, const std::optional<KeyOrder>& order) {
  const at::Tensor bias = given + sums;
  KeyBias split{bias.to(computing)};
  if (bias.sym_size(2) == 0) return split;
  const at::Tensor high = split.bias.detach();
  // -inf masks a key and has no low part.
  split.low = at::where(high.isfinite(), bias.detach() - high, 0.0).to(computing);
  const at::Tensor columns = order ? order->Own() : range.QueryPositions(bias.options());
  const at::Tensor own = columns.clamp(0, bias.sym_size(2) - 1).unsqueeze(1);
  const at::Tensor base = sums.detach().to(computing);
  split.base =
      at::where(base.isfinite(), base, 0.0)
          .gather(2, own.expand_symint({base.sym_size(0), base.sym_size(1), range.queries}));
  return split;
}

}  // namespace gnomon
