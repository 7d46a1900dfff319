// The CUDA kernels of attention_forward and attention_backward. Nothing of PyTorch's CUDA libraries
// is linked: one library serves PyTorch with and without CUDA, and what is asked of a device goes
// through the interfaces that all devices have.
#include "ops/attention/attention_cuda.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <torch/library.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>

#include "core/cuda_program.h"
#include "cuda/attention.h"
#include "cuda/input_of.h"
#include "cuda/runtime.h"
#include "ops/attention/call_tensors.h"

namespace gnomon {
namespace {

constexpr const char* kOperation = OperatorArguments::kOperation;

// Where PyTorch's own libraries are; NVRTC is in a folder beside.
std::string TorchFolder() {
  Dl_info info = {};
  if (dladdr(reinterpret_cast<const void*>(&c10::GetAllocator), &info) == 0) return {};
  if (info.dli_fname == nullptr) return {};
  return std::filesystem::path(info.dli_fname).parent_path().string();
}

cuda::Runtime& Runtime() {
  // Lives as long as the process, as contexts of the driver do.
  static cuda::Runtime* const runtime = [] {
    cuda::RuntimeOptions options =
        cuda::OptionsOfEnvironment(cuda::NvrtcFoldersOfTorch(TorchFolder()));
    options.program = CudaProgram;
    options.warn = [](const std::string& text) { TORCH_WARN("gnomon: ", text); };
    return new cuda::Runtime(std::move(options));
  }();
  return *runtime;
}

// The stream as the driver knows it (cudaStream_t, CUstream).
template <class Guard>
void* NativeStream(const Guard& guard, const c10::Stream& stream) {
  if constexpr (requires { guard.getStreamNativeHandle(stream); }) {
    return guard.getStreamNativeHandle(stream);
  } else {
    // A PyTorch that does not tell: c10::cuda::CUDAStream, which is nothing but a c10::Stream,
    // does.
    void* const library = dlopen("libc10_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    void* const symbol =
        library != nullptr ? dlsym(library, "_ZNK3c104cuda10CUDAStream6streamEv") : nullptr;
    TORCH_CHECK(symbol != nullptr, kOperation, ": this PyTorch does not tell the stream of a GPU");
    return reinterpret_cast<void* (*)(const c10::Stream*)>(symbol)(&stream);
  }
}

// Memory of a device that Torch's allocator has until the end of a call; what is on the stream by
// then comes first to whoever is given it next.
class ScratchTensors {
 public:
  explicit ScratchTensors(const at::Tensor& like) : options_(like.options().dtype(at::kByte)) {}
  void* New(size_t bytes) {
    return held_.emplace_back(at::empty({static_cast<int64_t>(bytes)}, options_))
        .mutable_data_ptr();
  }

 private:
  at::TensorOptions options_;
  std::vector<at::Tensor> held_;
};

// Calls body with the current stream of the tensor's device. A tensor of the CPU has none: tests
// give such to the kernel with a driver that is none either.
template <class Body>
auto OnStream(const at::Tensor& tensor, const Body& body) {
  CheckCudaIsOn(kOperation, "x", tensor);
  const c10::DeviceGuard guard(tensor.device());
  void* native = nullptr;
  int device = 0;
  if (tensor.is_cuda()) {
    const c10::impl::VirtualGuardImpl devices(tensor.device().type());
    native = NativeStream(devices, devices.getStream(tensor.device()));
    device = tensor.device().index();
  }
  ScratchTensors scratch(tensor);
  cuda::StreamBackend backend(Runtime(), device, native,
                              [&scratch](size_t bytes) { return scratch.New(bytes); });
  return body(backend);
}

// The same with the errors that Python knows.
template <class Body>
void TranslateCuda(const Body& body) {
  try {
    Translate(body);
  } catch (const cuda::CudaError& error) {
    TORCH_CHECK(false, kOperation, ": ", error.what());
  }
}

cuda::Element ElementOf(at::ScalarType type) {
  TORCH_CHECK_NOT_IMPLEMENTED(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf,
                              kOperation, ": ", type,
                              " on a GPU; expected bfloat16, float16 or float32");
  return type == at::kFloat      ? cuda::Element::kFloat32
         : type == at::kBFloat16 ? cuda::Element::kBfloat16
                                 : cuda::Element::kFloat16;
}

cuda::ConstTensor Rows(const at::Tensor& tensor) {
  return {tensor.const_data_ptr(), {tensor.stride(0), tensor.stride(1), tensor.stride(2)}};
}

cuda::Tensor MutableTokens(at::Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  return {tensor.mutable_data_ptr(), {tensor.stride(0), tensor.stride(1), tensor.stride(2)}};
}

cuda::Input InputOf(const CallTensors& call) {
  const at::ScalarType type = call.x().scalar_type();
  for (const at::Tensor& tokens : {call.y(), call.v(), call.relative_query()}) {
    TORCH_CHECK_TYPE(!tokens.defined() || tokens.scalar_type() == type, kOperation,
                     ": tokens of dtypes ", type, " and ", tokens.scalar_type(),
                     " on a GPU; expected one");
  }
  const cuda::Element element = ElementOf(type);
  const AttentionInput<float> terms = call.Terms<float>();
  TORCH_CHECK_NOT_IMPLEMENTED(terms.query_positions == nullptr, kOperation,
                              ": positions on a GPU; expected query_offset");
  cuda::Input input = cuda::WithoutTokens(terms);
  input.element = element;
  input.x = Rows(call.x());
  input.y = Rows(call.y());
  input.v = Rows(call.v());
  if (call.relative_query().defined()) input.relative.query = Rows(call.relative_query());
  const std::string problem = cuda::Unsupported(call.function(), input);
  TORCH_CHECK_NOT_IMPLEMENTED(problem.empty(), kOperation, ": ", problem);
  return input;
}

Outputs ForwardCuda(const OperatorArguments& a) {
  return OnStream(a.x, [&](cuda::Backend& backend) { return ForwardOn(a, backend); });
}

std::vector<at::Tensor> BackwardCuda(const SavedOutputs& saved, const OperatorArguments& a,
                                     const AttentionOperator::Needed& needed) {
  return OnStream(a.x,
                  [&](cuda::Backend& backend) { return BackwardOn(saved, a, needed, backend); });
}

}  // namespace

bool WantsOneType(const at::Tensor& tokens) { return tokens.is_cuda(); }

void CheckCudaIsOn(const char* operation, const char* name, const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return;
  const char* const value = std::getenv("GNOMON_CUDA");
  TORCH_CHECK_NOT_IMPLEMENTED(
      value != nullptr && std::string_view(value) == "1", operation, ": ", name, " is on ",
      tensor.device(),
      "; the kernels for GPUs have been proved by emulation and have not run on a GPU yet: "
      "expected "
      "the CPU, or the environment variable GNOMON_CUDA=1, which switches them on");
}

Outputs ForwardOn(const OperatorArguments& a, cuda::Backend& backend) {
  const CallTensors call(a);
  const cuda::Input input = InputOf(call);
  Outputs outputs = EmptyOutputs(a);
  if (call.empty()) {
    FillEmpty(outputs);
    return outputs;
  }
  auto& [o, lse, statistics] = outputs;
  // Rounded to the tokens' type it is the caller's affair.
  at::Tensor rounded = a.x.scalar_type() == at::kFloat
                           ? o
                           : at::empty(o.sizes(), o.options().dtype(a.x.scalar_type()));
  cuda::Output output;
  output.o = MutableTokens(rounded);
  if (!rounded.is_same(o)) output.exact_o = o.mutable_data_ptr<float>();
  output.lse = lse.mutable_data_ptr<float>();
  output.statistics = statistics.mutable_data_ptr<float>();
  TranslateCuda([&] { cuda::Forward(call.function(), input, output, backend); });
  return outputs;
}

std::vector<at::Tensor> BackwardOn(const SavedOutputs& outputs, const OperatorArguments& a,
                                   const AttentionOperator::Needed& needed,
                                   cuda::Backend& backend) {
  CallTensors call(a);
  const cuda::Input input = InputOf(call);
  CheckSaved(outputs, a, call.lengths());
  std::vector<at::Tensor> gradients = EmptyGradients(outputs, a, needed);
  if (call.empty()) {
    for (at::Tensor& gradient : gradients) gradient.zero_();
    return gradients;
  }
  const at::ScalarType type = a.x.scalar_type();
  const at::Tensor exact_o = outputs.o.contiguous();
  const at::Tensor o = exact_o.to(type);
  const at::Tensor d_o = WithRows(outputs.d_o.to(type));
  const at::Tensor d_lse = Contiguous(outputs.d_lse);
  const at::Tensor statistics = outputs.statistics.contiguous();
  cuda::Saved saved;
  saved.o = Rows(o);
  if (!o.is_same(exact_o)) saved.exact_o = exact_o.const_data_ptr<float>();
  saved.d_o = Rows(d_o);
  saved.d_lse = Data<float>(d_lse);
  saved.statistics = statistics.const_data_ptr<float>();
  const auto of = [&](std::string_view name) -> at::Tensor& {
    return gradients[IndexOf<OperatorArguments>(name)];
  };
  cuda::Gradient gradient;
  gradient.x = MutableTokens(of("x"));
  gradient.y = MutableTokens(of("y"));
  gradient.v = MutableTokens(of("v"));
  gradient.row_scalars = MutableData<float>(of("row_scalars"));
  gradient.column_scalars = MutableData<float>(of("column_scalars"));
  gradient.head_scalars = MutableData<float>(of("head_scalars"));
  gradient.factor = MutableData<float>(of("factor"));
  gradient.bias = call.BiasGradient(MutableData<float>(of("bias")));
  gradient.key_bias = MutableData<float>(of("key_bias"));
  gradient.pair_bias = CallTensors::PairGradient<float>(of("pair_bias"));
  gradient.relative_query = MutableTokens(of("relative_query"));
  gradient.relative_keys = MutableData<float>(of("relative_keys"));
  gradient.relative_values = MutableData<float>(of("relative_values"));
  gradient.temperature = MutableData<float>(of("temperature"));
  TranslateCuda([&] { cuda::Backward(call.function(), input, saved, gradient, backend); });
  return gradients;
}

TORCH_LIBRARY_IMPL(gnomon, CUDA, m) {
  m.impl("attention_forward", &AttentionOperator::RunForward<ForwardCuda>);
  m.impl("attention_backward", &AttentionOperator::RunBackward<BackwardCuda>);
}

}  // namespace gnomon
