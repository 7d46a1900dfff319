// What a pair function does to the rows of a tile: inner products to scores and weights, and back.
#if defined(GNOMON_SRC_CPU_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_ROWS_INL_H_
#undef GNOMON_SRC_CPU_ROWS_INL_H_
#else
#define GNOMON_SRC_CPU_ROWS_INL_H_
#endif

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "base/near_share.h"
#include "cpu/mask-inl.h"
#include "cpu/packing-inl.h"
#include "cpu/vocabulary-inl.h"
#include "cpu/workspace.h"
#include "gnomon/attention.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace HWY_NAMESPACE {

template <class Definition>
constexpr bool kHasProduct = Definition::kInput != PairInput::kNone;
template <class Definition>
constexpr bool kIsDistance = Definition::kInput == PairInput::kSquaredDistance;

// f's derivatives; arrays of one where the definition has none.
template <class Definition>
struct VectorDerivative {
  // Constructors that are not written are not compiled for the instruction set (g++, NEON).
  HWY_INLINE VectorDerivative() {}

  VF g;
  VF a[Definition::kRowScalars + 1];
  VF b[Definition::kColumnScalars + 1];
  VF t[Definition::kHeadScalars + 1];
};

// The column scalars of keys and, for a distance, the squared norms of the keys behind them.
template <class Definition>
struct ColumnScalars {
  static constexpr int kCount = Definition::kColumnScalars + (kIsDistance<Definition> ? 1 : 0);
  using Pointers = std::array<const float*, Definition::kColumnScalars + 1>;

  // Scalar s of key begin + n to to[s * stride + n]; 0 outside `keys`.
  static void Pack(const AttentionInput<float>& in, int64_t b, int64_t h, KeyRange keys,
                   int64_t begin, int64_t end, float* to, int64_t stride) {
    const int64_t head = b * in.shape.key_heads + h;
    const int64_t heads = in.shape.batch * in.shape.key_heads;
    RowReader keys_of_head(in.y, kIsDistance<Definition> ? in.shape.dim : 0);
    for (int s = 0; s < kCount; ++s, to += stride) {
      for (int64_t j = begin; j < end; ++j) {
        if (j < keys.begin || j >= keys.end) {
          to[j - begin] = 0.0f;
        } else if (s < Definition::kColumnScalars) {
          to[j - begin] = in.column_scalars[(s * heads + head) * in.shape.keys + j];
        } else {
          to[j - begin] = SquaredNorm(keys_of_head.Row(b, h, j), in.shape.dim);
        }
      }
    }
  }

  static Pointers At(const float* packed, int64_t stride) {
    Pointers at{};
    for (int s = 0; s < kCount; ++s) at[s] = packed + s * stride;
    return at;
  }
  static Pointers From(Pointers at, int64_t column) {
    for (int s = 0; s < kCount; ++s) at[s] += column;
    return at;
  }
};

// Those of every key head, padded to whole panels.
template <class Definition>
class PackedScalars {
 public:
  using Scalars = ColumnScalars<Definition>;

  PackedScalars(const AttentionInput<float>& in, const HeadPlaces& places, int64_t keys)
      : in_(in), places_(places), padded_(RoundUp(keys, kWidth)) {
    if (Scalars::kCount > 0) data_.Reset(Scalars::kCount * places.count * padded_);
  }

  void Fill(int64_t b, int64_t h, int64_t p, KeyRange keys) const {
    Scalars::Pack(in_, b, h, keys, p * kWidth, (p + 1) * kWidth, Head(b, h) + p * kWidth, padded_);
  }
  // Of keys from `begin` on.
  typename Scalars::Pointers At(int64_t b, int64_t h, int64_t begin) const {
    if (Scalars::kCount == 0) return {};
    return Scalars::At(Head(b, h) + begin, padded_);
  }

 private:
  float* Head(int64_t b, int64_t h) const {
    return data_.data() + places_.Of(b, h) * Scalars::kCount * padded_;
  }

