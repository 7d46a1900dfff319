// The kernel that rotates pairs of columns, on plain views.
#ifndef GNOMON_SRC_CPU_ROTATION_H_
#define GNOMON_SRC_CPU_ROTATION_H_

#include <cstdint>

#include "gnomon/attention.h"

namespace gnomon {

// Rotates the leading columns of tokens (B, H, L, D) in pairs, from (a, b) to (a c - b s, b c + a
// s), and copies the other columns. Pair n of a block of `block` columns consists of its columns n
// and n + block / 2 or, if pairs are adjacent, 2 n and 2 n + 1. Cosines and sines have shape (B, H,
// L, pairs) and equal strides, any of which may be 0.
template <class T>
struct PairRotation {
  int64_t batch = 0;
  int64_t heads = 0;
  int64_t rows = 0;
  int64_t columns = 0;  // D
  int64_t pairs = 0;
  int64_t block = 0;  // 0 if pairs are adjacent
  bool back = false;  // whether to negate the sines
  View<const T> tokens;
  View<const T> cosines;
  View<const T> sines;
  View<T> turned;  // may be the tokens

  int64_t count() const { return batch * heads * rows; }
};

// Rotates tokens [begin, end), counted in (B, H, L) order, with the selected instruction set.
void PairRotationKernel(const PairRotation<float>& rotation, int64_t begin, int64_t end);
void PairRotationKernel(const PairRotation<double>& rotation, int64_t begin, int64_t end);

}  // namespace gnomon

#endif  // GNOMON_SRC_CPU_ROTATION_H_
