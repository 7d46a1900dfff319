// Products of few rows with unpacked rows, declared per instruction set and compiled once, in
// row_products.cc.
//
// Packing keys into panels costs as much as multiplying several rows by them. For few rows, keys
// and values are therefore read in place, one vector of columns at a time. Each product depends
// only on its two rows, not on the batch of rows it is computed with: the backward pass computes
// the same numbers with other blocks of keys.
#if defined(GNOMON_SRC_CPU_ROW_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_ROW_PRODUCTS_INL_H_
#undef GNOMON_SRC_CPU_ROW_PRODUCTS_INL_H_
#else
#define GNOMON_SRC_CPU_ROW_PRODUCTS_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/visible_keys.h"
#include "cpu/bfloat16.h"
#include "cpu/packing-inl.h"
#include "gnomon/attention.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {

// Key heads with at most this many rows, over all their queries' heads, are multiplied by keys in
// place. The limit is lower for bfloat16 pairs (cpu/bfloat16.h), which are half as expensive to
// pack. Single-lane vectors would gain nothing. Doubles are always packed.
constexpr int64_t kMostRowsInPlace = HWY_TARGET == HWY_SCALAR || sizeof(Real) == 8 ? 0 : 8;
constexpr int64_t kMostPairRowsInPlace = kMostRowsInPlace / 2;

// The decision for a call. Both passes agree, so that they compute identical scores.
inline bool MultipliesInPlace(const AttentionShape& n, bool pairs) {
  const int64_t group = n.heads / std::max<int64_t>(1, n.key_heads);
  return group * n.queries <= (pairs ? kMostPairRowsInPlace : kMostRowsInPlace);
}

// Rows of one head in place, from a given one on.
struct RowsInPlace {
  const void* data = nullptr;
  int64_t stride = 0;  // in bytes
  TokenType type = kOwnType;

  RowsInPlace() = default;
  RowsInPlace(const Real* rows, int64_t row_stride)
      : data(rows), stride(row_stride * static_cast<int64_t>(sizeof(Real))) {}
  RowsInPlace(const Tokens& tokens, int64_t b, int64_t h, int64_t first)
      : data(tokens.row(b, h, first)),
        stride(tokens.stride[2] * BytesOf(tokens.type)),
        type(tokens.type) {}

  const void* row(int64_t i) const { return static_cast<const char*>(data) + i * stride; }
};

// C (m x n) = A (m x columns) B^T, with n rows of B and rows of A lda floats apart.
void MultiplyRows(size_t m, size_t n, size_t columns, const Real* a, size_t lda, RowsInPlace b,
                  Real* c, size_t ldc);
// C (m x columns) += A (m x n) B. Rows of C may be written up to a whole vector; the numbers past
// the last column are preserved.
void MultiplyAddRows(size_t m, size_t n, size_t columns, const Real* a, size_t lda, RowsInPlace b,
                     Real* c, size_t ldc);

// Products of m rows of x (bfloat16 pairs if `pairs`, cpu/bfloat16.h) with keys first + [begin,
// end) of one head, stored in columns [begin, end) of a tile. Columns outside `keys` become 0;
// their tokens may hold anything.
HWY_INLINE void MultiplyKeys(const Tokens& y, int64_t b, int64_t h, KeyRange keys, int64_t dim,
                             bool pairs, int64_t first, int64_t begin, int64_t end, size_t m,
                             const Real* x, size_t ldx, Real* tile, size_t ldt) {
  const int64_t from = std::clamp(keys.begin - first, begin, end);
  const int64_t to = std::clamp(keys.end - first, from, end);
  if (from > begin || to < end) {
    for (size_t r = 0; r < m; ++r) {
      std::fill(tile + r * ldt + begin, tile + r * ldt + from, 0.0f);
      std::fill(tile + r * ldt + to, tile + r * ldt + end, 0.0f);
    }
  }
  if constexpr (kMostRowsInPlace > 0) {
    if (from == to) return;
    const RowsInPlace rows(y, b, h, first + from);
    if (pairs) {
      MultiplyPairRows(m, Size(to - from), Size(dim), x, ldx, rows.data, rows.stride, tile + from,
                       ldt);
    } else {
      MultiplyRows(m, Size(to - from), Size(dim), x, ldx, rows, tile + from, ldt);
    }
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
