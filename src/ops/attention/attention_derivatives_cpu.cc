// The CPU kernels of attention_jvp and attention_backward_jvp: the fused kernel where it supports
// the call, otherwise the reference in dual numbers.
#include <ATen/ATen.h>
#include <gnomon/derivatives.h>
#include <torch/library.h>

#include <string_view>
#include <vector>

#include "ops/attention/fused_derivatives.h"
#include "ops/attention/gradients.h"
#include "ops/attention/kernel_call.h"
#include "ops/operators/attention_operators.h"
#include "ops/operators/dual_tensors.h"
#include "ops/operators/executor.h"
#include "ops/operators/kernel_arguments.h"

namespace gnomon {
namespace {

// Views of duals (B, H, L, columns).
View<Dual> DualRows(const at::Tensor& duals) {
  if (!duals.defined() || duals.numel() == 0) return {};
  return {DualData(duals), {duals.stride(0) / 2, duals.stride(1) / 2, duals.stride(2) / 2}};
}
View<const Dual> ConstRows(const at::Tensor& duals) {
  const View<Dual> rows = DualRows(duals);
  return {rows.data, rows.stride};
}

// A view of duals (1 or B, 1 or H, Lq, Lk), with strides of 0 along shared axes.
View<Dual> DualPairs(const at::Tensor& duals) {
  View<Dual> pairs = DualRows(duals);
  if (pairs.data == nullptr) return pairs;
  if (duals.size(0) == 1) pairs.stride[0] = 0;
  if (duals.size(1) == 1) pairs.stride[1] = 0;
  return pairs;
}

}  // namespace

template <>
View<Dual> PairGradient<Dual>(at::Tensor& duals) {
  return DualPairs(duals);
}

namespace {

// The operator's arguments and their tangents as dual numbers. Owns the tensors that the views
// point into.
class DualCall {
 public:
  DualCall(const OperatorArguments& arguments, const Tangents& tangents)
      : wide_(InDouble(arguments)), call_(wide_), of_(wide_, tangents) {
    const AttentionInput<double>& in = call_.input();
    input_.shape = in.shape;
    input_.x = ConstRows(of_("x"));
    input_.y = ConstRows(of_("y"));
    input_.v = ConstRows(of_("v"));
    input_.row_scalars = DualData(of_("row_scalars"));
    input_.column_scalars = DualData(of_("column_scalars"));
    input_.head_scalars = DualData(of_("head_scalars"));
    input_.factor = DualData(of_("factor"));
    SetBias(in);
    key_bias_low_ = Duals(wide_.key_bias_low, std::nullopt);
    key_bias_base_ = Duals(wide_.key_bias_base, std::nullopt);
    input_.key_bias = DualData(of_("key_bias"));
    input_.key_bias_low = DualData(key_bias_low_);
    input_.key_bias_base = DualData(key_bias_base_);
    const View<Dual> pairs = DualPairs(of_("pair_bias"));
    input_.pair_bias = {pairs.data, pairs.stride};
    Relative<Dual>& relative = input_.relative;
    relative.layout = in.relative.layout;
    relative.query = ConstRows(of_("relative_query"));
    relative.dim = in.relative.dim;
    relative.factor = in.relative.factor;
    relative.keys = DualData(of_("relative_keys"));
    relative.key_heads = in.relative.key_heads;
    relative.values = DualData(of_("relative_values"));
    relative.value_heads = in.relative.value_heads;
    relative.key = ConstRows(of_("relative_key"));
    relative.key_dim = in.relative.key_dim;
    relative.queries = DualData(of_("relative_queries"));
    relative.query_heads = in.relative.query_heads;
    input_.temperature = DualData(of_("temperature"));
    input_.softcap = in.softcap;
    input_.dropout = in.dropout;
    input_.mask = in.mask;
    input_.query_offset = in.query_offset;
    input_.query_offsets = in.query_offsets;
    input_.tolerance = in.tolerance;
    input_.query_positions = in.query_positions;
    input_.key_positions = in.key_positions;
    of_.Done();
  }

