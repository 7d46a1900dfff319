#include "cli/timer.h"

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "cli/progress.h"

namespace gnomon::lab::cli {

double TimeOn(c10::Device device, const std::function<void()>& work) {
  if (device.is_cpu()) {
    const Stopwatch clock;
    work();
    return clock.seconds();
  }
  const c10::impl::VirtualGuardImpl guard(device.type());
  if (!device.has_index()) device = guard.getDevice();
  const c10::Stream stream = guard.getStream(device);
  // Events record times only with this flag.
  c10::Event before(device.type(), c10::EventFlag::BACKEND_DEFAULT);
  c10::Event after(device.type(), c10::EventFlag::BACKEND_DEFAULT);
  guard.synchronizeStream(stream);
  before.record(stream);
  work();
  after.record(stream);
  after.synchronize();
  return before.elapsedTime(after) * 1e-3;
}

std::optional<int64_t> PeakBytesOn(c10::Device device, const std::function<void()>& work) {
  if (device.is_cpu()) return std::nullopt;
  const c10::impl::VirtualGuardImpl guard(device.type());
  if (!device.has_index()) device = guard.getDevice();
  auto* const allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
  if (allocator == nullptr) {
    work();
    return std::nullopt;
  }
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto allocated = [&] {
    return allocator->getDeviceStats(device.index()).allocated_bytes[kAll];
  };
  const int64_t before = allocated().current;
  allocator->resetPeakStats(device.index());
  work();
  return allocated().peak - before;
}

}  // namespace gnomon::lab::cli
