// Which instruction set the kernels run on.
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "core/targets.h"
#include "cpu/peak.h"
#include "gnomon/attention.h"
#include "hwy/targets.h"

namespace gnomon {
namespace {

void Choose(int64_t targets) {
  hwy::SetSupportedTargetsForTest(targets);
  hwy::GetChosenTarget().Update(targets);
}

// Targets that there are kernels for and that the processor has.
int64_t Supported() {
  static const int64_t supported = [] {
    hwy::SetSupportedTargetsForTest(0);
    return hwy::SupportedTargets() & HWY_TARGETS;
  }();
  return supported;
}

std::string Known() {
  std::string known;
  for (const std::string& name : Targets()) known += (known.empty() ? "" : ", ") + name;
  return known;
}

int64_t FindTarget(std::string_view name) {
  for (int64_t rest = Supported(); rest != 0; rest &= rest - 1) {
    const int64_t target = rest & -rest;
    if (name == hwy::TargetName(target)) return target;
  }
  throw Error("SetTarget: no instruction set '" + std::string(name) + "' here; there are " +
              Known());
}

// Set once a choice has been made, by whomever.
std::once_flag chosen;

}  // namespace

// The dispatch tables ask the processor again at every call until a target is chosen.
void ChooseTargetOnce() {
  std::call_once(chosen, [] {
    const char* name = std::getenv("GNOMON_TARGET");
    Choose(name != nullptr && *name != '\0' ? FindTarget(name) : Supported());
  });
}

std::vector<std::string> Targets() {
  std::vector<std::string> names;
  for (int64_t rest = Supported(); rest != 0; rest &= rest - 1) {
    names.emplace_back(hwy::TargetName(rest & -rest));
  }
  return names;
}

void SetTarget(std::string_view name) {
  const int64_t target = FindTarget(name);
  std::call_once(chosen, [] {});
  Choose(target);
}

std::string CurrentTarget() {
  ChooseTargetOnce();
  const int64_t chosen = hwy::SupportedTargets() & HWY_TARGETS;
  return hwy::TargetName(chosen & -chosen);
}

double MeasurePeakFlops(double seconds, const Executor& executor) {
  ChooseTargetOnce();
  if (!(seconds > 0)) throw Error("MeasurePeakFlops: seconds must be positive");
  std::vector<double> flops(static_cast<size_t>(executor.max_workers()));
  std::atomic<bool> stop{false};
  const auto start = std::chrono::steady_clock::now();
  std::thread timer([&] {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    stop = true;
  });
  executor.Run(executor.max_workers(), [&](int worker) { flops[worker] = CountGemmFlops(stop); });
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  timer.join();
  double sum = 0;
  for (const double f : flops) sum += f;
  return sum / elapsed.count();
}

}  // namespace gnomon