  // Not copyable, because input_ points into this object.
  DualCall(const DualCall&) = delete;
  DualCall& operator=(const DualCall&) = delete;

  const AttentionInput<Dual>& input() const { return input_; }
  const PairFunction& function() const { return call_.function(); }
  bool empty() const { return call_.empty(); }

  DualOutputs RunForward() const {
    const AttentionShape& n = input_.shape;
    const DualOutputs results = {EmptyDuals({n.batch, n.heads, n.queries, n.value_dim}).zero_(),
                                 EmptyDuals({n.batch, n.heads, n.queries}).zero_(),
                                 EmptyDuals({3, n.batch, n.heads, n.queries}).zero_()};
    if (empty()) return results;
    Translate([&] {
      AttentionForward(function(), input_,
                       {DualRows(results.o), DualData(results.lse), DualData(results.statistics)},
                       TorchExecutor());
    });
    return results;
  }

  void RunBackward(const DualOutputs& results, const at::Tensor& d_o, const at::Tensor& d_lse,
                   DualGradients<OperatorArguments>& of) const {
    if (empty()) return;
    at::Tensor& d_parameters = of("bias_parameters");
    const at::Tensor d_bias = d_parameters.defined() ? at::empty_like(bias_) : of("bias");
    AttentionGradient<Dual> gradient;
    const auto rows = [&](std::string_view name) { return DualRows(of(name)); };
    SetViews<Dual>(of, {DualData(d_bias), input_.bias.batch_stride, input_.bias.layout}, rows,
                   gradient);
    const AttentionBackwardInput<Dual> saved{ConstRows(results.o), DualData(results.lse),
                                             ConstRows(d_o), DualData(d_lse),
                                             DualData(results.statistics)};
    Translate([&] { AttentionBackward(function(), input_, saved, gradient, TorchExecutor()); });
    if (!d_parameters.defined()) return;
    const at::Tensor values = ValuePart(d_bias).contiguous();
    const at::Tensor tangents = TangentPart(d_bias).contiguous();
    ValuePart(d_parameters).copy_(call_.ParameterGradient(values));
    TangentPart(d_parameters)
        .copy_(direction_.defined() ? call_.ParameterGradientTangent(values, tangents, direction_)
                                    : call_.ParameterGradient(tangents));
  }

 private:
  void SetBias(const AttentionInput<double>& in) {
    direction_ = of_.tangent("bias_parameters");
    if (direction_.defined()) direction_ = direction_.to(at::kDouble);
    if (in.bias.table == nullptr) return;
    bias_ = wide_.bias             ? of_("bias")
            : direction_.defined() ? Duals(call_.bias(), call_.BiasTangent(direction_))
                                   : Duals(call_.bias(), at::Tensor());
    input_.bias = {DualData(bias_), in.bias.batch_stride, in.bias.layout};
  }

  OperatorArguments wide_;
  KernelCall<double> call_;
  NamedDuals<OperatorArguments> of_;
  at::Tensor direction_, bias_, key_bias_low_, key_bias_base_;
  AttentionInput<Dual> input_;
};

AttentionOperator::JvpOutputs JvpCpu(const OperatorArguments& a, const Tangents& tangents) {
  if (HasFusedDerivatives(a)) {
    if (const auto outputs = FusedJvp(a, tangents)) return *outputs;
  }
  return DualJvp<DualCall>(a, tangents);
}

std::vector<at::Tensor> BackwardJvpCpu(const Cotangents& cotangents, const OperatorArguments& a,
                                       const Tangents& tangents,
                                       const AttentionOperator::BothNeeded& needed) {
  if (HasFusedDerivatives(a)) {
    if (const auto results = FusedBackwardJvp(cotangents, a, tangents, needed)) return *results;
  }
  return DualBackwardJvp<DualCall>(cotangents, a, tangents, needed);
}

}  // namespace

TORCH_LIBRARY_IMPL(gnomon, CPU, m) {
  m.impl("attention_jvp", &AttentionOperator::RunJvp<JvpCpu>);
  m.impl("attention_backward_jvp", &AttentionOperator::RunBackwardJvp<BackwardJvpCpu>);
}

}  // namespace gnomon