  const AttentionInput<float>& in_;
  HeadPlaces places_;
  int64_t padded_;
  Buffer data_;
};

// A tile's keys as transposed panels, one behind the other; none where they are not packed, or as
// pairs.
struct TilePanels {
  const float* data = nullptr;
  int64_t columns = 0;  // of a token
  int64_t first = 0;    // the tile's column that Column counts from

  // The first number of each key from there on.
  const float* Column(int64_t j) const {
    const int64_t c = first + j;
    return data + c / kWidth * kWidth * columns + c % kWidth;
  }
};

// A pair of tokens whose gradients are its difference times a number, which no sum over other pairs
// may round: d_distance, that of its squared distance.
struct NearPair {
  int32_t row;     // of the tile
  int32_t column;  // of those that the row's scalars are of
  float d_distance;
};

// What one row brings to its pairs: its scalars as vectors and, for a distance, its token and where
// the keys are.
template <class Definition>
struct RowVectors {
  HWY_INLINE RowVectors() {}

  VF a[Definition::kRowScalars + 1];
  VF t[Definition::kHeadScalars + 1];
  VF norm;
  float near = 0;  // NearShare
  const void* x = nullptr;
  const void* y = nullptr;  // of the first column
  TilePanels panels;
  int64_t y_stride = 0;  // in bytes
  TokenType type = TokenType::kFloat32;
  int64_t dim = 0;
  int64_t keys = 0;  // from the first column on
  // Where the backward pass leaves pairs that are near, as those of row `index`.
  std::vector<NearPair>* near_pairs = nullptr;
  int32_t index = 0;
};

// Where the row meets its keys and the definition is a distance: the row's factor, its token's
// squared norm, and the panels of the first column.
template <class Definition>
HWY_INLINE RowVectors<Definition> LoadRow(const AttentionInput<float>& in, int64_t b, int64_t h,
                                          int64_t key_head, int64_t i, int64_t first_column,
                                          float factor = 0, float norm = 0,
                                          const TilePanels& panels = {}) {
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
    row.y_stride = in.y.stride[2] * (in.y.type == TokenType::kFloat32 ? 4 : 2);
    row.keys = n.keys - first_column;
    row.panels = panels;
    row.type = in.y.type;
    row.dim = n.dim;
    row.norm = hn::Set(d, norm);
    row.near = NearShare(factor, norm);
  }
  return row;
}

// A single pair of tokens x and y (null for a definition without a product), the same in all lanes.
template <class Definition>
class LonePair {
 public:
  // `row` is the query's.
  LonePair(const AttentionInput<float>& in, const RowVectors<Definition>& row, int64_t b,
           int64_t key_head, int64_t key, const float* x, const float* y)
      : row_(row) {
    const DF d;
    const AttentionShape& n = in.shape;
    if constexpr (kIsDistance<Definition>) {
      g_ = hn::Set(d, SquaredDistance(x, y, n.dim));
    } else if constexpr (kHasProduct<Definition>) {
      g_ = hn::Set(d, Sum(n.dim, [x, y](int64_t e) { return x[e] * y[e]; }));
    } else {
      g_ = hn::Zero(d);
    }
    for (int s = 0; s < Definition::kColumnScalars; ++s) {
      const int64_t of_head = (s * n.batch + b) * n.key_heads + key_head;
      b_[s] = hn::Set(d, in.column_scalars[of_head * n.keys + key]);
    }
  }

  float Value() const { return hn::GetLane(Definition::Value(g_, row_.a, b_, row_.t)); }
  VectorDerivative<Definition> Gradient() const {
    VectorDerivative<Definition> slope;
    Definition::Gradient(g_, row_.a, b_, row_.t, slope);
    return slope;
  }

 private:
  const RowVectors<Definition>& row_;
  VF g_;
  VF b_[Definition::kColumnScalars + 1];
};

