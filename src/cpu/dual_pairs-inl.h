// The pair function of a block of query rows in the kernel for derivatives: f and its tangents, and
// the gradients of the inner products, scalars and squared norms.
//
// A pair function is called through a table of functions (cpu/dual_table.h).
#if defined(GNOMON_SRC_CPU_DUAL_PAIRS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_DUAL_PAIRS_INL_H_
#undef GNOMON_SRC_CPU_DUAL_PAIRS_INL_H_
#else
#define GNOMON_SRC_CPU_DUAL_PAIRS_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "base/near_share.h"
#include "cpu/columns-inl.h"
#include "cpu/dual_block-inl.h"
#include "cpu/dual_call-inl.h"
#include "cpu/dual_columns-inl.h"
#include "cpu/dual_scores-inl.h"
#include "cpu/dual_sums-inl.h"
#include "cpu/packing-inl.h"
#include "cpu/rows-inl.h"
#include "cpu/vocabulary-inl.h"
#include "gnomon/attention.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {

// Reads keys with their tangents, one at a time.
class DualReader {
 public:
  explicit DualReader(const DualAttention& call)
      : rows_(call.in.y, call.dim),
        tangents_(call.tangent.y, call.has_y ? call.dim : 0),
        zeros_(call.has_y ? 0 : Size(call.dim)) {}

  DualNumbers At(int64_t b, int64_t h, int64_t key) {
    const Real* const y = rows_.Row(b, h, key);
    return {y, zeros_.empty() ? tangents_.Row(b, h, key) : zeros_.data()};
  }

 private:
  RowReader rows_;
  RowReader tangents_;
  std::vector<Real> zeros_;
};

class DualPairs {
 public:
  DualPairs(const DualAttention& call, DualHeadSums& heads)
      : call_(call),
        heads_(heads),
        norms_(call.n, call.is_distance()),
        d_norms_(call.n, call.is_distance() && call.wants_y) {}

  // Computes the squared norms of keys [begin, end) of a key head, and their tangents. Heads are
  // counted across the batch.
  void SetNorms(int64_t head, int64_t begin, int64_t end) const {
    if (!call_.is_distance()) return;
    DualReader keys(call_);
    for (int64_t j = begin; j < end; ++j) {
      const auto [y, y_tangent] = keys.At(head / call_.n.key_heads, head % call_.n.key_heads, j);
      norms_.Head(false, head)[j] = SquaredNorm(y, call_.dim);
      norms_.Head(true, head)[j] = call_.has_y ? NormTangent(y, y_tangent, call_.dim) : 0.0f;
    }
  }

  // Clears the sums of a key head.
  void Start(int64_t head) const {
    for (const bool is_tangent : {false, true}) {
      if (d_norms_.wanted()) std::fill_n(d_norms_.Head(is_tangent, head), call_.n.keys, 0.0f);
      Real* const d_scalars = call_.Gradient(is_tangent).column_scalars;
      for (int s = 0; d_scalars != nullptr && s < call_.column_scalars(); ++s) {
        std::fill_n(call_.ColumnScalar(d_scalars, s, head), call_.n.keys, 0.0f);
      }
    }
  }

  // Copies the scalars of the block's keys, and computes the squared norms of its queries.
  void SetScalars(DualBlock& block) const {
    const int64_t begin = block.keys.begin - block.first;
    const int64_t end = block.keys.end - block.first;
    const int64_t head = block.head_of_keys;
    for (const bool is_tangent : {false, true}) {
      const auto copy = [&](const Real* from, Real hidden, Real* to) {
        if (from == nullptr) {
          std::fill_n(to, block.columns(), 0.0f);
          return;
        }
        std::fill_n(to, begin, hidden);
        std::copy(from + block.first + begin, from + block.first + end, to + begin);
        std::fill(to + end, to + block.columns(), hidden);
      };
      const Real* const scalars = (is_tangent ? call_.tangent : call_.in).column_scalars;
      Real* const arrays = block.pairs + (is_tangent * kScalarArrays + kMostScalars) * call_.stride;
      for (int s = 0; s < call_.column_scalars(); ++s) {
        copy(scalars != nullptr ? call_.ColumnScalar(scalars, s, head) : nullptr,
             is_tangent ? 0.0f : 1.0f, arrays + s * call_.stride);
      }
      if (call_.is_distance()) {
        copy(norms_.Head(is_tangent, head), 0.0f, block.norms + is_tangent * call_.stride);
      }
    }
    if (!call_.is_distance()) return;
    for (int64_t r = 0; r < block.rows(); ++r) {
      const auto [x, x_tangent] = block.Query(r);
      block.norm[r] = SquaredNorm(x, call_.dim);
      block.norm_tangent[r] = NormTangent(x, x_tangent, call_.dim);
    }
  }

