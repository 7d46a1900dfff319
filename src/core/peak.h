// Measures the reference throughput of `gnomon bench`.
#ifndef GNOMON_SRC_CORE_PEAK_H_
#define GNOMON_SRC_CORE_PEAK_H_

#include "gnomon/attention.h"

namespace gnomon {

// Runs the kernels' fp32 GEMM on operands in cache, on every worker of the executor for about
// `seconds`. Returns the total throughput of all workers in floating-point operations per second.
double MeasurePeakFlops(double seconds, const Executor& executor);

}  // namespace gnomon

#endif  // GNOMON_SRC_CORE_PEAK_H_
