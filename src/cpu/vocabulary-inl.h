// The vocabulary of the definitions for Highway vectors (src/definitions/README.md), and other
// vector functions of the kernels. Abs, Sqrt and the operators are Highway's own.
#if defined(GNOMON_SRC_CPU_VOCABULARY_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_VOCABULARY_INL_H_
#undef GNOMON_SRC_CPU_VOCABULARY_INL_H_
#else
#define GNOMON_SRC_CPU_VOCABULARY_INL_H_
#endif

#include <cstdint>
#include <limits>
#include <numbers>

#include "cpu/real.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {

namespace hn = hwy::HWY_NAMESPACE;

using Real = GNOMON_REAL;
using DF = hn::ScalableTag<Real>;
using DI = hn::RebindToSigned<DF>;
using DU = hn::RebindToUnsigned<DF>;
using VF = hn::Vec<DF>;
using VI = hn::Vec<DI>;
constexpr size_t kLanes = HWY_LANES(Real);
constexpr auto kLog2E = static_cast<Real>(1.4426950408889634074);
constexpr auto kLn2 = static_cast<Real>(0.69314718055994530942);
constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
constexpr Real kNan = std::numeric_limits<Real>::quiet_NaN();

HWY_INLINE VF Splat(VF /*like*/, Real value) { return hn::Set(DF(), value); }
HWY_INLINE VF Tiny(VF /*like*/) {
  return hn::Set(DF(), static_cast<Real>(sizeof(Real) == 4 ? 1e-30 : 1e-300));
}

template <class M>
HWY_INLINE VF Select(M mask, VF yes, VF no) {
  return hn::IfThenElse(mask, yes, no);
}

// These return the second operand if either operand is NaN, as on x86; on other processors,
// Highway's functions drop NaN. They are function objects, so that argument-dependent lookup does
// not find Highway's functions. The overloads for doubles are used by token maps.
struct Maximum {
  HWY_INLINE double operator()(double a, double b) const { return a > b ? a : b; }
  HWY_INLINE VF operator()(VF a, VF b) const {
#if HWY_ARCH_X86 && HWY_TARGET != HWY_SCALAR
    return hn::Max(a, b);
#else
    return hn::IfThenElse(a > b, a, b);
#endif
  }
};
struct Minimum {
  HWY_INLINE double operator()(double a, double b) const { return a < b ? a : b; }
  HWY_INLINE VF operator()(VF a, VF b) const {
#if HWY_ARCH_X86 && HWY_TARGET != HWY_SCALAR
    return hn::Min(a, b);
#else
    return hn::IfThenElse(a < b, a, b);
#endif
  }
};
constexpr Maximum Max{};
constexpr Minimum Min{};

#ifdef GNOMON_DOUBLE
// Returns 1/sqrt(a) for normal a > 0 with relative error 3e-16.
HWY_INLINE VF Rsqrt(VF a) { return Splat(a, 1.0) / hn::Sqrt(a); }

