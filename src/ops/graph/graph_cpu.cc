// The CPU kernels of graph_forward and graph_backward.
#include <ATen/ATen.h>
#include <gnomon/graph.h>
#include <torch/library.h>

#include <vector>

#include "ops/graph/graph_call.h"
#include "ops/operators/executor.h"
#include "ops/operators/graph_operators.h"
#include "ops/operators/kernel_arguments.h"

namespace gnomon {
namespace {

template <class T>
void RunForward(const GraphCall& call, at::Tensor& o, at::Tensor& lse, at::Tensor& statistics) {
  Translate([&] {
    GraphForward(*call.function, call.Input<T>(),
                 {MutableNodes<T>(o), MutableData<T>(lse), MutableData<T>(statistics)},
                 TorchExecutor());
  });
}

Outputs ForwardCpu(const GraphArguments& a) {
  const GraphCall call(a);
  Outputs outputs = EmptyOutputs<GraphArguments, EmptyOnCpu>(a);
  auto& [o, lse, statistics] = outputs;
  if (a.x.scalar_type() == at::kDouble) {
    RunForward<double>(call, o, lse, statistics);
  } else {
    RunForward<float>(call, o, lse, statistics);
  }
  return outputs;
}

template <class T>
void RunBackward(const GraphCall& call, const SavedOutputs& outputs,
                 std::vector<at::Tensor>& gradients) {
  const at::Tensor d_o = WithRows(outputs.d_o);
  const at::Tensor o = WithRows(outputs.o);
  const at::Tensor d_lse = Contiguous(outputs.d_lse);
  const at::Tensor lse = outputs.lse.contiguous();
  const at::Tensor statistics = outputs.statistics.contiguous();
  const GraphBackwardInput<T> saved{Nodes<T>(o), lse.const_data_ptr<T>(), Nodes<T>(d_o),
                                    Data<T>(d_lse), statistics.const_data_ptr<T>()};
  NamedGradients<GraphArguments> of(gradients);
  const GraphGradient<T> gradient = GradientViews<T>(of);
  Translate(
      [&] { GraphBackward(*call.function, call.Input<T>(), saved, gradient, TorchExecutor()); });
}

std::vector<at::Tensor> BackwardCpu(const SavedOutputs& saved, const GraphArguments& a,
                                    const GraphOperator::Needed& needed) {
  GraphCall call(a);
  CheckSaved(saved, a, call.lengths);
  std::vector<at::Tensor> gradients = EmptyGradients<GraphArguments, EmptyOnCpu>(saved, a, needed);
  if (a.x.scalar_type() == at::kDouble) {
    RunBackward<double>(call, saved, gradients);
  } else {
    RunBackward<float>(call, saved, gradients);
  }
  return gradients;
}

}  // namespace

TORCH_LIBRARY_IMPL(gnomon, CPU, m) {
  m.impl("graph_forward", &GraphOperator::RunForward<ForwardCpu>);
  m.impl("graph_backward", &GraphOperator::RunBackward<BackwardCpu>);
}

}  // namespace gnomon
