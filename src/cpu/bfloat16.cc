#include "cpu/bfloat16.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define GNOMON_BFLOAT16 1
#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <type_traits>
#else
#define GNOMON_BFLOAT16 0
#include <cstdlib>
#endif

namespace gnomon {

#if GNOMON_BFLOAT16

#define GNOMON_TARGET_BFLOAT16 __attribute__((target("avx512f,avx512bw,avx512bf16")))
#define GNOMON_UNROLL _Pragma("GCC unroll 16")

namespace {

constexpr size_t kRows = 6;
constexpr size_t kVectors = 4;
constexpr size_t kLanes = 16;

// Computes one register block of C: kBlockRows rows by kBlockVectors vectors, over the full depth.
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

// Computes all rows of C in one block of columns.
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

// The number of inner products that are accumulated at once.
constexpr size_t kSums = 16;

// The unmasked intrinsics leave an operand undefined, which triggers a GCC warning.
constexpr __mmask16 kAllLanes = 0xffff;
constexpr __mmask8 kAllPairs = 0xff;

// Returns the sums of a, b, c and e within each 128-bit block, in this order.
GNOMON_TARGET_BFLOAT16 __attribute__((always_inline)) inline __m512 SumsOfFour(__m512 a, __m512 b,
                                                                               __m512 c, __m512 e) {
  const auto ab = (__m512d)_mm512_add_ps(_mm512_maskz_unpacklo_ps(kAllLanes, a, b),
                                         _mm512_maskz_unpackhi_ps(kAllLanes, a, b));
  const auto ce = (__m512d)_mm512_add_ps(_mm512_maskz_unpacklo_ps(kAllLanes, c, e),
                                         _mm512_maskz_unpackhi_ps(kAllLanes, c, e));
  return _mm512_add_ps((__m512)_mm512_maskz_unpacklo_pd(kAllPairs, ab, ce),
                       (__m512)_mm512_maskz_unpackhi_pd(kAllPairs, ab, ce));
}

// Returns the 128-bit blocks a0 + a1, a2 + a3, b0 + b1 and b2 + b3.
GNOMON_TARGET_BFLOAT16 __attribute__((always_inline)) inline __m512 SumsOfBlocks(__m512 a,
                                                                                 __m512 b) {
  return _mm512_add_ps(_mm512_maskz_shuffle_f32x4(kAllLanes, a, b, 0x88),
                       _mm512_maskz_shuffle_f32x4(kAllLanes, a, b, 0xdd));
}

// Returns a vector whose lane n is the sum of the lanes of of[n]. The order of summation is fixed.
GNOMON_TARGET_BFLOAT16 __attribute__((always_inline)) inline __m512 SumsOfLanes(const __m512* of) {
  const __m512 low =
      SumsOfBlocks(SumsOfFour(of[0], of[1], of[2], of[3]), SumsOfFour(of[4], of[5], of[6], of[7]));
  const __m512 high = SumsOfBlocks(SumsOfFour(of[8], of[9], of[10], of[11]),
                                   SumsOfFour(of[12], of[13], of[14], of[15]));
  return SumsOfBlocks(low, high);
}

// Adds the products of row r of A and row n of B to sums[r * kKeys + n], for kBlockRows rows of A
// and kParts rows of B.
template <int kBlockRows, int kKeys, int kParts>
GNOMON_TARGET_BFLOAT16 __attribute__((always_inline)) inline void AddRowProducts(
    size_t columns, const float* const* a, const uint16_t* const* b, __m512* sums) {
  constexpr size_t kColumns = 2 * kLanes;
  size_t column = 0;
  for (; column + kColumns <= columns; column += kColumns) {
    __m512bh left[kBlockRows];
    GNOMON_UNROLL
    for (int r = 0; r < kBlockRows; ++r) {
      left[r] = (__m512bh)_mm512_loadu_ps(a[r] + column / 2);
    }
    GNOMON_UNROLL
    for (int n = 0; n < kParts; ++n) {
      const __m512bh right = (__m512bh)_mm512_loadu_ps(b[n] + column);
      GNOMON_UNROLL
      for (int r = 0; r < kBlockRows; ++r) {
        sums[r * kKeys + n] = _mm512_dpbf16_ps(sums[r * kKeys + n], left[r], right);
      }
    }
  }
  if (column == columns) return;
  // Masked loads avoid reading past the ends of the rows.
  const size_t rest = columns - column;
  const auto numbers = static_cast<__mmask32>((uint64_t{1} << rest) - 1);
  const auto pairs = static_cast<__mmask16>((1u << (rest + 1) / 2) - 1);
  __m512bh left[kBlockRows];
  GNOMON_UNROLL
  for (int r = 0; r < kBlockRows; ++r) {
    left[r] = (__m512bh)_mm512_maskz_loadu_ps(pairs, a[r] + column / 2);
  }
  GNOMON_UNROLL
  for (int n = 0; n < kParts; ++n) {
    const __m512bh right = (__m512bh)_mm512_maskz_loadu_epi16(numbers, b[n] + column);
    GNOMON_UNROLL
    for (int r = 0; r < kBlockRows; ++r) {
      sums[r * kKeys + n] = _mm512_dpbf16_ps(sums[r * kKeys + n], left[r], right);
    }
  }
}

// Computes the inner products of kBlockRows rows of A with kSums / kBlockRows rows of B, and stores
// at most `count` per row of A.
template <int kBlockRows>
GNOMON_TARGET_BFLOAT16 void RowBlock(size_t columns, const float* const* a,
                                     const uint16_t* const* b, size_t count, float* c, size_t ldc) {
  constexpr int kKeys = kSums / kBlockRows;
  // The limit of 8 keeps all addresses of rows in registers.
  constexpr int kParts = std::min(kKeys, 8);
  __m512 sums[kSums];
  GNOMON_UNROLL
  for (__m512& sum : sums) sum = _mm512_setzero_ps();
  AddRowProducts<kBlockRows, kKeys, kParts>(columns, a, b, sums);
  if constexpr (kKeys > kParts) {
    AddRowProducts<kBlockRows, kKeys, kParts>(columns, a, b + kParts, sums + kParts);
  }
  float all[kSums];
  _mm512_storeu_ps(all, SumsOfLanes(sums));
  const size_t stored = std::min<size_t>(count, kKeys);
  for (size_t r = 0; r < kBlockRows; ++r) {
    std::memcpy(c + r * ldc, all + r * kKeys, stored * sizeof(float));
  }
}

}  // namespace

bool HasBfloat16Products() {
  static const bool has = __builtin_cpu_supports("avx512bf16") &&
                          __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512f");
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

void MultiplyPairRows(size_t m, size_t n, size_t columns, const float* a, size_t lda, const void* b,
                      int64_t stride, float* c, size_t ldc) {
  for (size_t j = 0; j < n; j += kSums) {
    // Replaces rows past the end with the last row; their products are not stored.
    const uint16_t* rows[kSums];
    for (size_t t = 0; t < kSums; ++t) {
      const auto row = static_cast<int64_t>(std::min(j + t, n - 1));
      rows[t] = reinterpret_cast<const uint16_t*>(static_cast<const char*>(b) + row * stride);
    }
    const size_t count = std::min(kSums, n - j);
    const auto multiply = [&]<size_t kBlockRows>(std::integral_constant<size_t, kBlockRows>,
                                                 size_t r) {
      const float* left[kBlockRows];
      for (size_t t = 0; t < kBlockRows; ++t) left[t] = a + (r + t) * lda;
      constexpr size_t kKeys = kSums / kBlockRows;
      for (size_t t = 0; t < count; t += kKeys) {
        RowBlock<kBlockRows>(columns, left, rows + t, count - t, c + r * ldc + j + t, ldc);
      }
    };
    size_t r = 0;
    for (; r + 4 <= m; r += 4) multiply(std::integral_constant<size_t, 4>(), r);
    if ((m & 2) != 0) {
      multiply(std::integral_constant<size_t, 2>(), r);
      r += 2;
    }
    if (r < m) multiply(std::integral_constant<size_t, 1>(), r);
  }
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

void MultiplyPairRows(size_t, size_t, size_t, const float*, size_t, const void*, int64_t, float*,
                      size_t) {
  std::abort();
}

#endif

}  // namespace gnomon
