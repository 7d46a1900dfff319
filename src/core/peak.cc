#include "core/peak.h"

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "core/targets.h"
#include "cpu/gemm_flops.h"

namespace gnomon {

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
