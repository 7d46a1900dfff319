#include "ops/coordinates/token_positions.h"

#include <ATen/ATen.h>

#include "ops/operators/tensors.h"

namespace gnomon {
namespace {

at::Tensor Joined(const at::Tensor& queries, const at::Tensor& keys) {
  if (queries.sym_numel() + keys.sym_numel() == 0) return at::zeros({1}, queries.options());
  return queries.is_same(keys) ? queries : at::cat({queries.reshape({-1}), keys.reshape({-1})});
}

}  // namespace

at::Tensor TokenPositions::First() const { return Joined(of_tokens, of_others).min(); }

at::Tensor TokenPositions::Last() const { return Joined(of_tokens, of_others).max(); }

std::optional<int64_t> TokenPositions::FirstOfConsecutive() const {
  if (!HasNumbers(of_tokens) || !of_tokens.is_cpu() || of_tokens.dim() != 2 ||
      of_tokens.numel() == 0) {
    return std::nullopt;
  }
  const int64_t first = of_tokens.const_data_ptr<int64_t>()[0];
  const int64_t sequences = of_tokens.stride(0) == 0 ? 1 : of_tokens.size(0);
  for (int64_t b = 0; b < sequences; ++b) {
    const int64_t* const own = of_tokens.const_data_ptr<int64_t>() + b * of_tokens.stride(0);
    for (int64_t i = 0; i < of_tokens.size(1); ++i) {
      if (own[i * of_tokens.stride(1)] != first + i) return std::nullopt;
    }
  }
  return first;
}

int64_t NumberOf(const at::Tensor& tensor, const char* what) {
  TORCH_CHECK_NOT_IMPLEMENTED(HasNumbers(tensor), what,
                              " depends on the values of positions, which are unknown in a traced "
                              "or vmapped call; pass query_offset, or make the call in eager mode");
  return tensor.item<int64_t>();
}

void CheckPositions(const char* what, const at::Tensor& positions, int64_t end,
                    const std::string& expected) {
  if (!HasNumbers(positions) || positions.numel() == 0) return;
  const auto first = positions.min().item<int64_t>();
  const auto last = positions.max().item<int64_t>();
  TORCH_CHECK_VALUE(first >= 0 && last < end, what, ": positions range from ", first, " to ", last,
                    "; expected ", expected);
}

}  // namespace gnomon
