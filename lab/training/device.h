// Selects the device on which models run.
#ifndef GNOMON_TRAINING_DEVICE_H_
#define GNOMON_TRAINING_DEVICE_H_

#include <c10/core/Device.h>

#include <string>

namespace gnomon::lab {

// Converts a name such as "cpu", "cuda" or "cuda:1" to a device. Throws Error if the name is
// invalid, the device does not exist, or gnomon does not support it.
c10::Device FindDevice(const std::string& name);

}  // namespace gnomon::lab

#endif  // GNOMON_TRAINING_DEVICE_H_
