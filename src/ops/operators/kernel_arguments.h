// Argument handling shared by the operators' CPU kernels.
#ifndef GNOMON_OPS_OPERATORS_KERNEL_ARGUMENTS_H_
#define GNOMON_OPS_OPERATORS_KERNEL_ARGUMENTS_H_

#include <ATen/ATen.h>
#include <gnomon/attention.h>

#include <cmath>

#include "ops/operators/argument_list.h"

namespace gnomon {

// Calls body() and translates the core's errors to exceptions that map to Python's.
template <class Body>
void Translate(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

// Checks the tensors and returns the pair function that the arguments name. Also stores its scalar
// counts in the axis lengths.
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

// The tensor, copied if its last axis is not contiguous.
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

// Whether all numbers are finite. Also false if their sum overflows.
inline bool IsFinite(const at::Tensor& tensor) {
  return std::isfinite(tensor.sum().item<double>());
}

}  // namespace gnomon

#endif  // GNOMON_OPS_OPERATORS_KERNEL_ARGUMENTS_H_