  // Turns row r's inner products into values of f, and their tangents into tangents of f.
  void SetValues(const DualBlock& block, int64_t r, const Columns& columns,
                 const DualRow& row) const {
    HWY_ALIGN Real one[kPairs];
    std::fill_n(one, kPairs, 1.0f);
    SetRowScalars(block, r);
    SetArguments(block, r, columns, row);
    const DualRow g = block.Row(block.g, r);
    const SlopeArrays slopes = Slopes(block, false);
    for (int64_t j = columns.first(); j < columns.last(); j += kPairs) {
      const int64_t count = std::min(kPairs, columns.last() - j);
      const PairArrays pairs = PairsAt(block, false, g.values, j);
      const PairArrays tangents = PairsAt(block, true, g.tangents, j);
      call_.function->pairs->values(pairs, count, row.values + j);
      call_.function->pairs->slopes(pairs, count, one, slopes);
      for (int64_t n = 0; n < count; n += kLaneCount) {
        hn::Store(ValueTangent(call_, slopes, tangents, n), DF(), row.tangents + j + n);
      }
    }
  }

  // Turns the gradients of scores into gradients of inner products, and sums the gradients of
  // scalars, squared norms and factors. Slopes are relative to those of the row's largest score
  // (see RowSoftmax).
  void SetProductGradients(DualBlock& block) {
    std::fill_n(block.d_columns, 2 * (kMostScalars + 1) * call_.stride, 0.0f);
    DualHeadSums::Sums& of_head = heads_.Of(false, block.head, block.number);
    DualHeadSums::Sums& of_head_tangent = heads_.Of(true, block.head, block.number);
    of_head = of_head_tangent = {};
    for (int64_t r = 0; r < block.rows(); ++r) {
      SetProductGradientRow(block, r, of_head, of_head_tangent);
    }
  }

  // Adds the gradients of queries from squared norms (d|x|^2/dx = 2 x) and from near pairs.
  void AddDistanceGradients(const DualBlock& block, const DualRow& sums) const {
    for (int64_t r = 0; r < block.rows(); ++r) {
      const auto [x, x_tangent] = block.Query(r);
      AddScaled(2 * block.d_norm[r], x, call_.dim, sums.values + r * call_.padded_dim);
      AddScaled(2 * block.d_norm_tangent[r], x, call_.dim, sums.tangents + r * call_.padded_dim);
      AddScaled(2 * block.d_norm[r], x_tangent, call_.dim, sums.tangents + r * call_.padded_dim);
    }
    DualReader keys(call_);
    for (const NearDual& pair : block.near) {
      const auto [x, x_tangent] = block.Query(pair.r);
      const auto [y, y_tangent] = keys.At(block.b, block.key_head, block.first + pair.j);
      Real* const tangent = sums.tangents + pair.r * call_.padded_dim;
      AddScaledDifference(2 * pair.d_distance, x, y, call_.dim,
                          sums.values + pair.r * call_.padded_dim);
      AddScaledDifference(2 * pair.d_distance_tangent, x, y, call_.dim, tangent);
      AddScaledDifference(2 * pair.d_distance, x_tangent, y_tangent, call_.dim, tangent);
    }
  }

