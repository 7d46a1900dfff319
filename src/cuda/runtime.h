// Runs GPU kernels, which are compiled at the first launch, cached on disk and loaded once per
// device.
#ifndef GNOMON_SRC_CUDA_RUNTIME_H_
#define GNOMON_SRC_CUDA_RUNTIME_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda/backend.h"
#include "cuda/cubin_cache.h"
#include "cuda/driver.h"
#include "cuda/nvrtc.h"

namespace gnomon::cuda {

struct RuntimeOptions {
  std::string driver;              // path of the driver library
  std::vector<std::string> nvrtc;  // candidate NVRTC libraries; the first that loads is used
  std::string cache;               // folder for compiled kernels; empty for no cache
  bool hopper = false;             // whether kernels for compute capability 9.0 are used
  // Returns the source of a kernel.
  std::function<Program(const KernelName&)> program;
  // Receives warnings.
  std::function<void(const std::string&)> warn;
};

// Returns the default options. The driver is $GNOMON_CUDA_DRIVER or libcuda.so.1. NVRTC is
// $GNOMON_NVRTC or, if this is not set, a library in the folders or in the loader's search path.
// The cache is DefaultCacheFolder(). GNOMON_HOPPER=on enables kernels for compute capability 9.0,
// which have not run on a GPU yet. `program` is left empty. Throws CudaError.
RuntimeOptions OptionsOfEnvironment(const std::vector<std::string>& nvrtc_folders);

// All member functions are thread-safe.
class Runtime {
 public:
  // The constructor loads nothing.
  explicit Runtime(RuntimeOptions options);
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  // Returns the cubin (or PTX, see Nvrtc::TargetFor) of a kernel for a compute capability (90 for
  // 9.0), from the cache if possible. Requires NVRTC but no driver. Throws CudaError.
  CubinCache::Binary Compile(const KernelName& name, int capability);

  // Enqueues the kernel on a stream of the device and returns immediately. Throws CudaError.
  void Launch(int device, void* stream, const KernelName& name, const LaunchShape& shape,
              const void* parameters, size_t bytes);

  // Returns the driver's name for the device. Throws CudaError.
  std::string DeviceName(int device);

  // Whether the device has compute capability 9.0 and its kernels are enabled. Throws CudaError.
  bool IsHopper(int device);

 private:
  struct Kernel;

  const Driver& driver();
  const Nvrtc& nvrtc();
  Kernel& Find(uint64_t context, const KernelName& name);
  void Load(int device, const KernelName& name, Kernel& kernel);
  // The compute capability of a device (90 for 9.0).
  int Capability(int device);

  const RuntimeOptions options_;
  CubinCache cache_;
  std::mutex libraries_;
  std::unique_ptr<Driver> driver_;
  std::unique_ptr<Nvrtc> nvrtc_;
  std::shared_mutex mutex_;  // protects the map
  std::map<std::pair<uint64_t, std::string>, std::unique_ptr<Kernel>> kernels_;
};

// The Backend for a stream of a device.
class StreamBackend final : public Backend {
 public:
  // `allocate` returns device memory that remains valid until all work that the call enqueues on
  // the stream has finished.
  StreamBackend(Runtime& runtime, int device, void* stream, std::function<void*(size_t)> allocate)
      : runtime_(runtime), device_(device), stream_(stream), allocate_(std::move(allocate)) {}

  void Launch(const KernelName& name, const LaunchShape& shape, const void* parameters,
              size_t bytes) override {
    runtime_.Launch(device_, stream_, name, shape, parameters, bytes);
  }
  void* Scratch(size_t bytes) override { return allocate_(bytes); }
  bool IsHopper() const override { return runtime_.IsHopper(device_); }

 private:
  Runtime& runtime_;
  const int device_;
  void* const stream_;
  const std::function<void*(size_t)> allocate_;
};

}  // namespace gnomon::cuda

#endif  // GNOMON_SRC_CUDA_RUNTIME_H_
