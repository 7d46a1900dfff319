// The devices on which the operators run.
#ifndef GNOMON_TORCH_DEVICES_H_
#define GNOMON_TORCH_DEVICES_H_

#include <c10/core/Device.h>

#include <string>

namespace gnomon {

// Returns why tensors on this device are rejected and what is expected; empty if they are accepted.
// Accepted devices are the CPU, CUDA, meta, and any external backend that has registered kernels
// for the operators.
std::string WhyRefused(c10::Device device);

// Returns the driver's name for a GPU, or the type and index of any other device.
std::string DeviceName(c10::Device device);

}  // namespace gnomon

#endif  // GNOMON_TORCH_DEVICES_H_
