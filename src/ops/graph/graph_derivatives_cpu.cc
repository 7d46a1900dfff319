// The CPU kernels of graph_jvp and graph_backward_jvp: the fused kernel where it supports the call,
// otherwise the reference in dual numbers.
#include <ATen/ATen.h>
#include <gnomon/derivatives.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <vector>

#include "core/derivatives.h"
#include "core/dual_tables.h"
#include "ops/graph/graph_call.h"
#include "ops/graph/graph_checks.h"
#include "ops/operators/dual_tensors.h"
#include "ops/operators/executor.h"
#include "ops/operators/graph_operators.h"
#include "ops/operators/kernel_arguments.h"
#include "ops/operators/tangent_tensors.h"

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

}  // namespace

template <>
View<Dual> MutableNodes<Dual>(at::Tensor& duals) {
  return DualNodes(duals);
}

namespace {

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
    of_.Done();
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
    const auto gradient = GradientViews<Dual>(of);
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

// The arguments and their tangents as the fused kernel reads them. Owns the tensors of the
// tangents.
template <class T>
class TangentGraph {
 public:
  TangentGraph(const GraphArguments& a, const Tangents& tangents) : call_(a), tangents_(tangents) {
    if (a.function != "dot") of_.function = FindDualTable<T>(*call_.function);
    of_.input = call_.Input<T>();
    GraphInput<T>& tangent = of_.tangent;
    tangent.x = Rows("x");
    tangent.y = Rows("y");
    tangent.v = Rows("v");
    tangent.row_scalars = tangents_.Numbers<T>("row_scalars");
    tangent.column_scalars = tangents_.Numbers<T>("column_scalars");
    tangent.head_scalars = tangents_.Numbers<T>("head_scalars");
    tangent.factor = tangents_.Numbers<T>("factor");
    tangent.edge_bias = tangents_.Numbers<T>("edge_bias");
    tangents_.Done();
  }

  GraphDerivatives<T>& of() { return of_; }

  void Run() const {
    Translate([&] { DifferentiateGraph(*call_.function, of_, TorchExecutor()); });
  }

 private:
  View<const T> Rows(std::string_view name) {
    const at::Tensor tangent = tangents_(name);
    if (!tangent.defined() || tangent.numel() == 0) return {};
    return Nodes<T>(tangents_.Keep(WithRows(tangent.to(c10::CppTypeToScalarType<T>::value))));
  }

  GraphCall call_;
  NamedTangents<GraphArguments> tangents_;
  GraphDerivatives<T> of_;
};

// The results of the operators; nullopt if they are not finite, because the kernel propagates NaN
// or infinity in a key to rows whose edges to it have a bias of -inf.
template <class T>
std::optional<GraphOperator::JvpOutputs> FusedGraphJvp(const GraphArguments& a,
                                                       const Tangents& tangents) {
  TangentGraph<T> call(a, tangents);
  GraphOperator::JvpOutputs outputs = EmptyJvpOutputs<GraphArguments, EmptyOnCpu>(a);
  auto& [o, lse, statistics, o_tangent, lse_tangent] = outputs;
  GraphDerivatives<T>& of = call.of();
  of.output = {MutableNodes<T>(o), MutableData<T>(lse), MutableData<T>(statistics)};
  of.o_tangent = MutableNodes<T>(o_tangent);
  of.lse_tangent = MutableData<T>(lse_tangent);
  call.Run();
  if (!IsFinite(o) || !IsFinite(o_tangent) || !IsFinite(lse_tangent)) return std::nullopt;
  return outputs;
}

template <class T>
std::optional<std::vector<at::Tensor>> FusedGraphBackwardJvp(
    const Cotangents& cotangents, const GraphArguments& a, const Tangents& tangents,
    const GraphOperator::BothNeeded& needed) {
  TangentGraph<T> call(a, tangents);
  GraphDerivatives<T>& of = call.of();
  std::vector<at::Tensor> results = EmptyOutputTangents(a, needed.back());
  of.o_tangent = MutableNodes<T>(results[0]);
  of.lse_tangent = MutableData<T>(results[1]);
  const CotangentRows<T> rows(cotangents);
  rows.SetViews(Nodes<T>, of);
  for (const bool is_tangent : {false, true}) {
    GraphOperator::Needed own;
    std::copy_n(needed.begin() + (is_tangent ? own.size() : 0), own.size(), own.begin());
    std::vector<at::Tensor> gradients = EmptyGradients<GraphArguments, EmptyOnCpu>({}, a, own);
    NamedGradients<GraphArguments> named(gradients);
    (is_tangent ? of.gradient_tangent : of.gradient) = GradientViews<T>(named);
    results.insert(results.end(), gradients.begin(), gradients.end());
  }
  call.Run();
  for (const at::Tensor& result : results) {
    if (!IsFinite(result)) return std::nullopt;
  }
  return results;
}

GraphOperator::JvpOutputs GraphJvpCpu(const GraphArguments& a, const Tangents& tangents) {
  const bool is_double = a.x.scalar_type() == at::kDouble;
  if (is_double ? HasDualTable<double>(a.function) : HasDualTable<float>(a.function)) {
    const auto outputs = (is_double ? FusedGraphJvp<double> : FusedGraphJvp<float>)(a, tangents);
    if (outputs) return *outputs;
  }
  return DualJvp<DualGraph>(a, tangents);
}

std::vector<at::Tensor> GraphBackwardJvpCpu(const Cotangents& cotangents, const GraphArguments& a,
                                            const Tangents& tangents,
                                            const GraphOperator::BothNeeded& needed) {
  const bool is_double = a.x.scalar_type() == at::kDouble;
  if (is_double ? HasDualTable<double>(a.function) : HasDualTable<float>(a.function)) {
    const auto results =
        (is_double ? FusedGraphBackwardJvp<double>
                   : FusedGraphBackwardJvp<float>)(cotangents, a, tangents, needed);
    if (results) return *results;
  }
  return DualBackwardJvp<DualGraph>(cotangents, a, tangents, needed);
}

}  // namespace

TORCH_LIBRARY_IMPL(gnomon, CPU, m) {
  m.impl("graph_jvp", &GraphOperator::RunJvp<GraphJvpCpu>);
  m.impl("graph_backward_jvp", &GraphOperator::RunBackwardJvp<GraphBackwardJvpCpu>);
}

}  // namespace gnomon
