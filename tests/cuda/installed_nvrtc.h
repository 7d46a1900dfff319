// The NVRTC of the installed PyTorch, and the resource usage of kernels that it compiles.
#ifndef GNOMON_TESTS_CUDA_INSTALLED_NVRTC_H_
#define GNOMON_TESTS_CUDA_INSTALLED_NVRTC_H_

#include <string>

#include "cuda/nvrtc.h"
#include "cuda/runtime.h"

namespace gnomon::testing {

inline constexpr int kArchitectures[] = {80, 90, 100, 120};

// The CUDA runtime options for this machine.
cuda::RuntimeOptions InstalledCuda();

// The NVRTC instance that all tests share; null if there is none.
const cuda::Nvrtc* InstalledNvrtc();

struct CompiledKernel {
  std::string cubin;
  int registers;    // per thread
  int stack;        // bytes per thread
  int spilled;      // bytes of spilled registers per thread, counted per spill
  bool serialized;  // whether products wait for each other (wgmma)
};

// Compiles the program for the compute capability with InstalledNvrtc(). Throws CudaError if that
// fails, and std::runtime_error if NVRTC does not support the capability.
CompiledKernel CompileFor(int capability, cuda::Program program);

}  // namespace gnomon::testing

#endif  // GNOMON_TESTS_CUDA_INSTALLED_NVRTC_H_
