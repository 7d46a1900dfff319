#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/rotation.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// Must follow foreach_target.h:
#include <algorithm>

#include "cpu/packing-inl.h"
#include "cpu/rotation.h"
#include "cpu/vocabulary-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace HWY_NAMESPACE {
namespace {

// Every product is rounded separately, so that vectors and single pairs give the same numbers.
template <class T>
HWY_INLINE void TurnPair(T a, T b, T c, T s, T* to_a, T* to_b) {
  *to_a = a * c - b * s;
  *to_b = b * c + a * s;
}

// Rotates the column pairs (n, n + count).
template <bool kBack>
HWY_INLINE void TurnHalves(const float* x, const float* HWY_RESTRICT cosines,
                           const float* HWY_RESTRICT sines, int64_t count, float* to) {
  const DF d;
  int64_t n = 0;
  for (; n + kLaneCount <= count; n += kLaneCount) {
    const VF a = hn::LoadU(d, x + n);
    const VF b = hn::LoadU(d, x + count + n);
    const VF c = hn::LoadU(d, cosines + n);
    const VF s = kBack ? hn::Neg(hn::LoadU(d, sines + n)) : hn::LoadU(d, sines + n);
    hn::StoreU(a * c - b * s, d, to + n);
    hn::StoreU(b * c + a * s, d, to + count + n);
  }
  for (; n < count; ++n) {
    TurnPair(x[n], x[count + n], cosines[n], kBack ? -sines[n] : sines[n], to + n, to + count + n);
  }
}

// Rotates the column pairs (2 n, 2 n + 1).
template <bool kBack>
HWY_INLINE void TurnNeighbours(const float* x, const float* HWY_RESTRICT cosines,
                               const float* HWY_RESTRICT sines, int64_t count, float* to) {
  const DF d;
  int64_t n = 0;
#if HWY_TARGET != HWY_SCALAR
  for (; n + kLaneCount <= count; n += kLaneCount) {
    VF a;
    VF b;
    hn::LoadInterleaved2(d, x + 2 * n, a, b);
    const VF c = hn::LoadU(d, cosines + n);
    const VF s = kBack ? hn::Neg(hn::LoadU(d, sines + n)) : hn::LoadU(d, sines + n);
    hn::StoreInterleaved2(a * c - b * s, b * c + a * s, d, to + 2 * n);
  }
#endif
  for (; n < count; ++n) {
    TurnPair(x[2 * n], x[2 * n + 1], cosines[n], kBack ? -sines[n] : sines[n], to + 2 * n,
             to + 2 * n + 1);
  }
}

template <bool kBack>
HWY_INLINE void TurnHalves(const double* x, const double* cosines, const double* sines,
                           int64_t count, double* to) {
  for (int64_t n = 0; n < count; ++n) {
    TurnPair(x[n], x[count + n], cosines[n], kBack ? -sines[n] : sines[n], to + n, to + count + n);
  }
}

template <bool kBack>
HWY_INLINE void TurnNeighbours(const double* x, const double* cosines, const double* sines,
                               int64_t count, double* to) {
  for (int64_t n = 0; n < count; ++n) {
    TurnPair(x[2 * n], x[2 * n + 1], cosines[n], kBack ? -sines[n] : sines[n], to + 2 * n,
             to + 2 * n + 1);
  }
}

template <bool kBack, class T>
HWY_INLINE void TurnTokens(const PairRotation<T>& rotation, int64_t begin, int64_t end) {
  const int64_t turned = 2 * rotation.pairs;
  for (int64_t token = begin; token < end; ++token) {
    const int64_t i = token % rotation.rows;
    const int64_t h = token / rotation.rows % rotation.heads;
    const int64_t b = token / rotation.rows / rotation.heads;
    const T* x = rotation.tokens.row(b, h, i);
    const T* cosines = rotation.cosines.row(b, h, i);
    const T* sines = rotation.sines.row(b, h, i);
    T* to = rotation.turned.row(b, h, i);
    if (rotation.block == 0) {
      TurnNeighbours<kBack>(x, cosines, sines, rotation.pairs, to);
    } else {
      const int64_t count = rotation.block / 2;
      for (int64_t c = 0; c < turned; c += rotation.block) {
        TurnHalves<kBack>(x + c, cosines + c / 2, sines + c / 2, count, to + c);
      }
    }
    if (to != x) std::copy_n(x + turned, rotation.columns - turned, to + turned);
  }
}

void TurnFloats(const PairRotation<float>& rotation, int64_t begin, int64_t end) {
  return rotation.back ? TurnTokens<true>(rotation, begin, end)
                       : TurnTokens<false>(rotation, begin, end);
}

void TurnDoubles(const PairRotation<double>& rotation, int64_t begin, int64_t end) {
  return rotation.back ? TurnTokens<true>(rotation, begin, end)
                       : TurnTokens<false>(rotation, begin, end);
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gnomon {
namespace {
HWY_EXPORT(TurnFloats);
HWY_EXPORT(TurnDoubles);
}  // namespace

void PairRotationKernel(const PairRotation<float>& rotation, int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(TurnFloats)(rotation, begin, end);
}

void PairRotationKernel(const PairRotation<double>& rotation, int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(TurnDoubles)(rotation, begin, end);
}

}  // namespace gnomon
#endif
