// How the engine calls pair functions: through a table or inlined, with inputs for rows or for
// single pairs.
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
#include "cpu/pair_rows-inl.h"
#include "cpu/pair_table.h"
#include "cpu/vocabulary-inl.h"
#include "cpu/workspace.h"
#include "gnomon/attention.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {

// The pair function of a pass, called through a table.
class ByTable {
 public:
  explicit ByTable(const PairTable& table) : table_(table) {}

  const PairTable& table() const { return table_; }
  bool has_product() const { return table_.has_product(); }
  bool is_distance() const { return table_.is_distance(); }
  int row_scalars() const { return table_.row_scalars; }
  int column_scalars() const { return table_.column_scalars; }
  int head_scalars() const { return table_.head_scalars; }

  // `kBias` is ignored, because the functions of a table test whether the bias is null.
  template <bool kBias, class... Arguments>
  Real Scores(Arguments&&... arguments) const {
    return table_.scores(arguments...);
  }
  template <bool kBias, class... Arguments>
  void Gradients(Arguments&&... arguments) const {
    table_.gradients(arguments...);
  }
  void Values(const PairArrays& pairs, int64_t count, Real* f) const {
    table_.values(pairs, count, f);
  }
  void Slopes(const PairArrays& pairs, int64_t count, const Real* scale,
              const SlopeArrays& slopes) const {
    table_.slopes(pairs, count, scale, slopes);
  }

 private:
  const PairTable& table_;
};

// The inlined pair function of a definition. The pass is compiled for this definition only.
template <class Definition>
class Inlined {
 public:
  explicit Inlined(const PairTable& table) : table_(table) {}

  const PairTable& table() const { return table_; }
  static constexpr bool has_product() { return kHasProduct<Definition>; }
  static constexpr bool is_distance() { return kIsDistance<Definition>; }
  static constexpr int row_scalars() { return Definition::kRowScalars; }
  static constexpr int column_scalars() { return Definition::kColumnScalars; }
  static constexpr int head_scalars() { return Definition::kHeadScalars; }

  template <bool kBias, class... Arguments>
  HWY_INLINE Real Scores(Arguments&&... arguments) const {
    return TileRowScores<Definition, kBias>(arguments...);
  }
  template <bool kBias, class... Arguments>
  HWY_INLINE void Gradients(Arguments&&... arguments) const {
    TileRowGradient<Definition, kBias>(arguments...);
  }
  static void Values(const PairArrays& pairs, int64_t count, Real* f) {
    TableFunctions<Definition>::Values(pairs, count, f);
  }
  static void Slopes(const PairArrays& pairs, int64_t count, const Real* scale,
                     const SlopeArrays& slopes) {
    TableFunctions<Definition>::Slopes(pairs, count, scale, slopes);
  }

 private:
  const PairTable& table_;
};

// The column scalars of keys, followed, for distances, by the squared norms of the keys.
class ColumnScalars {
 public:
  using Pointers = std::array<const Real*, kMostScalars + 1>;

  ColumnScalars(const AttentionInput<Real>& in, const PairTable& table)
      : in_(in), of_keys_(table.column_scalars), squares_(table.is_distance()) {}

  int count() const { return of_keys_ + (squares_ ? 1 : 0); }

  // Writes scalar s of key begin + n to to[s * stride + n], or 0 for keys outside `keys`.
  void Pack(int64_t b, int64_t h, KeyRange keys, int64_t begin, int64_t end, Real* to,
            int64_t stride) const {
    const int64_t head = b * in_.shape.key_heads + h;
    const int64_t heads = in_.shape.batch * in_.shape.key_heads;
    RowReader keys_of_head(in_.y, squares_ ? in_.shape.dim : 0);
    for (int s = 0; s < count(); ++s, to += stride) {
      for (int64_t j = begin; j < end; ++j) {
        if (j < keys.begin || j >= keys.end) {
          to[j - begin] = 0.0f;
        } else if (s < of_keys_) {
          to[j - begin] = in_.column_scalars[(s * heads + head) * in_.shape.keys + j];
        } else {
          to[j - begin] = SquaredNorm(keys_of_head.Row(b, h, j), in_.shape.dim);
        }
      }
    }
  }

