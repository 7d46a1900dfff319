// The CUDA kernels of the attention operators. Calls in float64 run on the CPU.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/attention.h"
#include "ops/attention/gradients.h"
#include "ops/attention/kernel_call.h"
#include "ops/attention/tangent_input.h"
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
       {OptionalTensor(a.y), OptionalTensor(a.v), a.relative_query, a.relative_key}) {
    TORCH_CHECK_TYPE(!tokens || tokens->scalar_type() == type, kAttention,
                     ": the inputs have dtypes ", type, " and ", tokens->scalar_type(),
                     "; expected the same dtype on a GPU");
  }
  TORCH_CHECK_NOT_IMPLEMENTED(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf,
                              kAttention, ": q, k and v have dtype ", type,
                              "; expected bfloat16, float16 or float32 on a GPU");
}

// The tensors must outlive the result.
cuda::Input InputOf(const OperatorArguments& a, const KernelCall<float>& call) {
  cuda::Input input(call.input());
  if (call.relative_query().defined()) {
    input.relative_query = TokenRows<float>(call.relative_query());
  }
  if (call.relative_key().defined()) input.relative_key = TokenRows<float>(call.relative_key());
  if (a.page_table) {
    input.y = TokenRows<float>(*a.key_pages);
    input.v = TokenRows<float>(*a.value_pages);
    input.pages = {call.page_table().const_data_ptr<int64_t>(), a.key_pages->size(0),
                   a.key_pages->size(2)};
  }
  const std::string problem = cuda::Unsupported(call.function(), input);
  TORCH_CHECK_NOT_IMPLEMENTED(problem.empty(), kAttention, ": ", problem);
  return input;
}

Outputs ForwardOn(const OperatorArguments& a, cuda::Backend& backend) {
  CheckCudaTypes(a);
  const KernelCall<float> call(a);
  const cuda::Input input = InputOf(a, call);
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
  output.precise = a.recorded;
  cuda::Forward(call.function(), input, output, backend);
  if (!exact.is_same(o)) o.copy_(exact);
  return outputs;
}

std::vector<at::Tensor> BackwardOn(const SavedOutputs& outputs, const OperatorArguments& a,
                                   const AttentionOperator::Needed& needed,
                                   cuda::Backend& backend) {
  CheckCudaTypes(a);
  KernelCall<float> call(a);
  const cuda::Input input = InputOf(a, call);
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
  saved.precise = a.recorded;
  NamedGradients<OperatorArguments> of(gradients);
  at::Tensor& d_parameters = of("bias_parameters");
  at::Tensor d_bias = d_parameters.numel() > 0 ? at::empty_like(call.bias()) : of("bias");
  cuda::Gradient gradient;
  const auto rows = [&](std::string_view name) { return MutableDeviceRows(of(name)); };
  SetViews<float>(of, call.BiasGradient(MutableData<float>(d_bias)), rows, gradient);
  cuda::Backward(call.function(), input, saved, gradient, backend);
  if (d_parameters.numel() > 0) d_parameters = call.ParameterGradient(d_bias);
  return gradients;
}

// The tangents of the arguments as the kernels read them.
class CudaTangents {
 public:
  CudaTangents(const OperatorArguments& a, const Tangents& tangents, const KernelCall<float>& call)
      : tangents_(a, tangents, call, a.x.scalar_type()), input_(tangents_.input()) {
    const at::Tensor& queries = tangents_.relative_query();
    if (queries.defined()) input_.relative_query = TokenRows<float>(queries);
    const at::Tensor& keys = tangents_.relative_key();
    if (keys.defined()) input_.relative_key = TokenRows<float>(keys);
  }

  const cuda::Input& input() const { return input_; }
  // The tangent of the bias parameters; undefined if it is 0.
  const at::Tensor& direction() const { return tangents_.direction(); }

 private:
  TangentInput<float> tangents_;
  cuda::Input input_;
};

// A result that kernels write as contiguous floats.
class ContiguousResult {
 public:
  explicit ContiguousResult(const at::Tensor& result)
      : result_(result),
        contiguous_(result.is_contiguous() ? result : at::empty(result.sizes(), result.options())) {
  }
  float* data() { return contiguous_.mutable_data_ptr<float>(); }
  void Finish() {
    if (!contiguous_.is_same(result_)) result_.copy_(contiguous_);
  }

