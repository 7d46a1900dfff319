// The CPU kernels of attention_forward and attention_backward.
#include <ATen/ATen.h>
#include <gnomon/attention.h>
#include <torch/library.h>

#include <string_view>
#include <utility>
#include <vector>

#include "ops/attention/call_checks.h"
#include "ops/attention/kernel_call.h"
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

// The tensor that kernels of type T write a gradient to: the gradient itself, or a wider buffer
// that is rounded later.
template <class T>
at::Tensor WideGradient(const at::Tensor& gradient) {
  constexpr at::ScalarType kType = c10::CppTypeToScalarType<T>::value;
  return gradient.scalar_type() == kType
             ? gradient
             : at::empty(gradient.sizes(), gradient.options().dtype(kType));
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
  at::Tensor d_x = WideGradient<T>(of("x"));
  at::Tensor d_y = WideGradient<T>(of("y"));
  at::Tensor d_v = WideGradient<T>(of("v"));
  AttentionGradient<T> gradient;
  gradient.x = MutableRows<T>(d_x);
  gradient.y = MutableRows<T>(d_y);
  gradient.v = MutableRows<T>(d_v);
  gradient.row_scalars = MutableData<T>(of("row_scalars"));
  gradient.column_scalars = MutableData<T>(of("column_scalars"));
  gradient.head_scalars = MutableData<T>(of("head_scalars"));
  gradient.factor = MutableData<T>(of("factor"));
  at::Tensor& d_parameters = of("bias_parameters");
  at::Tensor d_bias = d_parameters.numel() > 0 ? at::empty_like(call.bias()) : of("bias");
  gradient.bias = call.BiasGradient(MutableData<T>(d_bias));
  gradient.key_bias = MutableData<T>(of("key_bias"));
  gradient.pair_bias = PairGradient<T>(of("pair_bias"));
  gradient.temperature = MutableData<T>(of("temperature"));
  gradient.relative_query = MutableRows<T>(of("relative_query"));
  gradient.relative_keys = MutableData<T>(of("relative_keys"));
  gradient.relative_values = MutableData<T>(of("relative_values"));
  gradient.relative_key = MutableRows<T>(of("relative_key"));
  gradient.relative_queries = MutableData<T>(of("relative_queries"));
  of.Done();
  Translate(
      [&] { AttentionBackward(call.function(), call.input(), saved, gradient, TorchExecutor()); });
  for (const auto& [name, wide] : {std::pair("x", d_x), std::pair("y", d_y), std::pair("v", d_v)}) {
    of(name) = InType(wide, of(name).scalar_type());
  }
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
