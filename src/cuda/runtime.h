// Kernels on a GPU: compiled when they are first launched, kept on disk, loaded once per device.
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
  std::string driver;              // the driver's library
  std::vector<std::string> nvrtc;  // NVRTC's, of which the first that loads is taken
  std::string cache;               // folder of compiled kernels; empty: none
  // Gives what a kernel is compiled from.
  std::function<Program(const KernelName&)> program;
  // Is told what is no error and yet not as it should be.
  std::function<void(const std::string&)> warn;
};

// The driver is $GNOMON_CUDA_DRIVER, else libcuda.so.1; NVRTC $GNOMON_NVRTC, else one in the
// folders, else the system's; the cache is DefaultCacheFolder(). `program` is left to the caller.
RuntimeOptions OptionsOfEnvironment(const std::vector<std::string>& nvrtc_folders);

// Any number of threads may use one at the same time.
class Runtime {
 public:
  // Loads nothing yet.
  explicit Runtime(RuntimeOptions options);
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  // A kernel's cubin (or PTX, Nvrtc::TargetFor) for devices of that compute capability, 90 for 9.0,
  // from the cache if it is there. Needs NVRTC, but no driver. Throws CudaError.
  CubinCache::Binary Compile(const KernelName& name, int capability);

  // Puts the kernel on the stream, which is one of the device's, and returns at once. Throws
  // CudaError.
  void Launch(int device, void* stream, const KernelName& name, const LaunchShape& shape,
              const void* parameters, size_t bytes);

  // What the driver calls the device. Throws CudaError.
  std::string DeviceName(int device);

 private:
  struct Kernel;

  const Driver& driver();
  const Nvrtc& nvrtc();
  Kernel& Find(uint64_t context, const KernelName& name);
  void Load(int device, const KernelName& name, Kernel& kernel);

  const RuntimeOptions options_;
  CubinCache cache_;
  std::mutex libraries_;
  std::unique_ptr<Driver> driver_;
  std::unique_ptr<Nvrtc> nvrtc_;
  std::shared_mutex mutex_;  // of the map
  std::map<std::pair<uint64_t, std::string>, std::unique_ptr<Kernel>> kernels_;
};

// A device's stream as the plan of an operator sees it.
class StreamBackend final : public Backend {
 public:
  // `allocate` gives memory of the device that lives until what is on the stream by then is done.
  StreamBackend(Runtime& runtime, int device, void* stream, std::function<void*(size_t)> allocate)
      : runtime_(runtime), device_(device), stream_(stream), allocate_(std::move(allocate)) {}

  void Launch(const KernelName& name, const LaunchShape& shape, const void* parameters,
              size_t bytes) override {
    runtime_.Launch(device_, stream_, name, shape, parameters, bytes);
  }
  void* Scratch(size_t bytes) override { return allocate_(bytes); }

 private:
  Runtime& runtime_;
  const int device_;
  void* const stream_;
  const std::function<void*(size_t)> allocate_;
};

}  // namespace gnomon::cuda

#endif  // GNOMON_SRC_CUDA_RUNTIME_H_
