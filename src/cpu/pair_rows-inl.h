// Builds a PairTable from a definition. Its functions convert rows of a tile from inner products to
// scores, and from gradients of scores to gradients of inner products. Its other functions process
// arrays of pairs or rows.
#if defined(GNOMON_SRC_CPU_PAIR_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_PAIR_ROWS_INL_H_
#undef GNOMON_SRC_CPU_PAIR_ROWS_INL_H_
#else
#define GNOMON_SRC_CPU_PAIR_ROWS_INL_H_
#endif

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <vector>

#include "base/near_share.h"
#include "cpu/pair_table.h"
#include "cpu/vocabulary-inl.h"
#include "gnomon/attention.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {

static_assert(kLanes <= kMostLanes<Real>);

using NearPair = NearPairOf<Real>;
using TilePanels = TilePanelsOf<Real>;
using PairRow = PairRowOf<Real>;
using RowSoftmax = RowSoftmaxOf<Real>;
using RowSums = RowSumsOf<Real>;
using TileSums = TileSumsOf<Real>;
using PairArrays = PairArraysOf<Real>;
using SlopeArrays = SlopeArraysOf<Real>;
using RangeArrays = RangeArraysOf<Real>;
using PairTable = PairTableOf<Real>;

template <class Definition>
constexpr bool kHasProduct = Definition::kInput != PairInput::kNone;
template <class Definition>
constexpr bool kIsDistance = Definition::kInput == PairInput::kSquaredDistance;

// The derivatives of f. Each array has a spare element, so that none is empty.
template <class Definition, class Number = VF>
struct VectorDerivative {
  // Not defaulted: g++ does not compile defaulted constructors for the instruction set (NEON).
  HWY_INLINE VectorDerivative() {}

  Number g;
  Number a[Definition::kRowScalars + 1];
  Number b[Definition::kColumnScalars + 1];
  Number t[Definition::kHeadScalars + 1];
};

// A row's scalars as vectors, and pointers to the column scalars. It is passed only to inlined
// functions, so that its members stay in registers.
template <class Definition>
struct RowVectors {
  HWY_INLINE RowVectors(const PairRow& from, const Real* const* column_scalars) : row(from) {
    const DF d;
    constexpr int kCount = Definition::kColumnScalars + (kIsDistance<Definition> ? 1 : 0);
    for (int s = 0; s < kCount; ++s) columns[s] = column_scalars[s];
    for (int s = 0; s < Definition::kRowScalars; ++s) a[s] = hn::Set(d, from.a[s]);
    for (int s = 0; s < Definition::kHeadScalars; ++s) t[s] = hn::Set(d, from.t[s]);
    if constexpr (kIsDistance<Definition>) {
      norm = hn::Set(d, from.norm);
      near = hn::Set(d, from.near);
    }
  }

  // For a distance: the sums |x|^2 + |y|^2 for columns [j, j + kLanes).
  HWY_INLINE VF Norms(int64_t j) const {
    return norm + hn::LoadU(DF(), columns[Definition::kColumnScalars] + j);
  }

  const PairRow& row;
  const Real* columns[Definition::kColumnScalars + 1];
  VF a[Definition::kRowScalars + 1];
  VF t[Definition::kHeadScalars + 1];
  VF norm;
  VF near;
};

// Lower and upper bounds of a number in each lane.
struct VectorRange {
  HWY_INLINE VectorRange() {}
  HWY_INLINE VectorRange(VF from, VF to) : least(from), most(to) {}

  VF least;
  VF most;
};

// Whether a definition has bounds for f.
template <class Definition>
constexpr bool kHasBounds = requires(VectorRange g, const VF* scalars, const VectorRange* ranges) {
  Definition::Bounds(g, scalars, ranges, scalars);
};

// Squared distances of columns [j, j + kLanes), computed from inner products, and the lanes in
// which they have enough significant digits. Lanes whose norms overflow are excluded. Lanes whose
// norms are 0 are included, because norms are 0 past the last key, where tokens must not be read.
struct DistancesByNorms {
  VF distances;
  hn::Mask<DF> right;
};
template <class Definition>
HWY_INLINE DistancesByNorms ByNorms(const Real* HWY_RESTRICT products, int64_t j,
                                    const RowVectors<Definition>& row) {
  const DF d;
  const VF product = hn::Load(d, products + j);
  const VF norms = row.Norms(j);
  // For small tokens, rounding may give a negative result.
  const VF distances = Max(hn::Zero(d), norms - (product + product));
  const VF least = hn::Set(d, std::numeric_limits<Real>::min());
  return {distances, distances > hn::MulSub(norms, row.near, least)};
}

