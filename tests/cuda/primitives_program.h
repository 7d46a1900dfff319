// The kernel that calls the primitives (primitive_calls.cuh), as NVRTC is given it.
#ifndef GNOMON_TESTS_CUDA_PRIMITIVES_PROGRAM_H_
#define GNOMON_TESTS_CUDA_PRIMITIVES_PROGRAM_H_

#include <string>

#include "cuda/attention.h"
#include "cuda/backend.h"
#include "cuda/nvrtc.h"

namespace gnomon::testing {

cuda::KernelName PrimitivesName(cuda::Element element, bool aligned);
// The text of its translation unit.
std::string PrimitivesSource(const cuda::KernelName& name);
cuda::Program PrimitivesProgram(const cuda::KernelName& name);

}  // namespace gnomon::testing

#endif  // GNOMON_TESTS_CUDA_PRIMITIVES_PROGRAM_H_
