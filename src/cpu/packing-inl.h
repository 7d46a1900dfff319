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
constexpr int64_t kForwardColumns = 256;
constexpr int64_t kBackwardColumns = 192;
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

// A (batch, head) pair's rows of a view, or a copy padded to whole vectors where the columns are
// not.
class PaddedRows {
 public:
  // Copies nothing yet; Fill copies rows [begin, end) of one head.
  PaddedRows(View<const float> view, int64_t batch, int64_t heads, int64_t rows, int64_t columns)
      : view_(view), heads_(heads), rows_(rows), columns_(columns), padded_(Padded(columns)) {
    if (padded_ != columns) copy_.Reset(batch * heads * rows * padded_);
  }

  static int64_t Padded(int64_t columns) { return RoundUp(columns, kLaneCount); }
  bool copies() const { return static_cast<bool>(copy_); }

  void Fill(int64_t b, int64_t h, int64_t begin, int64_t end) const {
    if (!copies()) return;
    for (int64_t i = begin; i < end; ++i) {
      float* to = copy_.data() + ((b * heads_ + h) * rows_ + i) * padded_;
      std::copy_n(view_.row(b, h, i), columns_, to);
      std::fill(to + columns_, to + padded_, 0.0f);
    }
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

// Rows of each key head packed as transposed panels: column j of row d at
// panel(j / kPanel)[d * kPanel + j % kPanel]. Columns outside the batch's keys are 0.
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
    float* HWY_RESTRICT to = At(b, h, p);
    const int64_t begin = std::clamp<int64_t>(keys.begin - p * kWidth, 0, kWidth);
    const int64_t end = std::clamp<int64_t>(keys.end - p * kWidth, begin, kWidth);
    if (begin > 0 || end < kWidth) std::fill_n(to, columns_ * kWidth, 0.0f);
    // Eight rows at a time: each store touches another cache line, each load the same few.
    constexpr int64_t kRows = 8;
    int64_t j = begin;
    for (; j + kRows <= end; j += kRows) {
      const float* from[kRows];
      for (int64_t n = 0; n < kRows; ++n) from[n] = view_.row(b, h, p * kWidth + j + n);
      for (int64_t d = 0; d < columns_; ++d) {
        for (int64_t n = 0; n < kRows; ++n) to[d * kWidth + j + n] = from[n][d];
      }
    }
    for (; j < end; ++j) {
      const float* from = view_.row(b, h, p * kWidth + j);
      for (int64_t d = 0; d < columns_; ++d) to[d * kWidth + j] = from[d];
    }
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