// The natural logarithm of normal a > 0, relative error 2e-16; infinity and NaN are returned
// unchanged.
HWY_INLINE VF Log(VF a) {
  const DF d;
  const DI di;
  // a = 2^exponent (1 + f), 1 + f in [sqrt(1/2), sqrt(2)).
  const VI bits = hn::BitCast(di, a);
  const VI exponent = hn::ShiftRight<52>(bits - hn::Set(di, 0x3fe6a09e667f3bcd));
  const VF f = hn::BitCast(d, bits - hn::ShiftLeft<52>(exponent)) - hn::Set(d, 1.0);
  const VF e = hn::ConvertTo(d, exponent);
  // log(1 + f) = f - (f^2 / 2 - s (f^2 / 2 + z p(z))), s = f / (2 + f), z = s^2, p minimax.
  const VF s = f / (hn::Set(d, 2.0) + f);
  const VF z = s * s;
  VF p = hn::Set(d, 0.1479819860511658591);
  p = hn::MulAdd(p, z, hn::Set(d, 0.1531383769920937332));
  p = hn::MulAdd(p, z, hn::Set(d, 0.1818357216161805012));
  p = hn::MulAdd(p, z, hn::Set(d, 0.2222219843214978396));
  p = hn::MulAdd(p, z, hn::Set(d, 0.2857142874366239149));
  p = hn::MulAdd(p, z, hn::Set(d, 0.3999999999940941908));
  p = hn::MulAdd(p, z, hn::Set(d, 0.6666666666666735130));
  const VF half = hn::Set(d, 0.5) * f * f;
  // ln 2 in two parts; the first has so few bits that its product with an exponent is exact.
  const VF low = hn::MulAdd(s, hn::MulAdd(z, p, half), e * hn::Set(d, 1.90821492927058770e-10));
  const VF log = e * hn::Set(d, 0.693147180369123816490) - ((half - low) - f);
  return hn::IfThenElse(a < hn::Set(d, kInfinity), log, a);
}

#else
// Returns 1/sqrt(a) for normal a > 0 with relative error 3e-7.
HWY_INLINE VF Rsqrt(VF a) {
#if HWY_TARGET == HWY_SCALAR
  // On this target, Highway's estimate is too coarse for a single Newton step.
  return Splat(a, 1.0f) / hn::Sqrt(a);
#else
  // The estimate needs one Newton step if it has at least 11 bits, or two steps for the 8 bits on
  // Arm.
  const VF half = a * Splat(a, -0.5f);
  VF estimate = hn::ApproximateReciprocalSqrt(a);
#if HWY_ARCH_ARM
  estimate = estimate * hn::MulAdd(half * estimate, estimate, Splat(a, 1.5f));
#endif
  return estimate * hn::MulAdd(half * estimate, estimate, Splat(a, 1.5f));
#endif
}

// The natural logarithm of normal a > 0, relative error 2e-7; infinity and NaN are returned
// unchanged.
HWY_INLINE VF Log(VF a) {
  const DF d;
  const DI di;
  // a = 2^exponent (1 + f), 1 + f in [sqrt(1/2), sqrt(2)).
  const VI bits = hn::BitCast(di, a);
  const VI exponent = hn::ShiftRight<23>(bits - hn::Set(di, 0x3f3504f3));
  const VF f = hn::BitCast(d, bits - hn::ShiftLeft<23>(exponent)) - hn::Set(d, 1.0f);
  const VF e = hn::ConvertTo(d, exponent);
  // log(1 + f) = f + f^2 (-1/2 + f p(f)), p minimax.
  VF p = hn::Set(d, 0.0870043784f);
  p = hn::MulAdd(p, f, hn::Set(d, -0.142674878f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.149147674f));
  p = hn::MulAdd(p, f, hn::Set(d, -0.16577585f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.199630633f));
  p = hn::MulAdd(p, f, hn::Set(d, -0.250013381f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.333339095f));
  p = hn::MulAdd(p, f, hn::Set(d, -0.5f));
  // ln 2 in two parts; the first has so few bits that its product with an exponent is exact.
  p = hn::MulAdd(f * f, p, e * hn::Set(d, 1.42860677e-6f));
  const VF log = hn::MulAdd(e, hn::Set(d, 0.693145752f), f + p);
  return hn::IfThenElse(a < hn::Set(d, std::numeric_limits<Real>::infinity()), log, a);
}

#endif

// log(1 + a) for a >= 0. The relative error is 3e-7 in float (4e-16 in double), even where 1 + a
// rounds to 1.
HWY_INLINE VF Log1p(VF a) {
  const VF one = Splat(a, 1.0f);
  const VF sum = one + a;
  // The first-order rounding error of the sum; it is negligible for large sums.
  const VF lost = Select(a < Splat(a, sizeof(Real) == 4 ? Real{1e9f} : Real{1e18f}),
                         a - (sum - one), Splat(a, 0.0f));
  return Log(sum) + lost / sum;
}

