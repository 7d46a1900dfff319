#include "ops/operators/tensors.h"

#include <ATen/ATen.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

namespace gnomon {

bool IsPlainTensor(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet kNone =
      c10::python_ks | c10::DispatchKeySet({c10::DispatchKey::FuncTorchBatched,
                                            c10::DispatchKey::FuncTorchGradWrapper,
                                            c10::DispatchKey::Functionalize});
  return !tensor.is_meta() && !tensor.key_set().has_any(kNone);
}

bool HasNumbers(const at::Tensor& tensor) {
  return IsPlainTensor(tensor) && !c10::impl::TorchDispatchModeTLS::any_modes_set();
}

bool IsLow(at::ScalarType type) { return type == at::kBFloat16 || type == at::kHalf; }

at::ScalarType ComputingType(const at::Tensor& q) {
  return IsLow(q.scalar_type()) ? at::kFloat : q.scalar_type();
}

at::Tensor InType(const at::Tensor& tensor, at::ScalarType type) {
  return tensor.scalar_type() == type ? tensor : tensor.to(type);
}

}  // namespace gnomon
