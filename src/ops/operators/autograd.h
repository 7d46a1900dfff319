// Helpers shared by the operators' autograd kernels.
#ifndef GNOMON_OPS_OPERATORS_AUTOGRAD_H_
#define GNOMON_OPS_OPERATORS_AUTOGRAD_H_

#include <ATen/FuncTorchTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <utility>

namespace gnomon {

// Whether autograd must record the call. Skipping autograd where possible saves 10% of the time of
// a call with few tokens.
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

// Records derivatives in its scope, inside a kernel that runs below autograd.
class AboveAutograd {
 public:
  AboveAutograd()
      : outside_(false),
        keys_(c10::impl::tls_local_dispatch_key_set()),
        recorded_(keys_.included_,
                  keys_.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView),
        enabled_(true) {}

 private:
  c10::InferenceMode outside_;
  c10::impl::LocalDispatchKeySet keys_;
  c10::impl::ForceDispatchKeyGuard recorded_;
  at::AutoGradMode enabled_;
};

inline bool HasTangent(const at::Tensor& tensor) {
  return tensor.defined() && tensor._fw_grad(/*level=*/0).defined();
}

// Throws c10::NotImplementedError if an input of a second derivative, or of the derivative of a
// forward-mode derivative, carries a tangent.
inline void CheckNoTangent(const char* operation, const at::Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !HasTangent(tensor), operation,
      ": forward-mode derivatives of forward-mode or second derivatives are not supported; for "
      "second derivatives, nest reverse mode inside forward mode (jacfwd of jacrev, hessian)");
}

// Function::apply that also works inside torch.func transforms. PyTorch rejects C++ Functions
// there, because forward() might compute on tensors of any transform level. The Functions of this
// library compute nothing: they receive their outputs as arguments, from an operator called below
// autograd, as PyTorch's own derivative formulas do. The transforms can therefore be hidden during
// the call.
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