#ifdef GNOMON_DOUBLE
// 2^a for a <= 1023, relative error 2e-16. Exactly 1 at 0, so that the largest score of a row has
// weight 1, and exactly 0 below -1022.5. NaN gives NaN.
HWY_INLINE VF Exp2(VF a) {
  const DF d;
  const DI di;
  a = Max(hn::Set(d, -1023.0), a);
  // Adding 1.5 * 2^52 rounds a to an integer in the low bits; another 1023 makes this the biased
  // exponent.
  const VF magic = hn::Set(d, 6755399441056767.0);
  const VF shifted = a + magic;
  const VF r = a - (shifted - magic);
  const VF scale = hn::BitCast(d, hn::ShiftLeft<52>(hn::BitCast(di, shifted)));
  // 1 + r p(r), minimax on [-1/2, 1/2].
  VF p = hn::Set(d, 4.4549605981865186e-10);
  p = hn::MulAdd(p, r, hn::Set(d, 7.0725859492692234e-09));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0178062445845774e-07));
  p = hn::MulAdd(p, r, hn::Set(d, 1.3215442587921689e-06));
  p = hn::MulAdd(p, r, hn::Set(d, 1.5252733829836119e-05));
  p = hn::MulAdd(p, r, hn::Set(d, 0.0001540353044173605));
  p = hn::MulAdd(p, r, hn::Set(d, 0.0013333558146416936));
  p = hn::MulAdd(p, r, hn::Set(d, 0.0096181291076068882));
  p = hn::MulAdd(p, r, hn::Set(d, 0.055504108664821597));
  p = hn::MulAdd(p, r, hn::Set(d, 0.24022650695910097));
  p = hn::MulAdd(p, r, hn::Set(d, 0.69314718055994529));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0));
  return p * scale;
}

// e^a for a <= 709, relative error 2e-16; exactly 1 at 0, and 0 below -709. NaN gives NaN.
HWY_INLINE VF Exp(VF a) {
  const DF d;
  const DI di;
  a = Max(hn::Set(d, -709.0), a);
  const VF magic = hn::Set(d, 6755399441056767.0);
  const VF shifted = hn::MulAdd(a, hn::Set(d, 1.4426950408889634074), magic);
  const VF n = shifted - magic;
  // ln 2 in two parts; the first has so few bits that its product with an exponent is exact.
  const VF r =
      (a - n * hn::Set(d, 0.693147180369123816490)) - n * hn::Set(d, 1.90821492927058770e-10);
  const VF scale = hn::BitCast(d, hn::ShiftLeft<52>(hn::BitCast(di, shifted)));
  // 1 + (r + r^2 p(r)), minimax on [-ln(2) / 2, ln(2) / 2].
  VF p = hn::Set(d, 2.510065503606659e-08);
  p = hn::MulAdd(p, r, hn::Set(d, 2.7620438948634417e-07));
  p = hn::MulAdd(p, r, hn::Set(d, 2.755726789174553e-06));
  p = hn::MulAdd(p, r, hn::Set(d, 2.4801520557017829e-05));
  p = hn::MulAdd(p, r, hn::Set(d, 0.00019841269863420349));
  p = hn::MulAdd(p, r, hn::Set(d, 0.0013888888917690603));
  p = hn::MulAdd(p, r, hn::Set(d, 0.0083333333333299887));
  p = hn::MulAdd(p, r, hn::Set(d, 0.041666666666623171));
  p = hn::MulAdd(p, r, hn::Set(d, 0.16666666666666669));
  p = hn::MulAdd(p, r, hn::Set(d, 0.50000000000000011));
  const VF below = hn::MulAdd(r * r, p, r);
  return (hn::Set(d, 1.0) + below) * scale;
}

