// What the CPU kernels of the operators do with their arguments.
#ifndef GNOMON_OPS_OPERATORS_KERNEL_ARGUMENTS_H_
#define GNOMON_OPS_OPERATORS_KERNEL_ARGUMENTS_H_

#include <ATen/ATen.h>
#include <gnomon/attention.h>

#include "ops/operators/argument_list.h"

namespace gnomon {

// Calls body(), with the core's errors as those that Python knows by their types.
template <class Body>
void Translate(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

// The pair function that the arguments name, with its scalars among the lengths; checks the
// tensors.
template <class Arguments>
const PairFunction& CheckedFunction(const Arguments& arguments, AxisLengths<int64_t>& lengths) {
  const PairFunction* function = nullptr;
  Translate([&] { function = &FindPairFunction(arguments.function); });
  lengths['r'] = function->row_scalars;
  lengths['c'] = function->column_scalars;
  lengths['s'] = function->head_scalars;
  CheckArguments(arguments, lengths);
  return *function;
}

// The tensor with its last axis contiguous.
inline at::Tensor WithRows(const at::Tensor& tensor) {
  return tensor.stride(-1) == 1 || tensor.size(-1) == 1 ? tensor : tensor.contiguous();
}

inline at::Tensor Contiguous(const OptionalTensor& tensor) {
  return tensor ? tensor->contiguous() : at::Tensor();
}

template <class T>
const T* Data(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<T>() : nullptr;
}

template <class T>
T* MutableData(at::Tensor& tensor) {
  return tensor.numel() == 0 ? nullptr : tensor.data_ptr<T>();
}

}  // namespace gnomon

#endif  // GNOMON_OPS_OPERATORS_KERNEL_ARGUMENTS_H_
