// What the CPU kernels of the operators do with their arguments.
#ifndef GNOMON_OPS_ATTENTION_KERNEL_ARGUMENTS_H_
#define GNOMON_OPS_ATTENTION_KERNEL_ARGUMENTS_H_

#include <ATen/ATen.h>
#include <gnomon/attention.h>

#include <array>
#include <vector>

#include "ops/attention/operators.h"

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

// Throws c10::ValueError or c10::TypeError unless a tensor that is there has that shape and dtype.
inline void ExpectTensor(const char* operation, const char* name, const OptionalTensor& tensor,
                         at::IntArrayRef sizes, at::ScalarType dtype) {
  if (!tensor) return;
  TORCH_CHECK_VALUE(tensor->sizes() == sizes, operation, ": ", name, " has shape ", tensor->sizes(),
                    "; expected ", sizes);
  TORCH_CHECK_TYPE(tensor->scalar_type() == dtype, operation, ": ", name, " has dtype ",
                   tensor->scalar_type(), "; expected ", dtype);
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

// Empty gradients for those not needed, the others by `make` in the shape of what they belong to.
template <size_t kCount, class Make>
std::vector<at::Tensor> MakeGradients(const std::array<OptionalTensor, kCount>& of,
                                      const std::array<bool, kCount>& needed, const Make& make) {
  std::vector<at::Tensor> gradients;
  for (size_t n = 0; n < kCount; ++n) {
    gradients.push_back(needed[n] ? make(*of[n]) : at::empty({0}, of[0]->options()));
  }
  return gradients;
}

}  // namespace gnomon

#endif  // GNOMON_OPS_ATTENTION_KERNEL_ARGUMENTS_H_