// Sums of the squared differences of one token from kLanes keys.
class SquaredDifferences {
 public:
  HWY_INLINE SquaredDifferences() {
    for (VF& part : parts_) part = hn::Zero(DF());
  }

  // Adds `columns` columns, a multiple of kParts but for the last; those of the keys are at
  // keys[e * stride].
  HWY_INLINE void Add(const float* HWY_RESTRICT x, const float* HWY_RESTRICT keys, int64_t stride,
                      int64_t columns) {
    int64_t e = 0;
    for (; e + kParts <= columns; e += kParts) {
      for (int64_t n = 0; n < kParts; ++n) AddColumn(x[e + n], keys + (e + n) * stride, parts_[n]);
    }
    for (int64_t n = 0; e < columns; ++n, ++e) AddColumn(x[e], keys + e * stride, parts_[n]);
  }

  HWY_INLINE VF Sum() const { return (parts_[0] + parts_[1]) + (parts_[2] + parts_[3]); }

 private:
  static constexpr int64_t kParts = 4;

  static HWY_INLINE void AddColumn(float x, const float* keys, VF& part) {
    const DF d;
    const VF difference = hn::Set(d, x) - hn::LoadU(d, keys);
    part = hn::MulAdd(difference, difference, part);
  }

  VF parts_[kParts];
};

// NaN where squared distances overflow because the row's token is infinite: it is at the same
// distance from all keys, which is none.
template <class Definition>
HWY_INLINE VF UnlessInfinite(const RowVectors<Definition>& row, VF distances) {
  const DF d;
  if (HWY_LIKELY(hn::AllFalse(d, distances == hn::Set(d, kInfinity)))) return distances;
  float wide[kPackedColumns];
  bool infinite = false;
  for (int64_t e = 0; e < row.dim; e += kPackedColumns) {
    const int64_t columns = std::min(kPackedColumns, row.dim - e);
    Widen(row.x, row.type, e, columns, wide);
    infinite = infinite || std::any_of(wide, wide + columns, [](float x) { return std::isinf(x); });
  }
  return infinite ? hn::Set(d, kNan) : distances;
}

// Squared distances of a row and columns [j, j + kLanes), the same numbers wherever the keys lie.
// Only of lanes of `wanted` are they, and of keys that there are: a row of NaN wants those behind
// the last one, too.
template <class Definition>
HWY_NOINLINE VF NearDistances(const RowVectors<Definition>& row, int64_t j, hn::Mask<DF> wanted) {
  SquaredDifferences sums;
  if (row.panels.data != nullptr && row.type == TokenType::kFloat32) {
    sums.Add(static_cast<const float*>(row.x), row.panels.Column(j), kWidth, row.dim);
    return UnlessInfinite(row, sums.Sum());
  }
  const DF d;
  HWY_ALIGN float near[kLanes];
  hn::Store(hn::IfThenElseZero(wanted, hn::Set(d, 1.0f)), d, near);
  std::array<const void*, kLanes> keys;
  for (size_t lane = 0; lane < kLanes; ++lane) {
    const int64_t column = j + static_cast<int64_t>(lane);
    const bool reads = near[lane] != 0 && column < row.keys;
    keys[lane] = reads ? static_cast<const char*>(row.y) + column * row.y_stride : row.x;
  }
  HWY_ALIGN float query[kPackedColumns];
  HWY_ALIGN float wide[kLanes][kPackedColumns];
  HWY_ALIGN float packed[kPackedColumns * kLanes];
  const float* from[kLanes];
  for (size_t lane = 0; lane < kLanes; ++lane) from[lane] = wide[lane];
  for (int64_t e = 0; e < row.dim; e += kPackedColumns) {
    const int64_t columns = std::min(kPackedColumns, row.dim - e);
    Widen(row.x, row.type, e, columns, query);
    for (size_t lane = 0; lane < kLanes; ++lane) {
      Widen(keys[lane], row.type, e, columns, wide[lane]);
    }
    Transpose<kLaneCount, kLaneCount>(from, columns, packed);
    sums.Add(query, packed, kLaneCount, columns);
  }
  return UnlessInfinite(row, sums.Sum());
}

