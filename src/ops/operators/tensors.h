// Helpers for any tensor.
#ifndef GNOMON_OPS_OPERATORS_TENSORS_H_
#define GNOMON_OPS_OPERATORS_TENSORS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>

namespace gnomon {

// Returns the concrete number, and specialises a compiled graph to it.
inline int64_t Concrete(const c10::SymInt& number) { return number.guard_int(__FILE__, __LINE__); }
inline int64_t SizeOf(const at::Tensor& tensor, int64_t axis) {
  return Concrete(tensor.sym_size(axis));
}

// Whether a tensor is neither traced nor batched, even if a dispatch mode is active.
bool IsPlainTensor(const at::Tensor& tensor);

// Whether a tensor's data can be read. It cannot in traced calls or under vmap.
bool HasNumbers(const at::Tensor& tensor);

// Whether the dtype has lower precision than float32.
bool IsLow(at::ScalarType type);

// The dtype of accumulators, parameters and lse: that of q, but at least float32.
at::ScalarType ComputingType(const at::Tensor& q);

// Converts a tensor to a dtype. Tensors that already have this dtype are returned without a
// dispatcher call, which would take time.
at::Tensor InType(const at::Tensor& tensor, at::ScalarType type);

// Disables autocast in its scope, so that the operators' own products keep their compute dtype.
class WithoutAutocast {
 public:
  WithoutAutocast() : guard_(c10::autocast_dispatch_keyset) {}

 private:
  c10::impl::ExcludeDispatchKeyGuard guard_;
};

}  // namespace gnomon

#endif  // GNOMON_OPS_OPERATORS_TENSORS_H_
