// Where kernels of GPUs run: on the current stream of a tensor's device, in memory of Torch's
// allocator.
#ifndef GNOMON_OPS_OPERATORS_CUDA_STREAM_H_
#define GNOMON_OPS_OPERATORS_CUDA_STREAM_H_

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <type_traits>

#include "cuda/attention.h"
#include "cuda/backend.h"

namespace gnomon {

// Calls body(backend) for the device that `tensor` is on, with errors as those that Python knows.
// `operation` begins their texts. A tensor of the CPU is taken as one of a GPU: tests give such to
// the kernels with a driver that is none either.
void RunOnCudaStream(const char* operation, const at::Tensor& tensor,
                     const std::function<void(cuda::Backend&)>& body);

// The same, and returns what body does.
template <class Body>
auto OnCudaStream(const char* operation, const at::Tensor& tensor, const Body& body) {
  std::invoke_result_t<Body, cuda::Backend&> result;
  RunOnCudaStream(operation, tensor, [&](cuda::Backend& backend) { result = body(backend); });
  return result;
}

// What the driver calls it.
std::string NameOfGpu(int index);

}  // namespace gnomon

#endif  // GNOMON_OPS_OPERATORS_CUDA_STREAM_H_
