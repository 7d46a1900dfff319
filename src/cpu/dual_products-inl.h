// Matrix products of dual numbers, for blocks of rows in the kernel for derivatives.
//
// A product of dual numbers is a single product of stacked matrices: if x' is the tangent of a row
// x, then (x . y)' = [x' x] . [y y'].
#if defined(GNOMON_SRC_CPU_DUAL_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_DUAL_PRODUCTS_INL_H_
#undef GNOMON_SRC_CPU_DUAL_PRODUCTS_INL_H_
#else
#define GNOMON_SRC_CPU_DUAL_PRODUCTS_INL_H_
#endif

#include <algorithm>

#include "cpu/dual_block-inl.h"
#include "cpu/dual_sums-inl.h"
#include "cpu/gemm-inl.h"
#include "cpu/packing-inl.h"
#include "cpu/vocabulary-inl.h"
#include "gnomon/attention.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {

// Copies the rows of a block, and their tangents, as rows [x' x].
inline void CopyDual(const DualBlock& block, const Tokens& values, const Tokens& tangents,
                     int64_t columns, Real* to) {
  for (int64_t i = block.begin; i < block.end; ++i, to += 2 * columns) {
    Widen(values.row(block.b, block.h, i), values.type, 0, columns, to + columns);
    if (tangents.data == nullptr) {
      std::fill_n(to, columns, 0.0f);
    } else {
      Widen(tangents.row(block.b, block.h, i), tangents.type, 0, columns, to);
    }
  }
}

// Multiplies rows [x' x] by the panels of the block's keys. `to` receives the tangents of the
// products, then the products. Tangents that are 0 are skipped.
inline void MultiplyPanels(const DualBlock& block, const Real* x, bool has_tangents,
                           const DualPanels& panels, Real* to) {
  const int64_t columns = panels.columns();
  const int64_t begin = has_tangents ? 0 : columns;
  const int64_t end = panels.has_tangents() ? 2 * columns : columns;
  const DualRow rows = block.Row(to, 0);
  for (int64_t j = block.first; j < block.keys.end; j += kWidth) {
    const Real* const panel = panels.panel(block.b, block.key_head, j / kWidth);
    const size_t vectors = VectorsOfPanel(j, block.keys.end);
    const int64_t column = j - block.first;
    Multiply(block.row_count(), vectors, Size(columns), {x + columns, Size(2 * columns), 1}, panel,
             Size(kWidth), rows.values + column, Size(block.stride));
    if (begin < end) {
      Multiply(block.row_count(), vectors, Size(end - begin), {x + begin, Size(2 * columns), 1},
               panel + begin * kWidth, Size(kWidth), rows.tangents + column, Size(block.stride));
      continue;
    }
    for (int64_t r = 0; r < block.rows(); ++r) {
      std::fill_n(block.Row(to, r).tangents + column, vectors * kLanes, 0.0f);
    }
  }
}

// Multiplies rows of numbers, one per pair, by one row per key. `sums` receives the tangents of the
// products and, if needed, the products, as rows that are padded to whole vectors.
inline void MultiplyKeys(const DualBlock& block, Real* of_pairs, const DualRows& of_keys,
                         int64_t columns, bool needs_values, bool needs_tangents, Real* sums) {
  // A product sums over this many keys, so that its operands stay in cache.
  constexpr int64_t kKeysAtOnce = 256;
  const int64_t padded = PaddedColumns(columns);
  const int64_t rows = block.rows();
  std::fill_n(sums, 2 * rows * padded, 0.0f);
  const auto add = [&](const Real* from, int64_t count, const Rows& keys, Real* to) {
    for (int64_t j = block.keys.begin; j < block.keys.end; j += kKeysAtOnce) {
      MultiplyAdd(Size(count), Size(padded) / kLanes,
                  Size(std::min(kKeysAtOnce, block.keys.end - j)),
                  {from + j - block.first, Size(block.stride), 1}, keys.row(j), Size(keys.stride),
                  to, Size(padded));
    }
  };
  const DualRow pairs = block.Row(of_pairs, 0);
  const Rows values = of_keys.Values(block.b, block.key_head);
  if (!needs_tangents) return add(pairs.values, rows, values, sums + rows * padded);
  add(pairs.tangents, needs_values ? 2 * rows : rows, values, sums);
  const Rows tangents = of_keys.Tangents(block.b, block.key_head);
  if (tangents.data != nullptr) add(pairs.values, rows, tangents, sums);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
