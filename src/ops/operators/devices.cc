#include "ops/operators/devices.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/TensorOptions.h>

#include <optional>

#include "ops/operators/cuda_stream.h"

namespace gnomon {
namespace {

bool HasKernelsFromOutside(c10::Device device) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow("gnomon::attention_forward", "")
      .hasKernelForDispatchKey(c10::computeDispatchKey(std::nullopt, std::nullopt, device));
}

}  // namespace

std::string WhyRefused(c10::Device device) {
  if (device.is_cpu() || device.is_cuda() || device.is_meta()) return "";
  return HasKernelsFromOutside(device) ? "" : "expected the CPU or a CUDA device";
}

bool WantsOneType(c10::Device device) { return device.is_cuda(); }

std::string DeviceName(c10::Device device) {
  if (!device.is_cuda()) return device.str();
  return NameOfGpu(device.has_index() ? device.index() : 0);
}

}  // namespace gnomon
