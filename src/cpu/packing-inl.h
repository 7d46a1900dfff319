// Rows and panels that the matrix product reads, and sums over rows.
#if defined(GNOMON_SRC_CPU_PACKING_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_PACKING_INL_H_
#undef GNOMON_SRC_CPU_PACKING_INL_H_
#else
#define GNOMON_SRC_CPU_PACKING_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/visible_keys.h"
#include "cpu/gemm-inl.h"
#include "cpu/vocabulary-inl.h"
#include "cpu/workspace.h"
#include "gnomon/attention.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace HWY_NAMESPACE {

// A tile: rows by columns of the forward and of the backward pass.
constexpr int64_t kRowBlock = 48;
constexpr int64_t kForwardColumns = kMicroVectors == 4 ? 256 : 128;
constexpr int64_t kBackwardColumns = kMicroVectors == 4 ? 192 : 96;
constexpr int64_t kWidth = static_cast<int64_t>(kPanel);
constexpr int64_t kLaneCount = static_cast<int64_t>(kLanes);
constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2 = 0.693147180559945309f;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

HWY_INLINE size_t Size(int64_t n) { return static_cast<size_t>(n); }

// Vectors of a panel that hold its first `columns` columns.
HWY_INLINE size_t Vectors(int64_t columns) {
  return std::min(kMicroVectors, Size(DivideUp(columns, kLaneCount)));
}

// term(0) + ... + term(count - 1), in sixteen sums of their own so that the loop runs in vectors.
template <class Term>
HWY_INLINE float Sum(int64_t count, const Term& term) {
  constexpr int64_t kParts = 16;
  float part[kParts] = {};
  int64_t e = 0;
  for (; e + kParts <= count; e += kParts) {
    for (int64_t n = 0; n < kParts; ++n) part[n] += term(e + n);
  }
  for (; e < count; ++e) part[0] += term(e);
  float sum = 0;
  for (const float p : part) sum += p;
  return sum;
}

inline float SquaredNorm(const float* row, int64_t columns) {
  return Sum(columns, [row](int64_t e) { return row[e] * row[e]; });
}

// The rows of a matrix as a right operand of the product: whole vectors may be read from each.
struct Rows {
  const float* data = nullptr;
  int64_t stride = 0;
  const float* row(int64_t i) const { return data + i * stride; }
};

HWY_INLINE int64_t PaddedColumns(int64_t columns) { return RoundUp(columns, kLaneCount); }

// Rows [begin, end) of one head with zeros behind them up to whole vectors.
inline void CopyPadded(View<const float> view, int64_t b, int64_t h, int64_t begin, int64_t end,
                       int64_t columns, float* to) {
  const int64_t padded = PaddedColumns(columns);
  for (int64_t i = begin; i < end; ++i, to += padded) {
    std::copy_n(view.row(b, h, i), columns, to);
    std::fill(to + columns, to + padded, 0.0f);
  }
}

// A (batch, head) pair's rows of a view, or a copy padded to whole vectors where the columns are
// not.
class PaddedRows {
 public:
  // Copies nothing yet; Fill copies rows [begin, end) of one head.
  PaddedRows(View<const float> view, int64_t batch, int64_t heads, int64_t rows, int64_t columns)
      : view_(view),
        heads_(heads),
        rows_(rows),
        columns_(columns),
        padded_(PaddedColumns(columns)) {
    if (padded_ != columns) copy_.Reset(batch * heads * rows * padded_);
  }

  bool copies() const { return static_cast<bool>(copy_); }

  void Fill(int64_t b, int64_t h, int64_t begin, int64_t end) const {
    if (!copies()) return;
    CopyPadded(view_, b, h, begin, end, columns_,
               copy_.data() + ((b * heads_ + h) * rows_ + begin) * padded_);
  }

  Rows Head(int64_t b, int64_t h) const {
    if (copies()) return {copy_.data() + (b * heads_ + h) * rows_ * padded_, padded_};
    return {view_.row(b, h, 0), view_.stride[2]};
  }

