// Autograd kernels of the attention operators, and their kernels for the meta device.
#include <torch/library.h>

#include "ops/operators/attention_operators.h"
#include "ops/operators/fused_autograd.h"
#include "ops/operators/graph_operators.h"

namespace gnomon {

TORCH_LIBRARY_IMPL(gnomon, Autograd, m) {
  RegisterAutograd<OperatorArguments>(m);
  RegisterAutograd<GraphArguments>(m);
}

TORCH_LIBRARY_IMPL(gnomon, Meta, m) {
  RegisterMeta<OperatorArguments>(m);
  RegisterMeta<GraphArguments>(m);
}

}  // namespace gnomon
