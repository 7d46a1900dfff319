// This file links none of PyTorch's CUDA libraries, so that one library works with and without
// PyTorch's CUDA support. It queries devices through PyTorch's device-independent interfaces.
#include "ops/operators/cuda_stream.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "core/cuda_program.h"
#include "cuda/runtime.h"
#include "ops/operators/devices.h"
#include "ops/operators/kernel_arguments.h"

namespace gnomon {
namespace {

// The folder of PyTorch's libraries. NVRTC is in a sibling folder.
std::string TorchFolder() {
  Dl_info info = {};
  if (dladdr(reinterpret_cast<const void*>(&c10::GetAllocator), &info) == 0) return {};
  if (info.dli_fname == nullptr) return {};
  return std::filesystem::path(info.dli_fname).parent_path().string();
}

cuda::Runtime& Runtime() {
  // Never destroyed, like the driver's contexts.
  static cuda::Runtime* const runtime = [] {
    cuda::RuntimeOptions options =
        cuda::OptionsOfEnvironment(cuda::NvrtcFoldersOfTorch(TorchFolder()));
    options.program = CudaProgram;
    options.warn = [](const std::string& text) { TORCH_WARN("gnomon: ", text); };
    return new cuda::Runtime(std::move(options));
  }();
  return *runtime;
}

// The stream's native handle (cudaStream_t, CUstream).
template <class Guard>
void* NativeStream(const char* operation, const Guard& guard, const c10::Stream& stream) {
  if constexpr (requires { guard.getStreamNativeHandle(stream); }) {
    return guard.getStreamNativeHandle(stream);
  } else {
    // For PyTorch versions without getStreamNativeHandle(): c10::cuda::CUDAStream::stream() returns
    // the handle, and a c10::Stream has the same layout as a CUDAStream.
    void* const library = dlopen("libc10_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    void* const symbol =
        library != nullptr ? dlsym(library, "_ZNK3c104cuda10CUDAStream6streamEv") : nullptr;
    TORCH_CHECK(symbol != nullptr, operation,
                ": this version of PyTorch does not expose the CUDA stream; update PyTorch");
    return reinterpret_cast<void* (*)(const c10::Stream*)>(symbol)(&stream);
  }
}

// Whether the stream is known not to be captured.
template <class Guard>
bool IsNotCaptured(const Guard& guard, const c10::Stream& stream) {
  if constexpr (requires { guard.isStreamCapturing(stream); }) {
    return !guard.isStreamCapturing(stream);
  } else {
    return false;
  }
}

// Device memory from PyTorch's allocator, held until the end of a call. The allocator reuses it
// only for work that is queued on the stream afterwards.
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

}  // namespace

void RunOnCudaStream(const char* operation, const at::Tensor& tensor,
                     const std::function<void(cuda::Backend&)>& body) {
  const std::string problem = WhyRefused(tensor.device());
  TORCH_CHECK_NOT_IMPLEMENTED(problem.empty(), operation, ": x is on ", tensor.device(), "; ",
                              problem);
  const c10::DeviceGuard guard(tensor.device());
  void* native = nullptr;
  int device = 0;
  if (tensor.is_cuda()) {
    const c10::impl::VirtualGuardImpl devices(tensor.device().type());
    native = NativeStream(operation, devices, devices.getStream(tensor.device()));
    device = tensor.device().index();
  }
  ScratchTensors scratch(tensor);
  try {
    Translate([&] {
      cuda::StreamBackend backend(Runtime(), device, native,
                                  [&scratch](size_t bytes) { return scratch.New(bytes); });
      body(backend);
    });
  } catch (const cuda::CudaError& error) {
    TORCH_CHECK(false, operation, ": ", error.what());
  }
}

std::optional<std::array<int64_t, 2>> LastingStream(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return std::nullopt;
  const c10::impl::VirtualGuardImpl devices(tensor.device().type());
  const c10::Stream stream = devices.getStream(tensor.device());
  if (!IsNotCaptured(devices, stream)) return std::nullopt;
  return std::array<int64_t, 2>{tensor.device().index(), static_cast<int64_t>(stream.id())};
}

std::string NameOfGpu(int index) {
  try {
    return Runtime().DeviceName(index);
  } catch (const cuda::CudaError& error) {
    TORCH_CHECK(false, error.what());
  }
}

}  // namespace gnomon
