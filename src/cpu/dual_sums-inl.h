// Keys and values with their tangents, packed for matrix products, and sums over rows, one per key.
#if defined(GNOMON_SRC_CPU_DUAL_SUMS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_DUAL_SUMS_INL_H_
#undef GNOMON_SRC_CPU_DUAL_SUMS_INL_H_
#else
#define GNOMON_SRC_CPU_DUAL_SUMS_INL_H_
#endif

#include <algorithm>

#include "base/visible_keys.h"
#include "cpu/columns-inl.h"
#include "cpu/head_slots.h"
#include "cpu/packing-inl.h"
#include "cpu/workspace.h"
#include "gnomon/attention.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {

// The rows of each key head as transposed panels; each panel of values is followed by the panel of
// their tangents.
class DualPanels {
 public:
  DualPanels(const Tokens& values, const Tokens& tangents, const HeadSlots& slots, int64_t rows,
             int64_t columns)
      : values_(values),
        tangents_(tangents),
        slots_(slots),
        columns_(columns),
        depth_(columns * (tangents.data != nullptr ? 2 : 1)),
        panels_(DivideUp(rows, kWidth)),
        data_(slots.count * panels_ * depth_ * kWidth) {}

  void Fill(int64_t b, int64_t h, int64_t p, KeyRange keys) const {
    Real* const to = panel(b, h, p);
    PackPanel(values_, b, h, p * kWidth, keys, columns_, to);
    if (tangents_.data == nullptr) return;
    PackPanel(tangents_, b, h, p * kWidth, keys, columns_, to + columns_ * kWidth);
  }
  Real* panel(int64_t b, int64_t h, int64_t p) const {
    return data_.data() + (slots_.Of(b, h) * panels_ + p) * depth_ * kWidth;
  }

 private:
  Tokens values_;
  Tokens tangents_;
  HeadSlots slots_;
  int64_t columns_;
  int64_t depth_;
  int64_t panels_;
  Buffer data_;
};

// Sums with one row per key, accumulated in a view or in memory that is padded to whole vectors.
class KeySums {
 public:
  KeySums(const View<Real>& out, const AttentionShape& n, const HeadSlots& slots, int64_t columns)
      : out_(out),
        slots_(slots),
        keys_(n.keys),
        columns_(columns),
        padded_(PaddedColumns(columns)) {
    if (out.data != nullptr && padded_ != columns) {
      padded_sums_.Reset(slots.count * keys_ * padded_);
    }
  }

  bool wanted() const { return out_.data != nullptr; }
  int64_t stride() const { return padded_sums_ ? padded_ : out_.stride[2]; }
  Real* row(int64_t b, int64_t h, int64_t j) const {
    if (!padded_sums_) return out_.row(b, h, j);
    return padded_sums_.data() + (slots_.Of(b, h) * keys_ + j) * padded_;
  }
  void Clear(int64_t b, int64_t h) const {
    if (!wanted()) return;
    for (int64_t j = 0; j < keys_; ++j) {
      std::fill_n(row(b, h, j), padded_sums_ ? padded_ : columns_, 0.0f);
    }
  }
  void Finish(int64_t b, int64_t h) const {
    if (!padded_sums_) return;
    for (int64_t j = 0; j < keys_; ++j) std::copy_n(row(b, h, j), columns_, out_.row(b, h, j));
  }

 private:
  View<Real> out_;
  HeadSlots slots_;
  int64_t keys_;
  int64_t columns_;
  int64_t padded_;
  Buffer padded_sums_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
