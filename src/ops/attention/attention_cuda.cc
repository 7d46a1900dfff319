// The CUDA kernels of attention_forward and attention_backward. Calls in float64 run on the CPU.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <string>
#include <string_view>
#include <vector>

#include "cuda/attention.h"
#include "ops/attention/gradients.h"
#include "ops/attention/kernel_call.h"
#include "ops/operators/attention_operators.h"
#include "ops/operators/cuda_stream.h"
#include "ops/operators/on_cpu.h"

namespace gnomon {
namespace {

constexpr const char* kAttention = OperatorArguments::kOperation;

cuda::Tensor MutableDeviceRows(at::Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  return {tensor.mutable_data_ptr(), {tensor.stride(0), tensor.stride(1), tensor.stride(2)}};
}

void CheckCudaTypes(const OperatorArguments& a) {
  const at::ScalarType type = a.x.scalar_type();
  for (const OptionalTensor& tokens :
       {OptionalTensor(a.y), OptionalTensor(a.v), a.relative_query}) {
    TORCH_CHECK_TYPE(!tokens || tokens->scalar_type() == type, kAttention,
                     ": the inputs have dtypes ", type, " and ", tokens->scalar_type(),
                     "; expected the same dtype on a GPU");
  }
  TORCH_CHECK_NOT_IMPLEMENTED(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf,
                              kAttention, ": q, k and v have dtype ", type,
                              "; expected bfloat16, float16 or float32 on a GPU");
}

cuda::Input InputOf(const KernelCall<float>& call) {
  cuda::Input input(call.input());
  if (call.relative_query().defined()) {
    input.relative_query = TokenRows<float>(call.relative_query());
  }
  const std::string problem = cuda::Unsupported(call.function(), input);
  TORCH_CHECK_NOT_IMPLEMENTED(problem.empty(), kAttention, ": ", problem);
  return input;
}

Outputs ForwardOn(const OperatorArguments& a, cuda::Backend& backend) {
  CheckCudaTypes(a);
  const KernelCall<float> call(a);
  const cuda::Input input = InputOf(call);
  Outputs outputs = EmptyOutputs(a);
  if (call.empty()) {
    FillEmpty(outputs);
    return outputs;
  }
  auto& [o, lse, statistics] = outputs;
  cuda::Output output;
  // For 16-bit tokens, the kernels write o in float32, as contiguous rows. The caller rounds it.
  const bool is_float = a.x.scalar_type() == at::kFloat;
  const at::Tensor exact = is_float || o.is_contiguous() ? o : at::empty(o.sizes(), o.options());
  if (is_float) {
    output.o = MutableDeviceRows(o);
  } else {
    output.exact_o = exact.mutable_data_ptr<float>();
  }
  output.lse = lse.mutable_data_ptr<float>();
  output.statistics = statistics.mutable_data_ptr<float>();
  cuda::Forward(call.function(), input, output, backend);
  if (!exact.is_same(o)) o.copy_(exact);
  return outputs;
}

std::vector<at::Tensor> BackwardOn(const SavedOutputs& outputs, const OperatorArguments& a,
                                   const AttentionOperator::Needed& needed,
                                   cuda::Backend& backend) {
  CheckCudaTypes(a);
  KernelCall<float> call(a);
  const cuda::Input input = InputOf(call);
  CheckSaved(outputs, a, call.lengths());
  std::vector<at::Tensor> gradients = EmptyGradients(outputs, a, needed);
  if (call.empty()) {
    for (at::Tensor& gradient : gradients) gradient.zero_();
    return gradients;
  }
  const at::ScalarType type = a.x.scalar_type();
  const at::Tensor o = outputs.o.contiguous();
  const at::Tensor d_o = WithRows(outputs.d_o.to(type));
  const at::Tensor d_lse = Contiguous(outputs.d_lse);
  const at::Tensor statistics = outputs.statistics.contiguous();
  cuda::Saved saved;
  if (type == at::kFloat) {
    saved.o = TokenRows<float>(o);
  } else {
    saved.exact_o = o.const_data_ptr<float>();
  }
  saved.d_o = TokenRows<float>(d_o);
  saved.d_lse = Data<float>(d_lse);
  saved.statistics = statistics.const_data_ptr<float>();
  NamedGradients<OperatorArguments> of(gradients);
  cuda::Gradient gradient;
  const auto rows = [&](std::string_view name) { return MutableDeviceRows(of(name)); };
  SetViews<float>(of, call.BiasGradient(MutableData<float>(of("bias"))), rows, gradient);
  cuda::Backward(call.function(), input, saved, gradient, backend);
  return gradients;
}

Outputs ForwardCuda(const OperatorArguments& a) {
  if (a.x.scalar_type() == at::kDouble) return OnCpu<OperatorArguments>::Forward(a);
  return OnCudaStream(kAttention, a.x,
                      [&](cuda::Backend& backend) { return ForwardOn(a, backend); });
}

std::vector<at::Tensor> BackwardCuda(const SavedOutputs& saved, const OperatorArguments& a,
                                     const AttentionOperator::Needed& needed) {
  if (a.x.scalar_type() == at::kDouble) return OnCpu<OperatorArguments>::Backward(saved, a, needed);
  return OnCudaStream(kAttention, a.x, [&](cuda::Backend& backend) {
    return BackwardOn(saved, a, needed, backend);
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(gnomon, CUDA, m) {
  m.impl("attention_forward", &AttentionOperator::RunForward<ForwardCuda>);
  m.impl("attention_backward", &AttentionOperator::RunBackward<BackwardCuda>);
}

}  // namespace gnomon
