// A pair function with the tangents of its slopes, for second derivatives. There is one table per
// instruction set; dual_rows-inl.h builds it from a definition.
#ifndef GNOMON_SRC_CPU_DUAL_TABLE_H_
#define GNOMON_SRC_CPU_DUAL_TABLE_H_

#include <cstdint>

#include "cpu/pair_table.h"

namespace gnomon {

// Definitions are evaluated with numbers of type T.
template <class T>
struct DualTableOf {
  const PairTableOf<T>* pairs;
  // Computes the derivatives of f for `count` pairs, and the tangents of these derivatives from the
  // tangents of the pairs. All arrays have the same stride.
  void (*slopes)(const PairArraysOf<T>& pairs, const PairArraysOf<T>& tangents, int64_t count,
                 const SlopeArraysOf<T>& slopes, const SlopeArraysOf<T>& slope_tangents);
};
using DualTable = DualTableOf<float>;

}  // namespace gnomon

#endif  // GNOMON_SRC_CPU_DUAL_TABLE_H_