// Squared distances of columns [j, j + kLanes), computed by row.near_distances for the lanes in
// `wanted`.
HWY_INLINE VF NearDistances(const PairRow& row, int64_t j, hn::Mask<DF> wanted) {
  const DF d;
  HWY_ALIGN Real asked[kLanes];
  HWY_ALIGN Real distances[kLanes];
  hn::Store(hn::IfThenElseZero(wanted, hn::Set(d, 1.0f)), d, asked);
  row.near_distances(row, j, asked, distances);
  return hn::Load(d, distances);
}

// g of columns [j, j + kLanes) of a row, from its inner products.
template <class Definition>
HWY_INLINE VF LoadInput(const Real* HWY_RESTRICT products, int64_t j,
                        const RowVectors<Definition>& row) {
  const DF d;
  if constexpr (kIsDistance<Definition>) {
    const DistancesByNorms by_norms = ByNorms(products, j, row);
    if (HWY_LIKELY(hn::AllTrue(d, by_norms.right))) return by_norms.distances;
    return Select(by_norms.right, by_norms.distances,
                  NearDistances(row.row, j, hn::Not(by_norms.right)));
  } else if constexpr (kHasProduct<Definition>) {
    return hn::Load(d, products + j);
  } else {
    return hn::Zero(d);
  }
}

// Returns df * slope for columns [j, j + kLanes) of a row, or 0 for pairs of nearly equal tokens.
// These are moved to the row's near_pairs, because x - y would lose digits if computed as a
// difference of sums.
inline HWY_NOINLINE VF TakeNearPairs(const PairRow& row, int64_t j, VF norms, VF distances, VF df,
                                     VF slope) {
  const DF d;
  const VF zero = hn::Zero(d);
  // A definition's slope may be infinite or NaN at infinity.
  const VF d_distances = hn::IfThenElse(df == zero, zero, df * slope);
  const auto near = distances < norms * hn::Set(d, kLeastNear);
  HWY_ALIGN Real taken[kLanes];
  hn::Store(hn::IfThenElse(near, d_distances, zero), d, taken);
  for (size_t lane = 0; lane < kLanes; ++lane) {
    if (taken[lane] == 0.0f) continue;
    row.near_pairs->push_back(
        {row.index, static_cast<int32_t>(j + static_cast<int64_t>(lane)), taken[lane]});
  }
  return hn::IfThenElse(near, zero, d_distances);
}

// The lanes of columns [j, j + kLanes) that the row sees.
HWY_INLINE auto Visible(const RowView& view, int64_t j) {
  const DI di;
  // Adding to a constant sequence is fast; Highway builds a sequence with a variable start lane by
  // lane.
  const VI lane = hn::Iota(di, 0) + hn::Set(di, static_cast<int32_t>(j));
  const auto in_span = hn::And(lane > hn::Set(di, static_cast<int32_t>(view.span.begin - 1)),
                               lane < hn::Set(di, static_cast<int32_t>(view.span.end)));
  auto visible = in_span;
  if (view.segments != nullptr) {
    visible = hn::And(visible, LoadInts(view.segments + j) == hn::Set(di, view.segment));
  }
  if (view.positions == nullptr) return visible;
  const VI at = LoadInts(view.positions + j);
  return hn::And(visible, hn::And(at > hn::Set(di, view.low - 1), at < hn::Set(di, view.high)));
}

HWY_INLINE VF Masked(VF value, VF hidden, const RowView& view, int64_t j) {
  const DF d;
  return hn::IfThenElse(hn::RebindMask(d, Visible(view, j)), value, hidden);
}

// To keep the library small, doubles use the same loop for rows with and without a bias and for
// columns with and without a mask.
#ifdef GNOMON_DOUBLE
constexpr bool kOneLoop = true;
#else
constexpr bool kOneLoop = false;
#endif

// Columns [begin, end) of a row.
struct RowPart {
  int64_t begin;
  int64_t end;
  RowView view;
};
// The first `open` columns, with a view that hides none of them, and the other columns.
inline std::array<RowPart, 2> PartsOfRow(int64_t columns, int64_t open, const RowView& view) {
  RowView visible = view;
  visible.open = {0, open};
  return {{{0, open, visible}, {open, columns, view}}};
}

