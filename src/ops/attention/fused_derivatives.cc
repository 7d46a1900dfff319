#include "ops/attention/fused_derivatives.h"

#include <ATen/ATen.h>
#include <gnomon/attention.h>

#include <algorithm>

#include "core/derivatives.h"
#include "core/dual_tables.h"
#include "ops/attention/gradients.h"
#include "ops/attention/kernel_call.h"
#include "ops/attention/tangent_input.h"
#include "ops/operators/executor.h"
#include "ops/operators/kernel_arguments.h"
#include "ops/operators/tangent_tensors.h"
#include "ops/operators/tensors.h"

namespace gnomon {
namespace {

constexpr size_t kGradients = AttentionOperator::kGradients;

template <class T>
constexpr at::ScalarType kType = c10::CppTypeToScalarType<T>::value;

// The arguments and their tangents as the kernel reads them.
template <class T>
class TangentCall {
 public:
  TangentCall(const OperatorArguments& a, const Tangents& tangents)
      : call_(a), tangents_(a, tangents, call_, kType<T>) {
    if (a.function != "dot") of_.function = FindDualTable<T>(call_.function());
    of_.input = call_.input();
    of_.tangent = tangents_.input();
    const at::Tensor& queries = tangents_.relative_query();
    if (queries.defined()) of_.tangent.relative.query = Rows<T>(queries);
    const at::Tensor& keys = tangents_.relative_key();
    if (keys.defined()) of_.tangent.relative.key = Rows<T>(keys);
  }

  AttentionDerivatives<T>& of() { return of_; }
  bool empty() const { return call_.empty(); }
  Bias<T> BiasGradient(T* table) const { return call_.BiasGradient(table); }

  // For offset biases that the operator computes: an uninitialised gradient of their table, and the
  // gradient of the parameters with its tangent.
  at::Tensor EmptyTable() const { return at::empty_like(call_.bias()); }
  at::Tensor ParameterGradient(const at::Tensor& d_bias) const {
    return call_.ParameterGradient(d_bias);
  }
  at::Tensor ParameterGradientTangent(const at::Tensor& d_bias,
                                      const at::Tensor& d_bias_tangent) const {
    const at::Tensor& direction = tangents_.direction();
    return direction.defined() ? call_.ParameterGradientTangent(d_bias, d_bias_tangent, direction)
                               : call_.ParameterGradient(d_bias_tangent);
  }

  void Run() const {
    Translate([&] { DifferentiateAttention(call_.function(), of_, TorchExecutor()); });
  }

 private:
  KernelCall<T> call_;
  TangentInput<T> tangents_;
  AttentionDerivatives<T> of_;
};

// The requested gradients, or their tangents.
template <class T>
class GradientTensors {
 public:
  GradientTensors(const OperatorArguments& a, const bool* needed, const TangentCall<T>& call,
                  AttentionGradient<T>& to)
      : tensors_(EmptyGradients<OperatorArguments, EmptyOnCpu>({}, a, NeededFrom(needed))) {
    if (call.empty()) {
      for (at::Tensor& tensor : tensors_) tensor.zero_();
      return;
    }
    wants_parameters_ = of_("bias_parameters").numel() > 0;
    SetViews<T>(of_, call.BiasGradient(MutableData<T>(of_("bias"))), rows_, to);
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
  WideRows<T> rows_{of_};
  bool wants_parameters_ = false;
};

template <class T>
std::optional<AttentionOperator::JvpOutputs> Jvp(const OperatorArguments& a,
                                                 const Tangents& tangents) {
  TangentCall<T> call(a, tangents);
  AttentionOperator::JvpOutputs outputs = EmptyJvpOutputs<OperatorArguments, EmptyOnCpu>(a);
  auto& [o, lse, statistics, o_tangent, lse_tangent] = outputs;
  if (call.empty()) {
    Outputs values{o, lse, statistics};
    FillEmpty(values);
    o_tangent.zero_();
    lse_tangent.zero_();
    return outputs;
  }
  AttentionDerivatives<T>& of = call.of();
  of.output = {MutableRows<T>(o), MutableData<T>(lse), MutableData<T>(statistics)};
  of.o_tangent = MutableRows<T>(o_tangent);
  of.lse_tangent = MutableData<T>(lse_tangent);
  call.Run();
  if (!IsFinite(o) || !IsFinite(o_tangent) || !IsFinite(lse_tangent)) return std::nullopt;
  return outputs;
}

template <class T>
std::optional<std::vector<at::Tensor>> BackwardJvp(const Cotangents& cotangents,
                                                   const OperatorArguments& a,
                                                   const Tangents& tangents,
                                                   const AttentionOperator::BothNeeded& needed) {
  TangentCall<T> call(a, tangents);
  AttentionDerivatives<T>& of = call.of();
  std::vector<at::Tensor> results = EmptyOutputTangents(a, needed.back());
  for (at::Tensor& result : results) {
    if (call.empty()) result.zero_();
  }
  of.o_tangent = MutableRows<T>(results[0]);
  of.lse_tangent = MutableData<T>(results[1]);
  const CotangentRows<T> rows(cotangents);
  rows.SetViews(Rows<T>, of);
  GradientTensors<T> gradients(a, needed.data(), call, of.gradient);
  GradientTensors<T> gradient_tangents(a, needed.data() + kGradients, call, of.gradient_tangent);
  at::Tensor d_table;
  at::Tensor d_table_tangent;
  const bool wants_table =
      !call.empty() && (gradients.wants_parameters() || gradient_tangents.wants_parameters());
  if (wants_table) {
    d_table = call.EmptyTable();
    d_table_tangent = call.EmptyTable();
    of.gradient.bias = call.BiasGradient(MutableData<T>(d_table));
    of.gradient_tangent.bias = call.BiasGradient(MutableData<T>(d_table_tangent));
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

bool IsDouble(const OperatorArguments& a) { return a.x.scalar_type() == at::kDouble; }

}  // namespace

bool HasFusedDerivatives(const OperatorArguments& a) {
  return (IsDouble(a) ? HasDualTable<double> : HasDualTable<float>)(a.function);
}

std::optional<AttentionOperator::JvpOutputs> FusedJvp(const OperatorArguments& a,
                                                      const Tangents& tangents) {
  return (IsDouble(a) ? Jvp<double> : Jvp<float>)(a, tangents);
}

std::optional<std::vector<at::Tensor>> FusedBackwardJvp(
    const Cotangents& cotangents, const OperatorArguments& a, const Tangents& tangents,
    const AttentionOperator::BothNeeded& needed) {
  return (IsDouble(a) ? BackwardJvp<double> : BackwardJvp<float>)(cotangents, a, tangents, needed);
}

}  // namespace gnomon
