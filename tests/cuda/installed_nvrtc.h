// The NVRTC of the installed PyTorch, and the resource usage of kernels that it compiles.
#ifndef GNOMON_TESTS_CUDA_INSTALLED_NVRTC_H_
#define GNOMON_TESTS_CUDA_INSTALLED_NVRTC_H_

#include "cuda/nvrtc.h"
#include "cuda/runtime.h"

namespace gnomon::testing {

inline constexpr int kArchitectures[] = {80, 90, 100, 120};

// The CUDA runtime options for this machine.
cuda::RuntimeOptions InstalledCuda();

// The NVRTC instance that all tests share; null if there is none.
const cuda::Nvrtc* InstalledNvrtc();

// Resource usage per thread.
struct Footprint {
  int registers;
  int stack;    // bytes
  int spilled;  // bytes of spilled registers, counted per spill
};

// Compiles the program for the architecture with InstalledNvrtc(), and returns its resource usage.
// Throws CudaError if that fails.
Footprint FootprintOf(cuda::Program program, int architecture);

}  // namespace gnomon::testing

#endif  // GNOMON_TESTS_CUDA_INSTALLED_NVRTC_H_
