// The CPU kernels of graph_jvp and graph_backward_jvp: the reference in dual numbers.
#include <ATen/ATen.h>
#include <gnomon/derivatives.h>
#include <torch/library.h>

#include <vector>

#include "ops/graph/graph_checks.h"
#include "ops/operators/dual_tensors.h"
#include "ops/operators/executor.h"
#include "ops/operators/graph_operators.h"
#include "ops/operators/kernel_arguments.h"

namespace gnomon {
namespace {

// Views (nodes, heads, columns) as (1, heads, nodes, columns).
View<Dual> DualNodes(const at::Tensor& duals) {
  if (!duals.defined() || duals.numel() == 0) return {};
  return {DualData(duals), {0, duals.stride(1) / 2, duals.stride(0) / 2}};
}
View<const Dual> ConstNodes(const at::Tensor& duals) {
  const View<Dual> nodes = DualNodes(duals);
  return {nodes.data, nodes.stride};
}

// The operator's arguments and their tangents. Owns the tensors to which its views point.
class DualGraph {
 public:
  DualGraph(const GraphArguments& a, const Tangents& tangents)
      : wide_(InDouble(a)), function_(CheckedGraph(wide_, lengths_)), of_(wide_, tangents) {
    indptr_ = a.indptr.contiguous();
    indices_ = a.indices.contiguous();
    input_.shape = {*lengths_['H'], *lengths_['G'], *lengths_['N'], *lengths_['M'],
                    *lengths_['E'], *lengths_['D'], *lengths_['V']};
    input_.indptr = indptr_.const_data_ptr<int64_t>();
    input_.indices = indices_.const_data_ptr<int64_t>();
    input_.x = ConstNodes(of_("x"));
    input_.y = ConstNodes(of_("y"));
    input_.v = ConstNodes(of_("v"));
    input_.row_scalars = DualData(of_("row_scalars"));
    input_.column_scalars = DualData(of_("column_scalars"));
    input_.head_scalars = DualData(of_("head_scalars"));
    input_.factor = DualData(of_("factor"));
    input_.edge_bias = DualData(of_("edge_bias"));
    input_.dropout = DropoutOf(a);
  }

  DualOutputs RunForward() const {
    const GraphShape& n = input_.shape;
    const DualOutputs results = {EmptyDuals({n.queries, n.heads, n.value_dim}).zero_(),
                                 EmptyDuals({n.queries, n.heads}).zero_(),
                                 EmptyDuals({3, n.queries, n.heads}).zero_()};
    Translate([&] {
      GraphForward(function_, input_,
                   {DualNodes(results.o), DualData(results.lse), DualData(results.statistics)},
                   TorchExecutor());
    });
    return results;
  }

  void RunBackward(const DualOutputs& results, const at::Tensor& d_o, const at::Tensor& d_lse,
                   DualGradients<GraphArguments>& of) const {
    GraphGradient<Dual> gradient;
    gradient.x = DualNodes(of("x"));
    gradient.y = DualNodes(of("y"));
    gradient.v = DualNodes(of("v"));
    gradient.row_scalars = DualData(of("row_scalars"));
    gradient.column_scalars = DualData(of("column_scalars"));
    gradient.head_scalars = DualData(of("head_scalars"));
    gradient.factor = DualData(of("factor"));
    gradient.edge_bias = DualData(of("edge_bias"));
    const GraphBackwardInput<Dual> saved{ConstNodes(results.o), DualData(results.lse),
                                         ConstNodes(d_o), DualData(d_lse),
                                         DualData(results.statistics)};
    Translate([&] { GraphBackward(function_, input_, saved, gradient, TorchExecutor()); });
  }

 private:
  GraphArguments wide_;
  AxisLengths<int64_t> lengths_;
  const PairFunction& function_;
  NamedDuals<GraphArguments> of_;
  at::Tensor indptr_, indices_;
  GraphInput<Dual> input_;
};

}  // namespace

TORCH_LIBRARY_IMPL(gnomon, CPU, m) {
  m.impl("graph_jvp", &GraphOperator::RunJvp<DualJvp<DualGraph, GraphArguments>>);
  m.impl("graph_backward_jvp",
         &GraphOperator::RunBackwardJvp<DualBackwardJvp<DualGraph, GraphArguments>>);
}

}  // namespace gnomon
