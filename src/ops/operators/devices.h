#ifndef GNOMON_OPS_OPERATORS_DEVICES_H_
#define GNOMON_OPS_OPERATORS_DEVICES_H_

#include <gnomon/torch/devices.h>

namespace gnomon {

// Whether the device's kernels need all tokens of a call to share one dtype.
bool WantsOneType(c10::Device device);

}  // namespace gnomon

#endif  // GNOMON_OPS_OPERATORS_DEVICES_H_
