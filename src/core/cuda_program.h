// What the kernels for GPUs are compiled from: files of this library, embedded in it, and the
// definition of the pair function.
#ifndef GNOMON_SRC_CORE_CUDA_PROGRAM_H_
#define GNOMON_SRC_CORE_CUDA_PROGRAM_H_

#include <vector>

#include "cuda/backend.h"
#include "cuda/nvrtc.h"

namespace gnomon {

struct DeviceFile {
  const char* name;  // its path under src
  const char* text;
};

// All that a kernel may include besides definitions. Written by CMake.
const std::vector<DeviceFile>& DeviceFiles();

// Throws Error if there is no pair function of the kernel's definition, or no text of it.
cuda::Program CudaProgram(const cuda::KernelName& kernel);

}  // namespace gnomon

#endif  // GNOMON_SRC_CORE_CUDA_PROGRAM_H_
