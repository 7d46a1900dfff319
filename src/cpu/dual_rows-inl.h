// Vectors of dual numbers, with the definitions' vocabulary (src/definitions/README.md), and the
// slopes of a definition. At kinks, derivatives are the same as in src/reference/dual.h.
#if defined(GNOMON_SRC_CPU_DUAL_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_DUAL_ROWS_INL_H_
#undef GNOMON_SRC_CPU_DUAL_ROWS_INL_H_
#else
#define GNOMON_SRC_CPU_DUAL_ROWS_INL_H_
#endif

#include "cpu/dual_table.h"
#include "cpu/pair_rows-inl.h"
#include "cpu/vocabulary-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {
// Definitions that are included in this namespace are evaluated with dual numbers.
namespace duals {

namespace vectors = ::gnomon::GNOMON_KERNELS;

struct DualVector {
  // Not defaulted: g++ does not compile defaulted constructors for the instruction set.
  HWY_INLINE DualVector() {}
  HWY_INLINE DualVector(VF number, VF derivative) : value(number), tangent(derivative) {}

  VF value;
  VF tangent;
};

HWY_INLINE DualVector operator+(DualVector a, DualVector b) {
  return {a.value + b.value, a.tangent + b.tangent};
}
HWY_INLINE DualVector operator-(DualVector a, DualVector b) {
  return {a.value - b.value, a.tangent - b.tangent};
}
HWY_INLINE DualVector operator*(DualVector a, DualVector b) {
  return {a.value * b.value, hn::MulAdd(a.tangent, b.value, a.value * b.tangent)};
}
HWY_INLINE DualVector operator/(DualVector a, DualVector b) {
  const VF quotient = a.value / b.value;
  return {quotient, hn::NegMulAdd(quotient, b.tangent, a.tangent) / b.value};
}
HWY_INLINE auto operator<(DualVector a, DualVector b) { return a.value < b.value; }
HWY_INLINE auto operator<=(DualVector a, DualVector b) { return a.value <= b.value; }
HWY_INLINE auto operator>(DualVector a, DualVector b) { return a.value > b.value; }
HWY_INLINE auto operator>=(DualVector a, DualVector b) { return a.value >= b.value; }
HWY_INLINE auto operator==(DualVector a, DualVector b) { return a.value == b.value; }

HWY_INLINE DualVector Splat(DualVector /*like*/, Real value) {
  return {hn::Set(DF(), value), hn::Zero(DF())};
}
HWY_INLINE DualVector Tiny(DualVector like) { return {vectors::Tiny(like.value), hn::Zero(DF())}; }
template <class M>
HWY_INLINE DualVector Select(M mask, DualVector yes, DualVector no) {
  return {hn::IfThenElse(mask, yes.value, no.value), hn::IfThenElse(mask, yes.tangent, no.tangent)};
}
// Returns the operand that `first` selects; at a tie, the tangent is the mean of both.
template <class M>
HWY_INLINE DualVector SelectExtreme(M first, VF value, DualVector a, DualVector b) {
  const VF mean = (a.tangent + b.tangent) * hn::Set(DF(), 0.5f);
  const VF tangent = hn::IfThenElse(first, a.tangent, b.tangent);
  return {value, hn::IfThenElse(a.value == b.value, mean, tangent)};
}
HWY_INLINE DualVector Max(DualVector a, DualVector b) {
  return SelectExtreme(a.value > b.value, vectors::Max(a.value, b.value), a, b);
}
HWY_INLINE DualVector Min(DualVector a, DualVector b) {
  return SelectExtreme(a.value < b.value, vectors::Min(a.value, b.value), a, b);
}
HWY_INLINE DualVector Abs(DualVector a) {
  const VF zero = hn::Zero(DF());
  const VF tangent = hn::IfThenElse(a.value < zero, zero - a.tangent, a.tangent);
  return {hn::Abs(a.value), hn::IfThenElse(a.value == zero, zero, tangent)};
}
HWY_INLINE DualVector Sqrt(DualVector a) {
  const VF zero = hn::Zero(DF());
  const VF root = hn::Sqrt(a.value);
  return {root, hn::IfThenElse(root == zero, zero, a.tangent / (root + root))};
}
HWY_INLINE DualVector Rsqrt(DualVector a) {
  const VF inverse = vectors::Rsqrt(a.value);
  // In this order of multiplication, a tangent of 0 stays 0 even if the cube of `inverse`
  // overflows.
  return {inverse, ((a.tangent * inverse) * inverse) * (inverse * hn::Set(DF(), -0.5f))};
}
HWY_INLINE DualVector Exp(DualVector a) {
  const VF value = vectors::Exp(a.value);
  return {value, a.tangent * value};
}
HWY_INLINE DualVector Log(DualVector a) { return {vectors::Log(a.value), a.tangent / a.value}; }
HWY_INLINE DualVector Log1p(DualVector a) {
  return {vectors::Log1p(a.value), a.tangent / (a.value + hn::Set(DF(), 1.0f))};
}
HWY_INLINE DualVector Tanh(DualVector a) {
  const VF value = vectors::Tanh(a.value);
  return {value, a.tangent * hn::NegMulAdd(value, value, hn::Set(DF(), 1.0f))};
}
HWY_INLINE DualVector Angle(DualVector x, DualVector y) {
  const VF zero = hn::Zero(DF());
  const VF square = hn::MulAdd(x.value, x.value, y.value * y.value);
  const VF turn = hn::NegMulAdd(y.value, x.tangent, x.value * y.tangent);
  return {vectors::Angle(x.value, y.value), hn::IfThenElse(square == zero, zero, turn / square)};
}

// Implements DualTable::slopes for a definition that is included in this namespace.
template <class Definition>
HWY_FLATTEN void Slopes(const PairArrays& pairs, const PairArrays& tangents, int64_t count,
                        const SlopeArrays& slopes, const SlopeArrays& slope_tangents) {
  const DF d;
  const int64_t stride = pairs.stride;
  for (int64_t n = 0; n < count; n += static_cast<int64_t>(kLanes)) {
    const auto load = [&](const Real* values, const Real* of_values, int scalar) HWY_ATTR {
      const int64_t at = scalar * stride + n;
      return DualVector(hn::LoadU(d, values + at), hn::LoadU(d, of_values + at));
    };
    const auto store = [&](const DualVector& slope, Real* value, Real* tangent, int scalar)
                           HWY_ATTR {
                             const int64_t at = scalar * stride + n;
                             hn::StoreU(slope.value, d, value + at);
                             hn::StoreU(slope.tangent, d, tangent + at);
                           };
    DualVector g(hn::Zero(d), hn::Zero(d));
    if constexpr (kHasProduct<Definition>) g = load(pairs.g, tangents.g, 0);
    DualVector a[Definition::kRowScalars + 1];
    DualVector b[Definition::kColumnScalars + 1];
    DualVector t[Definition::kHeadScalars + 1];
    for (int s = 0; s < Definition::kRowScalars; ++s) a[s] = load(pairs.a, tangents.a, s);
    for (int s = 0; s < Definition::kColumnScalars; ++s) b[s] = load(pairs.b, tangents.b, s);
    for (int s = 0; s < Definition::kHeadScalars; ++s) t[s] = load(pairs.t, tangents.t, s);
    VectorDerivative<Definition, DualVector> slope;
    Definition::Gradient(g, a, b, t, slope);
    if constexpr (kHasProduct<Definition>) store(slope.g, slopes.g, slope_tangents.g, 0);
    for (int s = 0; s < Definition::kRowScalars; ++s) {
      store(slope.a[s], slopes.a, slope_tangents.a, s);
    }
    for (int s = 0; s < Definition::kColumnScalars; ++s) {
      store(slope.b[s], slopes.b, slope_tangents.b, s);
    }
    for (int s = 0; s < Definition::kHeadScalars; ++s) {
      store(slope.t[s], slopes.t, slope_tangents.t, s);
    }
  }
}

}  // namespace duals
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
