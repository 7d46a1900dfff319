#include "training/device.h"

#include <ATen/Context.h>
#include <c10/util/Exception.h>

#include <optional>

#include "gnomon/attention.h"
#include "gnomon/torch/devices.h"
#include "training/strings.h"

namespace gnomon::lab {
namespace {

std::optional<c10::Device> Parse(const std::string& name) {
  try {
    const c10::Device device(name);
    // The names must agree, because PyTorch truncates the index: cuda:256 would become cuda:0.
    if (device.str() == name) return device;
  } catch (const c10::Error&) {
    // The name is not a valid device.
  }
  return std::nullopt;
}

// The number of devices that PyTorch finds; 0 if it was built without GPU support.
int64_t CountDevices(c10::DeviceType type) {
  return at::globalContext().getAcceleratorHooksInterface(type).deviceCount();
}

}  // namespace

c10::Device FindDevice(const std::string& name) {
  const std::optional<c10::Device> device = Parse(name);
  if (!device || device->is_meta() || (device->is_cpu() && device->has_index()) ||
      (!device->is_cuda() && !WhyRefused(*device).empty())) {
    throw Error(StrCat("--device is '", name, "'; expected cpu, cuda or cuda:N"));
  }
  if (device->is_cpu()) return c10::Device(c10::kCPU);
  const int64_t count = CountDevices(device->type());
  if (count == 0) throw Error(StrCat("--device is ", name, ", but PyTorch finds no GPU"));
  if (device->index() >= count) {
    throw Error(StrCat("--device is ", name, "; expected a GPU index below ", count,
                       ", the number of GPUs"));
  }
  if (const std::string problem = WhyRefused(*device); !problem.empty()) {
    throw Error(StrCat("--device is ", name, "; ", problem));
  }
  return *device;
}

}  // namespace gnomon::lab
