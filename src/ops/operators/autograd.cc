// Autograd kernels of the attention operators, and their kernels for the meta device.
#include <torch/library.h>

#include "ops/operators/attention_operators.h"
#include "ops/operators/fused_autograd.h"
#include "ops/operators/graph_operators.h"

namespace gnomon {

void RefuseOnGpu(const char* operation) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, operation,
      ": forward-mode and second derivatives are not supported on a GPU; move the tensors to the "
      "CPU, or implement this attention with PyTorch operators");
}

TORCH_LIBRARY_IMPL(gnomon, Autograd, m) {
  RegisterAutograd<OperatorArguments>(m);
  RegisterAutograd<GraphArguments>(m);
}

TORCH_LIBRARY_IMPL(gnomon, CUDA, m) { RegisterCudaRefusal<GraphArguments>(m); }

TORCH_LIBRARY_IMPL(gnomon, Meta, m) {
  RegisterMeta<OperatorArguments>(m);
  RegisterMeta<GraphArguments>(m);
}

}  // namespace gnomon
