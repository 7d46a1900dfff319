#include "ops/attention/fused_derivatives.h"

#include <ATen/ATen.h>
#include <gnomon/attention.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <string_view>
#include <utility>

#include "core/derivatives.h"
#include "core/dual_tables.h"
#include "ops/attention/gradients.h"
#include "ops/attention/kernel_call.h"
#include "ops/operators/executor.h"
#include "ops/operators/kernel_arguments.h"
#include "ops/operators/tensors.h"

namespace gnomon {
namespace {

constexpr size_t kGradients = AttentionOperator::kGradients;

// Whether all numbers are finite. Also false if their sum overflows.
bool IsFinite(const at::Tensor& tensor) { return std::isfinite(tensor.sum().item<float>()); }

// The arguments and their tangents as the kernel reads them. Owns the tensors of the tangents.
class TangentCall {
 public:
  TangentCall(const OperatorArguments& a, const Tangents& tangents)
      : call_(a), tangents_(tangents) {
    if (a.function != "dot") of_.function = FindDualTable(call_.function());
    of_.input = call_.input();
    AttentionInput<float>& tangent = of_.tangent;
    SetTokens("x", a.x, tangent.x);
    SetTokens("y", a.y, tangent.y);
    SetTokens("v", a.v, tangent.v);
    tangent.row_scalars = Numbers("row_scalars");
    tangent.column_scalars = Numbers("column_scalars");
    tangent.head_scalars = Numbers("head_scalars");
    tangent.factor = Numbers("factor");
    tangent.bias = {Numbers("bias"), of_.input.bias.batch_stride, of_.input.bias.layout};
    direction_ = TangentOf("bias_parameters");
    if (direction_.defined()) {
      direction_ = direction_.to(a.bias_parameters->scalar_type());
      tangent.bias.table = Keep(call_.BiasTangent(direction_).contiguous()).const_data_ptr<float>();
    }
    tangent.key_bias = Numbers("key_bias");
    tangent.temperature = Numbers("temperature");
    const at::Tensor queries = TangentOf("relative_query");
    if (queries.defined()) {
      tangent.relative.query = Rows<float>(Keep(WithRows(queries.to(at::kFloat))));
    }
    tangent.relative.keys = Numbers("relative_keys");
    tangent.relative.values = Numbers("relative_values");
    const at::Tensor pairs = TangentOf("pair_bias");
    if (!pairs.defined()) return;
    const at::Tensor& wide = Keep(WithRows(pairs.to(at::kFloat)));
    tangent.pair_bias = {wide.const_data_ptr<float>(), PairStrides(wide)};
  }

  AttentionDerivatives& of() { return of_; }
  bool empty() const { return call_.empty(); }
  Bias<float> BiasGradient(float* table) const { return call_.BiasGradient(table); }

  // For offset biases that the operator computes: an uninitialised gradient of their table, and the
  // gradient of the parameters with its tangent.
  at::Tensor EmptyTable() const { return at::empty_like(call_.bias()); }
  at::Tensor ParameterGradient(const at::Tensor& d_bias) const {
    return call_.ParameterGradient(d_bias);
  }
  at::Tensor ParameterGradientTangent(const at::Tensor& d_bias,
                                      const at::Tensor& d_bias_tangent) const {
    return direction_.defined() ? call_.ParameterGradientTangent(d_bias, d_bias_tangent, direction_)
                                : call_.ParameterGradient(d_bias_tangent);
  }

  void Run() const {
    Translate([&] { DifferentiateAttention(of_, TorchExecutor()); });
  }

 private:
  at::Tensor TangentOf(std::string_view name) const {
    return tangents_.empty() ? at::Tensor()
                             : OrUndefined(tangents_.get(IndexOf<OperatorArguments>(name)));
  }
  void SetTokens(std::string_view name, const at::Tensor& tokens, Tokens& to) {
    const at::Tensor tangent = TangentOf(name);
    if (!tangent.defined()) return;
    to = TokenRows<float>(Keep(WithRows(tangent.to(tokens.scalar_type()))));
  }
  const float* Numbers(std::string_view name) {
    const at::Tensor tangent = TangentOf(name);
    if (!tangent.defined()) return nullptr;
    return Keep(tangent.to(at::kFloat).contiguous()).const_data_ptr<float>();
  }
  const at::Tensor& Keep(at::Tensor tensor) { return kept_.emplace_back(std::move(tensor)); }

  KernelCall<float> call_;
  const Tangents& tangents_;
  std::deque<at::Tensor> kept_;
  at::Tensor direction_;  // the tangent of the bias parameters
  AttentionDerivatives of_;
};

// The requested gradients, or their tangents.
class GradientTensors {
 public:
  GradientTensors(const OperatorArguments& a, const bool* needed, const TangentCall& call,
                  AttentionGradient<float>& to)
      : tensors_(EmptyGradients<OperatorArguments, EmptyOnCpu>({}, a, NeededFrom(needed))) {
    if (call.empty()) {
      for (at::Tensor& tensor : tensors_) tensor.zero_();
      return;
    }
    wants_parameters_ = of_("bias_parameters").numel() > 0;
    SetViews<float>(of_, call.BiasGradient(MutableData<float>(of_("bias"))), rows_, to);
  }

