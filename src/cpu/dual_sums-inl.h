// Keys and values with their tangents, packed for matrix products, and sums over rows, one per key.
#if defined(GNOMON_SRC_CPU_DUAL_SUMS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_DUAL_SUMS_INL_H_
#undef GNOMON_SRC_CPU_DUAL_SUMS_INL_H_
#else
#define GNOMON_SRC_CPU_DUAL_SUMS_INL_H_
#endif

#include <algorithm>
#include <vector>

#include "base/visible_keys.h"
#include "cpu/columns-inl.h"
#include "cpu/head_slots.h"
#include "cpu/packing-inl.h"
#include "cpu/pair_table.h"
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

  int64_t columns() const { return columns_; }
  bool has_tangents() const { return tangents_.data != nullptr; }
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

// The rows of each head and their tangents as right operands of matrix products.
class DualRows {
 public:
  DualRows(const Tokens& values, const Tokens& tangents, const HeadSlots& slots, int64_t rows,
           int64_t columns)
      : has_tangents_(tangents.data != nullptr),
        values_(values, slots, rows, columns),
        tangents_(tangents, slots, has_tangents_ ? rows : 0, columns) {}

  // Copies rows [begin, end) of one head if they cannot be used in place.
  void Fill(int64_t b, int64_t h, int64_t begin, int64_t end) const {
    values_.Fill(b, h, begin, end);
    if (has_tangents_) tangents_.Fill(b, h, begin, end);
  }
  Rows Values(int64_t b, int64_t h) const { return values_.Head(b, h); }
  // Without tangents, the rows' data is null.
  Rows Tangents(int64_t b, int64_t h) const {
    return has_tangents_ ? tangents_.Head(b, h) : Rows{};
  }

 private:
  bool has_tangents_;
  PaddedRows values_;
  PaddedRows tangents_;
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

// Gradients with one row per key, and their tangents.
struct DualKeySums {
  DualKeySums(const View<Real>& out, const View<Real>& out_tangents, const AttentionShape& n,
              const HeadSlots& slots, int64_t columns)
      : values(out, n, slots, columns), tangents(out_tangents, n, slots, columns) {}

  void Clear(int64_t b, int64_t h) const {
    values.Clear(b, h);
    tangents.Clear(b, h);
  }
  void Finish(int64_t b, int64_t h) const {
    values.Finish(b, h);
    tangents.Finish(b, h);
  }

  KeySums values;
  KeySums tangents;
};

// One number per key, and their tangents. Heads are counted across the batch.
class DualKeyNumbers {
 public:
  DualKeyNumbers(const AttentionShape& n, bool wanted)
      : heads_(n.batch * n.key_heads), keys_(n.keys) {
    if (wanted) numbers_.Reset(2 * heads_ * keys_);
  }

  bool wanted() const { return static_cast<bool>(numbers_); }
  Real* Head(bool is_tangent, int64_t head) const {
    return numbers_.data() + (is_tangent * heads_ + head) * keys_;
  }

 private:
  int64_t heads_;
  int64_t keys_;
  Buffer numbers_;
};

// The gradients of factors and head scalars, and their tangents: sums per block of rows. Heads are
// counted across the batch.
class DualHeadSums {
 public:
  struct Sums {
    double factor = 0;
    double t[kMostScalars] = {};
  };

  DualHeadSums(const AttentionShape& n, int64_t blocks)
      : n_(n), blocks_(blocks), sums_(Size(2 * n.batch * n.heads * blocks)) {}

  Sums& Of(bool is_tangent, int64_t head, int64_t block) {
    return sums_[Size((is_tangent * n_.batch * n_.heads + head) * blocks_ + block)];
  }
  // Adds up the sums of head h of all sequences of the batch, in a fixed order.
  Sums Total(bool is_tangent, int64_t h) {
    Sums total;
    for (int64_t b = 0; b < n_.batch; ++b) {
      for (int64_t block = 0; block < blocks_; ++block) {
        const Sums& from = Of(is_tangent, b * n_.heads + h, block);
        total.factor += from.factor;
        for (int s = 0; s < kMostScalars; ++s) total.t[s] += from.t[s];
      }
    }
    return total;
  }

 private:
  const AttentionShape& n_;
  int64_t blocks_;
  std::vector<Sums> sums_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
