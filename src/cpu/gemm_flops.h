// Measures the throughput of the kernels' matrix product.
#ifndef GNOMON_SRC_CPU_GEMM_FLOPS_H_
#define GNOMON_SRC_CPU_GEMM_FLOPS_H_

#include <atomic>

namespace gnomon {

// Runs the kernels' matrix product on operands in cache until `stop` is set, and returns the number
// of floating-point operations.
double CountGemmFlops(const std::atomic<bool>& stop);

}  // namespace gnomon

#endif  // GNOMON_SRC_CPU_GEMM_FLOPS_H_
