// Products of a few rows with unpacked rows. The functions are declared once per instruction set
// and compiled only in row_products.cc.
//
// Packing keys into panels takes as long as multiplying several rows by them. For few rows, keys
// and values are therefore read in place, one vector of columns at a time. Each product depends
// only on its two rows, and not on the rows that are processed with it, so the backward pass
// computes the same numbers as the forward pass even though its blocks of keys differ.
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

// Keys are read in place if the key head has at most this many rows, counted over all its query
// heads. The limit is lower for bfloat16 pairs (cpu/bfloat16.h), which are half as expensive to
// pack. With single-lane vectors, reading in place would not be faster. Doubles are always packed.
constexpr int64_t kMostRowsInPlace = HWY_TARGET == HWY_SCALAR || sizeof(Real) == 8 ? 0 : 8;
constexpr int64_t kMostPairRowsInPlace = kMostRowsInPlace / 2;

// Whether a call reads keys in place. Both passes make the same decision, so that they compute
// identical scores.
inline bool MultipliesInPlace(const AttentionShape& n, bool pairs) {
  const int64_t group = n.heads / std::max<int64_t>(1, n.key_heads);
  return group * n.queries <= (pairs ? kMostPairRowsInPlace : kMostRowsInPlace);
}

// Unpacked rows of one head, starting at a given row.
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

// Computes C (m x n) = A (m x columns) B^T, where B has n rows and the rows of A are lda floats
// apart.
void MultiplyRows(size_t m, size_t n, size_t columns, const Real* a, size_t lda, RowsInPlace b,
                  Real* c, size_t ldc);
// Computes C (m x columns) += A (m x n) B. The last vector of a row of C is written completely, but
// the numbers past the last column keep their values.
void MultiplyAddRows(size_t m, size_t n, size_t columns, const Real* a, size_t lda, RowsInPlace b,
                     Real* c, size_t ldc);

// Multiplies m rows of x by keys first + [begin, end) of one head, and stores the products in
// columns [begin, end) of a tile. With `pairs`, x consists of bfloat16 pairs (cpu/bfloat16.h).
// Columns outside `keys` become 0; their tokens may contain any values.
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