  // Adds the gradients of scalars, squared norms and near pairs of keys [begin, end).
  void AddColumnGradients(const DualBlock& block, int64_t begin, int64_t end,
                          const DualKeySums& d_y) const {
    const int64_t head = block.head_of_keys;
    for (const bool is_tangent : {false, true}) {
      const auto add = [&](int s, Real* to) {
        AddRow(ColumnGradients(block, s, begin - block.first).Of(is_tangent), end - begin,
               to + begin);
      };
      Real* const d_scalars = call_.Gradient(is_tangent).column_scalars;
      for (int s = 0; d_scalars != nullptr && s < call_.column_scalars(); ++s) {
        add(s, call_.ColumnScalar(d_scalars, s, head));
      }
      if (d_norms_.wanted()) add(kMostScalars, d_norms_.Head(is_tangent, head));
    }
    if (block.near.empty() || !call_.wants_y) return;
    DualReader keys(call_);
    for (const NearDual& pair : block.near) {
      const int64_t key = block.first + pair.j;
      if (key < begin || key >= end) continue;
      const auto [x, x_tangent] = block.Query(pair.r);
      const auto [y, y_tangent] = keys.At(block.b, block.key_head, key);
      if (d_y.values.wanted()) {
        AddScaledDifference(2 * pair.d_distance, y, x, call_.dim,
                            d_y.values.row(block.b, block.key_head, key));
      }
      if (!d_y.tangents.wanted()) continue;
      Real* const tangent = d_y.tangents.row(block.b, block.key_head, key);
      AddScaledDifference(2 * pair.d_distance_tangent, y, x, call_.dim, tangent);
      AddScaledDifference(2 * pair.d_distance, y_tangent, x_tangent, call_.dim, tangent);
    }
  }

  // Adds the gradients of a head's keys that pass through the squared norms: d|y|^2/dy = 2 y.
  void AddNormGradients(int64_t head, const DualKeySums& d_y) const {
    if (!d_norms_.wanted()) return;
    const int64_t b = head / call_.n.key_heads;
    const int64_t h = head % call_.n.key_heads;
    DualReader keys(call_);
    for (int64_t j = 0; j < call_.n.keys; ++j) {
      const Real d_norm = 2 * d_norms_.Head(false, head)[j];
      const Real d_norm_tangent = 2 * d_norms_.Head(true, head)[j];
      if (d_norm == 0 && d_norm_tangent == 0) continue;
      const auto [y, y_tangent] = keys.At(b, h, j);
      if (d_y.values.wanted()) AddScaled(d_norm, y, call_.dim, d_y.values.row(b, h, j));
      if (!d_y.tangents.wanted()) continue;
      AddScaled(d_norm_tangent, y, call_.dim, d_y.tangents.row(b, h, j));
      if (call_.has_y) AddScaled(d_norm, y_tangent, call_.dim, d_y.tangents.row(b, h, j));
    }
  }

 private:
  // The pair function's arguments and slopes are computed for this many columns at a time.
  static constexpr int64_t kPairs = 128;

  static Real NormTangent(const Real* x, const Real* tangent, int64_t columns) {
    return 2 * Sum(columns, [=](int64_t e) { return x[e] * tangent[e]; });
  }

  // The arrays of a row's pairs starting at `column`, or the arrays of their tangents, in scratch
  // memory. Scalars of rows and heads are equal in all columns, so their arrays are read from the
  // beginning. Scalars of columns are read starting at `column`.
  PairArrays PairsAt(const DualBlock& block, bool is_tangent, const Real* g, int64_t column) const {
    const Real* const pairs = block.pairs + is_tangent * kScalarArrays * call_.stride;
    return {g + column, pairs, pairs + kMostScalars * call_.stride + column,
            pairs + 2 * kMostScalars * call_.stride, call_.stride};
  }
  SlopeArrays Slopes(const DualBlock& block, bool is_tangent) const {
    Real* const slopes = block.slopes + is_tangent * (kScalarArrays + 1) * call_.stride;
    return {slopes, slopes + call_.stride, slopes + (1 + kMostScalars) * call_.stride,
            slopes + (1 + 2 * kMostScalars) * call_.stride};
  }
  // The gradients of column scalar s or, for s = kMostScalars, of the squared norms.
  DualRow ColumnGradients(const DualBlock& block, int s, int64_t column) const {
    Real* const values = block.d_columns + s * call_.stride + column;
    return {values, values + (kMostScalars + 1) * call_.stride};
  }