// p(x^2) of tanh(x) = x + x^3 p(x^2) below 0.625 (Cephes).
HWY_INLINE VF TanhSeries(VF z) {
  const DF d;
  VF p = hn::Set(d, -0.964399179425052238628);
  p = hn::MulAdd(p, z, hn::Set(d, -99.2877231001918586564));
  p = hn::MulAdd(p, z, hn::Set(d, -1614.68768441708447952));
  VF q = z + hn::Set(d, 112.811678491632931402);
  q = hn::MulAdd(q, z, hn::Set(d, 2235.48839060100448583));
  q = hn::MulAdd(q, z, hn::Set(d, 4844.06305325125486048));
  return p / q;
}

// p(r^2) of atan(r) = r + r^3 p(r^2) below tan(pi / 8) (Cephes).
HWY_INLINE VF AtanSeries(VF z) {
  const DF d;
  VF p = hn::Set(d, -0.8750608600031904122785);
  p = hn::MulAdd(p, z, hn::Set(d, -16.15753718733365076637));
  p = hn::MulAdd(p, z, hn::Set(d, -75.00855792314704667340));
  p = hn::MulAdd(p, z, hn::Set(d, -122.8866684490136173410));
  p = hn::MulAdd(p, z, hn::Set(d, -64.85021904942025371773));
  VF q = z + hn::Set(d, 24.85846490142306297962);
  q = hn::MulAdd(q, z, hn::Set(d, 165.0270098316988542046));
  q = hn::MulAdd(q, z, hn::Set(d, 432.8810604912902668951));
  q = hn::MulAdd(q, z, hn::Set(d, 485.3903996359136964868));
  q = hn::MulAdd(q, z, hn::Set(d, 194.5506571482613964425));
  return p / q;
}
#else
// 2^a for a <= 128, relative error 2e-7. Exactly 1 at 0, so that the largest score of a row has
// weight 1, and exactly 0 below -126.5. NaN gives NaN.
HWY_INLINE VF Exp2(VF a) {
  const DF d;
  const DI di;
  a = Max(hn::Set(d, -127.0f), a);
  // Adding 1.5 * 2^23 rounds a to an integer in the low bits; another 127 makes this the biased
  // exponent.
  const VF magic = hn::Set(d, 12583039.0f);
  const VF shifted = a + magic;
  const VF r = a - (shifted - magic);
  const VF scale = hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(di, shifted)));
  // 1 + r p(r), minimax on [-1/2, 1/2].
  VF p = hn::Set(d, 0.00132647273f);
  p = hn::MulAdd(p, r, hn::Set(d, 0.00967151299f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.0555073358f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.240222424f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.693147004f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
  return p * scale;
}

// e^a for a <= 88, relative error 1e-7; exactly 1 at 0, and 0 below -88. NaN gives NaN.
HWY_INLINE VF Exp(VF a) {
  const DF d;
  const DI di;
  a = Max(hn::Set(d, -100.0f), a);
  const VF n = hn::Round(a * hn::Set(d, 1.44269504f));
  // ln 2 in two parts; the first has so few bits that its product with an exponent is exact.
  const VF r = (a - n * hn::Set(d, 0.693145752f)) - n * hn::Set(d, 1.42860677e-6f);
  const VI biased = hn::Max(hn::ConvertTo(di, n) + hn::Set(di, 127), hn::Zero(di));
  // 1 + (r + r^2 p(r)), minimax on [-ln(2) / 2, ln(2) / 2]. The sum added to 1 is below one half,
  // so its rounding error is small relative to the result.
  VF p = hn::Set(d, 0.00138145406f);
  p = hn::MulAdd(p, r, hn::Set(d, 0.00836874545f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.041668389f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.166665211f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.49999994f));
  const VF below = hn::MulAdd(r * r, p, r);
  return (hn::Set(d, 1.0f) + below) * hn::BitCast(d, hn::ShiftLeft<23>(biased));
}

// p(x^2) of tanh(x) = x + x^3 p(x^2) below 0.625, minimax.
HWY_INLINE VF TanhSeries(VF z) {
  const DF d;
  VF p = hn::Set(d, -0.00570498593f);
  p = hn::MulAdd(p, z, hn::Set(d, 0.0206390861f));
  p = hn::MulAdd(p, z, hn::Set(d, -0.0537397154f));
  p = hn::MulAdd(p, z, hn::Set(d, 0.133314416f));
  return hn::MulAdd(p, z, hn::Set(d, -0.333332807f));
}

// p(r^2) of atan(r) = r + r^3 p(r^2) below tan(pi / 8), minimax.
HWY_INLINE VF AtanSeries(VF z) {
  const DF d;
  VF p = hn::Set(d, 0.0805372298f);
  p = hn::MulAdd(p, z, hn::Set(d, -0.138776794f));
  p = hn::MulAdd(p, z, hn::Set(d, 0.199777097f));
  return hn::MulAdd(p, z, hn::Set(d, -0.333329499f));
}
#endif

// The hyperbolic tangent, relative error 3e-7 (float64: 4e-16); infinity and NaN give 1 and NaN.
HWY_INLINE VF Tanh(VF a) {
  const DF d;
  const VF one = hn::Set(d, Real{1});
  // For arguments of at least 10 (float64: 22), the result rounds to 1.
  const VF size = Min(hn::Set(d, sizeof(Real) == 4 ? Real{10} : Real{22}), hn::Abs(a));
  const VF z = size * size;
  const VF low = hn::MulAdd(size * z, TanhSeries(z), size);
#ifdef GNOMON_DOUBLE
  const VF power = Exp(size + size);
#else
  const VF power = Exp2(size * hn::Set(d, 2.88539008f));
#endif
  const VF high = one - hn::Set(d, Real{2}) / (power + one);
  return hn::CopySign(Select(size < hn::Set(d, Real{0.625}), low, high), a);
}

// The angle between (x, y), y >= 0, and the x axis: 0 to pi, error 3e-7 (float64: 5e-16); 0 at the
// origin.
HWY_INLINE VF Angle(VF x, VF y) {
  const DF d;
  const VF zero = hn::Zero(d);
  const VF adjacent = hn::Abs(x);
  const auto steep = y > adjacent;
  const VF low = Select(steep, adjacent, y);
  const VF high = Select(steep, y, adjacent);
  // Reduces the argument of atan(low / high) to at most tan(pi / 8).
  const auto wide = low > high * hn::Set(d, static_cast<Real>(0.41421356237309504880));
  const VF divisor = Select(wide, high + low, high);
  const VF r =
      Select(wide, low - high, low) / Select(divisor == zero, hn::Set(d, Real{1}), divisor);
  const VF z = r * r;
  VF angle = hn::MulAdd(r * z, AtanSeries(z), r);
  angle = angle + Select(wide, hn::Set(d, std::numbers::pi_v<Real> / 4), zero);
  angle = Select(steep, hn::Set(d, std::numbers::pi_v<Real> / 2) - angle, angle);
  return Select(x < zero, hn::Set(d, std::numbers::pi_v<Real>) - angle, angle);
}

// Loads 32-bit or 8-bit integers, and widens them to the width of Real.
HWY_INLINE VI LoadInts(const int32_t* from) {
#ifdef GNOMON_DOUBLE
  return hn::PromoteTo(DI(), hn::LoadU(hn::Rebind<int32_t, DF>(), from));
#else
  return hn::LoadU(DI(), from);
#endif
}
HWY_INLINE VI LoadInts(const uint8_t* from) {
  const auto bytes = hn::LoadU(hn::Rebind<uint8_t, DF>(), from);
#ifdef GNOMON_DOUBLE
  return hn::PromoteTo(DI(), hn::PromoteTo(hn::Rebind<int32_t, DF>(), bytes));
#else
  return hn::PromoteTo(DI(), bytes);
#endif
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
