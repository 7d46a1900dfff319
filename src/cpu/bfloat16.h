// Matrix products with the processor's bfloat16 instructions (AVX512_BF16), which Highway 1.0
// lacks. A pair is two bfloat16 numbers that are stored in one float, the first in its lower half.
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

// Returns the pair with its second number (or its first, if `second` is false) set to 0.
inline float WithoutHalf(float pair, bool second) {
  return std::bit_cast<float>(std::bit_cast<uint32_t>(pair) & (second ? 0x0000ffffu : 0xffff0000u));
}

// The functions below require HasBfloat16Products().

// Rounds `count` floats to nearest even and stores them as pairs; `count` is a multiple of 32. `to`
// may alias `from`.
void RoundToPairs(const float* from, size_t count, float* to);

// Computes C (m x n) = A (m x k) B (k x n), or C += A B, with fp32 accumulation, where n = 16 *
// n_vectors and k = 2 * pairs. A row of A consists of pairs; rows are `lda` floats apart. A row of
// `b` interleaves two rows of B as pairs, column by column.
void MultiplyPairs(size_t m, size_t n_vectors, size_t pairs, const float* a, size_t lda,
                   const float* b, size_t ldb, float* c, size_t ldc);
void MultiplyAddPairs(size_t m, size_t n_vectors, size_t pairs, const float* a, size_t lda,
                      const float* b, size_t ldb, float* c, size_t ldc);

// Computes C (m x n) = A (m x columns) B^T. A row of A consists of pairs, zero-padded if the column
// count is odd; rows are `lda` floats apart. The n rows of B are plain arrays of `columns` bfloat16
// numbers, `stride` bytes apart. Each element of C depends only on its row of A and its row of B.
void MultiplyPairRows(size_t m, size_t n, size_t columns, const float* a, size_t lda, const void* b,
                      int64_t stride, float* c, size_t ldc);

}  // namespace gnomon

#endif  // GNOMON_SRC_CPU_BFLOAT16_H_
