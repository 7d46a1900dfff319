// Measures the time and memory of work on any device.
#ifndef GNOMON_CLI_TIMER_H_
#define GNOMON_CLI_TIMER_H_

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <optional>

namespace gnomon::lab::cli {

// The duration of `work` in seconds. On the CPU, this is wall-clock time; on other devices, it is
// the time between two events on the current stream, after all previous work has finished.
double TimeOn(c10::Device device, const std::function<void()>& work);

// The peak tensor memory in PyTorch's device allocator during `work` minus the amount before
// `work`, in bytes. None if the allocator does not count it, and on the CPU (see PeakBytes).
std::optional<int64_t> PeakBytesOn(c10::Device device, const std::function<void()>& work);

}  // namespace gnomon::lab::cli

#endif  // GNOMON_CLI_TIMER_H_
