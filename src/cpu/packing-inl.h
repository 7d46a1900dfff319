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

#include "base/visible_keys.h"
#include "cpu/bfloat16.h"
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

// Whether the tokens' inner products are of pairs (cpu/bfloat16.h, whose vectors are as long), in
// both directions: scores are the same numbers in both.
inline bool MultipliesPairs(bool bfloat16, int64_t dim) {
  return HWY_ARCH_X86 && kLanes == 16 && bfloat16 && dim > 0 && HasBfloat16Products();
}

HWY_INLINE size_t Size(int64_t n) { return static_cast<size_t>(n); }

// Vectors of a panel that hold its first `columns` columns.
HWY_INLINE size_t Vectors(int64_t columns) {
  return std::min(kMicroVectors, Size(DivideUp(columns, kLaneCount)));
}

// term(0) + ... + term(count - 1) in the type of a term, in sixteen sums of their own so that the
// loop runs in vectors.
template <class Term>
HWY_INLINE auto Sum(int64_t count, const Term& term) {
  constexpr int64_t kParts = 16;
  decltype(term(count)) part[kParts] = {};
  int64_t e = 0;
  for (; e + kParts <= count; e += kParts) {
    for (int64_t n = 0; n < kParts; ++n) part[n] += term(e + n);
  }
  for (; e < count; ++e) part[0] += term(e);
  // By halves: one after the other they would wait for each other.
  for (int64_t half = kParts / 2; half > 0; half /= 2) {
    for (int64_t n = 0; n < half; ++n) part[n] += part[n + half];
  }
  return part[0];
}

// One number of the matrix product (gemm.cc), rounded as it is there: term by term.
inline float InnerProduct(const float* x, const float* y, int64_t columns) {
  const hn::CappedTag<float, 1> d;
  constexpr auto kDepth = static_cast<int64_t>(kProductDepth);
  float total = 0;
  for (int64_t first = 0; first < columns; first += kDepth) {
    auto sum = hn::Zero(d);
    for (int64_t e = first; e < std::min(first + kDepth, columns); ++e) {
      sum = hn::MulAdd(hn::Set(d, x[e]), hn::Set(d, y[e]), sum);
    }
    total = first == 0 ? hn::GetLane(sum) : total + hn::GetLane(sum);
  }
  return total;
}

// Rounded once: squared distances are differences of these, and lose what they lack.
inline float SquaredNorm(const float* row, int64_t columns) {
  return static_cast<float>(
      Sum(columns, [row](int64_t e) { return static_cast<double>(row[e]) * row[e]; }));
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

// to[d * kStride + n] = from[n][d] for four rows.
template <int64_t kStride>
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
    float* at = to + d * kStride;
    hn::StoreU(hn::ConcatLowerLower(d4, lower23, lower01), d4, at);
    hn::StoreU(hn::ConcatUpperUpper(d4, lower23, lower01), d4, at + kStride);
    hn::StoreU(hn::ConcatLowerLower(d4, upper23, upper01), d4, at + 2 * kStride);
    hn::StoreU(hn::ConcatUpperUpper(d4, upper23, upper01), d4, at + 3 * kStride);
  }
#endif
  for (; d < columns; ++d) {
    for (int64_t n = 0; n < 4; ++n) to[d * kStride + n] = from[n][d];
  }
}

// Calls transpose(rows, n) for four rows of `keys` at a time, and one(row, n) for those that
// remain, n their place in the panel of rows [first, first + kWidth) of one head; clears the
// panel's places outside, up to the last vector that holds one inside.
template <class Four, class One>
HWY_INLINE void FillPanel(View<const float> view, int64_t b, int64_t h, int64_t first,
                          KeyRange keys, int64_t panel_rows, float* HWY_RESTRICT to,
                          const Four& four, const One& one) {
  const int64_t begin = std::clamp<int64_t>(keys.begin - first, 0, kWidth);
  const int64_t end = std::clamp<int64_t>(keys.end - first, begin, kWidth);
  for (int64_t j = 0; j < panel_rows; ++j) {
    std::fill_n(to + j * kWidth, begin, 0.0f);
    std::fill(to + j * kWidth + end, to + j * kWidth + RoundUp(end, kLaneCount), 0.0f);
  }
  int64_t n = begin;
  for (; n + 4 <= end; n += 4) {
    const float* const rows[4] = {view.row(b, h, first + n), view.row(b, h, first + n + 1),
                                  view.row(b, h, first + n + 2), view.row(b, h, first + n + 3)};
    four(rows, n);
  }
  for (; n < end; ++n) one(view.row(b, h, first + n), n);
}

