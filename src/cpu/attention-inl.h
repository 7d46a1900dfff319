// The fused operator, forward and backward, for one pair function and one instruction set.
//
// Keys are packed once for each head as transposed panels of kPanel columns, so that one
// microkernel serves every product. A tile is a block of query rows by a block of keys: its scores
// are made by one product, turned into weights while they are in cache, and used up by the next
// products. Queries are independent tasks forward; backward, keys are, and what they add to queries
// goes to one partial sum for each chunk of keys. Tasks are cut by shape alone and sums over tasks
// run in fixed order: results do not depend on the number of workers.
#if defined(GNOMON_SRC_CPU_ATTENTION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_ATTENTION_INL_H_
#undef GNOMON_SRC_CPU_ATTENTION_INL_H_
#else
#define GNOMON_SRC_CPU_ATTENTION_INL_H_
#endif

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/parallel.h"
#include "core/visible_keys.h"
#include "cpu/gemm-inl.h"
#include "cpu/vocabulary-inl.h"
#include "cpu/workspace.h"
#include "gnomon/attention.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace HWY_NAMESPACE {

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

template <class Definition>
constexpr bool kHasProduct = Definition::kInput != PairInput::kNone;
template <class Definition>
constexpr bool kIsDistance = Definition::kInput == PairInput::kSquaredDistance;

// f's derivatives; arrays of one where the definition has none.
template <class Definition>
struct VectorDerivative {
  VF g;
  VF a[Definition::kRowScalars + 1];
  VF b[Definition::kColumnScalars + 1];
  VF t[Definition::kHeadScalars + 1];
};

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

// The bias in units of log2, with room to read whole panels; or its gradient's rows.
class BiasTable {
 public:
  explicit BiasTable(const AttentionInput<float>& in)
      : bias_(in.bias), heads_(in.shape.heads), queries_(in.shape.queries) {
    if (!exists()) return;
    size_ =
        bias_.layout != nullptr ? bias_.layout->table_size() : in.shape.queries + in.shape.keys - 1;
    // Rows are read in whole panels: up to one past the last key.
    stride_ = size_ + kWidth;
    tables_ = bias_.batch_stride == 0 ? 1 : in.shape.batch;
    scaled_.Reset(tables_ * heads_ * stride_);
    masks_.assign(static_cast<size_t>(tables_ * heads_), 0);
  }

  bool exists() const { return bias_.table != nullptr; }
  bool by_layout() const { return bias_.layout != nullptr; }
  int64_t size() const { return size_; }
  int64_t stride() const { return stride_; }
  int64_t tables() const { return exists() ? tables_ * heads_ : 0; }

  // Table n of tables().
  void Fill(int64_t n) {
    const float* from = bias_.table + (n / heads_) * bias_.batch_stride + (n % heads_) * size_;
    float* to = scaled_.data() + n * stride_;
    std::fill_n(to + size_, stride_ - size_, 0.0f);
    bool masks = false;
    for (int64_t e = 0; e < size_; ++e) {
      to[e] = from[e] * kLog2E;
      masks = masks || from[e] == -kInfinity;
    }
    masks_[static_cast<size_t>(n)] = masks ? 1 : 0;
  }

  // Whether the table of a head masks anything by -inf.
  bool masks(int64_t b, int64_t h) const {
    return exists() && masks_[static_cast<size_t>(Index(b, h))] != 0;
  }

  // Biases of row i for columns [begin, begin + count); scratch has room for count.
  const float* Row(int64_t b, int64_t h, int64_t i, int64_t begin, int64_t count, int64_t keys,
                   float* scratch) const {
    const float* table = scaled_.data() + Index(b, h) * stride_;
    if (!by_layout()) return table + queries_ - 1 + begin - i;
    const int64_t in_range = std::clamp<int64_t>(keys - begin, 0, count);
    ForEachRun(i, begin, in_range, [&](int64_t n, int64_t length, int64_t entry) {
      if (entry < 0) {
        std::fill_n(scratch + n, length, 0.0f);
      } else {
        std::copy_n(table + entry, length, scratch + n);
      }
    });
    std::fill_n(scratch + in_range, count - in_range, 0.0f);
    return scratch;
  }

  // Where the gradient of row i, columns from begin on, is added up: in `table` (a gradient of
  // stride() floats) itself, or in zeroed scratch that Scatter empties.
  float* GradientRow(float* table, int64_t i, int64_t begin, int64_t count, float* scratch) const {
    if (!by_layout()) return table + queries_ - 1 + begin - i;
    std::fill_n(scratch, count, 0.0f);
    return scratch;
  }
  void Scatter(float* table, int64_t i, int64_t begin, int64_t count, int64_t keys,
               const float* scratch) const {
    if (!by_layout()) return;
    ForEachRun(i, begin, std::min(count, keys - begin),
               [&](int64_t n, int64_t length, int64_t entry) {
                 if (entry < 0) return;
                 for (int64_t m = 0; m < length; ++m) table[entry + m] += scratch[n + m];
               });
  }

 private:
  // Calls body(n, length, entry) for the runs of entries of row i, columns [begin, begin + count);
  // n counts from begin.
  template <class Body>
  void ForEachRun(int64_t i, int64_t begin, int64_t count, const Body& body) const {
    for (int64_t n = 0; n < count;) {
      const int64_t length = std::min(bias_.layout->RunLength(i, begin + n), count - n);
      body(n, length, bias_.layout->Entry(i, begin + n));
      n += length;
    }
  }

  int64_t Index(int64_t b, int64_t h) const {
    return (bias_.batch_stride == 0 ? 0 : b * heads_) + h;
  }

  Bias<const float> bias_;
  int64_t heads_;
  int64_t queries_;
  int64_t size_ = 0;
  int64_t stride_ = 0;
  int64_t tables_ = 0;
  Buffer scaled_;
  std::vector<char> masks_;
};

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

// The column scalars of each key head and, for a distance, the squared norms of its keys behind
// them; padded to whole panels, zeros outside the batch's keys.
template <class Definition>
class ColumnScalars {
 public:
  static constexpr int kCount = Definition::kColumnScalars + (kIsDistance<Definition> ? 1 : 0);
  using Pointers = std::array<const float*, Definition::kColumnScalars + 1>;

  explicit ColumnScalars(const AttentionInput<float>& in)
      : in_(in), padded_(RoundUp(in.shape.keys, kWidth)) {
    if (kCount > 0) data_.Reset(kCount * in.shape.batch * in.shape.key_heads * padded_);
  }

  void Fill(int64_t b, int64_t h, int64_t p, KeyRange keys) const {
    const int64_t head = b * in_.shape.key_heads + h;
    const int64_t heads = in_.shape.batch * in_.shape.key_heads;
    for (int s = 0; s < kCount; ++s) {
      float* to = data_.data() + (head * kCount + s) * padded_;
      for (int64_t j = p * kWidth; j < (p + 1) * kWidth; ++j) {
        if (j < keys.begin || j >= keys.end) {
          to[j] = 0.0f;
        } else if (s < Definition::kColumnScalars) {
          to[j] = in_.column_scalars[(s * heads + head) * in_.shape.keys + j];
        } else {
          to[j] = SquaredNorm(in_.y.row(b, h, j), in_.shape.dim);
        }
      }
    }
  }

