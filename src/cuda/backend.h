// What the plan (attention.h) asks of the place where kernels run: a GPU, or the emulation of the
// tests.
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

// Which kernel: its kind ("forward", "backward_keys", ...), the name of the pair function
// ("penumbral_log"; empty where the kernel asks for none), and the values of its constants, always
// all of them and in the same order. Kernels of equal names are the same code.
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
  // Runs a kernel after those launched before it. The kernel's only argument is one struct, passed
  // by value; no side of the grid is 0.
  virtual void Launch(const KernelName& kernel, const LaunchShape& shape, const void* parameters,
                      size_t bytes) = 0;
  // Device memory until the end of the call, aligned to 256 bytes, its content undefined.
  virtual void* Scratch(size_t bytes) = 0;
};

// The kernel's name in the text of its translation unit, which profilers show.
std::string KernelEntry(const KernelName& kernel);

// The text of a kernel's translation unit for NVRTC. It includes files by their path under src
// ("cuda/forward.cuh", "definitions/dot-inl.h"), those includes others in the same way, and there
// is no other include: KernelSourceFiles() and the definition's file are all that must be embedded.
// `structure` and `file` are the struct and the file of the kernel's pair function ("PenumbralLog",
// "definitions/penumbral-inl.h"); both are ignored where the kernel asks for none.
std::string KernelSource(const KernelName& kernel, std::string_view structure,
                         std::string_view file);
const std::vector<std::string>& KernelSourceFiles();

// Options of NVRTC besides the architecture. A product and a sum are fused where the source says
// so and nowhere else: a score must be the same number in every kernel that computes it.
const std::vector<std::string>& KernelCompilerOptions();

}  // namespace gnomon::cuda

#endif  // GNOMON_SRC_CUDA_BACKEND_H_
