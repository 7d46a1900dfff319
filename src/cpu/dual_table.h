// A pair function with the tangents of its slopes, for second derivatives. There is one table per
// instruction set; dual_rows-inl.h builds it from a definition.
#ifndef GNOMON_SRC_CPU_DUAL_TABLE_H_
#define GNOMON_SRC_CPU_DUAL_TABLE_H_

#include <cstdint>

#include "cpu/pair_table.h"

namespace gnomon {

struct DualTable {
  const PairTable* pairs;
  // Computes the derivatives of f for `count` pairs, and the tangents of these derivatives from the
  // tangents of the pairs. All arrays have the same stride.
  void (*slopes)(const PairArrays& pairs, const PairArrays& tangents, int64_t count,
                 const SlopeArrays& slopes, const SlopeArrays& slope_tangents);
};

}  // namespace gnomon

#endif  // GNOMON_SRC_CPU_DUAL_TABLE_H_