  bool wants_parameters() const { return wants_parameters_; }
  void SetParameters(const at::Tensor& gradient) {
    tensors_[IndexOf<OperatorArguments>("bias_parameters")] = gradient;
  }

  void AddTo(std::vector<at::Tensor>& results) {
    rows_.Round(tensors_);
    results.insert(results.end(), tensors_.begin(), tensors_.end());
  }

 private:
  static AttentionOperator::Needed NeededFrom(const bool* flags) {
    AttentionOperator::Needed needed;
    std::copy_n(flags, needed.size(), needed.begin());
    return needed;
  }

  std::vector<at::Tensor> tensors_;
  NamedGradients<OperatorArguments> of_{tensors_};
  WideRows<float> rows_{of_};
  bool wants_parameters_ = false;
};

bool HasTable(std::string_view name) {
  bool has_table = name == "dot";
  if (!has_table) Translate([&] { has_table = FindDualTable(FindPairFunction(name)) != nullptr; });
  return has_table;
}

}  // namespace

bool HasFusedDerivatives(const OperatorArguments& a) {
  return HasTable(a.function) && a.x.scalar_type() != at::kDouble && !a.relative_queries;
}

std::optional<AttentionOperator::JvpOutputs> FusedJvp(const OperatorArguments& a,
                                                      const Tangents& tangents) {
  TangentCall call(a, tangents);
  AttentionOperator::JvpOutputs outputs = EmptyJvpOutputs<OperatorArguments, EmptyOnCpu>(a);
  auto& [o, lse, statistics, o_tangent, lse_tangent] = outputs;
  if (call.empty()) {
    Outputs values{o, lse, statistics};
    FillEmpty(values);
    o_tangent.zero_();
    lse_tangent.zero_();
    return outputs;
  }
  AttentionDerivatives& of = call.of();
  of.output = {MutableRows<float>(o), MutableData<float>(lse), MutableData<float>(statistics)};
  of.o_tangent = MutableRows<float>(o_tangent);
  of.lse_tangent = MutableData<float>(lse_tangent);
  call.Run();
  if (!IsFinite(o) || !IsFinite(o_tangent) || !IsFinite(lse_tangent)) return std::nullopt;
  return outputs;
}

std::optional<std::vector<at::Tensor>> FusedBackwardJvp(
    const Cotangents& cotangents, const OperatorArguments& a, const Tangents& tangents,
    const AttentionOperator::BothNeeded& needed) {
  TangentCall call(a, tangents);
  AttentionDerivatives& of = call.of();
  std::vector<at::Tensor> results = EmptyOutputTangents(a, needed.back());
  for (at::Tensor& result : results) {
    if (call.empty()) result.zero_();
  }
  of.o_tangent = MutableRows<float>(results[0]);
  of.lse_tangent = MutableData<float>(results[1]);
  const auto wide = [](const OptionalTensor& tensor) {
    return tensor ? tensor->to(at::kFloat) : at::Tensor();
  };
  const at::Tensor d_o = WithRows(wide(cotangents.d_o));
  at::Tensor d_o_tangent = wide(cotangents.d_o_tangent);
  if (d_o_tangent.defined()) d_o_tangent = WithRows(d_o_tangent);
  const at::Tensor d_lse = Contiguous(AsOptional(wide(cotangents.d_lse)));
  const at::Tensor d_lse_tangent = Contiguous(AsOptional(wide(cotangents.d_lse_tangent)));
  of.d_o = Rows<float>(d_o);
  if (d_o_tangent.defined()) of.d_o_tangent = Rows<float>(d_o_tangent);
  of.d_lse = Data<float>(d_lse);
  of.d_lse_tangent = Data<float>(d_lse_tangent);
  GradientTensors gradients(a, needed.data(), call, of.gradient);
  GradientTensors gradient_tangents(a, needed.data() + kGradients, call, of.gradient_tangent);
  at::Tensor d_table;
  at::Tensor d_table_tangent;
  const bool wants_table =
      !call.empty() && (gradients.wants_parameters() || gradient_tangents.wants_parameters());
  if (wants_table) {
    d_table = call.EmptyTable();
    d_table_tangent = call.EmptyTable();
    of.gradient.bias = call.BiasGradient(MutableData<float>(d_table));
    of.gradient_tangent.bias = call.BiasGradient(MutableData<float>(d_table_tangent));
  }
  if (!call.empty()) call.Run();
  if (wants_table && gradients.wants_parameters()) {
    gradients.SetParameters(call.ParameterGradient(d_table));
  }
  if (wants_table && gradient_tangents.wants_parameters()) {
    gradient_tangents.SetParameters(call.ParameterGradientTangent(d_table, d_table_tangent));
  }
  gradients.AddTo(results);
  gradient_tangents.AddTo(results);
  for (const at::Tensor& result : results) {
    if (!IsFinite(result)) return std::nullopt;
  }
  return results;
}

}  // namespace gnomon
