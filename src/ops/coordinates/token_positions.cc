#include "ops/coordinates/token_positions.h"

#include <ATen/ATen.h>

#include "ops/operators/tensors.h"

namespace gnomon {

int64_t NumberOf(const at::Tensor& tensor, const char* what) {
  TORCH_CHECK_NOT_IMPLEMENTED(HasNumbers(tensor), what,
                              " depends on the values of positions, which are unknown in a traced "
                              "or vmapped call; expected query_offset, or an eager call");
  return tensor.item<int64_t>();
}

void CheckPositions(const char* what, const at::Tensor& positions, int64_t end,
                    const std::string& expected) {
  if (!HasNumbers(positions) || positions.numel() == 0) return;
  const auto first = positions.min().item<int64_t>();
  const auto last = positions.max().item<int64_t>();
  TORCH_CHECK_VALUE(first >= 0 && last < end, what, ": positions are from ", first, " to ", last,
                    "; expected ", expected);
}

}  // namespace gnomon
