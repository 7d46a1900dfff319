// The CPU kernels of graph_jvp and graph_backward_jvp: the fused kernel where it supports the call,
// otherwise the reference in dual numbers.
#include <ATen/ATen.h>
#include <gnomon/derivatives.h>
#include <torch/library.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "core/derivatives.h"
#include "core/dual_tables.h"
#include "ops/graph/graph_call.h"
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
    tangent.row_scalars = Numbers("row_scalars");
    tangent.column_scalars = Numbers("column_scalars");
    tangent.head_scalars = Numbers("head_scalars");
    tangent.factor = Numbers("factor");
    tangent.edge_bias = Numbers("edge_bias");
  }

  GraphDerivatives<T>& of() { return of_; }

  void Run() const {
    Translate([&] { DifferentiateGraph(*call_.function, of_, TorchExecutor()); });
  }

 private:
  static constexpr at::ScalarType kType = c10::CppTypeToScalarType<T>::value;

  at::Tensor TangentOf(std::string_view name) const {
    return tangents_.empty() ? at::Tensor()
                             : OrUndefined(tangents_.get(IndexOf<GraphArguments>(name)));
  }
  View<const T> Rows(std::string_view name) {
    const at::Tensor tangent = TangentOf(name);
    if (!tangent.defined() || tangent.numel() == 0) return {};
    return Nodes<T>(Keep(WithRows(tangent.to(kType))));
  }
  const T* Numbers(std::string_view name) {
    const at::Tensor tangent = TangentOf(name);
    if (!tangent.defined()) return nullptr;
    return Keep(tangent.to(kType).contiguous()).template const_data_ptr<T>();
  }
  const at::Tensor& Keep(at::Tensor tensor) { return kept_.emplace_back(std::move(tensor)); }

  GraphCall call_;
  const Tangents& tangents_;
  std::deque<at::Tensor> kept_;
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
  const auto wide = [](const OptionalTensor& tensor) {
    return tensor ? tensor->to(c10::CppTypeToScalarType<T>::value) : at::Tensor();
  };
  const at::Tensor d_o = WithRows(wide(cotangents.d_o));
  at::Tensor d_o_tangent = wide(cotangents.d_o_tangent);
  if (d_o_tangent.defined()) d_o_tangent = WithRows(d_o_tangent);
  const at::Tensor d_lse = Contiguous(AsOptional(wide(cotangents.d_lse)));
  const at::Tensor d_lse_tangent = Contiguous(AsOptional(wide(cotangents.d_lse_tangent)));
  of.d_o = Nodes<T>(d_o);
  if (d_o_tangent.defined()) of.d_o_tangent = Nodes<T>(d_o_tangent);
  of.d_lse = Data<T>(d_lse);
  of.d_lse_tangent = Data<T>(d_lse_tangent);
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

// Whether the fused kernel supports a call: its pair function must have a table of dual functions.
template <class T>
bool HasTableFor(const GraphArguments& a) {
  bool has_table = false;
  Translate([&] { has_table = FindDualTable<T>(FindPairFunction(a.function)) != nullptr; });
  return has_table;
}

GraphOperator::JvpOutputs GraphJvpCpu(const GraphArguments& a, const Tangents& tangents) {
  const bool is_double = a.x.scalar_type() == at::kDouble;
  if (is_double ? HasTableFor<double>(a) : HasTableFor<float>(a)) {
    const auto outputs = (is_double ? FusedGraphJvp<double> : FusedGraphJvp<float>)(a, tangents);
    if (outputs) return *outputs;
  }
  return DualJvp<DualGraph>(a, tangents);
}

std::vector<at::Tensor> GraphBackwardJvpCpu(const Cotangents& cotangents, const GraphArguments& a,
                                            const Tangents& tangents,
                                            const GraphOperator::BothNeeded& needed) {
  const bool is_double = a.x.scalar_type() == at::kDouble;
  if (is_double ? HasTableFor<double>(a) : HasTableFor<float>(a)) {
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
