// Where the operators run.
#ifndef GNOMON_OPS_OPERATORS_DEVICES_H_
#define GNOMON_OPS_OPERATORS_DEVICES_H_

#include <c10/core/Device.h>

#include <string>

namespace gnomon {

// Why tensors on that device are not taken, naming what is expected; empty where they are. Taken
// are the CPU, CUDA's devices, what shapes alone are computed on, and the device of a backend from
// outside that has registered kernels of the operators.
std::string WhyRefused(c10::Device device);

// Whether its kernels want all tokens of a call to be of one type, a lower one than float32 too.
bool WantsOneType(c10::Device device);

// What the driver calls a GPU; of other devices, their type and number.
std::string DeviceName(c10::Device device);

}  // namespace gnomon

#endif  // GNOMON_OPS_OPERATORS_DEVICES_H_