 private:
  at::Tensor result_, contiguous_;
};

AttentionOperator::JvpOutputs JvpOn(const OperatorArguments& a, const Tangents& tangents,
                                    cuda::Backend& backend) {
  CheckCudaTypes(a);
  const KernelCall<float> call(a);
  const cuda::Input input = InputOf(a, call);
  AttentionOperator::JvpOutputs outputs = EmptyJvpOutputs(a);
  auto& [o, lse, statistics, o_tangent, lse_tangent] = outputs;
  if (call.empty()) {
    Outputs values{o, lse, statistics};
    FillEmpty(values);
    o_tangent.zero_();
    lse_tangent.zero_();
    return outputs;
  }
  const CudaTangents tangent(a, tangents, call);
  ContiguousResult exact(o);
  ContiguousResult exact_tangent(o_tangent);
  cuda::Output output;
  output.exact_o = exact.data();
  output.lse = lse.mutable_data_ptr<float>();
  output.statistics = statistics.mutable_data_ptr<float>();
  cuda::Forward(call.function(), input, output, backend);
  cuda::Saved saved;
  saved.exact_o = output.exact_o;
  saved.statistics = output.statistics;
  cuda::ForwardTangents(call.function(), input, tangent.input(), saved,
                        {exact_tangent.data(), lse_tangent.mutable_data_ptr<float>()}, backend);
  exact.Finish();
  exact_tangent.Finish();
  return outputs;
}

// The requested gradients, or their tangents.
class CudaGradients {
 public:
  CudaGradients(const OperatorArguments& a, const bool* needed, const KernelCall<float>& call) {
    AttentionOperator::Needed own;
    std::copy_n(needed, own.size(), own.begin());
    any_ = std::any_of(own.begin(), own.end(), [](bool is_needed) { return is_needed; });
    tensors_ = EmptyGradients({}, a, own);
    if (call.empty()) {
      for (at::Tensor& tensor : tensors_) tensor.zero_();
      return;
    }
    NamedGradients<OperatorArguments> of(tensors_);
    wants_parameters_ = of("bias_parameters").numel() > 0;
    const auto rows = [&](std::string_view name) { return MutableDeviceRows(of(name)); };
    SetViews<float>(of, call.BiasGradient(MutableData<float>(of("bias"))), rows, gradient_);
  }

  // For offset biases that the operator computes: requests the gradient of their table, and stores
  // that of the parameters.
  bool wants_parameters() const { return wants_parameters_; }
  void SetBias(const Bias<float>& gradient) {
    gradient_.bias = gradient;
    any_ = true;
  }
  void SetParameters(const at::Tensor& gradient) {
    tensors_[IndexOf<OperatorArguments>("bias_parameters")] = gradient;
  }

  bool any() const { return any_; }
  const cuda::Gradient& gradient() const { return gradient_; }
  void AddTo(std::vector<at::Tensor>& results) const {
    results.insert(results.end(), tensors_.begin(), tensors_.end());
  }

 private:
  bool any_ = false;
  bool wants_parameters_ = false;
  std::vector<at::Tensor> tensors_;
  cuda::Gradient gradient_;
};