// The biases of columns [j, j + kLanes).
HWY_INLINE VF LoadBias(const Real* HWY_RESTRICT bias, int64_t j) {
  const DF d;
  return kOneLoop && bias == nullptr ? hn::Zero(d) : hn::LoadU(d, bias + j);
}

// Replaces the inner products of columns [begin, end) (whole vectors) with scores in log2 units;
// returns the largest score.
template <class Definition, bool kBias, bool kMasked>
HWY_INLINE Real RowScores(Real* HWY_RESTRICT tile, int64_t begin, int64_t end,
                          const RowVectors<Definition>& row, Real factor,
                          const Real* HWY_RESTRICT bias, const RowView& view) {
  const DF d;
  const VF c = hn::Set(d, factor);
  const VF hidden = hn::Set(d, -kInfinity);
  VF largest = hidden;
  for (int64_t j = begin; j < end; j += kLanes) {
    VF b[Definition::kColumnScalars + 1];
    for (int s = 0; s < Definition::kColumnScalars; ++s) b[s] = hn::LoadU(d, row.columns[s] + j);
    const VF g = LoadInput(tile, j, row);
    const VF f = Definition::Value(g, row.a, b, row.t);
    VF score;
    if constexpr (kBias) {
      const VF beta = LoadBias(bias, j);
      score = hn::MulAdd(f, c, beta);
      // A bias of -inf hides a pair even if f is NaN.
      if constexpr (kMasked) score = hn::IfThenElse(beta == hidden, hidden, score);
    } else {
      score = f * c;
    }
    if constexpr (kMasked) {
      if (j < view.open.begin || j >= view.open.end) score = Masked(score, hidden, view, j);
    }
    largest = hn::Max(largest, score);
    hn::Store(score, d, tile + j);
  }
  return hn::GetLane(hn::MaxOfLanes(d, largest));
}

// Processes all columns; the first `open` columns need no mask.
template <class Definition, bool kBias>
HWY_INLINE Real TileRowScores(Real* HWY_RESTRICT tile, int64_t columns, int64_t open,
                              const PairRow& row, const Real* const* column_scalars, Real factor,
                              const Real* bias, const RowView& view) {
  const RowVectors<Definition> vectors(row, column_scalars);
  if constexpr (kOneLoop) {
    Real largest = -kInfinity;
    for (const RowPart& part : PartsOfRow(columns, open, view)) {
      if (part.begin == part.end) continue;
      const Real of_part = RowScores<Definition, kBias, true>(tile, part.begin, part.end, vectors,
                                                              factor, bias, part.view);
      largest = part.begin < open ? of_part : std::max(largest, of_part);
    }
    return largest;
  }
  const Real largest =
      RowScores<Definition, kBias, false>(tile, 0, open, vectors, factor, bias, view);
  if (open == columns) return largest;
  return std::max(largest, RowScores<Definition, kBias, true>(tile, open, columns, vectors, factor,
                                                              bias, view));
}

HWY_INLINE void AddSums(const RowSums& other, int row_scalars, RowSums& sums) {
  sums.score += other.score;
  sums.mean += other.mean;
  sums.norm += other.norm;
  for (int s = 0; s < row_scalars; ++s) sums.a[s] += other.a[s];
}

// Processes columns [begin, end) (whole vectors) of one row in the backward pass (see
// PairTable::gradients). Scores are bitwise identical to those of RowScores, because different
// rounding of large scores would change the weights. Without kNear, stops at the first vector whose
// distances from norms are inaccurate, and leaves the rest to NearRowGradient.
template <class Definition, bool kBias>
HWY_NOINLINE RowSums NearRowGradient(Real* HWY_RESTRICT tile, Real* HWY_RESTRICT gradient,
                                     int64_t begin, int64_t end, const PairRow& row,
                                     const Real* const* column_scalars, Real* const* d_columns,
                                     Real factor, const Real* HWY_RESTRICT bias, Real* d_bias,
                                     const RowSoftmax& softmax, bool balances, const RowView& view,
                                     TileSums& totals);
