// Rows of scores, weights and their gradients, each with the row of its tangents.
#if defined(GNOMON_SRC_CPU_DUAL_SCORES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_DUAL_SCORES_INL_H_
#undef GNOMON_SRC_CPU_DUAL_SCORES_INL_H_
#else
#define GNOMON_SRC_CPU_DUAL_SCORES_INL_H_
#endif

#include <algorithm>
#include <cmath>

#include "cpu/columns-inl.h"
#include "cpu/dropout-inl.h"
#include "cpu/packing-inl.h"
#include "cpu/rows-inl.h"
#include "cpu/vocabulary-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {

// Columns [begin, end), and the whole vectors that cover them.
struct Columns {
  int64_t begin;
  int64_t end;
  int64_t first() const { return begin / kLaneCount * kLaneCount; }
  int64_t last() const { return RoundUp(end, kLaneCount); }
};

HWY_INLINE VF Within(const Columns& columns, int64_t j, VF value, VF otherwise) {
  if (HWY_LIKELY(j >= columns.begin && j + kLaneCount <= columns.end)) return value;
  RowView view;
  view.span = {columns.begin, columns.end};
  return Masked(value, otherwise, view, j);
}

HWY_INLINE Real Total(VF sums) { return hn::GetLane(hn::SumOfLanes(DF(), sums)); }

// Turns inner products into scores in log2 units, and their tangents into tangents of scores.
// Returns the largest score. The biases are added if they are not null; `bias` is in log2 units.
HWY_INLINE Real SetScores(Real* HWY_RESTRICT scores, Real* HWY_RESTRICT tangents,
                          const Columns& columns, Real factor, Real factor_tangent,
                          const Real* HWY_RESTRICT bias, const Real* HWY_RESTRICT bias_tangent) {
  const DF d;
  const VF in_log2 = hn::Set(d, factor * kLog2E);
  const VF c = hn::Set(d, factor);
  const VF dc = hn::Set(d, factor_tangent);
  const VF hidden = hn::Set(d, -kInfinity);
  VF largest = hidden;
  for (int64_t j = columns.first(); j < columns.last(); j += kLaneCount) {
    const VF g = hn::Load(d, scores + j);
    VF score = g * in_log2;
    if (bias != nullptr) score = hn::MulAdd(g, in_log2, hn::LoadU(d, bias + j));
    score = Within(columns, j, score, hidden);
    largest = Max(largest, score);
    VF tangent = hn::MulAdd(hn::Load(d, tangents + j), c, g * dc);
    if (bias_tangent != nullptr) tangent = tangent + hn::LoadU(d, bias_tangent + j);
    tangent = Within(columns, j, tangent, hn::Zero(d));
    hn::Store(score, d, scores + j);
    hn::Store(tangent, d, tangents + j);
  }
  return hn::GetLane(hn::MaxOfLanes(d, largest));
}

// Returns the first column with the given score; -1 if there is none.
HWY_INLINE int64_t FindScore(const Real* scores, const Columns& columns, Real score) {
  const DF d;
  const VF wanted = hn::Set(d, score);
  for (int64_t j = columns.first(); j < columns.last(); j += kLaneCount) {
    const intptr_t lane = hn::FindFirstTrue(d, hn::Load(d, scores + j) == wanted);
    if (lane >= 0) return j + lane;
  }
  return -1;
}

// The sum of 2^(score - largest) over a row, and the weighted mean of the tangents of its scores.
struct RowTotals {
  Real weight;
  Real mean;
};

// Turns scores into weights, and the tangents of scores into those of weights.
HWY_INLINE RowTotals SetWeights(Real* HWY_RESTRICT scores, Real* HWY_RESTRICT tangents,
                                const Columns& columns, Real largest) {
  const DF d;
  const VF shift = hn::Set(d, largest);
  VF sum = hn::Zero(d);
  VF sum_of_tangents = hn::Zero(d);
  for (int64_t j = columns.first(); j < columns.last(); j += kLaneCount) {
    const VF weight = Exp2(hn::Load(d, scores + j) - shift);
    sum = sum + weight;
    sum_of_tangents = hn::MulAdd(weight, hn::Load(d, tangents + j), sum_of_tangents);
    hn::Store(weight, d, scores + j);
  }
  const Real total = Total(sum);
  const Real mean = Total(sum_of_tangents) / total;
  const VF inverse = hn::Set(d, 1.0f / total);
  const VF m = hn::Set(d, mean);
  for (int64_t j = columns.first(); j < columns.last(); j += kLaneCount) {
    const VF weight = hn::Load(d, scores + j) * inverse;
    hn::Store(weight, d, scores + j);
    hn::Store(weight * (hn::Load(d, tangents + j) - m), d, tangents + j);
  }
  return {total, mean};
}

