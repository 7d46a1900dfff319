// Selection of the kernels' instruction set.
#include <cstdlib>
#include <mutex>

#include "core/targets.h"
#include "gnomon/attention.h"
#include "hwy/targets.h"

namespace gnomon {
namespace {

// `targets` includes lower ones, for kernels that are not compiled for the best one.
void Choose(int64_t targets) {
  hwy::SetSupportedTargetsForTest(targets);
  hwy::GetChosenTarget().Update(targets);
}

// The targets that have kernels and that the processor supports.
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

// Returns the target of that name, and all lower ones.
int64_t FindTargets(std::string_view name) {
  for (int64_t rest = Supported(); rest != 0; rest &= rest - 1) {
    const int64_t target = rest & -rest;
    if (name == hwy::TargetName(target)) return rest;
  }
  throw Error("SetTarget: this machine or build does not support the instruction set '" +
              std::string(name) + "'; supported: " + Known());
}

// Set once a target has been selected.
std::once_flag chosen;

}  // namespace

// Until a target is selected, the dispatch tables query the processor on every call.
void ChooseTargetOnce() {
  std::call_once(chosen, [] {
    const char* name = std::getenv("GNOMON_TARGET");
    Choose(name != nullptr && *name != '\0' ? FindTargets(name) : Supported());
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
  const int64_t targets = FindTargets(name);
  std::call_once(chosen, [] {});
  Choose(targets);
}

std::string CurrentTarget() {
  ChooseTargetOnce();
  const int64_t usable = hwy::SupportedTargets() & HWY_TARGETS;
  return hwy::TargetName(usable & -usable);
}

}  // namespace gnomon
