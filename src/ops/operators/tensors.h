// What is asked of any tensor.
#ifndef GNOMON_OPS_OPERATORS_TENSORS_H_
#define GNOMON_OPS_OPERATORS_TENSORS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <cstdint>

namespace gnomon {

// The number, to which a compiled graph is then specialised.
inline int64_t Concrete(const c10::SymInt& number) { return number.guard_int(__FILE__, __LINE__); }
inline int64_t SizeOf(const at::Tensor& tensor, int64_t axis) {
  return Concrete(tensor.sym_size(axis));
}

// Whether the numbers of a tensor can be read: those of a call that is traced, or of samples that
// vmap maps, cannot.
bool HasNumbers(const at::Tensor& tensor);

// Below float32.
bool IsLow(at::ScalarType type);

// The type of a call's sums, parameters and lse: q's dtype, or float32 where that is lower.
at::ScalarType ComputingType(const at::Tensor& q);

// A tensor in that type. One that has it stays out of Torch's dispatcher, which takes its time to
// find that there is nothing to do.
at::Tensor InType(const at::Tensor& tensor, at::ScalarType type);

}  // namespace gnomon

#endif  // GNOMON_OPS_OPERATORS_TENSORS_H_
