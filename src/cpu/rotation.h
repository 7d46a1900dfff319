// The kernel that turns pairs of columns, on plain views.
#ifndef GNOMON_SRC_CPU_ROTATION_H_
#define GNOMON_SRC_CPU_ROTATION_H_

#include <cstdint>

#include "gnomon/attention.h"

namespace gnomon {

// Tokens (B, H, L, D), of which the first columns are turned in pairs, (a, b) to (a c - b s, b c +
// a s), and the others are copied. Pair n of a block of `block` columns is columns n and n + block
// / 2 of it, or 2 n and 2 n + 1 where pairs are neighbours. Cosines and sines are (B, H, L, pairs)
// with the same strides, of which any may be 0.
template <class T>
struct PairRotation {
  int64_t batch = 0;
  int64_t heads = 0;
  int64_t rows = 0;
  int64_t columns = 0;  // D
  int64_t pairs = 0;
  int64_t block = 0;  // 0: pairs are neighbours
  bool back = false;  // whether sines are negated
  View<const T> tokens;
  View<const T> cosines;
  View<const T> sines;
  T* turned = nullptr;  // contiguous; may alias the tokens

  int64_t count() const { return batch * heads * rows; }
};

// The tokens [begin, end) in the order of (B, H, L), for the instruction set that has been chosen.
void PairRotationKernel(const PairRotation<float>& rotation, int64_t begin, int64_t end);
void PairRotationKernel(const PairRotation<double>& rotation, int64_t begin, int64_t end);

}  // namespace gnomon

#endif  // GNOMON_SRC_CPU_ROTATION_H_