  // Scalar s of keys from `begin` on; last, their squared norms.
  Pointers At(int64_t b, int64_t h, int64_t begin) const {
    Pointers at{};
    for (int s = 0; s < kCount; ++s) {
      at[s] = data_.data() + ((b * in_.shape.key_heads + h) * kCount + s) * padded_ + begin;
    }
    return at;
  }

 private:
  const AttentionInput<float>& in_;
  int64_t padded_;
  Buffer data_;
};

// The segments of keys, with room to read whole vectors, and each panel's range of them.
class Segments {
 public:
  Segments(const Mask& mask, const AttentionShape& n)
      : queries_(mask.query_segments),
        query_count_(n.queries),
        stride_(RoundUp(n.keys, kWidth)),
        panels_(stride_ / kWidth) {
    if (!exists()) return;
    keys_.assign(Size(n.batch * stride_), 0);
    for (int64_t b = 0; b < n.batch; ++b) {
      std::copy_n(mask.key_segments + b * n.keys, n.keys, keys_.data() + b * stride_);
      for (int64_t p = 0; p < panels_; ++p) {
        const int32_t* panel = mask.key_segments + b * n.keys + p * kWidth;
        const auto [low, high] =
            std::minmax_element(panel, panel + std::min(kWidth, n.keys - p * kWidth));
        ranges_.push_back({*low, *high});
      }
    }
  }

  struct Range {
    int32_t low;
    int32_t high;
  };

  bool exists() const { return queries_ != nullptr; }
  const int32_t* Keys(int64_t b, int64_t begin) const {
    return exists() ? keys_.data() + b * stride_ + begin : nullptr;
  }
  int32_t Query(int64_t b, int64_t i) const {
    return exists() ? queries_[b * query_count_ + i] : 0;
  }

  Range OfQueries(int64_t b, int64_t begin, int64_t end) const {
    const int32_t* first = queries_ + b * query_count_;
    const auto [low, high] = std::minmax_element(first + begin, first + end);
    return {*low, *high};
  }
  // At least that of keys [begin, end).
  Range OfKeys(int64_t b, int64_t begin, int64_t end) const {
    Range range = ranges_[Size(b * panels_ + begin / kWidth)];
    for (int64_t p = begin / kWidth + 1; p * kWidth < end; ++p) {
      const Range& panel = ranges_[Size(b * panels_ + p)];
      range = {std::min(range.low, panel.low), std::max(range.high, panel.high)};
    }
    return range;
  }

 private:
  const int32_t* queries_;
  int64_t query_count_;
  int64_t stride_;
  int64_t panels_;
  std::vector<int32_t> keys_;
  std::vector<Range> ranges_;
};

// The visible part of one row of a tile, relative to the tile's first column.
struct RowSpan {
  int64_t begin = 0;
  int64_t end = 0;
};

// One tile's mask: every row's span, and the columns that any row sees.
struct TileMask {
  RowSpan rows[kRowBlock];
  int64_t begin = 0;  // first column that a row sees
  int64_t end = 0;    // one past the last; end <= begin: the tile sees nothing
  bool partial = false;
  bool segmented = false;  // rows may not see a key of their span, for its segment

  // Spans of `count` rows from query i on, for columns [first, first + width).
  void Set(const Mask& mask, KeyRange batch, int64_t position, int64_t count, int64_t first,
           int64_t width) {
    begin = width;
    end = 0;
    for (int64_t r = 0; r < count; ++r) {
      const KeyRange keys = VisibleKeys(mask, batch, position + r);
      rows[r].begin = std::clamp<int64_t>(keys.begin - first, 0, width);
      rows[r].end = std::clamp<int64_t>(keys.end - first, rows[r].begin, width);
      if (rows[r].begin == rows[r].end) continue;
      begin = std::min(begin, rows[r].begin);
      end = std::max(end, rows[r].end);
    }
    partial = HidesWithin({begin, end}, 0, count);
  }

  // After Set, for `count` queries of batch b from `query` on and columns from `first` on.
  void SetSegments(const Segments& segments, int64_t b, int64_t query, int64_t count,
                   int64_t first) {
    if (!segments.exists() || end <= begin) return;
    const Segments::Range rows_range = segments.OfQueries(b, query, query + count);
    const Segments::Range keys_range = segments.OfKeys(b, first + begin, first + end);
    if (rows_range.high < keys_range.low || keys_range.high < rows_range.low) {
      end = begin;
      std::fill_n(rows, count, RowSpan{});
      return;
    }
    segmented = rows_range.low != keys_range.low || rows_range.high != keys_range.high ||
                rows_range.low != rows_range.high;
  }

  // What any of rows [first_row, last_row) sees.
  RowSpan Seen(int64_t first_row, int64_t last_row) const {
    RowSpan seen{end, begin};
    for (int64_t r = first_row; r < last_row; ++r) {
      if (rows[r].begin == rows[r].end) continue;
      seen.begin = std::min(seen.begin, rows[r].begin);
      seen.end = std::max(seen.end, rows[r].end);
    }
    return seen;
  }

  // Whether one of rows [first_row, last_row) does not see all of the span.
  bool HidesWithin(RowSpan span, int64_t first_row, int64_t last_row) const {
    return std::any_of(rows + first_row, rows + last_row, [span](RowSpan row) {
      return row.begin > span.begin || row.end < span.end;
    });
  }
};

// What a row sees of some columns: those of its span that are of its segment.
struct RowView {
  RowSpan span;
  const int32_t* segments = nullptr;  // of the columns; null: one segment
  int32_t segment = 0;
};

// What one row brings to its pairs: its scalars as vectors and, for a distance, its token.
template <class Definition>
struct RowVectors {
  VF a[Definition::kRowScalars + 1];
  VF t[Definition::kHeadScalars + 1];
  VF norm;
  const float* x = nullptr;
  const float* y = nullptr;  // of the first column
  int64_t y_stride = 0;
  int64_t dim = 0;
};

// norm is the squared norm of the row's token, for a distance.
template <class Definition>
HWY_INLINE RowVectors<Definition> LoadRow(const AttentionInput<float>& in, int64_t b, int64_t h,
                                          int64_t key_head, int64_t i, int64_t first_column,
                                          float norm) {
  const DF d;
  const AttentionShape& n = in.shape;
  RowVectors<Definition> row;
  for (int s = 0; s < Definition::kRowScalars; ++s) {
    row.a[s] = hn::Set(d, in.row_scalars[((s * n.batch + b) * n.heads + h) * n.queries + i]);
  }
  for (int s = 0; s < Definition::kHeadScalars; ++s) {
    row.t[s] = hn::Set(d, in.head_scalars[s * n.heads + h]);
  }
  if constexpr (kIsDistance<Definition>) {
    row.x = in.x.row(b, h, i);
    row.y = in.y.row(b, key_head, first_column);
    row.y_stride = in.y.stride[2];
    row.dim = n.dim;
    row.norm = hn::Set(d, norm);
  }
  return row;
}

