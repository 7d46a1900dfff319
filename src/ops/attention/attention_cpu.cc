// The CPU kernels of attention_forward and attention_backward.
#include <ATen/ATen.h>
#include <gnomon/attention.h>
#include <torch/library.h>

#include <optional>
#include <utility>
#include <vector>

#include "ops/attention/call_checks.h"
#include "ops/attention/gradients.h"
#include "ops/attention/kernel_call.h"
#include "ops/attention/pages.h"
#include "ops/operators/attention_operators.h"
#include "ops/operators/executor.h"
#include "ops/operators/kernel_arguments.h"

namespace gnomon {
namespace {

void CheckTypes(const OperatorArguments& a) {
  const at::ScalarType type = a.x.scalar_type();
  const at::ScalarType wide = WideType(type);
  TORCH_CHECK_TYPE(wide == at::kFloat || wide == at::kDouble, OperatorArguments::kOperation,
                   ": x has dtype ", type, "; expected bfloat16, float16, float32 or float64");
  TORCH_CHECK_TYPE(a.y.scalar_type() == type, OperatorArguments::kOperation, ": y has dtype ",
                   a.y.scalar_type(), "; expected the dtype of x, ", type);
  for (const auto& [name, tokens] : {std::pair("relative_query", &a.relative_query),
                                     std::pair("relative_key", &a.relative_key)}) {
    TORCH_CHECK_TYPE(!*tokens || (*tokens)->scalar_type() == wide, OperatorArguments::kOperation,
                     ": ", name, " has dtype ", (*tokens)->scalar_type(), "; expected ", wide);
  }
}

template <class T>
Outputs RunForward(const OperatorArguments& a) {
  const KernelCall<T> call(a);
  Outputs outputs = EmptyOutputs<OperatorArguments, EmptyOnCpu>(a);
  if (call.empty()) {
    FillEmpty(outputs);
    return outputs;
  }
  auto& [o, lse, statistics] = outputs;
  const AttentionOutput<T> output{MutableRows<T>(o), MutableData<T>(lse),
                                  MutableData<T>(statistics)};
  Translate([&] { AttentionForward(call.function(), call.input(), output, TorchExecutor()); });
  return outputs;
}

Outputs ForwardCpu(const OperatorArguments& a) {
  CheckPages(a);
  if (a.page_table) {
    OperatorArguments gathered = a;
    gathered.y = GatherSeenPages(*a.key_pages, *a.page_table, a.key_lengths);
    gathered.v = GatherSeenPages(*a.value_pages, *a.page_table, a.key_lengths);
    gathered.key_pages = gathered.value_pages = gathered.page_table = std::nullopt;
    return ForwardCpu(gathered);
  }
  CheckTypes(a);
  return a.x.scalar_type() == at::kDouble ? RunForward<double>(a) : RunForward<float>(a);
}

template <class T>
std::vector<at::Tensor> RunBackward(const SavedOutputs& outputs, const OperatorArguments& a,
                                    const AttentionOperator::Needed& needed) {
  KernelCall<T> call(a);
  CheckSaved(outputs, a, call.lengths());
  std::vector<at::Tensor> gradients =
      EmptyGradients<OperatorArguments, EmptyOnCpu>(outputs, a, needed);
  if (call.empty()) {
    for (at::Tensor& gradient : gradients) gradient.zero_();
    return gradients;
  }
  const at::Tensor o = WithRows(outputs.o);
  const at::Tensor lse = outputs.lse.contiguous();
  const at::Tensor d_o = WithRows(outputs.d_o);
  const at::Tensor d_lse = Contiguous(outputs.d_lse);
  const at::Tensor statistics = outputs.statistics.contiguous();
  const AttentionBackwardInput<T> saved{Rows<T>(o), lse.const_data_ptr<T>(), Rows<T>(d_o),
                                        Data<T>(d_lse), statistics.const_data_ptr<T>()};
  NamedGradients<OperatorArguments> of(gradients);
  at::Tensor& d_parameters = of("bias_parameters");
  at::Tensor d_bias = d_parameters.numel() > 0 ? at::empty_like(call.bias()) : of("bias");
  WideRows<T> rows(of);
  AttentionGradient<T> gradient;
  SetViews<T>(of, call.BiasGradient(MutableData<T>(d_bias)), rows, gradient);
  Translate(
      [&] { AttentionBackward(call.function(), call.input(), saved, gradient, TorchExecutor()); });
  rows.Round(gradients);
  if (d_parameters.numel() > 0) d_parameters = call.ParameterGradient(d_bias);
  return gradients;
}

std::vector<at::Tensor> BackwardCpu(const SavedOutputs& saved, const OperatorArguments& a,
                                    const AttentionOperator::Needed& needed) {
  CheckTypes(a);
  return a.x.scalar_type() == at::kDouble ? RunBackward<double>(saved, a, needed)
                                          : RunBackward<float>(saved, a, needed);
}

}  // namespace

TORCH_LIBRARY_IMPL(gnomon, CPU, m) {
  m.impl("attention_forward", &AttentionOperator::RunForward<ForwardCpu>);
  m.impl("attention_backward", &AttentionOperator::RunBackward<BackwardCpu>);
}

}  // namespace gnomon