  // Fills the arrays with the scalars of row r and of its head.
  void SetRowScalars(const DualBlock& block, int64_t r) const {
    const int64_t count = std::min(kPairs, call_.stride);
    for (const bool is_tangent : {false, true}) {
      const AttentionInput<Real>& from = is_tangent ? call_.tangent : call_.in;
      Real* const arrays = block.pairs + is_tangent * kScalarArrays * call_.stride;
      for (int s = 0; s < call_.row_scalars(); ++s) {
        std::fill_n(arrays + s * call_.stride, count,
                    from.row_scalars != nullptr
                        ? call_.RowScalar(from.row_scalars, s, block.head)[block.begin + r]
                        : 0.0f);
      }
      for (int s = 0; s < call_.head_scalars(); ++s) {
        std::fill_n(
            arrays + (2 * kMostScalars + s) * call_.stride, count,
            from.head_scalars != nullptr ? from.head_scalars[s * call_.n.heads + block.h] : 0.0f);
      }
    }
  }

  // Computes the pair function's arguments from inner products.
  void SetArguments(const DualBlock& block, int64_t r, const Columns& columns,
                    const DualRow& products) const {
    const DF d;
    const DualRow g = block.Row(block.g, r);
    if (!call_.is_distance()) {
      const int64_t first = columns.first();
      const int64_t count = columns.last() - first;
      std::copy_n(products.values + first, count, g.values + first);
      std::copy_n(products.tangents + first, count, g.tangents + first);
      return;
    }
    const VF norm = hn::Set(d, block.norm[r]);
    const VF norm_tangent = hn::Set(d, block.norm_tangent[r]);
    const VF near =
        hn::Set(d, NearShare(block.c * call_.TemperOf(block, r).temperature, block.norm[r]));
    const VF least = hn::Set(d, std::numeric_limits<Real>::min());
    for (int64_t j = columns.first(); j < columns.last(); j += kLaneCount) {
      const VF product = hn::Load(d, products.values + j);
      const VF product_tangent = hn::Load(d, products.tangents + j);
      const VF norms = norm + hn::Load(d, block.norms + j);
      const VF norm_tangents = norm_tangent + hn::Load(d, block.norms + call_.stride + j);
      const VF distances = Max(hn::Zero(d), norms - (product + product));
      hn::Store(distances, d, g.values + j);
      hn::Store(norm_tangents - (product_tangent + product_tangent), d, g.tangents + j);
      if (HWY_LIKELY(hn::AllTrue(d, distances > hn::MulSub(norms, near, least)))) continue;
      SetByDifferences(block, r, std::max(j, columns.begin), std::min(j + kLaneCount, columns.end),
                       g);
    }
  }
  // Computes the arguments of columns [begin, end) from the differences of tokens.
  void SetByDifferences(const DualBlock& block, int64_t r, int64_t begin, int64_t end,
                        const DualRow& g) const {
    DualReader keys(call_);
    const DualNumbers x = block.Query(r);
    for (int64_t j = begin; j < end; ++j) {
      const DualNumbers y = keys.At(block.b, block.key_head, block.first + j);
      g.values[j] = SquaredDistance(x.values, y.values, call_.dim);
      g.tangents[j] = 2 * Sum(call_.dim, [=](int64_t e) {
                        return (x.values[e] - y.values[e]) * (x.tangents[e] - y.tangents[e]);
                      });
    }
  }

  // Computes f and its slopes for `count` pairs of row r, starting at column j.
  void Differentiate(const DualBlock& block, int64_t r, int64_t j, int64_t count, Real* f) const {
    const DualRow g = block.Row(block.g, r);
    const PairArrays pairs = PairsAt(block, false, g.values, j);
    call_.function->pairs->values(pairs, count, f);
    call_.function->slopes(pairs, PairsAt(block, true, g.tangents, j), count, Slopes(block, false),
                           Slopes(block, true));
    // Clears the numbers of hidden pairs, which may be arbitrary.
    const auto clear = [&](int64_t begin, int64_t end) {
      for (int64_t n = std::max(begin - j, int64_t{0}); n < std::min(end - j, count); ++n) {
        f[n] = 0;
        for (int64_t array = 0; array < 2 * (kScalarArrays + 1); ++array) {
          block.slopes[array * call_.stride + n] = 0;
        }
      }
    };
    const Columns& columns = block.seen[r];
    clear(columns.first(), columns.begin);
    clear(columns.end, columns.last());
  }

