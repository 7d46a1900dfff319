// Tensors that do not depend on a call's inputs, created once and cached.
#ifndef GNOMON_OPS_OPERATORS_KEPT_TENSOR_H_
#define GNOMON_OPS_OPERATORS_KEPT_TENSOR_H_

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>

namespace gnomon {

// A tensor with the device and compute dtype of q that depends only on the key. make() is called
// once, unless the call is traced or transformed. The tensor must not be modified.
at::Tensor KeptTensor(const std::string& key, const at::Tensor& q,
                      const std::function<at::Tensor()>& make);

// Returns a per-head tensor filled with a number, in the compute dtype.
at::Tensor HeadNumber(const at::Tensor& q, double number);

// Returns the number as a scalar tensor. PyTorch would create such a tensor, with three calls, for
// every product with a number.
at::Tensor KeptNumber(const at::Tensor& q, double number);

}  // namespace gnomon

#endif  // GNOMON_OPS_OPERATORS_KEPT_TENSOR_H_
