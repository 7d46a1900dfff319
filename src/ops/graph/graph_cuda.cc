// graph_forward and graph_backward on GPUs, where they are not there yet: an error by name.
#include <torch/library.h>

#include "ops/graph/graph_operators.h"

namespace gnomon {
namespace {

[[noreturn]] void Refuse(const at::Tensor& x) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, GraphArguments::kOperation, ": x is on ", x.device(),
                              "; expected the CPU, attention over graphs has no kernels for GPUs");
}

Outputs ForwardCuda(const GraphArguments& a) { Refuse(a.x); }

std::vector<at::Tensor> BackwardCuda(const SavedOutputs& /*saved*/, const GraphArguments& a,
                                     const GraphOperator::Needed& /*needed*/) {
  Refuse(a.x);
}

}  // namespace

TORCH_LIBRARY_IMPL(gnomon, CUDA, m) {
  m.impl("graph_forward", &GraphOperator::RunForward<ForwardCuda>);
  m.impl("graph_backward", &GraphOperator::RunBackward<BackwardCuda>);
}

}  // namespace gnomon
