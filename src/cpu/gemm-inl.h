// The matrix product of the kernels. It is declared once per instruction set and compiled only in
// gemm.cc.
#if defined(GNOMON_SRC_CPU_GEMM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_GEMM_INL_H_
#undef GNOMON_SRC_CPU_GEMM_INL_H_
#else
#define GNOMON_SRC_CPU_GEMM_INL_H_
#endif

#include "cpu/vocabulary-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {

// A microkernel holds kMicroRows x kMicroVectors accumulators: 24 of 32 registers, or 12 of 16.
constexpr size_t kMicroRows = 6;
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET <= HWY_AVX3 || HWY_ARCH_ARM_A64
constexpr size_t kMicroVectors = 4;
#else
constexpr size_t kMicroVectors = 2;
#endif
// The number of columns in a packed panel.
constexpr size_t kPanel = kMicroVectors * HWY_LANES(Real);

// Multiply sums this many products at a time and then adds these partial sums, which is more
// accurate than one long sum.
constexpr size_t kProductDepth = 64;

// A matrix with strides: element (i, j) is data[i * row + j * column].
struct Strided {
  const Real* data;
  size_t row;
  size_t column;
};

// Computes C (m x n) = A (m x k) B (k x n), or C += A B. n is passed as a number of vectors. Rows
// of B and C are contiguous and start ldb and ldc elements apart.
void Multiply(size_t m, size_t n_vectors, size_t k, Strided a, const Real* b, size_t ldb, Real* c,
              size_t ldc);
void MultiplyAdd(size_t m, size_t n_vectors, size_t k, Strided a, const Real* b, size_t ldb,
                 Real* c, size_t ldc);

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
