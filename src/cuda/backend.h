// The interface between the plan (plan.h) and the back end that runs kernels: a GPU, or the
// emulator used in tests.
#ifndef GNOMON_SRC_CUDA_BACKEND_H_
#define GNOMON_SRC_CUDA_BACKEND_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace gnomon::cuda {

// Identifies a kernel: its kind ("forward", "backward_keys", ...), the name of the pair function
// ("penumbral_log"; empty if unused), and the values of all constants in fixed order. Kernels with
// equal names have equal code.
struct KernelName {
  std::string kind;
  std::string definition;
  std::vector<std::pair<std::string, int64_t>> constants;

  bool operator==(const KernelName&) const = default;
};

struct LaunchShape {
  std::array<uint32_t, 3> grid;
  uint32_t threads;
  uint32_t shared_bytes;
};

class Backend {
 public:
  virtual ~Backend() = default;
  // Launches a kernel, which runs after all kernels launched earlier. Its only argument is a
  // struct, which is passed by value. No grid dimension is 0.
  virtual void Launch(const KernelName& kernel, const LaunchShape& shape, const void* parameters,
                      size_t bytes) = 0;
  // Returns uninitialised device memory, aligned to 256 bytes and valid until the end of the call.
  virtual void* Scratch(size_t bytes) = 0;
  // The number of blocks that fills a GPU. It is the same for all GPUs, because results depend on
  // it; tests choose others.
  virtual int64_t BlocksToFill() const { return 264; }
  // Whether kernels may use the instructions that only compute capability 9.0 has.
  virtual bool IsHopper() const { return false; }
};

// The kernel's function name in its translation unit, as shown by profilers.
std::string KernelEntry(const KernelName& kernel);

// Whether the kernel must be compiled for exactly one architecture, such as "sm_90a".
bool IsArchitectureSpecific(const KernelName& kernel);

// The translation unit of a kernel, for NVRTC. Files are included by their path under src
// ("cuda/forward.cuh", "definitions/dot-inl.h"). `structure` and `file` are the struct and the file
// of the kernel's pair function ("PenumbralLog", "definitions/penumbral-inl.h"); both are ignored
// if the kernel has none.
std::string KernelSource(const KernelName& kernel, std::string_view structure,
                         std::string_view file);

// NVRTC options except the architecture. Multiply-adds are fused only where the source requests it,
// so that all kernels compute bitwise identical scores.
const std::vector<std::string>& KernelCompilerOptions();

}  // namespace gnomon::cuda

#endif  // GNOMON_SRC_CUDA_BACKEND_H_
