// Where models are trained, measured and asked.
#ifndef GNOMON_TRAINING_DEVICE_H_
#define GNOMON_TRAINING_DEVICE_H_

#include <c10/core/Device.h>

#include <string>

namespace gnomon::models {

// "cpu", "cuda" or "cuda:1" as a device. Throws Error where the name is none, where there is no
// such device, and where gnomon does not run on it.
c10::Device FindDevice(const std::string& name);

}  // namespace gnomon::models

#endif  // GNOMON_TRAINING_DEVICE_H_