// Squared distances below this share of the sum of the squared norms are computed anew from
// differences: cancellation has left them four digits or fewer.
constexpr float kNear = 1e-3f;

// Replaces squared distances in s that are below `limit`; y is the token of lane 0.
template <class Definition>
HWY_NOINLINE void NearDistances(const RowVectors<Definition>& row, const float* y,
                                const float* limit, float* s) {
  for (size_t lane = 0; lane < kLanes; ++lane) {
    if (!(s[lane] < limit[lane])) continue;
    const float* key = y + static_cast<int64_t>(lane) * row.y_stride;
    s[lane] = Sum(row.dim, [x = row.x, key](int64_t e) {
      const float difference = x[e] - key[e];
      return difference * difference;
    });
  }
}

// g of columns [j, j + kLanes) of a row, from its inner products.
template <class Definition>
HWY_INLINE VF LoadInput(const float* HWY_RESTRICT products, int64_t j,
                        const RowVectors<Definition>& row, const float* const* column_scalars) {
  const DF d;
  if constexpr (!kHasProduct<Definition>) return hn::Zero(d);
  const VF product = hn::Load(d, products + j);
  if constexpr (!kIsDistance<Definition>) return product;
  if constexpr (kIsDistance<Definition>) {
    const VF norms = row.norm + hn::LoadU(d, column_scalars[Definition::kColumnScalars] + j);
    VF s = norms - (product + product);
    const VF limit = norms * hn::Set(d, kNear);
    if (HWY_UNLIKELY(!hn::AllFalse(d, s < limit))) {
      HWY_ALIGN float near[kLanes];
      HWY_ALIGN float limits[kLanes];
      hn::Store(s, d, near);
      hn::Store(limit, d, limits);
      NearDistances(row, row.y + j * row.y_stride, limits, near);
      s = hn::Load(d, near);
    }
    return s;
  }
}

// Lanes of columns [j, j + kLanes) that the row sees.
HWY_INLINE auto Visible(const RowView& view, int64_t j) {
  const DI di;
  const VI lane = hn::Iota(di, static_cast<int32_t>(j));
  const auto in_span = hn::And(lane > hn::Set(di, static_cast<int32_t>(view.span.begin - 1)),
                               lane < hn::Set(di, static_cast<int32_t>(view.span.end)));
  if (view.segments == nullptr) return in_span;
  return hn::And(in_span, hn::LoadU(di, view.segments + j) == hn::Set(di, view.segment));
}

HWY_INLINE VF Masked(VF value, VF hidden, const RowView& view, int64_t j) {
  const DF d;
  return hn::IfThenElse(hn::RebindMask(d, Visible(view, j)), value, hidden);
}

// Inner products -> scores in units of log2, in place; returns the largest. `columns` is a multiple
// of the vector length.
template <class Definition, bool kBias, bool kMasked>
HWY_INLINE float RowScores(float* HWY_RESTRICT tile, int64_t columns,
                           const RowVectors<Definition>& row, const float* const* column_scalars,
                           float factor, const float* HWY_RESTRICT bias, const RowView& view) {
  const DF d;
  const VF c = hn::Set(d, factor);
  const VF hidden = hn::Set(d, -kInfinity);
  VF largest = hidden;
  for (int64_t j = 0; j < columns; j += kLanes) {
    VF b[Definition::kColumnScalars + 1];
    for (int s = 0; s < Definition::kColumnScalars; ++s) {
      b[s] = hn::LoadU(d, column_scalars[s] + j);
    }
    const VF g = LoadInput(tile, j, row, column_scalars);
    const VF f = Definition::Value(g, row.a, b, row.t);
    VF score;
    if constexpr (kBias) {
      const VF beta = hn::LoadU(d, bias + j);
      score = hn::MulAdd(f, c, beta);
      // A bias of -inf hides whatever f is, NaN included.
      if constexpr (kMasked) score = hn::IfThenElse(beta == hidden, hidden, score);
    } else {
      score = f * c;
    }
    if constexpr (kMasked) score = Masked(score, hidden, view, j);
    largest = hn::Max(largest, score);
    hn::Store(score, d, tile + j);
  }
  return hn::GetLane(hn::MaxOfLanes(d, largest));
}

