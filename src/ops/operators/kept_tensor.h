// Tensors that depend on nothing of a call, and are made once.
#ifndef GNOMON_OPS_OPERATORS_KEPT_TENSOR_H_
#define GNOMON_OPS_OPERATORS_KEPT_TENSOR_H_

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>

namespace gnomon {

// A tensor of q's device and computing type that depends on the key alone, which make() makes:
// once, unless the call is traced or transformed. No one may change it.
at::Tensor KeptTensor(const std::string& key, const at::Tensor& q,
                      const std::function<at::Tensor()>& make);

// A number in every head, in the computing type.
at::Tensor HeadNumber(const at::Tensor& q, double number);

// The same without axes. Torch makes one anew, in three calls, wherever it multiplies by a number.
at::Tensor KeptNumber(const at::Tensor& q, double number);

}  // namespace gnomon

#endif  // GNOMON_OPS_OPERATORS_KEPT_TENSOR_H_