 private:
  View<const float> view_;
  int64_t heads_;
  int64_t rows_;
  int64_t columns_;
  int64_t padded_;
  Buffer copy_;
};

// to[d * kWidth + n] = from[n][d] for four rows.
HWY_INLINE void TransposeFour(const float* const* from, int64_t columns, float* HWY_RESTRICT to) {
  int64_t d = 0;
#if HWY_TARGET != HWY_SCALAR
  const hn::Full128<float> d4;
  for (; d + 4 <= columns; d += 4) {
    const auto row0 = hn::LoadU(d4, from[0] + d);
    const auto row1 = hn::LoadU(d4, from[1] + d);
    const auto row2 = hn::LoadU(d4, from[2] + d);
    const auto row3 = hn::LoadU(d4, from[3] + d);
    const auto lower01 = hn::InterleaveLower(d4, row0, row1);
    const auto lower23 = hn::InterleaveLower(d4, row2, row3);
    const auto upper01 = hn::InterleaveUpper(d4, row0, row1);
    const auto upper23 = hn::InterleaveUpper(d4, row2, row3);
    float* at = to + d * kWidth;
    hn::StoreU(hn::ConcatLowerLower(d4, lower23, lower01), d4, at);
    hn::StoreU(hn::ConcatUpperUpper(d4, lower23, lower01), d4, at + kWidth);
    hn::StoreU(hn::ConcatLowerLower(d4, upper23, upper01), d4, at + 2 * kWidth);
    hn::StoreU(hn::ConcatUpperUpper(d4, upper23, upper01), d4, at + 3 * kWidth);
  }
#endif
  for (; d < columns; ++d) {
    for (int64_t n = 0; n < 4; ++n) to[d * kWidth + n] = from[n][d];
  }
}

// Rows [first, first + kWidth) of one head as a transposed panel: column j of row first + n at
// to[j * kWidth + n]. Rows outside `keys` are 0, up to the last vector that holds one inside.
inline void PackPanel(View<const float> view, int64_t b, int64_t h, int64_t first, KeyRange keys,
                      int64_t columns, float* HWY_RESTRICT to) {
  const int64_t begin = std::clamp<int64_t>(keys.begin - first, 0, kWidth);
  const int64_t end = std::clamp<int64_t>(keys.end - first, begin, kWidth);
  for (int64_t j = 0; j < columns; ++j) {
    std::fill_n(to + j * kWidth, begin, 0.0f);
    std::fill(to + j * kWidth + end, to + j * kWidth + RoundUp(end, kLaneCount), 0.0f);
  }
  int64_t n = begin;
  for (; n + 4 <= end; n += 4) {
    const float* const from[4] = {view.row(b, h, first + n), view.row(b, h, first + n + 1),
                                  view.row(b, h, first + n + 2), view.row(b, h, first + n + 3)};
    TransposeFour(from, columns, to + n);
  }
  for (; n < end; ++n) {
    const float* from = view.row(b, h, first + n);
    for (int64_t j = 0; j < columns; ++j) to[j * kWidth + n] = from[j];
  }
}

// Rows of each key head packed as transposed panels (PackPanel), one behind the other.
class Panels {
 public:
  Panels(View<const float> view, int64_t batch, int64_t heads, int64_t rows, int64_t columns)
      : view_(view),
        heads_(heads),
        columns_(columns),
        panels_(DivideUp(rows, kWidth)),
        data_(batch * heads * panels_ * columns * kWidth) {}

  int64_t count() const { return panels_; }

  const float* panel(int64_t b, int64_t h, int64_t p) const { return At(b, h, p); }

  void Fill(int64_t b, int64_t h, int64_t p, KeyRange keys) const {
    PackPanel(view_, b, h, p * kWidth, keys, columns_, At(b, h, p));
  }

 private:
  float* At(int64_t b, int64_t h, int64_t p) const {
    return data_.data() + ((b * heads_ + h) * panels_ + p) * columns_ * kWidth;
  }

  View<const float> view_;
  int64_t heads_;
  int64_t columns_;
  int64_t panels_;
  Buffer data_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