template <class Definition, bool kBias, bool kMasked, bool kNear = false>
HWY_INLINE RowSums RowGradient(Real* HWY_RESTRICT tile, Real* HWY_RESTRICT gradient, int64_t begin,
                               int64_t end, const PairRow& of_row,
                               const Real* const* column_scalars, Real* const* d_columns,
                               Real factor, const Real* HWY_RESTRICT bias, Real* d_bias,
                               const RowSoftmax& softmax, bool balances, const RowView& view,
                               TileSums& totals) {
  const DF d;
  const VF zero = hn::Zero(d);
  const VF c = hn::Set(d, factor);
  const VF c2 = hn::Set(d, factor * kLog2E);
  const VF largest = hn::Set(d, softmax.largest);
  const VF inverse_sum = hn::Set(d, softmax.inverse_sum);
  const VF delta = hn::Set(d, softmax.delta);
  const VF top_f = hn::Set(d, softmax.top_f);
  const RowVectors<Definition> row(of_row, column_scalars);
  constexpr int kColumns = Definition::kColumnScalars + (kIsDistance<Definition> ? 1 : 0);
  // These are local copies, so that stores cannot alias them.
  Real* to_columns[Definition::kColumnScalars + 1];
  for (int s = 0; s < kColumns; ++s) to_columns[s] = d_columns[s];
  VF sum_factor = hn::Load(d, totals.factor);
  VF sum_score = zero;
  VF sum_mean = zero;
  VF sum_norm = zero;
  VF top_slopes[Definition::kRowScalars + 1];
  for (int s = 0; s <= Definition::kRowScalars; ++s) {
    top_slopes[s] = hn::Set(d, softmax.top_slopes[s]);
  }
  VF sum_a[Definition::kRowScalars + 1];
  VF sum_t[Definition::kHeadScalars + 1];
  for (int s = 0; s < Definition::kRowScalars; ++s) sum_a[s] = zero;
  for (int s = 0; s < Definition::kHeadScalars; ++s) sum_t[s] = hn::Load(d, totals.t[s]);
  int64_t j = begin;
  for (; j < end; j += kLanes) {
    VF b[Definition::kColumnScalars + 1];
    for (int s = 0; s < Definition::kColumnScalars; ++s) b[s] = hn::LoadU(d, row.columns[s] + j);
    VF g;
    if constexpr (kIsDistance<Definition> && !kNear) {
      const DistancesByNorms by_norms = ByNorms(tile, j, row);
      if (HWY_UNLIKELY(!hn::AllTrue(d, by_norms.right))) break;
      g = by_norms.distances;
    } else {
      g = LoadInput(tile, j, row);
    }
    const VF f = Definition::Value(g, row.a, b, row.t);
    VectorDerivative<Definition> slope;
    Definition::Gradient(g, row.a, b, row.t, slope);
    VF score;
    if constexpr (kBias) {
      score = hn::MulAdd(f, c2, LoadBias(bias, j));
    } else {
      score = f * c2;
    }
    VF exponent = score - largest;
    if constexpr (kMasked) {
      if (j < view.open.begin || j >= view.open.end) {
        exponent = Masked(exponent, hn::Set(d, -kInfinity), view, j);
      }
    }
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
      VF beyond_top = slope.g - top_slopes[0];
      if constexpr (kNear) {
        dg = TakeNearPairs(of_row, j, row.Norms(j), g, df, slope.g);
        beyond_top = hn::IfThenElse(dg == zero, zero - top_slopes[0], beyond_top);
      }
      // |x - y|^2 = |x|^2 + |y|^2 - 2 x.y
      hn::Store(dg * hn::Set(d, -2.0f), d, gradient + j);
      sum_norm = hn::MulAdd(df, beyond_top, sum_norm);
      Real* to = to_columns[Definition::kColumnScalars] + j;
      hn::StoreU(hn::LoadU(d, to) + dg, d, to);
    } else {
      hn::Store(dg, d, gradient + j);
    }
    for (int s = 0; s < Definition::kRowScalars; ++s) {
      sum_a[s] = hn::MulAdd(df, slope.a[s] - top_slopes[s + 1], sum_a[s]);
    }
    for (int s = 0; s < Definition::kHeadScalars; ++s) {
      sum_t[s] = hn::MulAdd(df, slope.t[s], sum_t[s]);
    }
    for (int s = 0; s < Definition::kColumnScalars; ++s) {
      Real* to = to_columns[s] + j;
      hn::StoreU(hn::MulAdd(df, slope.b[s], hn::LoadU(d, to)), d, to);
    }
  }
  hn::Store(sum_factor, d, totals.factor);
  for (int s = 0; s < Definition::kHeadScalars; ++s) hn::Store(sum_t[s], d, totals.t[s]);
  RowSums sums;
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
      AddSums(NearRowGradient<Definition, kBias>(tile, gradient, j, end, of_row, column_scalars,
                                                 d_columns, factor, bias, d_bias, softmax, balances,
                                                 view, totals),
              Definition::kRowScalars, sums);
    }
  }
  return sums;
}