// Scores -> weights 2^(score - largest), in place; returns their sum.
HWY_INLINE float RowWeights(float* HWY_RESTRICT tile, int64_t columns, float largest) {
  const DF d;
  const VF shift = hn::Set(d, largest);
  VF sum = hn::Zero(d);
  for (int64_t j = 0; j < columns; j += kLanes) {
    const VF weight = Exp2(hn::Load(d, tile + j) - shift);
    sum = sum + weight;
    hn::Store(weight, d, tile + j);
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

HWY_INLINE void ScaleRow(float* row, int64_t columns, float factor) {
  const DF d;
  const VF f = hn::Set(d, factor);
  for (int64_t j = 0; j < columns; j += kLanes) hn::StoreU(hn::LoadU(d, row + j) * f, d, row + j);
}

// Whether some number of rows [begin, end) of one head is not finite.
inline bool HasNonFinite(View<const float> view, int64_t b, int64_t h, int64_t begin, int64_t end,
                         int64_t columns) {
  float sum = 0;
  for (int64_t i = begin; i < end; ++i) {
    // 0 for finite numbers, else NaN.
    sum += Sum(columns, [row = view.row(b, h, i)](int64_t e) { return row[e] * 0.0f; });
  }
  return sum != 0.0f;
}

template <class Definition>
class ForwardPass {
 public:
  ForwardPass(const AttentionInput<float>& in, const AttentionOutput<float>& out,
              const Executor& executor)
      : in_(in),
        out_(out),
        executor_(executor),
        n_(in.shape),
        group_(n_.heads / std::max<int64_t>(1, n_.key_heads)),
        value_columns_(PaddedRows::Padded(n_.value_dim)),
        keys_(in.y, n_.batch, n_.key_heads, kHasProduct<Definition> ? n_.keys : 0, n_.dim),
        values_(in.v, n_.batch, n_.key_heads, n_.keys, n_.value_dim),
        scalars_(in),
        bias_(in),
        segments_(in.mask, n_) {}

  void Run() {
    Pack();
    const int64_t blocks = DivideUp(n_.queries, kRowBlock);
    const int64_t tasks = n_.batch * n_.heads * blocks;
    const int64_t scratch = kRowBlock * (kForwardColumns + value_columns_) + kForwardColumns;
    const Buffer memory(scratch * WorkersFor(executor_, tasks));
    ParallelTasks(executor_, tasks, [&](int64_t task, int worker) {
      const int64_t head = task / blocks;
      // The last rows first: under a causal mask they see most.
      QueryBlock(head / n_.heads, head % n_.heads, (blocks - 1 - task % blocks) * kRowBlock,
                 memory.data() + worker * scratch);
    });
  }

 private:
  void Pack() {
    const int64_t panels = DivideUp(n_.keys, kWidth);
    // A hidden value is multiplied by a weight of 0, which NaN and inf survive.
    const bool hides = in_.mask.left != kUnbounded || in_.mask.right != kUnbounded ||
                       bias_.exists() || segments_.exists();
    if (hides) {
      non_finite_.assign(static_cast<size_t>(n_.batch * n_.key_heads * panels), 0);
    }
    const int64_t tasks = n_.batch * n_.key_heads * panels;
    ParallelTasks(executor_, tasks + bias_.tables(), [&](int64_t task, int) {
      if (task >= tasks) return bias_.Fill(task - tasks);
      const int64_t p = task % panels;
      const int64_t h = task / panels % n_.key_heads;
      const int64_t b = task / panels / n_.key_heads;
      const KeyRange keys = BatchKeys(in_.mask, n_.keys, b);
      const int64_t begin = std::max(keys.begin, p * kWidth);
      const int64_t end = std::min(keys.end, (p + 1) * kWidth);
      if (kHasProduct<Definition>) keys_.Fill(b, h, p, keys);
      scalars_.Fill(b, h, p, keys);
      values_.Fill(b, h, begin, end);
      if (hides) {
        non_finite_[static_cast<size_t>(task)] =
            HasNonFinite(in_.v, b, h, begin, end, n_.value_dim) ? 1 : 0;
      }
    });
  }

  // A block of queries and what its rows have added up so far.
  struct Block {
    int64_t b;
    int64_t h;
    int64_t first_row;
    int64_t rows;
    float* tile;               // kRowBlock x kForwardColumns
    float* sum;                // kRowBlock x value_columns_: weights times values
    float* bias;               // scratch of one row
    float largest[kRowBlock];  // score, in units of log2
    float weight[kRowBlock];   // sum of 2^(score - largest)
    float norm[kRowBlock];     // squared norm of the query, for a distance
  };

  void QueryBlock(int64_t b, int64_t h, int64_t first_row, float* scratch) const {
    Block block{};
    block.b = b;
    block.h = h;
    block.first_row = first_row;
    block.rows = std::min(kRowBlock, n_.queries - first_row);
    block.tile = scratch;
    block.sum = block.tile + kRowBlock * kForwardColumns;
    block.bias = block.sum + kRowBlock * value_columns_;
    std::fill_n(block.largest, block.rows, -kInfinity);
    std::fill_n(block.sum, block.rows * value_columns_, 0.0f);

    const KeyRange batch = BatchKeys(in_.mask, n_.keys, b);
    const int64_t position = QueryOffset(in_, b) + first_row;
    for (int64_t r = 0; kIsDistance<Definition> && r < block.rows; ++r) {
      block.norm[r] = SquaredNorm(in_.x.row(b, h, first_row + r), n_.dim);
    }
    TileMask seen;
    seen.Set(in_.mask, batch, position, block.rows, 0, n_.keys);
    for (int64_t first = seen.begin / kWidth * kWidth; first < seen.end; first += kForwardColumns) {
      TileMask mask;
      mask.Set(in_.mask, batch, position, block.rows, first,
               std::min(kForwardColumns, n_.keys - first));
      mask.SetSegments(segments_, b, first_row, block.rows, first);
      if (mask.end <= mask.begin) continue;
      // Rows that see different keys go in small groups, each as far as it sees.
      const int64_t step = mask.partial ? static_cast<int64_t>(kMicroRows) : block.rows;
      for (int64_t r = 0; r < block.rows; r += step) {
        AddKeys(block, mask, r, std::min(r + step, block.rows), first);
      }
    }
    Finish(block);
  }

  // Adds a tile's keys, from `first` on, to rows [first_row, last_row) of a block.
  void AddKeys(Block& block, const TileMask& mask, int64_t first_row, int64_t last_row,
               int64_t first) const {
    const RowSpan seen = mask.Seen(first_row, last_row);
    if (seen.end <= seen.begin) return;
    const int64_t key_head = block.h / group_;
    const int64_t query = block.first_row + first_row;
    const size_t rows = Size(last_row - first_row);
    float* tile = block.tile + first_row * kForwardColumns;
    float* sum = block.sum + first_row * value_columns_;
    if (kHasProduct<Definition>) {
      for (int64_t c = seen.begin / kWidth * kWidth; c < seen.end; c += kWidth) {
        Multiply(rows, Vectors(seen.end - c), Size(n_.dim),
                 {in_.x.row(block.b, block.h, query), Size(in_.x.stride[2]), 1},
                 keys_.panel(block.b, key_head, (first + c) / kWidth), kPanel, tile + c,
                 Size(kForwardColumns));
      }
    }
    // Whole vectors.
    const RowSpan span{seen.begin / kLaneCount * kLaneCount, RoundUp(seen.end, kLaneCount)};
    const bool masked = mask.HidesWithin(span, first_row, last_row) || mask.segmented ||
                        bias_.masks(block.b, block.h);
    for (int64_t r = first_row; r < last_row; ++r) {
      AddWeights(block, r, first, span, masked, mask.rows[r]);
    }
    if (masked && AnyNonFinite(block.b, key_head, first + seen.begin, first + seen.end)) {
      return AddVisibleValues(block, mask, first_row, last_row, first);
    }
    const Rows values = values_.Head(block.b, key_head);
    MultiplyAdd(rows, Size(value_columns_) / kLanes, Size(seen.end - seen.begin),
                {tile + seen.begin, Size(kForwardColumns), 1}, values.row(first + seen.begin),
                Size(values.stride), sum, Size(value_columns_));
  }

  // Row r of a block: its inner products within the span become weights.
  void AddWeights(Block& block, int64_t r, int64_t first, RowSpan span, bool masked,
                  RowSpan visible) const {
    const int64_t query = block.first_row + r;
    const int64_t columns = span.end - span.begin;
    float* tile = block.tile + r * kForwardColumns + span.begin;
    const int64_t key_head = block.h / group_;
    const RowVectors<Definition> row = LoadRow<Definition>(in_, block.b, block.h, key_head, query,
                                                           first + span.begin, block.norm[r]);
    const auto scalars = scalars_.At(block.b, key_head, first + span.begin);
    const float factor = in_.factor[block.h] * kLog2E;
    const RowView view{{visible.begin - span.begin, visible.end - span.begin},
                       segments_.Keys(block.b, first + span.begin),
                       segments_.Query(block.b, query)};
    float top;
    if (bias_.exists()) {
      const float* bias =
          bias_.Row(block.b, block.h, query, first + span.begin, columns, n_.keys, block.bias);
      top = masked ? RowScores<Definition, true, true>(tile, columns, row, scalars.data(), factor,
                                                       bias, view)
                   : RowScores<Definition, true, false>(tile, columns, row, scalars.data(), factor,
                                                        bias, view);
    } else {
      top = masked ? RowScores<Definition, false, true>(tile, columns, row, scalars.data(), factor,
                                                        nullptr, view)
                   : RowScores<Definition, false, false>(tile, columns, row, scalars.data(), factor,
                                                         nullptr, view);
    }
    if (top > block.largest[r]) {
      // The first time the sums are 0, and 2^-inf is 0 as well.
      const float shrink = std::exp2(block.largest[r] - top);
      block.weight[r] *= shrink;
      ScaleRow(block.sum + r * value_columns_, value_columns_, shrink);
      block.largest[r] = top;
    }
    // All scores so far are -inf (or NaN): any finite shift gives weights of 0 (or NaN).
    const float shift = block.largest[r] == -kInfinity ? 0.0f : block.largest[r];
    block.weight[r] += RowWeights(tile, columns, shift);
  }

  void Finish(const Block& block) const {
    for (int64_t r = 0; r < block.rows; ++r) {
      const float weight = block.weight[r];
      const float scale = weight == 0.0f ? 0.0f : 1.0f / weight;
      const float* sum = block.sum + r * value_columns_;
      float* o = out_.o.row(block.b, block.h, block.first_row + r);
      for (int64_t e = 0; e < n_.value_dim; ++e) o[e] = sum[e] * scale;
      out_.lse[(block.b * n_.heads + block.h) * n_.queries + block.first_row + r] =
          weight == 0.0f ? -kInfinity : (block.largest[r] + std::log2(weight)) * kLn2;
    }
  }

  // Whether a panel of values with one of keys [begin, end) has a number that is not finite.
  bool AnyNonFinite(int64_t b, int64_t key_head, int64_t begin, int64_t end) const {
    if (non_finite_.empty()) return false;
    const char* flags =
        non_finite_.data() + (b * n_.key_heads + key_head) * DivideUp(n_.keys, kWidth);
    return std::any_of(flags + begin / kWidth, flags + DivideUp(end, kWidth),
                       [](char flag) { return flag != 0; });
  }

  // Weights times values over the pairs that are visible alone.
  void AddVisibleValues(const Block& block, const TileMask& mask, int64_t first_row,
                        int64_t last_row, int64_t first) const {
    for (int64_t r = first_row; r < last_row; ++r) {
      const RowSpan span = mask.rows[r];
      const float* weights = block.tile + r * kForwardColumns;
      float* sum = block.sum + r * value_columns_;
      const float* bias = bias_.exists() ? bias_.Row(block.b, block.h, block.first_row + r, first,
                                                     span.end, n_.keys, block.bias)
                                         : nullptr;
      const int32_t* segments = segments_.Keys(block.b, first);
      const int32_t segment = segments_.Query(block.b, block.first_row + r);
      for (int64_t j = span.begin; j < span.end; ++j) {
        if (bias != nullptr && bias[j] == -kInfinity) continue;
        if (segments != nullptr && segments[j] != segment) continue;
        const float* v = in_.v.row(block.b, block.h / group_, first + j);
        for (int64_t e = 0; e < n_.value_dim; ++e) sum[e] += weights[j] * v[e];
      }
    }
  }

  const AttentionInput<float>& in_;
  const AttentionOutput<float>& out_;
  const Executor& executor_;
  const AttentionShape& n_;
  int64_t group_;
  int64_t value_columns_;
  Panels keys_;
  PaddedRows values_;
  ColumnScalars<Definition> scalars_;
  BiasTable bias_;
  Segments segments_;
  std::vector<char> non_finite_;  // for each panel of values
};

// What the backward pass adds up over one row of a tile, besides the tiles themselves.
template <class Definition>
struct RowSums {
  float factor = 0;
  float norm = 0;  // by the squared norm of a distance
  float a[Definition::kRowScalars + 1] = {};
  float t[Definition::kHeadScalars + 1] = {};
};

// One row of the backward pass. In: inner products in `tile`, dP in `gradient`. Out: weights p in
// `tile`, the inner products' gradients in `gradient`; those of the column scalars, and last of the
// squared norms of a distance, are added to `d_columns`, dS to `d_bias` where it is not null.
template <class Definition, bool kBias, bool kMasked>
HWY_INLINE RowSums<Definition> RowGradient(float* HWY_RESTRICT tile, float* HWY_RESTRICT gradient,
                                           int64_t columns, const RowVectors<Definition>& row,
                                           const float* const* column_scalars,
                                           float* const* d_columns, float factor,
                                           const float* HWY_RESTRICT bias, float* d_bias, float lse,
                                           float delta, const RowView& view) {
  const DF d;
  const VF zero = hn::Zero(d);
  const VF c = hn::Set(d, factor);
  const VF c2 = hn::Set(d, factor * kLog2E);
  const VF shift = hn::Set(d, lse);
  const VF mean = hn::Set(d, delta);
  VF sum_factor = zero;
  VF sum_norm = zero;
  VF sum_a[Definition::kRowScalars + 1];
  VF sum_t[Definition::kHeadScalars + 1];
  for (int s = 0; s < Definition::kRowScalars; ++s) sum_a[s] = zero;
  for (int s = 0; s < Definition::kHeadScalars; ++s) sum_t[s] = zero;
  for (int64_t j = 0; j < columns; j += kLanes) {
    VF b[Definition::kColumnScalars + 1];
    for (int s = 0; s < Definition::kColumnScalars; ++s) {
      b[s] = hn::LoadU(d, column_scalars[s] + j);
    }
    const VF g = LoadInput(tile, j, row, column_scalars);
    VectorDerivative<Definition> slope;
    const VF f = Definition::Gradient(g, row.a, b, row.t, slope);
    VF exponent = hn::MulSub(f, c2, shift);
    if constexpr (kBias) exponent = exponent + hn::LoadU(d, bias + j);
    if constexpr (kMasked) exponent = Masked(exponent, hn::Set(d, -kInfinity), view, j);
    const VF p = Exp2(exponent);
    const VF ds = p * (hn::Load(d, gradient + j) - mean);
    hn::Store(p, d, tile + j);
    if constexpr (kBias) {
      if (d_bias != nullptr) hn::StoreU(hn::LoadU(d, d_bias + j) + ds, d, d_bias + j);
    }
    sum_factor = hn::MulAdd(ds, f, sum_factor);
    const VF df = c * ds;
    const VF dg = df * slope.g;
    if constexpr (kIsDistance<Definition>) {
      // |x - y|^2 = |x|^2 + |y|^2 - 2 x.y
      hn::Store(dg * hn::Set(d, -2.0f), d, gradient + j);
      sum_norm = sum_norm + dg;
      float* to = d_columns[Definition::kColumnScalars] + j;
      hn::StoreU(hn::LoadU(d, to) + dg, d, to);
    } else {
      hn::Store(dg, d, gradient + j);
    }
    for (int s = 0; s < Definition::kRowScalars; ++s) {
      sum_a[s] = hn::MulAdd(df, slope.a[s], sum_a[s]);
    }
    for (int s = 0; s < Definition::kHeadScalars; ++s) {
      sum_t[s] = hn::MulAdd(df, slope.t[s], sum_t[s]);
    }
    for (int s = 0; s < Definition::kColumnScalars; ++s) {
      float* to = d_columns[s] + j;
      hn::StoreU(hn::MulAdd(df, slope.b[s], hn::LoadU(d, to)), d, to);
    }
  }
  RowSums<Definition> sums;
  sums.factor = hn::GetLane(hn::SumOfLanes(d, sum_factor));
  if (kIsDistance<Definition>) sums.norm = hn::GetLane(hn::SumOfLanes(d, sum_norm));
  for (int s = 0; s < Definition::kRowScalars; ++s) {
    sums.a[s] = hn::GetLane(hn::SumOfLanes(d, sum_a[s]));
  }
  for (int s = 0; s < Definition::kHeadScalars; ++s) {
    sums.t[s] = hn::GetLane(hn::SumOfLanes(d, sum_t[s]));
  }
  return sums;
}

template <class Definition>
class BackwardPass {
 public:
  BackwardPass(const AttentionInput<float>& in, const AttentionBackwardInput<float>& saved,
               const AttentionGradient<float>& grad, const Executor& executor)
      : in_(in),
        saved_(saved),
        grad_(grad),
        executor_(executor),
        n_(in.shape),
        group_(n_.heads / std::max<int64_t>(1, n_.key_heads)),
        dim_(kHasProduct<Definition> ? n_.dim : 0),
        padded_dim_(PaddedRows::Padded(dim_)),
        padded_value_dim_(PaddedRows::Padded(n_.value_dim)),
        blocks_(DivideUp(n_.keys, kBackwardColumns)),
        chunks_(Chunks(n_, blocks_)),
        head_rows_(n_.batch * n_.heads * n_.queries),
        key_panels_(in.y, n_.batch, n_.key_heads, dim_ > 0 ? n_.keys : 0, dim_),
        value_panels_(in.v, n_.batch, n_.key_heads, n_.keys, n_.value_dim),
        keys_(in.y, n_.batch, n_.key_heads, dim_ > 0 ? n_.keys : 0, dim_),
        queries_(in.x, n_.batch, n_.heads, dim_ > 0 ? n_.queries : 0, dim_),
        d_o_(saved.d_o, n_.batch, n_.heads, n_.queries, n_.value_dim),
        scalars_(in),
        bias_(in),
        segments_(in.mask, n_),
        lse_(head_rows_),
        delta_(head_rows_),
        d_head_(static_cast<size_t>(n_.batch * n_.heads * chunks_)) {
    if (grad.x.data != nullptr && dim_ > 0) d_queries_.Reset(chunks_ * head_rows_ * padded_dim_);
    if (kIsDistance<Definition>) norms_.Reset(head_rows_);
    if (kRowSums > 0) d_rows_.Reset(chunks_ * kRowSums * head_rows_);
    if (grad.bias.table != nullptr) {
      d_bias_.Reset(n_.batch * n_.heads * chunks_ * bias_.stride());
    }
  }

  void Run() {
    Prepare();
    const int64_t tasks = n_.batch * n_.key_heads * chunks_;
    const int64_t scratch =
        kBackwardColumns * (padded_dim_ + padded_value_dim_ + kColumnSums + 2 * kRowBlock + 2);
    const Buffer memory(scratch * WorkersFor(executor_, tasks));
    ParallelTasks(executor_, tasks, [&](int64_t task, int worker) {
      const int64_t head = task / chunks_;
      Chunk(head / n_.key_heads, head % n_.key_heads, task % chunks_,
            memory.data() + worker * scratch);
    });
    Merge();
  }

 private:
  // Sums over keys that every query has, and over queries that every key has: its scalars'
  // gradients and, last, its squared norm's.
  static constexpr int kRowSums = Definition::kRowScalars + (kIsDistance<Definition> ? 1 : 0);
  static constexpr int kColumnSums = ColumnScalars<Definition>::kCount;

  // Enough tasks to share out, few enough that the partial sums stay small beside the inputs.
  static int64_t Chunks(const AttentionShape& n, int64_t blocks) {
    constexpr int64_t kTasks = 16;
    const int64_t heads = std::max<int64_t>(1, n.batch * n.key_heads);
    return std::clamp<int64_t>(DivideUp(kTasks, heads), 1, std::max<int64_t>(1, blocks));
  }

  // Packs keys and values, scales the bias, and makes each row's lse and delta.
  void Prepare() {
    const int64_t panels = DivideUp(n_.keys, kWidth);
    const int64_t row_blocks = DivideUp(n_.queries, kRowBlock);
    const int64_t key_tasks = n_.batch * n_.key_heads * panels;
    const int64_t row_tasks = n_.batch * n_.heads * row_blocks;
    ParallelTasks(executor_, key_tasks + row_tasks + bias_.tables(), [&](int64_t task, int) {
      if (task < key_tasks) {
        const int64_t p = task % panels;
        PrepareKeys(task / panels / n_.key_heads, task / panels % n_.key_heads, p);
      } else if (task < key_tasks + row_tasks) {
        const int64_t head = (task - key_tasks) / row_blocks;
        const int64_t first = (task - key_tasks) % row_blocks * kRowBlock;
        PrepareRows(head / n_.heads, head % n_.heads, first,
                    std::min(first + kRowBlock, n_.queries));
      } else {
        bias_.Fill(task - key_tasks - row_tasks);
      }
    });
  }

  void PrepareKeys(int64_t b, int64_t h, int64_t p) const {
    const KeyRange keys = BatchKeys(in_.mask, n_.keys, b);
    value_panels_.Fill(b, h, p, keys);
    scalars_.Fill(b, h, p, keys);
    if (dim_ == 0) return;
    key_panels_.Fill(b, h, p, keys);
    keys_.Fill(b, h, std::max(keys.begin, p * kWidth), std::min(keys.end, (p + 1) * kWidth));
  }

  void PrepareRows(int64_t b, int64_t h, int64_t begin, int64_t end) const {
    d_o_.Fill(b, h, begin, end);
    if (dim_ > 0) queries_.Fill(b, h, begin, end);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = (b * n_.heads + h) * n_.queries + i;
      if (norms_) norms_.data()[row] = SquaredNorm(in_.x.row(b, h, i), dim_);
      if (saved_.lse[row] == -kInfinity) {
        // 2^(s - inf) = 0: a row without keys has no weights and no gradients.
        lse_.data()[row] = kInfinity;
        delta_.data()[row] = 0;
        continue;
      }
      const float* o = saved_.o.row(b, h, i);
      const float* d_o = saved_.d_o.row(b, h, i);
      const float sum = Sum(n_.value_dim, [o, d_o](int64_t e) { return o[e] * d_o[e]; });
      lse_.data()[row] = saved_.lse[row] * kLog2E;
      delta_.data()[row] = sum - (saved_.d_lse != nullptr ? saved_.d_lse[row] : 0.0f);
    }
  }

  // Every chunk-th block of keys of one key head, against all queries of its group.
  void Chunk(int64_t b, int64_t key_head, int64_t chunk, float* scratch) {
    for (int64_t h = key_head * group_; h < (key_head + 1) * group_; ++h) {
      const int64_t head = b * n_.heads + h;
      d_head_[static_cast<size_t>(head * chunks_ + chunk)] = {};
      if (d_queries_) {
        std::fill_n(QueryGradient(chunk, head, 0), n_.queries * padded_dim_, 0.0f);
      }
      for (int s = 0; s < kRowSums; ++s) {
        std::fill_n(RowSum(chunk, s, head), n_.queries, 0.0f);
      }
      if (d_bias_) std::fill_n(BiasGradient(chunk, head), bias_.stride(), 0.0f);
    }
    const KeyRange batch = BatchKeys(in_.mask, n_.keys, b);
    for (int64_t block = chunk; block < blocks_; block += chunks_) {
      KeyBlock(b, key_head, chunk, block * kBackwardColumns, batch, scratch);
    }
  }

  void KeyBlock(int64_t b, int64_t key_head, int64_t chunk, int64_t first, KeyRange batch,
                float* scratch) {
    const int64_t columns = std::min(kBackwardColumns, n_.keys - first);
    float* HWY_RESTRICT tile = scratch;
    float* HWY_RESTRICT gradient = tile + kRowBlock * kBackwardColumns;
    float* HWY_RESTRICT d_keys = gradient + kRowBlock * kBackwardColumns;
    float* HWY_RESTRICT d_values = d_keys + kBackwardColumns * padded_dim_;
    float* HWY_RESTRICT d_columns = d_values + kBackwardColumns * padded_value_dim_;
    float* HWY_RESTRICT bias_scratch = d_columns + kBackwardColumns * kColumnSums;
    std::fill_n(d_keys, kBackwardColumns * (padded_dim_ + padded_value_dim_ + kColumnSums), 0.0f);
    for (int64_t h = key_head * group_; h < (key_head + 1) * group_; ++h) {
      for (int64_t row = 0; row < n_.queries; row += kRowBlock) {
        Tile(b, h, chunk, first, row, batch, tile, gradient, d_keys, d_values, d_columns,
             bias_scratch);
      }
    }
    for (int64_t j = 0; j < columns; ++j) {
      if (grad_.y.data != nullptr && dim_ > 0) {
        float* d_y = grad_.y.row(b, key_head, first + j);
        std::copy_n(d_keys + j * padded_dim_, dim_, d_y);
        if constexpr (kIsDistance<Definition>) {
          // 0 too for a key that nothing sees: what it holds then does not matter.
          const float d_norm = d_columns[Definition::kColumnScalars * kBackwardColumns + j];
          if (d_norm != 0) AddNormGradient(d_norm, in_.y.row(b, key_head, first + j), d_y);
        }
      }
      if (grad_.v.data != nullptr) {
        std::copy_n(d_values + j * padded_value_dim_, n_.value_dim,
                    grad_.v.row(b, key_head, first + j));
      }
    }
    for (int s = 0; grad_.column_scalars != nullptr && s < Definition::kColumnScalars; ++s) {
      std::copy_n(
          d_columns + s * kBackwardColumns, columns,
          grad_.column_scalars + ((s * n_.batch + b) * n_.key_heads + key_head) * n_.keys + first);
    }
  }

  void Tile(int64_t b, int64_t h, int64_t chunk, int64_t first, int64_t first_row, KeyRange batch,
            float* HWY_RESTRICT tile, float* HWY_RESTRICT gradient, float* d_keys, float* d_values,
            float* d_columns, float* bias_scratch) {
    const int64_t key_head = h / group_;
    const int64_t head = b * n_.heads + h;
    const int64_t rows = std::min(kRowBlock, n_.queries - first_row);
    TileMask mask;
    mask.Set(in_.mask, batch, QueryOffset(in_, b) + first_row, rows, first,
             std::min(kBackwardColumns, n_.keys - first));
    mask.SetSegments(segments_, b, first_row, rows, first);
    if (mask.end <= mask.begin) return;
    const Rows d_o = d_o_.Head(b, h);
    for (int64_t c = mask.begin / kWidth * kWidth; c < mask.end; c += kWidth) {
      if (dim_ > 0) {
        Multiply(Size(rows), Vectors(mask.end - c), Size(dim_),
                 {in_.x.row(b, h, first_row), Size(in_.x.stride[2]), 1},
                 key_panels_.panel(b, key_head, (first + c) / kWidth), kPanel, tile + c,
                 kBackwardColumns);
      }
      Multiply(Size(rows), Vectors(mask.end - c), Size(n_.value_dim),
               {saved_.d_o.row(b, h, first_row), Size(saved_.d_o.stride[2]), 1},
               value_panels_.panel(b, key_head, (first + c) / kWidth), kPanel, gradient + c,
               kBackwardColumns);
    }
    RowGradients(b, h, chunk, first, first_row, rows, mask, tile, gradient, d_columns,
                 bias_scratch);
    const size_t seen = Size(mask.end - mask.begin);
    if (grad_.v.data != nullptr) {
      MultiplyAdd(seen, Size(padded_value_dim_) / kLanes, Size(rows),
                  {tile + mask.begin, 1, Size(kBackwardColumns)}, d_o.row(first_row),
                  Size(d_o.stride), d_values + mask.begin * padded_value_dim_,
                  Size(padded_value_dim_));
    }
    if (dim_ == 0) return;
    if (grad_.y.data != nullptr) {
      const Rows queries = queries_.Head(b, h);
      MultiplyAdd(seen, Size(padded_dim_) / kLanes, Size(rows),
                  {gradient + mask.begin, 1, Size(kBackwardColumns)}, queries.row(first_row),
                  Size(queries.stride), d_keys + mask.begin * padded_dim_, Size(padded_dim_));
    }
    if (d_queries_) {
      const Rows keys = keys_.Head(b, key_head);
      MultiplyAdd(Size(rows), Size(padded_dim_) / kLanes, seen,
                  {gradient + mask.begin, Size(kBackwardColumns), 1}, keys.row(first + mask.begin),
                  Size(keys.stride), QueryGradient(chunk, head, first_row), Size(padded_dim_));
    }
  }

  // Turns a tile's products into weights and gradients of the scores.
  void RowGradients(int64_t b, int64_t h, int64_t chunk, int64_t first, int64_t first_row,
                    int64_t rows, const TileMask& mask, float* tile, float* gradient,
                    float* d_columns, float* bias_scratch) {
    const int64_t head = b * n_.heads + h;
    // Whole vectors that some row sees.
    const int64_t begin = mask.begin / kLaneCount * kLaneCount;
    const int64_t end = RoundUp(mask.end, kLaneCount);
    const bool masked = mask.HidesWithin({begin, end}, 0, rows) || mask.segmented;
    const auto scalars = scalars_.At(b, h / group_, first + begin);
    std::array<float*, Definition::kColumnScalars + 1> d_scalars{};
    for (int s = 0; s < kColumnSums; ++s) d_scalars[s] = d_columns + s * kBackwardColumns + begin;
    RowSums<Definition>& totals = d_head_[static_cast<size_t>(head * chunks_ + chunk)];
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t i = first_row + r;
      const RowVectors<Definition> row =
          LoadRow<Definition>(in_, b, h, h / group_, i, first + begin,
                              norms_ ? norms_.data()[head * n_.queries + i] : 0);
      const RowView view{{mask.rows[r].begin - begin, mask.rows[r].end - begin},
                         segments_.Keys(b, first + begin),
                         segments_.Query(b, i)};
      float* const weights = tile + r * kBackwardColumns + begin;
      float* const d_scores = gradient + r * kBackwardColumns + begin;
      const float lse = lse_.data()[head * n_.queries + i];
      const float delta = delta_.data()[head * n_.queries + i];
      const float factor = in_.factor[h];
      const int64_t width = end - begin;
      RowSums<Definition> sums;
      if (bias_.exists()) {
        const float* bias = bias_.Row(b, h, i, first + begin, width, n_.keys, bias_scratch);
        float* d_table = d_bias_ ? BiasGradient(chunk, head) : nullptr;
        float* d_bias = d_bias_ ? bias_.GradientRow(d_table, i, first + begin, width,
                                                    bias_scratch + kBackwardColumns)
                                : nullptr;
        sums = masked ? RowGradient<Definition, true, true>(weights, d_scores, width, row,
                                                            scalars.data(), d_scalars.data(),
                                                            factor, bias, d_bias, lse, delta, view)
                      : RowGradient<Definition, true, false>(
                            weights, d_scores, width, row, scalars.data(), d_scalars.data(), factor,
                            bias, d_bias, lse, delta, view);
        if (d_bias_) bias_.Scatter(d_table, i, first + begin, width, n_.keys, d_bias);
      } else {
        sums = masked
                   ? RowGradient<Definition, false, true>(weights, d_scores, width, row,
                                                          scalars.data(), d_scalars.data(), factor,
                                                          nullptr, nullptr, lse, delta, view)
                   : RowGradient<Definition, false, false>(weights, d_scores, width, row,
                                                           scalars.data(), d_scalars.data(), factor,
                                                           nullptr, nullptr, lse, delta, view);
      }
      totals.factor += sums.factor;
      for (int s = 0; s < Definition::kHeadScalars; ++s) totals.t[s] += sums.t[s];
      for (int s = 0; s < Definition::kRowScalars; ++s) RowSum(chunk, s, head)[i] += sums.a[s];
      if (kIsDistance<Definition>) RowSum(chunk, Definition::kRowScalars, head)[i] += sums.norm;
    }
  }

  // Adds up what the chunks gave, in order.
  void Merge() {
    const int64_t row_tasks = d_queries_ ? n_.batch * n_.heads : 0;
    ParallelTasks(executor_, row_tasks, [&](int64_t head, int) {
      for (int64_t i = 0; i < n_.queries; ++i) {
        float* to = grad_.x.row(head / n_.heads, head % n_.heads, i);
        std::copy_n(QueryGradient(0, head, i), dim_, to);
        for (int64_t chunk = 1; chunk < chunks_; ++chunk) {
          const float* from = QueryGradient(chunk, head, i);
          for (int64_t e = 0; e < dim_; ++e) to[e] += from[e];
        }
        if (!kIsDistance<Definition>) continue;
        float d_norm = 0;
        for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
          d_norm += RowSum(chunk, Definition::kRowScalars, head)[i];
        }
        if (d_norm != 0) {
          AddNormGradient(d_norm, in_.x.row(head / n_.heads, head % n_.heads, i), to);
        }
      }
    });
    for (int s = 0; grad_.row_scalars != nullptr && s < Definition::kRowScalars; ++s) {
      float* to = grad_.row_scalars + s * head_rows_;
      std::copy_n(RowSum(0, s, 0), head_rows_, to);
      for (int64_t chunk = 1; chunk < chunks_; ++chunk) {
        const float* from = RowSum(chunk, s, 0);
        for (int64_t e = 0; e < head_rows_; ++e) to[e] += from[e];
      }
    }
    for (int64_t h = 0; h < n_.heads; ++h) {
      RowSums<Definition> sums;
      for (int64_t b = 0; b < n_.batch; ++b) {
        for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
          const RowSums<Definition>& part =
              d_head_[static_cast<size_t>((b * n_.heads + h) * chunks_ + chunk)];
          sums.factor += part.factor;
          for (int s = 0; s < Definition::kHeadScalars; ++s) sums.t[s] += part.t[s];
        }
      }
      if (grad_.factor != nullptr) grad_.factor[h] = sums.factor;
      for (int s = 0; grad_.head_scalars != nullptr && s < Definition::kHeadScalars; ++s) {
        grad_.head_scalars[s * n_.heads + h] = sums.t[s];
      }
    }
    if (!d_bias_) return;
    ParallelTasks(executor_, n_.heads, [&](int64_t h, int) {
      // A table that the batch shares is there even if the batch is empty.
      for (int64_t n = 0; n < bias_.tables() / n_.heads; ++n) {
        std::fill_n(grad_.bias.table + n * grad_.bias.batch_stride + h * bias_.size(), bias_.size(),
                    0.0f);
      }
      for (int64_t b = 0; b < n_.batch; ++b) {
        float* to = grad_.bias.table + b * grad_.bias.batch_stride + h * bias_.size();
        for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
          const float* from = BiasGradient(chunk, b * n_.heads + h);
          for (int64_t e = 0; e < bias_.size(); ++e) to[e] += from[e];
        }
      }
    });
  }

  float* QueryGradient(int64_t chunk, int64_t head, int64_t i) const {
    return d_queries_.data() + (chunk * head_rows_ + head * n_.queries + i) * padded_dim_;
  }
  float* RowSum(int64_t chunk, int s, int64_t head) const {
    return d_rows_.data() + (chunk * kRowSums + s) * head_rows_ + head * n_.queries;
  }
  // d|x|^2/dx = 2x.
  void AddNormGradient(float d_norm, const float* x, float* d_x) const {
    for (int64_t e = 0; e < dim_; ++e) d_x[e] += 2 * d_norm * x[e];
  }
  float* BiasGradient(int64_t chunk, int64_t head) const {
    return d_bias_.data() + (head * chunks_ + chunk) * bias_.stride();
  }

  const AttentionInput<float>& in_;
  const AttentionBackwardInput<float>& saved_;
  const AttentionGradient<float>& grad_;
  const Executor& executor_;
  const AttentionShape& n_;
  int64_t group_;
  int64_t dim_;
  int64_t padded_dim_;
  int64_t padded_value_dim_;
  int64_t blocks_;
  int64_t chunks_;
  int64_t head_rows_;
  Panels key_panels_;
  Panels value_panels_;
  PaddedRows keys_;
  PaddedRows queries_;
  PaddedRows d_o_;
  ColumnScalars<Definition> scalars_;
  BiasTable bias_;
  Segments segments_;
  Buffer lse_;    // in units of log2
  Buffer delta_;  // sum_j p_ij dP_ij - dlse_i
  Buffer norms_;  // squared norms of the queries, for a distance
  std::vector<RowSums<Definition>> d_head_;
  Buffer d_queries_;
  Buffer d_rows_;
  Buffer d_bias_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
