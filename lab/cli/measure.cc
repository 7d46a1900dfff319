#include "cli/measure.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <numeric>
#include <sstream>
#include <string>
#include <utility>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace gnomon::lab::cli {
namespace {

// The peak resident memory in bytes since the last reset.
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

double Median(std::vector<double> values) { return Quantile(std::move(values), 0.5); }

double Quantile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  const auto rank = static_cast<int64_t>(share * static_cast<double>(values.size()));
  const auto at = values.begin() + std::min(rank, static_cast<int64_t>(values.size()) - 1);
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

double ProcessorSeconds() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

std::optional<OtherPrograms::Times> OtherPrograms::Now() {
  // "cpu user nice system idle iowait irq softirq steal ...", in ticks (proc(5)); guest time is
  // included in user time.
  std::ifstream in("/proc/stat");
  std::string name;
  double ticks[8] = {};
  in >> name;
  for (double& count : ticks) in >> count;
  const auto per_second = static_cast<double>(sysconf(_SC_CLK_TCK));
  if (!in || name != "cpu" || per_second <= 0) return {};
  return Times{.all = std::accumulate(std::begin(ticks), std::end(ticks), 0.0) / per_second,
               .idle = (ticks[3] + ticks[4]) / per_second,
               .own = ProcessorSeconds()};
}

OtherPrograms::OtherPrograms() : start_(Now()) {}

std::optional<double> OtherPrograms::Share() const {
  const std::optional<Times> now = Now();
  if (!start_ || !now || now->all <= start_->all) return {};
  const double all = now->all - start_->all;
  const double others = all - (now->idle - start_->idle) - (now->own - start_->own);
  return std::clamp(others / all, 0.0, 1.0);
}

void GiveBackFreedMemory() {
#ifdef __GLIBC__
  // By default, glibc raises this threshold as blocks are freed, and retains freed blocks below it.
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

}  // namespace gnomon::lab::cli