  Pointers At(const Real* packed, int64_t stride) const {
    Pointers at{};
    for (int s = 0; s < count(); ++s) at[Size(s)] = packed + s * stride;
    return at;
  }

 private:
  const AttentionInput<Real>& in_;
  int of_keys_;
  bool squares_;
};

// The column scalars of every key head, padded to whole panels.
class PackedScalars {
 public:
  PackedScalars(const AttentionInput<Real>& in, const PairTable& table, const HeadSlots& slots,
                int64_t keys)
      : scalars_(in, table), slots_(slots), padded_(RoundUp(keys, kWidth)) {
    if (scalars_.count() > 0) data_.Reset(scalars_.count() * slots.count * padded_);
  }

  const ColumnScalars& scalars() const { return scalars_; }

  void Fill(int64_t b, int64_t h, int64_t p, KeyRange keys) const {
    if (scalars_.count() == 0) return;
    scalars_.Pack(b, h, keys, p * kWidth, (p + 1) * kWidth, Head(b, h) + p * kWidth, padded_);
  }
  // The scalars of keys starting at `begin`.
  ColumnScalars::Pointers At(int64_t b, int64_t h, int64_t begin) const {
    if (scalars_.count() == 0) return {};
    return scalars_.At(Head(b, h) + begin, padded_);
  }

 private:
  Real* Head(int64_t b, int64_t h) const {
    return data_.data() + slots_.Of(b, h) * scalars_.count() * padded_;
  }

  ColumnScalars scalars_;
  HeadSlots slots_;
  int64_t padded_;
  Buffer data_;
};

// The first element of tile column j in panels of keys.
HWY_INLINE const Real* ColumnOf(const TilePanels& panels, int64_t j) {
  const int64_t c = panels.first + j;
  return panels.data + c / kWidth * kWidth * panels.columns + c % kWidth;
}

// Sums of squared differences between one token and kLanes keys.
class SquaredDifferences {
 public:
  HWY_INLINE SquaredDifferences() {
    for (VF& part : parts_) part = hn::Zero(DF());
  }