  // f at the largest score of a row, and its slopes with respect to g and the row's scalars.
  struct Top {
    DualNumber f;
    DualNumber g;
    DualNumber a[kMostScalars];
  };
  Top TopOf(const DualBlock& block, int64_t r, Real* f) const {
    Top top;
    if (block.top[r] < 0) return top;
    const int64_t j = block.top[r] / kLaneCount * kLaneCount;
    const int64_t n = block.top[r] - j;
    Differentiate(block, r, j, kLaneCount, f);
    const DualRow g = block.Row(block.g, r);
    const SlopeArrays slopes = Slopes(block, false);
    const SlopeArrays slope_tangents = Slopes(block, true);
    HWY_ALIGN Real tangents[kLanes];
    hn::Store(ValueTangent(call_, slopes, PairsAt(block, true, g.tangents, j), 0), DF(), tangents);
    const auto number = [](Real value, Real tangent) {
      return std::isfinite(value) && std::isfinite(tangent) ? DualNumber{value, tangent}
                                                            : DualNumber{};
    };
    top.f = number(f[n], tangents[n]);
    const auto is_near = [&](int64_t column) {
      return g.values[column] < (block.norm[r] + block.norms[column]) * kLeastNear;
    };
    if (call_.is_distance() && !is_near(block.top[r])) {
      top.g = number(slopes.g[n], slope_tangents.g[n]);
    }
    for (int s = 0; s < call_.row_scalars(); ++s) {
      const int64_t at = s * call_.stride + n;
      top.a[s] = number(slopes.a[at], slope_tangents.a[at]);
    }
    return top;
  }

