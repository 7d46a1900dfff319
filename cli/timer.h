// Times and memory of work on any device.
#ifndef GNOMON_CLI_TIMER_H_
#define GNOMON_CLI_TIMER_H_

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <optional>

namespace gnomon::cli {

// Seconds that `work` takes: of the CPU by its clock; of another device between two events on its
// current stream, after all that was put on it before has been done.
double TimeOn(c10::Device device, const std::function<void()>& work);

// Bytes that PyTorch's allocator of a device holds for tensors at the highest point of `work`
// beyond those that it held before; none where it does not count them, and of the CPU (see
// PeakBytes).
std::optional<int64_t> PeakBytesOn(c10::Device device, const std::function<void()>& work);

}  // namespace gnomon::cli

#endif  // GNOMON_CLI_TIMER_H_