  // Adds `columns` columns, a multiple of kParts except in the last call. Key columns are at keys[e
  // * stride].
  HWY_INLINE void Add(const Real* HWY_RESTRICT x, const Real* HWY_RESTRICT keys, int64_t stride,
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

  static HWY_INLINE void AddColumn(Real x, const Real* keys, VF& part) {
    const DF d;
    const VF difference = hn::Set(d, x) - hn::LoadU(d, keys);
    part = hn::MulAdd(difference, difference, part);
  }

  VF parts_[kParts];
};

// Returns `distances`, or NaN if any of them is infinite because the row's token is; the distances
// of such a token are undefined.
HWY_INLINE VF UnlessInfinite(const PairRow& row, VF distances) {
  const DF d;
  if (HWY_LIKELY(hn::AllFalse(d, distances == hn::Set(d, kInfinity)))) return distances;
  Real wide[kPackedColumns];
  bool infinite = false;
  for (int64_t e = 0; e < row.dim; e += kPackedColumns) {
    const int64_t columns = std::min(kPackedColumns, row.dim - e);
    Widen(row.x, row.type, e, columns, wide);
    infinite = infinite || std::any_of(wide, wide + columns, [](Real x) { return std::isinf(x); });
  }
  return infinite ? hn::Set(d, kNan) : distances;
}

// Implements PairRow::near_distances for any layout of the keys. Skips columns past the last key,
// which are also requested if a row contains NaN.
inline HWY_NOINLINE void DistancesByDifferences(const PairRow& row, int64_t j, const Real* wanted,
                                                Real* distances) {
  const DF d;
  SquaredDifferences sums;
  if (row.panels.data != nullptr && row.type == kOwnType) {
    sums.Add(static_cast<const Real*>(row.x), ColumnOf(row.panels, j), kWidth, row.dim);
    hn::Store(UnlessInfinite(row, sums.Sum()), d, distances);
    return;
  }
  std::array<const void*, kLanes> keys;
  for (size_t lane = 0; lane < kLanes; ++lane) {
    const int64_t column = j + static_cast<int64_t>(lane);
    const bool reads = wanted[lane] != 0 && column < row.keys;
    keys[lane] = reads ? static_cast<const char*>(row.y) + column * row.y_stride : row.x;
  }
  HWY_ALIGN Real query[kPackedColumns];
  HWY_ALIGN Real wide[kLanes][kPackedColumns];
  HWY_ALIGN Real packed[kPackedColumns * kLanes];
  const Real* from[kLanes];
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
  hn::Store(UnlessInfinite(row, sums.Sum()), d, distances);
}

// Calls f(s) for each of `count` scalars. The loop has a constant bound, so that it is unrolled.
template <class F>
HWY_INLINE void ForScalars(int count, const F& f) {
  for (int s = 0; s < kMostScalars; ++s) {
    if (s == count) return;
    f(s);
  }
}

// Loads the inputs that rows of a head share: the head's scalars and, for distances, the location
// of the keys, which start at `first_column`.
template <class Functions>
HWY_INLINE PairRow LoadHead(const Functions& functions, const AttentionInput<Real>& in, int64_t b,
                            int64_t h, int64_t key_head, int64_t first_column,
                            const TilePanels& panels) {
  const AttentionShape& n = in.shape;
  PairRow row;
  ForScalars(functions.head_scalars(), [&](int s) { row.t[s] = in.head_scalars[s * n.heads + h]; });
  if (functions.is_distance()) {
    row.near_distances = DistancesByDifferences;
    row.y = in.y.row(b, key_head, first_column);
    row.type = TypeOf(in.y);
    row.y_stride = in.y.stride[2] * BytesOf(row.type);
    row.keys = n.keys - first_column;
    row.panels = panels;
    row.dim = n.dim;
  }
  return row;
}

// Loads the inputs of row i. The factor and the token's squared norm are needed only for distances.
template <class Functions>
HWY_INLINE void LoadRow(const Functions& functions, const AttentionInput<Real>& in, int64_t b,
                        int64_t h, int64_t i, Real factor, Real norm, PairRow& row) {
  const AttentionShape& n = in.shape;
  ForScalars(functions.row_scalars(), [&](int s) {
    row.a[s] = in.row_scalars[((s * n.batch + b) * n.heads + h) * n.queries + i];
  });
  if (functions.is_distance()) {
    row.x = in.x.row(b, h, i);
    row.norm = norm;
    row.near = NearShare(static_cast<float>(factor), static_cast<float>(norm));
  }
}

// Pairs for which f and its derivatives are evaluated: one pair for each of several rows, at most a
// block of rows.
template <class Functions>
class LonePairs {
 public:
  LonePairs(const Functions& functions, const AttentionInput<Real>& in)
      : functions_(functions), in_(in) {}

  int64_t count() const { return count_; }

  // Adds the pair of row i and a key with tokens x and y, which are null if the definition has no
  // product.
  void Add(int64_t b, int64_t h, int64_t i, int64_t key_head, int64_t key, const Real* x,
           const Real* y) {
    const AttentionShape& n = in_.shape;
    if (functions_.is_distance()) {
      g_[count_] = SquaredDistance(x, y, n.dim);
    } else if (functions_.has_product()) {
      g_[count_] = Sum(n.dim, [x, y](int64_t e) { return x[e] * y[e]; });
    }
    ForScalars(functions_.row_scalars(), [&](int s) {
      a_[s][count_] = in_.row_scalars[((s * n.batch + b) * n.heads + h) * n.queries + i];
    });
    ForScalars(functions_.column_scalars(), [&](int s) {
      const int64_t of_head = (s * n.batch + b) * n.key_heads + key_head;
      b_[s][count_] = in_.column_scalars[of_head * n.keys + key];
    });
    ForScalars(functions_.head_scalars(),
               [&](int s) { t_[s][count_] = in_.head_scalars[s * n.heads + h]; });
    ++count_;
  }