// Continues RowGradient from the first near column. This is a separate loop, so that the fast loop
// contains no function calls.
template <class Definition, bool kBias>
HWY_NOINLINE RowSums NearRowGradient(Real* HWY_RESTRICT tile, Real* HWY_RESTRICT gradient,
                                     int64_t begin, int64_t end, const PairRow& row,
                                     const Real* const* column_scalars, Real* const* d_columns,
                                     Real factor, const Real* HWY_RESTRICT bias, Real* d_bias,
                                     const RowSoftmax& softmax, bool balances, const RowView& view,
                                     TileSums& totals) {
  return RowGradient<Definition, kBias, true, true>(tile, gradient, begin, end, row, column_scalars,
                                                    d_columns, factor, bias, d_bias, softmax,
                                                    balances, view, totals);
}

// Processes all columns; the first `open` columns need no mask.
template <class Definition, bool kBias>
HWY_INLINE void TileRowGradient(Real* tile, Real* gradient, int64_t columns, int64_t open,
                                const PairRow& row, const Real* const* column_scalars,
                                Real* const* d_columns, Real factor, const Real* bias, Real* d_bias,
                                const RowSoftmax& softmax, bool balances, const RowView& view,
                                TileSums& totals, RowSums& sums) {
  if constexpr (kOneLoop) {
    sums = {};
    for (const RowPart& part : PartsOfRow(columns, open, view)) {
      if (part.begin == part.end) continue;
      AddSums(RowGradient<Definition, kBias, true>(tile, gradient, part.begin, part.end, row,
                                                   column_scalars, d_columns, factor, bias, d_bias,
                                                   softmax, balances, part.view, totals),
              Definition::kRowScalars, sums);
    }
    return;
  }
  sums =
      RowGradient<Definition, kBias, false>(tile, gradient, 0, open, row, column_scalars, d_columns,
                                            factor, bias, d_bias, softmax, balances, view, totals);
  if (open == columns) return;
  AddSums(RowGradient<Definition, kBias, true>(tile, gradient, open, columns, row, column_scalars,
                                               d_columns, factor, bias, d_bias, softmax, balances,
                                               view, totals),
          Definition::kRowScalars, sums);
}

// The functions of a definition's table. They are flattened, because the compiler may consider the
// definition too large to inline, and a function call per vector would be slow.
template <class Definition>
struct TableFunctions {
  static HWY_FLATTEN Real Scores(Real* tile, int64_t columns, int64_t open, const PairRow& row,
                                 const Real* const* column_scalars, Real factor, const Real* bias,
                                 const RowView& view) {
    if (kOneLoop || bias != nullptr) {
      return TileRowScores<Definition, true>(tile, columns, open, row, column_scalars, factor, bias,
                                             view);
    }
    return TileRowScores<Definition, false>(tile, columns, open, row, column_scalars, factor,
                                            nullptr, view);
  }

  static HWY_FLATTEN void Gradients(Real* tile, Real* gradient, int64_t columns, int64_t open,
                                    const PairRow& row, const Real* const* column_scalars,
                                    Real* const* d_columns, Real factor, const Real* bias,
                                    Real* d_bias, const RowSoftmax& softmax, bool balances,
                                    const RowView& view, TileSums& totals, RowSums& sums) {
    if (kOneLoop || bias != nullptr) {
      return TileRowGradient<Definition, true>(tile, gradient, columns, open, row, column_scalars,
                                               d_columns, factor, bias, d_bias, softmax, balances,
                                               view, totals, sums);
    }
    TileRowGradient<Definition, false>(tile, gradient, columns, open, row, column_scalars,
                                       d_columns, factor, nullptr, nullptr, softmax, balances, view,
                                       totals, sums);
  }

