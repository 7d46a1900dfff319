#include "cpu/bfloat16.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define GNOMON_BFLOAT16 1
#include <immintrin.h>
#else
#define GNOMON_BFLOAT16 0
#include <cstdlib>
#endif

namespace gnomon {

#if GNOMON_BFLOAT16

#define GNOMON_TARGET_BFLOAT16 __attribute__((target("avx512f,avx512bf16")))
#define GNOMON_UNROLL _Pragma("GCC unroll 8")

namespace {

constexpr size_t kRows = 6;
constexpr size_t kVectors = 4;
constexpr size_t kLanes = 16;

// One block of rows x vectors, all of k, in registers.
template <int kBlockRows, int kBlockVectors, bool kAdd>
GNOMON_TARGET_BFLOAT16 __attribute__((always_inline)) inline void Micro(size_t pairs,
                                                                        const float* a, size_t lda,
                                                                        const float* b, size_t ldb,
                                                                        float* c, size_t ldc) {
  __m512 sum[kBlockRows][kBlockVectors];
  GNOMON_UNROLL
  for (int i = 0; i < kBlockRows; ++i) {
    GNOMON_UNROLL
    for (int v = 0; v < kBlockVectors; ++v) sum[i][v] = _mm512_setzero_ps();
  }
  for (size_t p = 0; p < pairs; ++p) {
    __m512bh right[kBlockVectors];
    GNOMON_UNROLL
    for (int v = 0; v < kBlockVectors; ++v) {
      right[v] = (__m512bh)_mm512_loadu_ps(b + p * ldb + v * kLanes);
    }
    GNOMON_UNROLL
    for (int i = 0; i < kBlockRows; ++i) {
      const __m512bh left = (__m512bh)_mm512_set1_ps(a[i * lda + p]);
      GNOMON_UNROLL
      for (int v = 0; v < kBlockVectors; ++v) {
        sum[i][v] = _mm512_dpbf16_ps(sum[i][v], left, right[v]);
      }
    }
  }
  GNOMON_UNROLL
  for (int i = 0; i < kBlockRows; ++i) {
    GNOMON_UNROLL
    for (int v = 0; v < kBlockVectors; ++v) {
      float* to = c + i * ldc + v * kLanes;
      _mm512_storeu_ps(to, kAdd ? _mm512_add_ps(_mm512_loadu_ps(to), sum[i][v]) : sum[i][v]);
    }
  }
}

// All rows of one column block.
template <int kBlockVectors, bool kAdd>
GNOMON_TARGET_BFLOAT16 void Block(size_t m, size_t pairs, const float* a, size_t lda,
                                  const float* b, size_t ldb, float* c, size_t ldc) {
  for (; m >= kRows; m -= kRows, a += kRows * lda, c += kRows * ldc) {
    Micro<kRows, kBlockVectors, kAdd>(pairs, a, lda, b, ldb, c, ldc);
  }
  switch (m) {
    case 5:
      return Micro<5, kBlockVectors, kAdd>(pairs, a, lda, b, ldb, c, ldc);
    case 4:
      return Micro<4, kBlockVectors, kAdd>(pairs, a, lda, b, ldb, c, ldc);
    case 3:
      return Micro<3, kBlockVectors, kAdd>(pairs, a, lda, b, ldb, c, ldc);
    case 2:
      return Micro<2, kBlockVectors, kAdd>(pairs, a, lda, b, ldb, c, ldc);
    case 1:
      return Micro<1, kBlockVectors, kAdd>(pairs, a, lda, b, ldb, c, ldc);
    default:
      return;
  }
}

template <bool kAdd>
void Product(size_t m, size_t n_vectors, size_t pairs, const float* a, size_t lda, const float* b,
             size_t ldb, float* c, size_t ldc) {
  for (; n_vectors >= kVectors; n_vectors -= kVectors) {
    Block<kVectors, kAdd>(m, pairs, a, lda, b, ldb, c, ldc);
    b += kVectors * kLanes;
    c += kVectors * kLanes;
  }
  for (; n_vectors > 0; --n_vectors) {
    Block<1, kAdd>(m, pairs, a, lda, b, ldb, c, ldc);
    b += kLanes;
    c += kLanes;
  }
}

}  // namespace

bool HasBfloat16Products() {
  static const bool has = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512f");
  return has;
}

GNOMON_TARGET_BFLOAT16 void RoundToPairs(const float* from, size_t count, float* to) {
  for (size_t n = 0; n < count; n += 2 * kLanes) {
    const __m512 low = _mm512_loadu_ps(from + n);
    const __m512 high = _mm512_loadu_ps(from + n + kLanes);
    _mm512_storeu_ps(to + n / 2, (__m512)_mm512_cvtne2ps_pbh(high, low));
  }
}

void MultiplyPairs(size_t m, size_t n_vectors, size_t pairs, const float* a, size_t lda,
                   const float* b, size_t ldb, float* c, size_t ldc) {
  Product<false>(m, n_vectors, pairs, a, lda, b, ldb, c, ldc);
}

void MultiplyAddPairs(size_t m, size_t n_vectors, size_t pairs, const float* a, size_t lda,
                      const float* b, size_t ldb, float* c, size_t ldc) {
  Product<true>(m, n_vectors, pairs, a, lda, b, ldb, c, ldc);
}

#else

bool HasBfloat16Products() { return false; }

void RoundToPairs(const float*, size_t, float*) { std::abort(); }

void MultiplyPairs(size_t, size_t, size_t, const float*, size_t, const float*, size_t, float*,
                   size_t) {
  std::abort();
}

void MultiplyAddPairs(size_t, size_t, size_t, const float*, size_t, const float*, size_t, float*,
                      size_t) {
  std::abort();
}

#endif

}  // namespace gnomon