  void SetProductGradientRow(DualBlock& block, int64_t r, DualHeadSums::Sums& of_head,
                             DualHeadSums::Sums& of_head_tangent) const {
    const DF d;
    const DualLanes<VF> zero{hn::Zero(d), hn::Zero(d)};
    const Columns& columns = block.seen[r];
    const DualRow gradients = block.Row(block.gradients, r);
    const SlopeArrays slopes = Slopes(block, false);
    const SlopeArrays slope_tangents = Slopes(block, true);
    HWY_ALIGN Real f[kPairs];
    SetRowScalars(block, r);
    const Top top = TopOf(block, r, f);
    const auto slope_at = [&](Real* SlopeArrays::* of, int s, int64_t n) HWY_ATTR {
      const int64_t at = s * call_.stride + n;
      return LoadDual(d, {slopes.*of + at, slope_tangents.*of + at});
    };
    const auto difference = [&](const DualLanes<VF>& x, const DualNumber& y) HWY_ATTR {
      return x - DualLanes<VF>(hn::Set(d, y.value), hn::Set(d, y.tangent));
    };
    const DualLanes<VF> c(hn::Set(d, block.c), hn::Set(d, block.dc));
    DualLanes<VF> sum_f = zero;
    DualLanes<VF> sum_norm = zero;
    DualLanes<VF> sum_a[kMostScalars];
    DualLanes<VF> sum_t[kMostScalars];
    for (int s = 0; s < kMostScalars; ++s) sum_a[s] = sum_t[s] = zero;
    for (int64_t j = columns.first(); j < columns.last(); j += kPairs) {
      const int64_t count = std::min(kPairs, columns.last() - j);
      Differentiate(block, r, j, count, f);
      const PairArrays tangents = PairsAt(block, true, block.Row(block.g, r).tangents, j);
      for (int64_t n = 0; n < count; n += kLaneCount) {
        const DualLanes<VF> ds =
            LoadDual(d, {gradients.values + j + n, gradients.tangents + j + n});
        const DualLanes<VF> df = ds * c;
        const DualLanes<VF> value(hn::Load(d, f + n), ValueTangent(call_, slopes, tangents, n));
        sum_f.Add(ds, difference(value, top.f));
        for (int s = 0; s < call_.row_scalars(); ++s) {
          sum_a[s].Add(df, difference(slope_at(&SlopeArrays::a, s, n), top.a[s]));
        }
        for (int s = 0; s < call_.head_scalars(); ++s) {
          sum_t[s].Add(df, slope_at(&SlopeArrays::t, s, n));
        }
        for (int s = 0; s < call_.column_scalars(); ++s) {
          AddProduct(d, df, slope_at(&SlopeArrays::b, s, n), ColumnGradients(block, s, j + n));
        }
        if (!call_.has_product()) continue;
        DualLanes<VF> slope = slope_at(&SlopeArrays::g, 0, n);
        if (call_.is_distance()) {
          TakeNear(block, r, j + n, df, slope);
          AddProduct(d, df, slope, ColumnGradients(block, kMostScalars, j + n));
          sum_norm.Add(df, difference(slope, top.g));
          const VF minus_two = hn::Set(d, -2.0f);
          slope = {slope.value * minus_two, slope.tangent * minus_two};
        }
        StoreDual(df * slope, d, {gradients.values + j + n, gradients.tangents + j + n});
      }
    }
    const DualNumber d_sum = block.sum[r];
    const Real df = block.c * d_sum.value;
    const Real df_tangent = block.c * d_sum.tangent + block.dc * d_sum.value;
    const auto whole = [&](const DualLanes<VF>& sum, const DualNumber& of_top) HWY_ATTR {
      return DualNumber{Total(sum.value) + df * of_top.value,
                        Total(sum.tangent) + df_tangent * of_top.value + df * of_top.tangent};
    };
    of_head.factor += Total(sum_f.value) + d_sum.value * top.f.value;
    of_head_tangent.factor +=
        Total(sum_f.tangent) + d_sum.tangent * top.f.value + d_sum.value * top.f.tangent;
    for (int s = 0; s < call_.head_scalars(); ++s) {
      of_head.t[s] += Total(sum_t[s].value);
      of_head_tangent.t[s] += Total(sum_t[s].tangent);
    }
    for (int s = 0; s < call_.row_scalars(); ++s) {
      const DualNumber sum = whole(sum_a[s], top.a[s]);
      for (const bool is_tangent : {false, true}) {
        Real* const to = call_.Gradient(is_tangent).row_scalars;
        if (to == nullptr) continue;
        call_.RowScalar(to, s, block.head)[block.begin + r] = is_tangent ? sum.tangent : sum.value;
      }
    }
    const DualNumber of_norm = whole(sum_norm, top.g);
    block.d_norm[r] = of_norm.value;
    block.d_norm_tangent[r] = of_norm.tangent;
  }

  // Moves the gradients of pairs of nearly equal tokens in columns [j, j + kLanes) to block.near,
  // and clears the slopes of these pairs.
  void TakeNear(DualBlock& block, int64_t r, int64_t j, const DualLanes<VF>& df,
                DualLanes<VF>& slope) const {
    const DF d;
    const VF norms = hn::Set(d, block.norm[r]) + hn::Load(d, block.norms + j);
    const VF distances = hn::Load(d, block.Row(block.g, r).values + j);
    const auto near = distances < norms * hn::Set(d, kLeastNear);
    if (HWY_LIKELY(hn::AllFalse(d, near))) return;
    HWY_ALIGN Real values[kLanes];
    HWY_ALIGN Real tangents[kLanes];
    const DualLanes<VF> dg = df * slope;
    hn::Store(hn::IfThenElseZero(near, dg.value), d, values);
    hn::Store(hn::IfThenElseZero(near, dg.tangent), d, tangents);
    for (size_t lane = 0; lane < kLanes; ++lane) {
      if (values[lane] == 0 && tangents[lane] == 0) continue;
      block.near.push_back({r, j + static_cast<int64_t>(lane), values[lane], tangents[lane]});
    }
    slope.value = hn::IfThenZeroElse(near, slope.value);
    slope.tangent = hn::IfThenZeroElse(near, slope.tangent);
  }

  const DualAttention& call_;
  DualHeadSums& heads_;
  DualKeyNumbers norms_;    // squared norms of the keys
  DualKeyNumbers d_norms_;  // gradients of the squared norms
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
