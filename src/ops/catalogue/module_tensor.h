#ifndef GNOMON_OPS_CATALOGUE_MODULE_TENSOR_H_
#define GNOMON_OPS_CATALOGUE_MODULE_TENSOR_H_

#include <ATen/core/Tensor.h>

#include <string>

namespace gnomon {

// A tensor of a module: a parameter if it is learned, otherwise a buffer.
struct ModuleTensor {
  std::string name;
  at::Tensor start;  // float64
  bool learned;
};

}  // namespace gnomon

#endif  // GNOMON_OPS_CATALOGUE_MODULE_TENSOR_H_