// Squared distances of columns [j, j + kLanes) of a row by its inner products, and which lanes have
// enough digits left: none of norms that overflow; those of norms that are 0, as they are behind
// the last key, where nothing may be read.
struct DistancesByNorms {
  VF distances;
  hn::Mask<DF> right;
};
template <class Definition>
HWY_INLINE DistancesByNorms ByNorms(const float* HWY_RESTRICT products, int64_t j,
                                    const RowVectors<Definition>& row,
                                    const float* const* column_scalars) {
  const DF d;
  const VF product = hn::Load(d, products + j);
  const VF norms = row.norm + hn::LoadU(d, column_scalars[Definition::kColumnScalars] + j);
  // Of tokens too small to be near, rounding may leave less than nothing.
  const VF distances = Max(hn::Zero(d), norms - (product + product));
  const VF least = hn::Set(d, std::numeric_limits<float>::min());
  return {distances, distances > hn::MulSub(norms, hn::Set(d, row.near), least)};
}

// g of columns [j, j + kLanes) of a row, from its inner products.
template <class Definition>
HWY_INLINE VF LoadInput(const float* HWY_RESTRICT products, int64_t j,
                        const RowVectors<Definition>& row, const float* const* column_scalars) {
  const DF d;
  if constexpr (kIsDistance<Definition>) {
    const DistancesByNorms by_norms = ByNorms(products, j, row, column_scalars);
    if (HWY_LIKELY(hn::AllTrue(d, by_norms.right))) return by_norms.distances;
    return Select(by_norms.right, by_norms.distances,
                  NearDistances(row, j, hn::Not(by_norms.right)));
  } else if constexpr (kHasProduct<Definition>) {
    return hn::Load(d, products + j);
  } else {
    return hn::Zero(d);
  }
}

// df slope of columns [j, j + kLanes) of a row, but for those of tokens so near that x - y has
// fewer digits as a difference of sums: these it leaves in the row's near_pairs.
template <class Definition>
HWY_NOINLINE VF TakeNearPairs(const RowVectors<Definition>& row, int64_t j,
                              const float* const* column_scalars, VF distances, VF df, VF slope) {
  const DF d;
  const VF zero = hn::Zero(d);
  // At infinity a definition may have no slope.
  const VF d_distances = hn::IfThenElse(df == zero, zero, df * slope);
  const VF norms = row.norm + hn::LoadU(d, column_scalars[Definition::kColumnScalars] + j);
  const auto near = distances < norms * hn::Set(d, kLeastNear);
  HWY_ALIGN float taken[kLanes];
  hn::Store(hn::IfThenElse(near, d_distances, zero), d, taken);
  for (size_t lane = 0; lane < kLanes; ++lane) {
    if (taken[lane] == 0.0f) continue;
    row.near_pairs->push_back(
        {row.index, static_cast<int32_t>(j + static_cast<int64_t>(lane)), taken[lane]});
  }
  return hn::IfThenElse(near, zero, d_distances);
}

// Lanes of columns [j, j + kLanes) that the row sees.
HWY_INLINE auto Visible(const RowView& view, int64_t j) {
  const DI di;
  const VI lane = hn::Iota(di, static_cast<int32_t>(j));
  const auto in_span = hn::And(lane > hn::Set(di, static_cast<int32_t>(view.span.begin - 1)),
                               lane < hn::Set(di, static_cast<int32_t>(view.span.end)));
  auto visible = in_span;
  if (view.segments != nullptr) {
    visible = hn::And(visible, hn::LoadU(di, view.segments + j) == hn::Set(di, view.segment));
  }
  if (view.positions == nullptr) return visible;
  const VI at = hn::LoadU(di, view.positions + j);
  return hn::And(visible,
                 hn::And(at > hn::Set(di, view.seen.low - 1), at < hn::Set(di, view.seen.high)));
}