// A row of numbers and the row of their tangents.
struct DualRow {
  Real* values;
  Real* tangents;
  Real* Of(bool is_tangent) const { return is_tangent ? tangents : values; }
};

// Turns the gradients of weights into those of scores, whose sum over the row is d_lse up to
// rounding.
HWY_INLINE void SetScoreGradients(const DualRow& weights, const DualRow& gradients,
                                  const Columns& columns, Real d_lse, Real d_lse_tangent) {
  const DF d;
  const Real* HWY_RESTRICT p = weights.values;
  const Real* HWY_RESTRICT dp = weights.tangents;
  Real* HWY_RESTRICT g = gradients.values;
  Real* HWY_RESTRICT dg = gradients.tangents;
  VF sum = hn::Zero(d);
  VF sum_of_tangents = hn::Zero(d);
  for (int64_t j = columns.first(); j < columns.last(); j += kLaneCount) {
    const VF weight = hn::Load(d, p + j);
    const VF gradient = hn::Load(d, g + j);
    sum = hn::MulAdd(weight, gradient, sum);
    const VF part = hn::MulAdd(weight, hn::Load(d, dg + j), sum_of_tangents);
    sum_of_tangents = hn::MulAdd(hn::Load(d, dp + j), gradient, part);
  }
  const VF delta = hn::Set(d, Total(sum) - d_lse);
  const VF delta_tangent = hn::Set(d, Total(sum_of_tangents) - d_lse_tangent);
  for (int64_t j = columns.first(); j < columns.last(); j += kLaneCount) {
    const VF weight = hn::Load(d, p + j);
    const VF difference = hn::Load(d, g + j) - delta;
    const VF tangent = weight * (hn::Load(d, dg + j) - delta_tangent);
    hn::Store(weight * difference, d, g + j);
    hn::Store(hn::MulAdd(hn::Load(d, dp + j), difference, tangent), d, dg + j);
  }
}

// Corrects the gradient of the largest score so that the row's sum is exact. Otherwise, slopes that
// are large and nearly equal would amplify the rounding error of that sum.
HWY_INLINE void BalanceRow(Real* HWY_RESTRICT gradients, const Columns& columns, int64_t top,
                           Real sum) {
  const DF d;
  VF total = hn::Zero(d);
  for (int64_t j = columns.first(); j < columns.last(); j += kLaneCount) {
    total = total + hn::Load(d, gradients + j);
  }
  gradients[top] -= Total(total) - sum;
}

// A row's temperature with its tangent, and the soft cap (0 if there is none).
struct Temper {
  Real temperature;
  Real temperature_tangent;
  Real softcap;

  // The derivative of the cap at a score in log2 units.
  HWY_INLINE VF CapSlope(VF score) const {
    const DF d;
    const VF one = hn::Set(d, 1.0f);
    const VF e = Exp2(hn::Abs(score) * hn::Set(d, -2.0f / softcap));
    return hn::Set(d, 4.0f) * e / ((one + e) * (one + e));
  }
  HWY_INLINE VF Capped(VF score) const { return Tanh(score * hn::Set(DF(), kLn2 / softcap)); }
};

