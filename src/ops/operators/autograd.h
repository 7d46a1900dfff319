// What the autograd kernels of the operators have in common.
#ifndef GNOMON_OPS_OPERATORS_AUTOGRAD_H_
#define GNOMON_OPS_OPERATORS_AUTOGRAD_H_

#include <ATen/FuncTorchTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <utility>

namespace gnomon {

// Whether a call is to be recorded. Where it is not, leaving the graph alone saves a tenth of the
// time of attention over a few tokens.
template <size_t kCount>
bool RecordsGradients(const std::array<bool, kCount>& needed) {
  return at::GradMode::is_enabled() &&
         std::find(needed.begin(), needed.end(), true) != needed.end();
}

template <class Call>
auto BelowAutograd(const Call& call) {
  at::AutoDispatchBelowADInplaceOrView guard;
  return call();
}

// Throws c10::NotImplementedError where a tensor carries a tangent of forward-mode differentiation,
// which the kernels do not carry on: without this it would be lost.
inline void CheckNoTangent(const char* operation, const at::Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(!tensor.defined() || !tensor._fw_grad(/*level=*/0).defined(),
                              operation,
                              ": forward-mode derivatives (jvp, jacfwd, hessian) are not "
                              "supported; use reverse mode (grad, vjp, jacrev)");
}
inline void CheckNoTangent(const char* operation, const std::optional<at::Tensor>& tensor) {
  if (tensor) CheckNoTangent(operation, *tensor);
}
template <class... Tensors>
void CheckNoTangents(const char* operation, const Tensors&... tensors) {
  (CheckNoTangent(operation, tensors), ...);
}

// Function::apply, within the transforms of torch.func too. Torch refuses a Function in C++ there,
// as its forward() might compute on tensors of any level. Those of this library compute nothing:
// their outputs come with the arguments, from an operator that was called below autograd as Torch's
// own formulas do, so that the transforms can be out of sight meanwhile.
template <class Function, class... Args>
auto ApplyFunction(Args&&... args) {
  class WithoutTransforms {
   public:
    WithoutTransforms() : state_(std::move(at::functorch::functorchTLSAccessor())) {}
    ~WithoutTransforms() { at::functorch::functorchTLSAccessor() = std::move(state_); }

   private:
    std::unique_ptr<at::functorch::FuncTorchTLSBase> state_;
  };
  const WithoutTransforms guard;
  return Function::apply(std::forward<Args>(args)...);
}

}  // namespace gnomon

#endif  // GNOMON_OPS_OPERATORS_AUTOGRAD_H_