HWY_INLINE VF Masked(VF value, VF hidden, const RowView& view, int64_t j) {
  const DF d;
  return hn::IfThenElse(hn::RebindMask(d, Visible(view, j)), value, hidden);
}

// How many columns from the first on, whole vectors, a row sees all of.
HWY_INLINE int64_t OpenColumns(const RowView& view, int64_t columns) {
  if (view.segments != nullptr || view.positions != nullptr || view.span.begin > 0) return 0;
  return std::clamp<int64_t>(view.span.end, 0, columns) / kLaneCount * kLaneCount;
}

// Inner products of columns [begin, end), whole vectors -> scores in units of log2, in place;
// returns the largest.
template <class Definition, bool kBias, bool kMasked>
HWY_INLINE float RowScores(float* HWY_RESTRICT tile, int64_t begin, int64_t end,
                           const RowVectors<Definition>& row, const float* const* column_scalars,
                           float factor, const float* HWY_RESTRICT bias, const RowView& view) {
  const DF d;
  const VF c = hn::Set(d, factor);
  const VF hidden = hn::Set(d, -kInfinity);
  VF largest = hidden;
  for (int64_t j = begin; j < end; j += kLanes) {
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

// The same of all columns, of which the first `open` need no mask.
template <class Definition, bool kBias>
HWY_INLINE float TileRowScores(float* HWY_RESTRICT tile, int64_t columns, int64_t open,
                               const RowVectors<Definition>& row,
                               const float* const* column_scalars, float factor, const float* bias,
                               const RowView& view) {
  const float largest =
      RowScores<Definition, kBias, false>(tile, 0, open, row, column_scalars, factor, bias, view);
  if (open == columns) return largest;
  return std::max(largest, RowScores<Definition, kBias, true>(tile, open, columns, row,
                                                              column_scalars, factor, bias, view));
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

// The first weight that is 1: that of the row's largest score. `columns` if there is none.
inline HWY_NOINLINE int64_t FindOne(const float* tile, int64_t columns) {
  const DF d;
  const VF one = hn::Set(d, 1.0f);
  for (int64_t j = 0; j < columns; j += kLaneCount) {
    const intptr_t lane = hn::FindFirstTrue(d, hn::Load(d, tile + j) == one);
    if (lane >= 0) return j + lane;
  }
  return columns;
}

// The key of a row's largest score as its statistics have it: -1 where there is none, or where a
// float may not hold it.
HWY_INLINE float TopKey(float weight, int64_t key) {
  constexpr int64_t kMost = int64_t{1} << 24;
  return weight > 0.0f && key < kMost ? static_cast<float>(key) : -1.0f;
}

HWY_INLINE void ScaleRow(float* row, int64_t columns, float factor) {
  const DF d;
  const VF f = hn::Set(d, factor);
  for (int64_t j = 0; j < columns; j += kLanes) hn::StoreU(hn::LoadU(d, row + j) * f, d, row + j);
}

// What turns a row's scores into weights, p = 2^(score - largest) / sum, and these into gradients,
// ds = p (dP - delta); and f of the largest score: the sum of ds (f - top_f) has no large terms,
// however large f is.
struct RowSoftmax {
  float largest;
  float inverse_sum;
  float delta;
  float top_f;
};

// What the backward pass adds up over one row of a tile, besides the tiles themselves.
template <class Definition>
struct RowSums {
  float score = 0;  // ds
  float mean = 0;   // p (f - top_f)
  float norm = 0;   // by the squared norm of a distance
  float a[Definition::kRowScalars + 1] = {};

  RowSums& operator+=(const RowSums& other) {
    score += other.score;
    mean += other.mean;
    norm += other.norm;
    for (int s = 0; s < Definition::kRowScalars; ++s) a[s] += other.a[s];
    return *this;
  }
};

// And over all rows of a tile, in vectors, which are summed once.
template <class Definition>
struct TileSums {
  HWY_INLINE TileSums() {}

  VF factor;  // ds (f - top_f)
  VF t[Definition::kHeadScalars + 1];

  HWY_INLINE void Clear() {
    factor = hn::Zero(DF());
    for (int s = 0; s < Definition::kHeadScalars; ++s) t[s] = hn::Zero(DF());
  }
};

// Columns [begin, end), whole vectors, of one row of the backward pass. In: inner products in
// `tile`, dP in `gradient`. Out: weights p in `tile`, the inner products' gradients in `gradient`;
// those of the column scalars, and last of the squared norms of a distance, are added to
// `d_columns`, dS to `d_bias` where it is not null. Scores are RowScores' to the last bit: rounded
// otherwise, large ones would give other weights. Whether the row's rounding is to be balanced,
// which takes sums of its own, `balances` says; what the factor and the head scalars take of all
// rows is summed in `totals`. Distances are right by their norms unless kNear says that they may
// not be.
template <class Definition, bool kBias>
HWY_NOINLINE RowSums<Definition> NearRowGradient(
    float* HWY_RESTRICT tile, float* HWY_RESTRICT gradient, int64_t begin, int64_t end,
    const RowVectors<Definition>& row, const float* const* column_scalars, float* const* d_columns,
    float factor, const float* HWY_RESTRICT bias, float* d_bias, const RowSoftmax& softmax,
    bool balances, const RowView& view, TileSums<Definition>& totals);
template <class Definition, bool kBias, bool kMasked, bool kNear = false>
HWY_INLINE RowSums<Definition> RowGradient(
    float* HWY_RESTRICT tile, float* HWY_RESTRICT gradient, int64_t begin, int64_t end,
    const RowVectors<Definition>& row, const float* const* column_scalars, float* const* d_columns,
    float factor, const float* HWY_RESTRICT bias, float* d_bias, const RowSoftmax& softmax,
    bool balances, const RowView& view, TileSums<Definition>& totals) {
  const DF d;
  const VF zero = hn::Zero(d);
  const VF c = hn::Set(d, factor);
  const VF c2 = hn::Set(d, factor * kLog2E);
  const VF largest = hn::Set(d, softmax.largest);
  const VF inverse_sum = hn::Set(d, softmax.inverse_sum);
  const VF delta = hn::Set(d, softmax.delta);
  const VF top_f = hn::Set(d, softmax.top_f);
  VF sum_factor = totals.factor;
  VF sum_score = zero;
  VF sum_mean = zero;
  VF sum_norm = zero;
  VF sum_a[Definition::kRowScalars + 1];
  VF sum_t[Definition::kHeadScalars + 1];
  for (int s = 0; s < Definition::kRowScalars; ++s) sum_a[s] = zero;
  for (int s = 0; s < Definition::kHeadScalars; ++s) sum_t[s] = totals.t[s];
  int64_t j = begin;
  for (; j < end; j += kLanes) {
    VF b[Definition::kColumnScalars + 1];
    for (int s = 0; s < Definition::kColumnScalars; ++s) {
      b[s] = hn::LoadU(d, column_scalars[s] + j);
    }
    VF g;
    if constexpr (kIsDistance<Definition> && !kNear) {
      const DistancesByNorms by_norms = ByNorms(tile, j, row, column_scalars);
      if (HWY_UNLIKELY(!hn::AllTrue(d, by_norms.right))) break;
      g = by_norms.distances;
    } else {
      g = LoadInput(tile, j, row, column_scalars);
    }
    const VF f = Definition::Value(g, row.a, b, row.t);
    VectorDerivative<Definition> slope;
    Definition::Gradient(g, row.a, b, row.t, slope);
    VF score;
    if constexpr (kBias) {
      score = hn::MulAdd(f, c2, hn::LoadU(d, bias + j));
    } else {
      score = f * c2;
    }
    VF exponent = score - largest;
    if constexpr (kMasked) exponent = Masked(exponent, hn::Set(d, -kInfinity), view, j);
    const VF p = Exp2(exponent) * inverse_sum;
    const VF ds = p * (hn::Load(d, gradient + j) - delta);
    hn::Store(p, d, tile + j);
    if constexpr (kBias) {
      if (d_bias != nullptr) hn::StoreU(hn::LoadU(d, d_bias + j) + ds, d, d_bias + j);
    }
    const VF below_top = f - top_f;
    sum_factor = hn::MulAdd(ds, below_top, sum_factor);
    sum_score = sum_score + ds;
    sum_mean = hn::MulAdd(p, below_top, sum_mean);
    const VF df = c * ds;
    VF dg = df * slope.g;
    if constexpr (kIsDistance<Definition>) {
      if constexpr (kNear) dg = TakeNearPairs(row, j, column_scalars, g, df, slope.g);
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
  totals.factor = sum_factor;
  for (int s = 0; s < Definition::kHeadScalars; ++s) totals.t[s] = sum_t[s];
  RowSums<Definition> sums;
  if (balances) {
    sums.score = hn::GetLane(hn::SumOfLanes(d, sum_score));
    sums.mean = hn::GetLane(hn::SumOfLanes(d, sum_mean));
  }
  if (kIsDistance<Definition>) sums.norm = hn::GetLane(hn::SumOfLanes(d, sum_norm));
  for (int s = 0; s < Definition::kRowScalars; ++s) {
    sums.a[s] = hn::GetLane(hn::SumOfLanes(d, sum_a[s]));
  }
  if constexpr (kIsDistance<Definition> && !kNear) {
    if (HWY_UNLIKELY(j < end)) {
      sums +=
          NearRowGradient<Definition, kBias>(tile, gradient, j, end, row, column_scalars, d_columns,
                                             factor, bias, d_bias, softmax, balances, view, totals);
    }
  }
  return sums;
}

// From the first column on that is near: a loop of its own, so that the other calls nothing.
template <class Definition, bool kBias>
HWY_NOINLINE RowSums<Definition> NearRowGradient(
    float* HWY_RESTRICT tile, float* HWY_RESTRICT gradient, int64_t begin, int64_t end,
    const RowVectors<Definition>& row, const float* const* column_scalars, float* const* d_columns,
    float factor, const float* HWY_RESTRICT bias, float* d_bias, const RowSoftmax& softmax,
    bool balances, const RowView& view, TileSums<Definition>& totals) {
  return RowGradient<Definition, kBias, true, true>(tile, gradient, begin, end, row, column_scalars,
                                                    d_columns, factor, bias, d_bias, softmax,
                                                    balances, view, totals);
}

// The same of all columns, of which the first `open` need no mask.
template <class Definition, bool kBias>
HWY_INLINE RowSums<Definition> TileRowGradient(float* tile, float* gradient, int64_t columns,
                                               int64_t open, const RowVectors<Definition>& row,
                                               const float* const* column_scalars,
                                               float* const* d_columns, float factor,
                                               const float* bias, float* d_bias,
                                               const RowSoftmax& softmax, bool balances,
                                               const RowView& view, TileSums<Definition>& totals) {
  RowSums<Definition> sums =
      RowGradient<Definition, kBias, false>(tile, gradient, 0, open, row, column_scalars, d_columns,
                                            factor, bias, d_bias, softmax, balances, view, totals);
  if (open < columns) {
    sums += RowGradient<Definition, kBias, true>(tile, gradient, open, columns, row, column_scalars,
                                                 d_columns, factor, bias, d_bias, softmax, balances,
                                                 view, totals);
  }
  return sums;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