std::vector<at::Tensor> BackwardJvpOn(const Cotangents& cotangents, const OperatorArguments& a,
                                      const Tangents& tangents,
                                      const AttentionOperator::BothNeeded& needed,
                                      cuda::Backend& backend) {
  CheckCudaTypes(a);
  const KernelCall<float> call(a);
  const cuda::Input input = InputOf(a, call);
  std::vector<at::Tensor> results = EmptyOutputTangents(a, needed.back());
  CudaGradients gradients(a, needed.data(), call);
  CudaGradients gradient_tangents(a, needed.data() + AttentionOperator::kGradients, call);
  if (call.empty()) {
    for (at::Tensor& result : results) result.zero_();
    gradients.AddTo(results);
    gradient_tangents.AddTo(results);
    return results;
  }
  const CudaTangents tangent(a, tangents, call);
  at::Tensor d_table;
  at::Tensor d_table_tangent;
  if (gradients.wants_parameters() || gradient_tangents.wants_parameters()) {
    d_table = at::empty_like(call.bias());
    d_table_tangent = at::empty_like(call.bias());
    gradients.SetBias(call.BiasGradient(MutableData<float>(d_table)));
    gradient_tangents.SetBias(call.BiasGradient(MutableData<float>(d_table_tangent)));
  }
  const AttentionShape& n = input.shape;
  const auto floats = a.x.options().dtype(at::kFloat);
  at::Tensor o = at::empty({n.batch, n.heads, n.queries, n.value_dim}, floats);
  at::Tensor statistics = at::empty({3, n.batch, n.heads, n.queries}, floats);
  cuda::Saved saved;
  saved.exact_o = o.mutable_data_ptr<float>();
  saved.statistics = statistics.mutable_data_ptr<float>();
  cuda::Output output;
  output.exact_o = o.mutable_data_ptr<float>();
  output.statistics = statistics.mutable_data_ptr<float>();
  output.precise = saved.precise = gradients.any();
  cuda::Forward(call.function(), input, output, backend);
  if (needed.back()) {
    ContiguousResult o_tangent(results[0]);
    cuda::ForwardTangents(call.function(), input, tangent.input(), saved,
                          {o_tangent.data(), results[1].mutable_data_ptr<float>()}, backend);
    o_tangent.Finish();
  }
  const at::ScalarType type = a.x.scalar_type();
  const auto rows = [&](const at::Tensor& tensor) {
    return tensor.defined() ? WithRows(tensor.to(type)) : tensor;
  };
  const at::Tensor d_o = rows(cotangents.d_o);
  const at::Tensor d_o_tangent = rows(OrUndefined(cotangents.d_o_tangent));
  const at::Tensor d_lse = Contiguous(cotangents.d_lse);
  const at::Tensor d_lse_tangent = Contiguous(cotangents.d_lse_tangent);
  saved.d_o = TokenRows<float>(d_o);
  saved.d_lse = Data<float>(d_lse);
  if (gradients.any()) {
    cuda::Backward(call.function(), input, saved, gradients.gradient(), backend);
  }
  if (gradient_tangents.any()) {
    cuda::CotangentTangents cotangent;
    if (d_o_tangent.defined()) cotangent.d_o = TokenRows<float>(d_o_tangent);
    cotangent.d_lse = Data<float>(d_lse_tangent);
    cuda::BackwardTangents(call.function(), input, tangent.input(), saved, cotangent,
                           gradient_tangents.gradient(), backend);
  }
  if (gradients.wants_parameters()) gradients.SetParameters(call.ParameterGradient(d_table));
  if (gradient_tangents.wants_parameters()) {
    gradient_tangents.SetParameters(
        tangent.direction().defined()
            ? call.ParameterGradientTangent(d_table, d_table_tangent, tangent.direction())
            : call.ParameterGradient(d_table_tangent));
  }
  gradients.AddTo(results);
  gradient_tangents.AddTo(results);
  return results;
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

AttentionOperator::JvpOutputs JvpCuda(const OperatorArguments& a, const Tangents& tangents) {
  if (a.x.scalar_type() == at::kDouble) return OnCpu<OperatorArguments>::Jvp(a, tangents);
  return OnCudaStream(kAttention, a.x,
                      [&](cuda::Backend& backend) { return JvpOn(a, tangents, backend); });
}

std::vector<at::Tensor> BackwardJvpCuda(const Cotangents& cotangents, const OperatorArguments& a,
                                        const Tangents& tangents,
                                        const AttentionOperator::BothNeeded& needed) {
  if (a.x.scalar_type() == at::kDouble) {
    return OnCpu<OperatorArguments>::BackwardJvp(cotangents, a, tangents, needed);
  }
  return OnCudaStream(kAttention, a.x, [&](cuda::Backend& backend) {
    return BackwardJvpOn(cotangents, a, tangents, needed, backend);
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(gnomon, CUDA, m) {
  m.impl("attention_forward", &AttentionOperator::RunForward<ForwardCuda>);
  m.impl("attention_backward", &AttentionOperator::RunBackward<BackwardCuda>);
  m.impl("attention_jvp", &AttentionOperator::RunJvp<JvpCuda>);
  m.impl("attention_backward_jvp", &AttentionOperator::RunBackwardJvp<BackwardJvpCuda>);
}

}  // namespace gnomon
