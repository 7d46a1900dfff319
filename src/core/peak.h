// The yardstick of `gnomon bench`.
#ifndef GNOMON_SRC_CORE_PEAK_H_
#define GNOMON_SRC_CORE_PEAK_H_

#include "gnomon/attention.h"

namespace gnomon {

// Runs a loop of multiply-adds shaped like the fp32 GEMM of the kernels, with all operands in
// cache, on every worker of the executor for about `seconds`; returns the rate of all workers
// together in floating-point operations a second.
double MeasurePeakFlops(double seconds, const Executor& executor);

}  // namespace gnomon

#endif  // GNOMON_SRC_CORE_PEAK_H_