  // The values of pairs [n, n + kLanes).
  struct PairVectors {
    HWY_INLINE PairVectors(const PairArrays& pairs, int64_t n) {
      const DF d;
      g = kHasProduct<Definition> ? hn::Load(d, pairs.g + n) : hn::Zero(d);
      for (int s = 0; s < Definition::kRowScalars; ++s) {
        a[s] = hn::Load(d, pairs.a + s * pairs.stride + n);
      }
      for (int s = 0; s < Definition::kColumnScalars; ++s) {
        b[s] = hn::Load(d, pairs.b + s * pairs.stride + n);
      }
      for (int s = 0; s < Definition::kHeadScalars; ++s) {
        t[s] = hn::Load(d, pairs.t + s * pairs.stride + n);
      }
    }

    VF g;
    VF a[Definition::kRowScalars + 1];
    VF b[Definition::kColumnScalars + 1];
    VF t[Definition::kHeadScalars + 1];
  };

  static HWY_FLATTEN void Values(const PairArrays& pairs, int64_t count, Real* f) {
    for (int64_t n = 0; n < count; n += kLanes) {
      const PairVectors p(pairs, n);
      hn::Store(Definition::Value(p.g, p.a, p.b, p.t), DF(), f + n);
    }
  }

  static HWY_FLATTEN void Slopes(const PairArrays& pairs, int64_t count, const Real* scale,
                                 const SlopeArrays& slopes) {
    const DF d;
    for (int64_t n = 0; n < count; n += kLanes) {
      const PairVectors p(pairs, n);
      VectorDerivative<Definition> slope;
      Definition::Gradient(p.g, p.a, p.b, p.t, slope);
      const VF of_f = hn::Load(d, scale + n);
      if constexpr (kHasProduct<Definition>) hn::Store(of_f * slope.g, d, slopes.g + n);
      for (int s = 0; s < Definition::kRowScalars; ++s) {
        hn::Store(of_f * slope.a[s], d, slopes.a + s * pairs.stride + n);
      }
      for (int s = 0; s < Definition::kColumnScalars; ++s) {
        hn::Store(of_f * slope.b[s], d, slopes.b + s * pairs.stride + n);
      }
      for (int s = 0; s < Definition::kHeadScalars; ++s) {
        hn::Store(of_f * slope.t[s], d, slopes.t + s * pairs.stride + n);
      }
    }
  }

  static HWY_FLATTEN void Bounds(const RangeArrays& ranges, int64_t count, Real* least,
                                 Real* most) {
    const DF d;
    VectorRange b[Definition::kColumnScalars + 1];
    for (int s = 0; s < Definition::kColumnScalars; ++s) {
      b[s] = {hn::Set(d, ranges.b_least[s]), hn::Set(d, ranges.b_most[s])};
    }
    for (int64_t n = 0; n < count; n += kLanes) {
      VF a[Definition::kRowScalars + 1];
      VF t[Definition::kHeadScalars + 1];
      for (int s = 0; s < Definition::kRowScalars; ++s) {
        a[s] = hn::Load(d, ranges.a + s * ranges.stride + n);
      }
      for (int s = 0; s < Definition::kHeadScalars; ++s) {
        t[s] = hn::Load(d, ranges.t + s * ranges.stride + n);
      }
      const VectorRange g(hn::Load(d, ranges.g_least + n), hn::Load(d, ranges.g_most + n));
      const VectorRange f = Definition::Bounds(g, a, b, t);
      hn::Store(f.least, d, least + n);
      hn::Store(f.most, d, most + n);
    }
  }

  static constexpr auto BoundsOrNull() -> decltype(PairTable::bounds) {
    if constexpr (kHasBounds<Definition>) {
      return Bounds;
    } else {
      return nullptr;
    }
  }
};

template <class Definition>
const PairTable& TableOf() {
  using Functions = TableFunctions<Definition>;
  static_assert(Definition::kRowScalars <= kMostScalars &&
                    Definition::kColumnScalars <= kMostScalars &&
                    Definition::kHeadScalars <= kMostScalars,
                "a row, a column and a head have at most three scalars each");
  static constexpr PairTable kTable = {.target = HWY_TARGET,
                                       .input = Definition::kInput,
                                       .row_scalars = Definition::kRowScalars,
                                       .column_scalars = Definition::kColumnScalars,
                                       .head_scalars = Definition::kHeadScalars,
                                       .scores = Functions::Scores,
                                       .gradients = Functions::Gradients,
                                       .values = Functions::Values,
                                       .slopes = Functions::Slopes,
                                       .bounds = Functions::BoundsOrNull()};
  return kTable;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
