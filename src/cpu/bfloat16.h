// Products of bfloat16 numbers by the processor's own instructions for them (AVX512_BF16), which
// Highway 1.0 does not offer. Two numbers lie in each float of an array, the first in its lower
// half.
#ifndef GNOMON_SRC_CPU_BFLOAT16_H_
#define GNOMON_SRC_CPU_BFLOAT16_H_

#include <bit>
#include <cstddef>
#include <cstdint>

namespace gnomon {

// Whether this build and this processor have them.
bool HasBfloat16Products();

// A float that holds two numbers of bfloat16.
inline float PairOf(uint16_t first, uint16_t second) {
  return std::bit_cast<float>(uint32_t{first} | uint32_t{second} << 16);
}

// The pair with 0 for one of its numbers.
inline float WithoutHalf(float pair, bool second) {
  return std::bit_cast<float>(std::bit_cast<uint32_t>(pair) & (second ? 0x0000ffffu : 0xffff0000u));
}

// The rest only where HasBfloat16Products().

// Rounds `count` floats, a multiple of 32, to nearest even; `to` may be `from`.
void RoundToPairs(const float* from, size_t count, float* to);

// C (m x n) = A (m x k) B (k x n), or C += A B, with fp32 sums: a row of A is k / 2 pairs, rows
// `lda` floats apart; a row of B has the pairs of two rows of the matrix, column by column. n
// counts vectors of 16.
void MultiplyPairs(size_t m, size_t n_vectors, size_t pairs, const float* a, size_t lda,
                   const float* b, size_t ldb, float* c, size_t ldc);
void MultiplyAddPairs(size_t m, size_t n_vectors, size_t pairs, const float* a, size_t lda,
                      const float* b, size_t ldb, float* c, size_t ldc);

// C (m x n) = A (m x columns) B^T: a row of A is pairs, rows `lda` floats apart, with a 0 behind an
// odd column; the n rows of B are `columns` numbers of bfloat16 where they lie, `stride` bytes
// apart. A product is a number of its two rows alone.
void MultiplyPairRows(size_t m, size_t n, size_t columns, const float* a, size_t lda, const void* b,
                      int64_t stride, float* c, size_t ldc);

}  // namespace gnomon

#endif  // GNOMON_SRC_CPU_BFLOAT16_H_