// Rows of one head as a transposed panel: column j of row first + n at to[j * kWidth + n].
inline void PackPanel(View<const float> view, int64_t b, int64_t h, int64_t first, KeyRange keys,
                      int64_t columns, float* HWY_RESTRICT to) {
  FillPanel(
      view, b, h, first, keys, columns, to,
      [=](const float* const* rows, int64_t n)
          HWY_ATTR { TransposeFour<kWidth>(rows, columns, to + n); },
      [=](const float* row, int64_t n) HWY_ATTR {
        for (int64_t j = 0; j < columns; ++j) to[j * kWidth + n] = row[j];
      });
}

// A row's columns two by two as pairs of bfloat16 (cpu/bfloat16.h), with a 0 behind an odd one.
HWY_INLINE void PairColumns(const float* row, int64_t columns, float* to) {
  for (int64_t j = 0; j + 1 < columns; j += 2) to[j / 2] = PairOf(row[j], row[j + 1]);
  if (columns % 2 != 0) to[columns / 2] = PairOf(row[columns - 1], 0.0f);
}

// The panel of the columns' pairs.
inline void PackPairs(View<const float> view, int64_t b, int64_t h, int64_t first, KeyRange keys,
                      int64_t columns, float* HWY_RESTRICT to) {
  constexpr int64_t kStep = 64;  // columns
  const int64_t pairs = DivideUp(columns, 2);
  FillPanel(
      view, b, h, first, keys, pairs, to,
      [=](const float* const* rows, int64_t n) HWY_ATTR {
        float paired[4][kStep / 2];
        const float* const from[4] = {paired[0], paired[1], paired[2], paired[3]};
        for (int64_t j = 0; j < columns; j += kStep) {
          const int64_t count = std::min(kStep, columns - j);
          for (int64_t r = 0; r < 4; ++r) PairColumns(rows[r] + j, count, paired[r]);
          TransposeFour<kWidth>(from, DivideUp(count, 2), to + j / 2 * kWidth + n);
        }
      },
      [=](const float* row, int64_t n) HWY_ATTR {
        for (int64_t j = 0; j < pairs; ++j) {
          to[j * kWidth + n] = PairOf(row[2 * j], 2 * j + 1 < columns ? row[2 * j + 1] : 0.0f);
        }
      });
}

// Rows [begin, end) of one head, begin even, two by two as pairs: column j of rows begin + 2 n and
// begin + 2 n + 1 at to[n * padded + j], with zeros up to whole vectors. Rows outside `keys` are 0.
inline void PairRows(View<const float> view, int64_t b, int64_t h, int64_t begin, int64_t end,
                     KeyRange keys, int64_t columns, float* HWY_RESTRICT to) {
  const int64_t padded = PaddedColumns(columns);
  for (int64_t i = begin; i < end; i += 2, to += padded) {
    const bool first = i >= keys.begin && i < keys.end;
    const bool second = i + 1 >= keys.begin && i + 1 < keys.end;
    const float* HWY_RESTRICT low = first ? view.row(b, h, i) : nullptr;
    const float* HWY_RESTRICT high = second ? view.row(b, h, i + 1) : nullptr;
    if (first && second) {
      for (int64_t j = 0; j < columns; ++j) to[j] = PairOf(low[j], high[j]);
    } else {
      for (int64_t j = 0; j < columns; ++j) {
        to[j] = PairOf(first ? low[j] : 0.0f, second ? high[j] : 0.0f);
      }
    }
    std::fill(to + columns, to + padded, 0.0f);
  }
}

// Rows of each key head packed as transposed panels, or as those of pairs, one behind the other.
class Panels {
 public:
  Panels(View<const float> view, int64_t batch, int64_t heads, int64_t rows, int64_t columns,
         bool pairs = false)
      : view_(view),
        heads_(heads),
        columns_(columns),
        pairs_(pairs),
        panel_rows_(pairs ? DivideUp(columns, 2) : columns),
        panels_(DivideUp(rows, kWidth)),
        data_(batch * heads * panels_ * panel_rows_ * kWidth) {}

  int64_t count() const { return panels_; }

  const float* panel(int64_t b, int64_t h, int64_t p) const { return At(b, h, p); }

  void Fill(int64_t b, int64_t h, int64_t p, KeyRange keys) const {
    const auto pack = pairs_ ? PackPairs : PackPanel;
    pack(view_, b, h, p * kWidth, keys, columns_, At(b, h, p));
  }

 private:
  float* At(int64_t b, int64_t h, int64_t p) const {
    return data_.data() + ((b * heads_ + h) * panels_ + p) * panel_rows_ * kWidth;
  }

  View<const float> view_;
  int64_t heads_;
  int64_t columns_;
  bool pairs_;
  int64_t panel_rows_;
  int64_t panels_;
  Buffer data_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
