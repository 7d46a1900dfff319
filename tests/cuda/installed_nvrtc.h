// The NVRTC of the installed PyTorch, and what kernels that it compiles take of a GPU.
#ifndef GNOMON_TESTS_CUDA_INSTALLED_NVRTC_H_
#define GNOMON_TESTS_CUDA_INSTALLED_NVRTC_H_

#include "cuda/nvrtc.h"
#include "cuda/runtime.h"

namespace gnomon::testing {

inline constexpr int kArchitectures[] = {80, 90, 100, 120};

// The run time's options of this machine.
cuda::RuntimeOptions InstalledCuda();

// Kept for all tests; null if there is none.
const cuda::Nvrtc* InstalledNvrtc();

// Of one thread.
struct Footprint {
  int registers;
  int stack;    // bytes
  int spilled;  // bytes of registers, each as often as it is
};

// Compiles it for the architecture, with InstalledNvrtc(). Throws CudaError if it does not compile.
Footprint FootprintOf(cuda::Program program, int architecture);

}  // namespace gnomon::testing

#endif  // GNOMON_TESTS_CUDA_INSTALLED_NVRTC_H_
