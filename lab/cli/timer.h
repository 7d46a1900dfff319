// Time and memory of work on any device.
#ifndef GNOMON_CLI_TIMER_H_
#define GNOMON_CLI_TIMER_H_

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <optional>

namespace gnomon::cli {

// The duration of `work` in seconds: wall-clock time on the CPU; on other devices the time between
// two events on the current stream, after all previous work has finished.
double TimeOn(c10::Device device, const std::function<void()>& work);

// The peak of tensor memory in PyTorch's device allocator during `work` minus that before it, in
// bytes; none if the allocator does not count it, and for the CPU (see PeakBytes).
std::optional<int64_t> PeakBytesOn(c10::Device device, const std::function<void()>& work);

}  // namespace gnomon::cli

#endif  // GNOMON_CLI_TIMER_H_
