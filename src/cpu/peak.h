// The yardstick of the benchmarks.
#ifndef GNOMON_SRC_CPU_PEAK_H_
#define GNOMON_SRC_CPU_PEAK_H_

#include <atomic>

namespace gnomon {

// Runs the kernels' matrix product on operands in cache until `stop`; returns the floating-point
// operations done.
double CountGemmFlops(const std::atomic<bool>& stop);

}  // namespace gnomon

#endif  // GNOMON_SRC_CPU_PEAK_H_
