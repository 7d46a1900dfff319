// Products of few rows with rows where they lie, declared for each instruction set; compiled once,
// in row_products.cc.
//
// Packing keys into panels costs as much as some rows' products with them. Few rows take inner
// products with keys as they are in memory, a vector of columns at a time, and sums of values
// likewise. A product is a number of its two rows alone, whatever else is multiplied beside it: the
// backward pass makes the same, for other blocks of keys.
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
namespace HWY_NAMESPACE {

// So many rows of a key head, of all its queries' heads, are multiplied with its keys where they
// lie; fewer where products are of pairs of bfloat16 (cpu/bfloat16.h), half as many to pack.
// Vectors of one number would gain nothing.
constexpr int64_t kMostRowsInPlace = HWY_TARGET == HWY_SCALAR ? 0 : 8;
constexpr int64_t kMostPairRowsInPlace = kMostRowsInPlace / 2;

// Of a call, in both directions: scores are the same numbers in both.
inline bool MultipliesInPlace(const AttentionShape& n, bool pairs) {
  const int64_t group = n.heads / std::max<int64_t>(1, n.key_heads);
  return group * n.queries <= (pairs ? kMostPairRowsInPlace : kMostRowsInPlace);
}

// Rows of one head where they lie, from one of them on.
struct RowsInPlace {
  const void* data = nullptr;
  int64_t stride = 0;  // in bytes
  TokenType type = TokenType::kFloat32;

  RowsInPlace() = default;
  RowsInPlace(const float* rows, int64_t row_stride)
      : data(rows), stride(row_stride * static_cast<int64_t>(sizeof(float))) {}
  RowsInPlace(const Tokens& tokens, int64_t b, int64_t h, int64_t first)
      : data(tokens.row(b, h, first)),
        stride(tokens.stride[2] * (tokens.type == TokenType::kFloat32 ? 4 : 2)),
        type(tokens.type) {}

  const void* row(int64_t i) const { return static_cast<const char*>(data) + i * stride; }
};

// C (m x n) = A (m x columns) B^T of B's n rows: their inner products with A's, which lie lda
// floats apart.
void MultiplyRows(size_t m, size_t n, size_t columns, const float* a, size_t lda, RowsInPlace b,
                  float* c, size_t ldc);
// C (m x columns) += A (m x n) B. Rows of C may be written up to a whole vector, with what is there
// behind the last column.
void MultiplyAddRows(size_t m, size_t n, size_t columns, const float* a, size_t lda, RowsInPlace b,
                     float* c, size_t ldc);

// Products of m rows of x, pairs where `pairs` says so (cpu/bfloat16.h), with keys first + begin to
// first + end of one head to columns [begin, end) of a tile: 0 for those that are not of `keys`,
// whose tokens may be anything.
HWY_INLINE void MultiplyKeys(const Tokens& y, int64_t b, int64_t h, KeyRange keys, int64_t dim,
                             bool pairs, int64_t first, int64_t begin, int64_t end, size_t m,
                             const float* x, size_t ldx, float* tile, size_t ldt) {
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
}  // namespace HWY_NAMESPACE
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
