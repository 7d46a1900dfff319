#include "cuda/runtime.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <string_view>

namespace gnomon::cuda {
namespace {

// The shared memory that a kernel may use without raising its limit.
constexpr uint32_t kSharedBytesAtOnce = 48 * 1024;
// The maximum grid dimension in y and z.
constexpr uint32_t kMostBlocks = 65535;

std::string Text(const KernelName& name) {
  std::string text = name.kind + " of " + name.definition;
  for (const auto& [constant, value] : name.constants) {
    text += ", " + constant + " = " + std::to_string(value);
  }
  return text;
}

}  // namespace

// A kernel loaded into one context.
struct Runtime::Kernel {
  std::mutex mutex;  // held while loading the kernel and raising its limit
  std::atomic<Driver::Function> function{nullptr};
  std::atomic<uint32_t> shared_limit{0};
  uint32_t static_shared_bytes = 0;
};

RuntimeOptions OptionsOfEnvironment(const std::vector<std::string>& nvrtc_folders) {
  const auto variable = [](const char* name) -> std::string {
    const char* value = std::getenv(name);
    return value != nullptr ? value : "";
  };
  RuntimeOptions options;
  options.driver = variable("GNOMON_CUDA_DRIVER");
  if (options.driver.empty()) options.driver = "libcuda.so.1";
  if (const std::string given = variable("GNOMON_NVRTC"); !given.empty()) {
    options.nvrtc = {given};
  } else {
    std::vector<std::string> folders = nvrtc_folders;
    for (const char* name : {"CUDA_HOME", "CUDA_PATH"}) {
      if (const std::string home = variable(name); !home.empty())
        folders.push_back(home + "/lib64");
    }
    folders.emplace_back("/usr/local/cuda/lib64");
    for (const std::string& folder : folders) {
      for (std::string& library : NvrtcLibrariesIn(folder)) options.nvrtc.push_back(library);
    }
    // The loader looks these names up in its search path.
    for (const char* name : {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"}) {
      options.nvrtc.emplace_back(name);
    }
  }
  options.cache = DefaultCacheFolder();
  const std::string hopper = variable("GNOMON_HOPPER");
  if (!hopper.empty() && hopper != "on") {
    throw CudaError("CUDA: GNOMON_HOPPER is '" + hopper + "'; expected on or an empty value");
  }
  options.hopper = !hopper.empty();
  return options;
}

Runtime::Runtime(RuntimeOptions options)
    : options_(std::move(options)), cache_(options_.cache, options_.warn) {}

Runtime::~Runtime() = default;

const Driver& Runtime::driver() {
  const std::lock_guard<std::mutex> lock(libraries_);
  if (!driver_) driver_ = std::make_unique<Driver>(options_.driver);
  return *driver_;
}

const Nvrtc& Runtime::nvrtc() {
  const std::lock_guard<std::mutex> lock(libraries_);
  if (!nvrtc_) nvrtc_ = std::make_unique<Nvrtc>(options_.nvrtc);
  return *nvrtc_;
}

CubinCache::Binary Runtime::Compile(const KernelName& name, int capability) {
  const Nvrtc& compiler = nvrtc();
  const Program program = options_.program(name);
  const std::string target = compiler.TargetFor(capability) + (program.specific ? "a" : "");
  std::vector<std::string> parts = {program.text, target, compiler.version()};
  for (const auto& [file, text] : program.files) {
    parts.push_back(file);
    parts.push_back(text);
  }
  for (const std::string& option : program.options) parts.push_back(option);
  return cache_.Get(CacheKey(parts), [&] { return compiler.Compile(program, target); });
}

Runtime::Kernel& Runtime::Find(uint64_t context, const KernelName& name) {
  const std::pair<uint64_t, std::string> key(context, Text(name));
  {
    const std::shared_lock<std::shared_mutex> lock(mutex_);
    const auto found = kernels_.find(key);
    if (found != kernels_.end()) return *found->second;
  }
  const std::unique_lock<std::shared_mutex> lock(mutex_);
  std::unique_ptr<Kernel>& kernel = kernels_[key];
  if (!kernel) kernel = std::make_unique<Kernel>();
  return *kernel;
}

void Runtime::Load(int device, const KernelName& name, Kernel& kernel) {
  const Driver& d = driver();
  const std::lock_guard<std::mutex> lock(kernel.mutex);
  if (kernel.function != nullptr) return;
  const CubinCache::Binary binary = Compile(name, Capability(device));
  const RelaxedCapture relaxed(d);
  Driver::Module module = nullptr;
  d.Check(d.module_load_data(&module, binary->c_str()), "loading " + Text(name));
  Driver::Function function = nullptr;
  int static_bytes = 0;
  try {
    d.Check(d.module_get_function(&function, module, options_.program(name).entry.c_str()),
            "finding " + Text(name));
    d.Check(d.function_get_attribute(&static_bytes, Driver::kSharedSizeBytes, function),
            "querying the shared memory of " + Text(name));
  } catch (const CudaError&) {
    d.module_unload(module);
    throw;
  }
  kernel.static_shared_bytes = static_cast<uint32_t>(static_bytes);
  kernel.shared_limit =
      kSharedBytesAtOnce - std::min(kernel.static_shared_bytes, kSharedBytesAtOnce);
  kernel.function = function;
}

int Runtime::Capability(int device) {
  const Driver& d = driver();
  int wanted = 0;
  d.Check(d.device_get(&wanted, device), "querying device " + std::to_string(device));
  return 10 * d.Attribute(wanted, Driver::kComputeCapabilityMajor) +
         d.Attribute(wanted, Driver::kComputeCapabilityMinor);
}

bool Runtime::IsHopper(int device) { return options_.hopper && Capability(device) == 90; }

std::string Runtime::DeviceName(int device) {
  const Driver& d = driver();
  int own = 0;
  d.Check(d.device_get(&own, device), "querying device " + std::to_string(device));
  return d.Name(own);
}

void Runtime::Launch(int device, void* stream, const KernelName& name, const LaunchShape& shape,
                     const void* parameters, size_t bytes) {
  const auto& [x, y, z] = shape.grid;
  if (x == 0 || y == 0 || z == 0) return;
  if (y > kMostBlocks || z > kMostBlocks || x > 0x7fffffffu) {
    throw CudaError("CUDA: " + Text(name) + " has a grid of " + std::to_string(x) + " x " +
                    std::to_string(y) + " x " + std::to_string(z) +
                    " blocks; expected at most (2^31 - 1) x 65535 x 65535");
  }
  const Driver& d = driver();
  const CurrentContext context(d, device);
  Kernel& kernel = Find(context.id(), name);
  if (kernel.function == nullptr) Load(device, name, kernel);
  if (shape.shared_bytes > kernel.shared_limit) {
    const std::lock_guard<std::mutex> lock(kernel.mutex);
    if (shape.shared_bytes > kernel.shared_limit) {
      int own = 0;
      d.Check(d.device_get(&own, device), "querying device " + std::to_string(device));
      const int most = d.Attribute(own, Driver::kMaxSharedMemoryPerBlockOptIn);
      if (int64_t{shape.shared_bytes} + kernel.static_shared_bytes > most) {
        throw CudaError("CUDA: " + Text(name) + " needs " +
                        std::to_string(int64_t{shape.shared_bytes} + kernel.static_shared_bytes) +
                        " bytes of shared memory per block; device " + std::to_string(device) +
                        " has " + std::to_string(most));
      }
      d.Check(d.function_set_attribute(kernel.function, Driver::kMaxDynamicSharedSizeBytes,
                                       static_cast<int>(shape.shared_bytes)),
              "reserving shared memory for " + Text(name));
      kernel.shared_limit = shape.shared_bytes;
    }
  }
  // The parameters are passed as one buffer, so that the driver checks their size.
  size_t size = bytes;
  void* const kPointer = reinterpret_cast<void*>(1);
  void* const kSize = reinterpret_cast<void*>(2);
  void* extra[] = {kPointer, const_cast<void*>(parameters), kSize, &size, nullptr};
  d.Check(d.launch_kernel(kernel.function, x, y, z, shape.threads, 1, 1, shape.shared_bytes,
                          static_cast<Driver::Stream>(stream), /*parameters=*/nullptr, extra),
          "launching " + Text(name));
}

}  // namespace gnomon::cuda
