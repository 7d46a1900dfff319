#include "ops/coordinates/token_positions.h"

#include <ATen/ATen.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

namespace gnomon {

bool HasNumbers(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet kNone =
      c10::python_ks | c10::DispatchKeySet({c10::DispatchKey::FuncTorchBatched,
                                            c10::DispatchKey::FuncTorchGradWrapper,
                                            c10::DispatchKey::Functionalize});
  return !tensor.is_meta() && !tensor.key_set().has_any(kNone) &&
         !c10::impl::TorchDispatchModeTLS::any_modes_set();
}

int64_t NumberOf(const at::Tensor& tensor, const char* what) {
  TORCH_CHECK_NOT_IMPLEMENTED(HasNumbers(tensor), what,
                              " goes by the numbers of positions, which a call that is traced or "
                              "mapped does not know; expected query_offset, or a plain call");
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
