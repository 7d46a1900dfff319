// Runs GPU kernels on the current stream of a tensor's device, with memory from PyTorch's
// allocator.
#ifndef GNOMON_OPS_OPERATORS_CUDA_STREAM_H_
#define GNOMON_OPS_OPERATORS_CUDA_STREAM_H_

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <type_traits>

#include "cuda/attention.h"
#include "cuda/backend.h"

namespace gnomon {

// Calls body(backend) for the device of `tensor`. Errors become exceptions that map to Python's;
// their messages start with `operation`. CPU tensors are accepted as well: tests pass them to
// kernels on a mock driver.
void RunOnCudaStream(const char* operation, const at::Tensor& tensor,
                     const std::function<void(cuda::Backend&)>& body);

// RunOnCudaStream that returns the result of body.
template <class Body>
auto OnCudaStream(const char* operation, const at::Tensor& tensor, const Body& body) {
  std::invoke_result_t<Body, cuda::Backend&> result;
  RunOnCudaStream(operation, tensor, [&](cuda::Backend& backend) { result = body(backend); });
  return result;
}

// The device and the stream that RunOnCudaStream() uses for a tensor on a GPU. Nullopt if the
// stream is being captured into a graph, or if this version of PyTorch does not say: memory that
// such a call allocates must not be used by later calls.
std::optional<std::array<int64_t, 2>> LastingStream(const at::Tensor& tensor);

// The driver's name for the GPU.
std::string NameOfGpu(int index);

}  // namespace gnomon

#endif  // GNOMON_OPS_OPERATORS_CUDA_STREAM_H_
