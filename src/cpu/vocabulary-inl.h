// The definitions' vocabulary for Highway vectors (src/definitions/README.md), and what else the
// kernels compute with vectors. Abs, Sqrt and the operators are Highway's own.
#if defined(GNOMON_SRC_CPU_VOCABULARY_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_VOCABULARY_INL_H_
#undef GNOMON_SRC_CPU_VOCABULARY_INL_H_
#else
#define GNOMON_SRC_CPU_VOCABULARY_INL_H_
#endif

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using DI = hn::RebindToSigned<DF>;
using VF = hn::Vec<DF>;
using VI = hn::Vec<DI>;
constexpr size_t kLanes = HWY_LANES(float);

HWY_INLINE VF Splat(VF /*like*/, float value) { return hn::Set(DF(), value); }

template <class M>
HWY_INLINE VF Select(M mask, VF yes, VF no) {
  return hn::IfThenElse(mask, yes, no);
}

#if HWY_TARGET == HWY_SCALAR
// Highway's own drop NaN here, which the other targets pass through as the second operand.
HWY_INLINE VF Max(VF a, VF b) { return hn::IfThenElse(a > b, a, b); }
HWY_INLINE VF Min(VF a, VF b) { return hn::IfThenElse(a < b, a, b); }
#else
using hn::Max;
using hn::Min;
#endif

// 1/sqrt(a) for normal a > 0, within 3e-7 of the value.
HWY_INLINE VF Rsqrt(VF a) {
#if HWY_TARGET == HWY_SCALAR
  // Highway's estimate has too few bits here for one step.
  return Splat(a, 1.0f) / hn::Sqrt(a);
#else
  // One Newton step on the estimate.
  const VF estimate = hn::ApproximateReciprocalSqrt(a);
  const VF half = a * Splat(a, -0.5f);
  return estimate * hn::MulAdd(half * estimate, estimate, Splat(a, 1.5f));
#endif
}

// 2^a for a <= 128, relative error 1e-7; exactly 0 below -126.5. NaN gives NaN.
HWY_INLINE VF Exp2(VF a) {
  const DF d;
  const DI di;
  a = Max(hn::Set(d, -127.0f), a);
  // Adding 1.5 * 2^23 rounds to an integer in the low bits; 127 more makes it the biased exponent.
  const VF magic = hn::Set(d, 12583039.0f);
  const VF shifted = a + magic;
  const VF r = a - (shifted - magic);
  const VF scale = hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(di, shifted)));
  // Minimax polynomial on [-1/2, 1/2].
  VF p = hn::Set(d, 0.00132669704f);
  p = hn::MulAdd(p, r, hn::Set(d, 0.00967545975f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.0555074262f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.240221218f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.693146949f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.00000007f));
  return p * scale;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
