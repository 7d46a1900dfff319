#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/gemm.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// Must follow foreach_target.h:
#include <algorithm>
#include <atomic>
#include <vector>

#include "base/parallel.h"
#include "cpu/gemm-inl.h"
#include "cpu/gemm_flops.h"
#include "cpu/vocabulary-inl.h"
#include "hwy/highway.h"

// The accumulators stay in registers only if all loops over them are unrolled.
#undef GNOMON_UNROLL
#define GNOMON_UNROLL _Pragma("GCC unroll 8")

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {
#if !GNOMON_HAS_NO_KERNELS
namespace {

// Computes one register block of C: kRows rows by kVectors vectors, over all of k.
template <int kRows, int kVectors, bool kAdd>
HWY_INLINE void Micro(size_t k, Strided a, const Real* HWY_RESTRICT b, size_t ldb,
                      Real* HWY_RESTRICT c, size_t ldc) {
  const DF d;
  VF sum[kRows][kVectors];
  GNOMON_UNROLL
  for (int i = 0; i < kRows; ++i) {
    GNOMON_UNROLL
    for (int v = 0; v < kVectors; ++v) sum[i][v] = hn::Zero(d);
  }
  const Real* HWY_RESTRICT column = a.data;
  for (size_t p = 0; p < k; ++p) {
    VF right[kVectors];
    GNOMON_UNROLL
    for (int v = 0; v < kVectors; ++v) right[v] = hn::LoadU(d, b + v * kLanes);
    GNOMON_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const VF left = hn::Set(d, column[i * a.row]);
      GNOMON_UNROLL
      for (int v = 0; v < kVectors; ++v) sum[i][v] = hn::MulAdd(left, right[v], sum[i][v]);
    }
    b += ldb;
    column += a.column;
  }
  GNOMON_UNROLL
  for (int i = 0; i < kRows; ++i) {
    GNOMON_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      Real* to = c + i * ldc + v * kLanes;
      hn::StoreU(kAdd ? hn::LoadU(d, to) + sum[i][v] : sum[i][v], d, to);
    }
  }
}

// Computes all rows of C in one block of columns.
template <int kVectors, bool kAdd>
HWY_NOINLINE void Block(size_t m, size_t k, Strided a, const Real* b, size_t ldb, Real* c,
                        size_t ldc) {
  while (m >= kMicroRows) {
    Micro<kMicroRows, kVectors, kAdd>(k, a, b, ldb, c, ldc);
    a.data += kMicroRows * a.row;
    c += kMicroRows * ldc;
    m -= kMicroRows;
  }
  switch (m) {
    case 5:
      return Micro<5, kVectors, kAdd>(k, a, b, ldb, c, ldc);
    case 4:
      return Micro<4, kVectors, kAdd>(k, a, b, ldb, c, ldc);
    case 3:
      return Micro<3, kVectors, kAdd>(k, a, b, ldb, c, ldc);
    case 2:
      return Micro<2, kVectors, kAdd>(k, a, b, ldb, c, ldc);
    case 1:
      return Micro<1, kVectors, kAdd>(k, a, b, ldb, c, ldc);
    default:
      return;
  }
}

template <bool kAdd>
HWY_INLINE void Product(size_t m, size_t n_vectors, size_t k, Strided a, const Real* b, size_t ldb,
                        Real* c, size_t ldc) {
  for (; n_vectors >= kMicroVectors; n_vectors -= kMicroVectors) {
    Block<kMicroVectors, kAdd>(m, k, a, b, ldb, c, ldc);
    b += kPanel;
    c += kPanel;
  }
  if constexpr (kMicroVectors > 2) {
    if (n_vectors == 3) return Block<3, kAdd>(m, k, a, b, ldb, c, ldc);
    if (n_vectors == 2) return Block<2, kAdd>(m, k, a, b, ldb, c, ldc);
  }
  if (n_vectors == 1) Block<1, kAdd>(m, k, a, b, ldb, c, ldc);
}

}  // namespace

void Multiply(size_t m, size_t n_vectors, size_t k, Strided a, const Real* b, size_t ldb, Real* c,
              size_t ldc) {
  Product<false>(m, n_vectors, std::min(k, kProductDepth), a, b, ldb, c, ldc);
  for (size_t p = kProductDepth; p < k; p += kProductDepth) {
    Product<true>(m, n_vectors, std::min(k - p, kProductDepth),
                  {a.data + p * a.column, a.row, a.column}, b + p * ldb, ldb, c, ldc);
  }
}

void MultiplyAdd(size_t m, size_t n_vectors, size_t k, Strided a, const Real* b, size_t ldb,
                 Real* c, size_t ldc) {
  Product<true>(m, n_vectors, k, a, b, ldb, c, ldc);
}

#ifndef GNOMON_DOUBLE
namespace {

// Multiplies blocks that fit the L1 cache until `stop` is set; returns the number of floating-point
// operations.
double CountFlops(const std::atomic<bool>& stop) {
  constexpr size_t kRows = 8 * kMicroRows;
  constexpr size_t kDepth = 64;
  const std::vector<Real> a(kRows * kDepth, 1e-3f);
  const std::vector<Real> b(kDepth * kPanel, 1e-3f);
  std::vector<Real> c(kRows * kPanel);
  double flops = 0;
  while (!stop.load(std::memory_order_relaxed)) {
    for (int repeat = 0; repeat < 64; ++repeat) {
      Multiply(kRows, kMicroVectors, kDepth, {a.data(), kDepth, 1}, b.data(), kPanel, c.data(),
               kPanel);
    }
    flops += 64.0 * 2 * kRows * kDepth * kPanel;
  }
  return flops;
}

}  // namespace
#endif
#endif
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#if HWY_ONCE && !defined(GNOMON_DOUBLE)
namespace gnomon {
namespace {
HWY_EXPORT(CountFlops);
}  // namespace

double CountGemmFlops(const std::atomic<bool>& stop) {
  return HWY_DYNAMIC_DISPATCH(CountFlops)(stop);
}

}  // namespace gnomon
#endif