// Applies a temperature and a soft cap to the results of SetScores, and returns the largest score.
// Stores the previous (plain) scores in `plain`, with 0 for hidden pairs: values in log2 units, and
// tangents.
HWY_INLINE Real SetTemperedScores(Real* HWY_RESTRICT scores, Real* HWY_RESTRICT tangents,
                                  const Columns& columns, const Temper& temper,
                                  const DualRow& plain) {
  const DF d;
  const VF hidden = hn::Set(d, -kInfinity);
  const VF temperature = hn::Set(d, temper.temperature);
  const VF temperature_tangent = hn::Set(d, temper.temperature_tangent * kLn2);
  VF largest = hidden;
  for (int64_t j = columns.first(); j < columns.last(); j += kLaneCount) {
    const VF whole = hn::Load(d, scores + j);
    const auto hides = whole == hidden;
    const VF value = hn::IfThenZeroElse(hides, whole);
    const VF value_tangent = hn::IfThenZeroElse(hides, hn::Load(d, tangents + j));
    hn::Store(value, d, plain.values + j);
    hn::Store(value_tangent, d, plain.tangents + j);
    VF score = temperature * value;
    VF tangent = hn::MulAdd(temperature, value_tangent, temperature_tangent * value);
    if (temper.softcap != 0) {
      tangent = tangent * temper.CapSlope(score);
      score = temper.Capped(score) * hn::Set(d, temper.softcap * kLog2E);
    }
    score = hn::IfThenElse(hides, hidden, score);
    largest = Max(largest, score);
    hn::Store(score, d, scores + j);
    hn::Store(hn::IfThenZeroElse(hides, tangent), d, tangents + j);
  }
  return hn::GetLane(hn::MaxOfLanes(d, largest));
}

struct DualNumber {
  Real value = 0;
  Real tangent = 0;
};

// The gradient of a row's temperature, and the sum of the gradients of its plain scores.
struct TemperSums {
  DualNumber temperature;
  DualNumber scores;
};

// Turns the gradients of scores into gradients of the plain scores (before temperature and soft
// cap).
HWY_INLINE TemperSums SetPlainGradients(const DualRow& gradients, const DualRow& plain,
                                        const Columns& columns, const Temper& temper) {
  const DF d;
  const VF zero = hn::Zero(d);
  const VF ln2 = hn::Set(d, kLn2);
  const VF temperature = hn::Set(d, temper.temperature);
  const VF temperature_tangent = hn::Set(d, temper.temperature_tangent);
  VF sums[4] = {zero, zero, zero, zero};
  for (int64_t j = columns.first(); j < columns.last(); j += kLaneCount) {
    const VF value = hn::Load(d, plain.values + j) * ln2;
    const VF tangent = hn::Load(d, plain.tangents + j);
    VF of_score = hn::Load(d, gradients.values + j);
    VF of_tangent = hn::Load(d, gradients.tangents + j);
    if (temper.softcap != 0) {
      const VF score = temperature * hn::Load(d, plain.values + j);
      const VF change = hn::MulAdd(temperature, tangent, temperature_tangent * value) *
                        hn::Set(d, -2.0f / temper.softcap);
      const VF slope = temper.CapSlope(score);
      const VF slope_tangent = slope * temper.Capped(score) * change;
      of_tangent = hn::MulAdd(slope, of_tangent, slope_tangent * of_score);
      of_score = slope * of_score;
    }
    sums[0] = hn::MulAdd(of_score, value, sums[0]);
    sums[1] = hn::MulAdd(of_score, tangent, hn::MulAdd(of_tangent, value, sums[1]));
    of_tangent = hn::MulAdd(temperature, of_tangent, temperature_tangent * of_score);
    of_score = temperature * of_score;
    sums[2] = sums[2] + of_score;
    sums[3] = sums[3] + of_tangent;
    hn::Store(of_score, d, gradients.values + j);
    hn::Store(of_tangent, d, gradients.tangents + j);
  }
  return {{Total(sums[0]), Total(sums[1])}, {Total(sums[2]), Total(sums[3])}};
}

// Multiplies a row of numbers and the row of their tangents by the dropout mask; `first` is the key
// of column 0.
HWY_INLINE void DropRow(const Dropper& dropper, int64_t first, const Columns& columns,
                        const DualRow& row) {
  const DF d;
  for (int64_t j = columns.first(); j < columns.last(); j += kLaneCount) {
    hn::Store(dropper.Drop(first + j, hn::Load(d, row.values + j)), d, row.values + j);
    hn::Store(dropper.Drop(first + j, hn::Load(d, row.tangents + j)), d, row.tangents + j);
  }
}

HWY_INLINE void AddRow(const Real* HWY_RESTRICT from, int64_t count, Real* HWY_RESTRICT to) {
  for (int64_t n = 0; n < count; ++n) to[n] += from[n];
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