  // Computes f and its derivatives for all pairs; the derivatives overwrite the inputs.
  void Differentiate() {
    if (count_ == 0) return;
    FillVectors();
    functions_.Values(Arrays(), count_, f_);
    HWY_ALIGN Real one[kRowBlock];
    std::fill_n(one, RoundUp(count_, kLaneCount), 1.0f);
    functions_.Slopes(Arrays(), count_, one, {g_, a_[0], b_[0], t_[0]});
  }
  Real f(int64_t n) const { return f_[n]; }
  Real g(int64_t n) const { return g_[n]; }
  Real a(int s, int64_t n) const { return a_[s][n]; }

 private:
  PairArrays Arrays() const { return {g_, a_[0], b_[0], t_[0], kRowBlock}; }
  // Pads the arrays to whole vectors.
  void FillVectors() {
    const auto fill = [this](Real* numbers) {
      std::fill(numbers + count_, numbers + RoundUp(count_, kLaneCount), 1.0f);
    };
    fill(g_);
    for (int s = 0; s < functions_.row_scalars(); ++s) fill(a_[s]);
    for (int s = 0; s < functions_.column_scalars(); ++s) fill(b_[s]);
    for (int s = 0; s < functions_.head_scalars(); ++s) fill(t_[s]);
  }

  const Functions& functions_;
  const AttentionInput<Real>& in_;
  int64_t count_ = 0;
  HWY_ALIGN Real f_[kRowBlock];
  HWY_ALIGN Real g_[kRowBlock];
  HWY_ALIGN Real a_[kMostScalars][kRowBlock];
  HWY_ALIGN Real b_[kMostScalars][kRowBlock];
  HWY_ALIGN Real t_[kMostScalars][kRowBlock];
};

// The number of leading columns, in whole vectors, that are fully visible to a row.
HWY_INLINE int64_t OpenColumns(const RowView& view, int64_t columns) {
  return view.open.begin > 0 ? 0 : std::min(view.open.end, columns);
}

// Replaces scores by weights 2^(score - largest); returns their sum.
HWY_INLINE Real RowWeights(Real* HWY_RESTRICT tile, int64_t columns, Real largest) {
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

// The index of the first weight equal to 1, which is that of the largest score; `columns` if there
// is none.
inline HWY_NOINLINE int64_t FindOne(const Real* tile, int64_t columns) {
  const DF d;
  const VF one = hn::Set(d, 1.0f);
  for (int64_t j = 0; j < columns; j += kLaneCount) {
    const intptr_t lane = hn::FindFirstTrue(d, hn::Load(d, tile + j) == one);
    if (lane >= 0) return j + lane;
  }
  return columns;
}

// The key of the largest score, as stored in the row statistics: -1 if there is none, or if a Real
// cannot represent it.
HWY_INLINE Real TopKey(Real weight, int64_t key) {
  constexpr int64_t kMost = int64_t{1} << 24;
  return weight > 0.0f && key < kMost ? static_cast<Real>(key) : -1.0f;
}

HWY_INLINE void ScaleRow(Real* row, int64_t columns, Real factor) {
  const DF d;
  const VF f = hn::Set(d, factor);
  for (int64_t j = 0; j < columns; j += kLanes) hn::StoreU(hn::LoadU(d, row + j) * f, d, row + j);
}

HWY_INLINE void ClearSums(int head_scalars, TileSums& sums) {
  const VF zero = hn::Zero(DF());
  hn::Store(zero, DF(), sums.factor);
  for (int s = 0; s < head_scalars; ++s) hn::Store(zero, DF(), sums.t[s]);
}
HWY_INLINE Real SumOfLanes(const Real* lanes) {
  return hn::GetLane(hn::SumOfLanes(DF(), hn::Load(DF(), lanes)));
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
