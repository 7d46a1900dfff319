// The kernel that calls the primitives (primitive_calls.cuh), in the form passed to NVRTC.
#ifndef GNOMON_TESTS_CUDA_PRIMITIVES_PROGRAM_H_
#define GNOMON_TESTS_CUDA_PRIMITIVES_PROGRAM_H_

#include <string>

#include "cuda/attention.h"
#include "cuda/backend.h"
#include "cuda/nvrtc.h"

namespace gnomon::testing {

cuda::KernelName PrimitivesName(cuda::Element element, bool aligned);
// The kernel that calls those of compute capability 9.0 (wgmma_calls.cuh). `columns`: kStep and
// kValueDim.
cuda::KernelName WgmmaName(cuda::Element element, int columns);
// Returns the source of the kernel's translation unit.
std::string PrimitivesSource(const cuda::KernelName& name);
cuda::Program PrimitivesProgram(const cuda::KernelName& name);

}  // namespace gnomon::testing

#endif  // GNOMON_TESTS_CUDA_PRIMITIVES_PROGRAM_H_
