// A pair function with the tangents of its slopes, for second derivatives: one table per
// instruction set (dual_rows-inl.h builds it from a definition).
#ifndef GNOMON_SRC_CPU_DUAL_TABLE_H_
#define GNOMON_SRC_CPU_DUAL_TABLE_H_

#include <cstdint>

#include "cpu/pair_table.h"

namespace gnomon {

struct DualTable {
  const PairTable* pairs;
  // The derivatives of f of `count` pairs, and the tangents of these derivatives for the tangents
  // of the pairs. All arrays have the same stride.
  void (*slopes)(const PairArrays& pairs, const PairArrays& tangents, int64_t count,
                 const SlopeArrays& slopes, const SlopeArrays& slope_tangents);
};

}  // namespace gnomon

#endif  // GNOMON_SRC_CPU_DUAL_TABLE_H_
