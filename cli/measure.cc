#include "cli/measure.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace gnomon::cli {
namespace {

// The highest that the resident memory has been since the last reset.
std::optional<int64_t> HighWaterBytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    std::istringstream words(line);
    std::string name;
    int64_t kibibytes = 0;
    if (words >> name >> kibibytes && name == "VmHWM:") return kibibytes * 1024;
  }
  return std::nullopt;
}

bool ResetHighWater() {
  std::ofstream file("/proc/self/clear_refs");
  file << "5" << std::flush;
  return file.good();
}

}  // namespace

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

void GiveBackFreedMemory() {
#ifdef __GLIBC__
  // glibc moves this threshold up as blocks are freed, and keeps freed blocks below it.
  constexpr int kThreshold = 1 << 16;
  mallopt(M_MMAP_THRESHOLD, kThreshold);
#endif
}

std::optional<int64_t> PeakBytes(const std::function<void()>& work) {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
  if (!ResetHighWater()) return std::nullopt;
  const std::optional<int64_t> before = HighWaterBytes();
  work();
  const std::optional<int64_t> peak = HighWaterBytes();
  if (!before || !peak) return std::nullopt;
  return *peak - *before;
}

}  // namespace gnomon::cli
