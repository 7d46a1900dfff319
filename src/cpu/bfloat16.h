// Matrix products with the processor's bfloat16 instructions (AVX512_BF16), which Highway 1.0
// lacks. Each float of an array holds two bfloat16 numbers, the first in its lower half.
#ifndef GNOMON_SRC_CPU_BFLOAT16_H_
#define GNOMON_SRC_CPU_BFLOAT16_H_

#include <bit>
#include <cstddef>
#include <cstdint>

namespace gnomon {

// Whether the build and the processor support these instructions.
bool HasBfloat16Products();

// Packs two bfloat16 numbers into a float.
inline float PairOf(uint16_t first, uint16_t second) {
  return std::bit_cast<float>(uint32_t{first} | uint32_t{second} << 16);
}

// Returns the pair with one of its numbers set to 0.
inline float WithoutHalf(float pair, bool second) {
  return std::bit_cast<float>(std::bit_cast<uint32_t>(pair) & (second ? 0x0000ffffu : 0xffff0000u));
}

// The functions below require HasBfloat16Products().

// Rounds `count` floats (a multiple of 32) to nearest even. `to` may alias `from`.
void RoundToPairs(const float* from, size_t count, float* to);

// C (m x n) = A (m x k) B (k x n), or C += A B, with fp32 accumulation. A row of A is k / 2 pairs;
// rows are `lda` floats apart. A row of B interleaves two rows of the matrix as pairs, column by
// column. n is given in vectors of 16.
void MultiplyPairs(size_t m, size_t n_vectors, size_t pairs, const float* a, size_t lda,
                   const float* b, size_t ldb, float* c, size_t ldc);
void MultiplyAddPairs(size_t m, size_t n_vectors, size_t pairs, const float* a, size_t lda,
                      const float* b, size_t ldb, float* c, size_t ldc);

// C (m x n) = A (m x columns) B^T. A row of A consists of pairs, zero-padded if the column count is
// odd; rows are `lda` floats apart. The n rows of B are unpacked: `columns` bfloat16 numbers each,
// `stride` bytes apart. Each product depends only on its two rows.
void MultiplyPairRows(size_t m, size_t n, size_t columns, const float* a, size_t lda, const void* b,
                      int64_t stride, float* c, size_t ldc);

}  // namespace gnomon

#endif  // GNOMON_SRC_CPU_BFLOAT16_H_
