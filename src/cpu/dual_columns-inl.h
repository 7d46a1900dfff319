// Sums and products over the columns of tokens, with their tangents.
#if defined(GNOMON_SRC_CPU_DUAL_COLUMNS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_DUAL_COLUMNS_INL_H_
#undef GNOMON_SRC_CPU_DUAL_COLUMNS_INL_H_
#else
#define GNOMON_SRC_CPU_DUAL_COLUMNS_INL_H_
#endif

#include <cstdint>

#include "cpu/columns-inl.h"
#include "cpu/dual_scores-inl.h"
#include "cpu/vocabulary-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {

// A row and its tangent.
struct DualNumbers {
  const Real* values;
  const Real* tangents;
};

// The inner product of two rows, or the squared norm of their difference.
template <bool kDistance, size_t kCount = kLanes>
HWY_INLINE DualNumber DualSumOfProducts(DualNumbers x, DualNumbers y, int64_t n) {
  const hn::CappedTag<Real, kCount> d;
  constexpr auto kStep = static_cast<int64_t>(kCount);
  DualNumber total;
  int64_t k = 0;
  if (n >= kStep) {
    auto sum = hn::Zero(d);
    auto tangent = hn::Zero(d);
    for (; k + kStep <= n; k += kStep) {
      const auto a = hn::LoadU(d, x.values + k);
      const auto da = hn::LoadU(d, x.tangents + k);
      const auto b = hn::LoadU(d, y.values + k);
      const auto db = hn::LoadU(d, y.tangents + k);
      if constexpr (kDistance) {
        const auto difference = a - b;
        sum = hn::MulAdd(difference, difference, sum);
        tangent = hn::MulAdd(difference + difference, da - db, tangent);
      } else {
        sum = hn::MulAdd(a, b, sum);
        tangent = hn::MulAdd(da, b, hn::MulAdd(a, db, tangent));
      }
    }
    total.value = hn::GetLane(hn::SumOfLanes(d, sum));
    total.tangent = hn::GetLane(hn::SumOfLanes(d, tangent));
  }
  if constexpr (kCount > 1) {
    if (k < n) {
      const DualNumber rest = DualSumOfProducts<kDistance, kCount / 2>(
          {x.values + k, x.tangents + k}, {y.values + k, y.tangents + k}, n - k);
      total.value += rest.value;
      total.tangent += rest.tangent;
    }
  }
  return total;
}

// The functions below are not inlined, because a copy for each call would enlarge the library.

template <bool kDistance>
HWY_NOINLINE DualNumber DualProduct(DualNumbers x, DualNumbers y, int64_t n) {
  return DualSumOfProducts<kDistance>(x, y, n);
}

// Computes `to += factor * from` for dual numbers; to.values may be null.
inline HWY_NOINLINE void AddScaledDual(DualNumber factor, DualNumbers from, int64_t n,
                                       const DualRow& to) {
  ForVectors(n, [=](auto d, int64_t k) HWY_ATTR {
    const auto f = hn::Set(d, factor.value);
    const auto x = hn::LoadU(d, from.values + k);
    const auto sum = hn::MulAdd(f, hn::LoadU(d, from.tangents + k), hn::LoadU(d, to.tangents + k));
    hn::StoreU(hn::MulAdd(hn::Set(d, factor.tangent), x, sum), d, to.tangents + k);
    if (to.values == nullptr) return;
    hn::StoreU(hn::MulAdd(f, x, hn::LoadU(d, to.values + k)), d, to.values + k);
  });
}

// Computes `to += factor * (x - y)` in the same way.
inline HWY_NOINLINE void AddScaledDualDifference(DualNumber factor, DualNumbers x, DualNumbers y,
                                                 int64_t n, const DualRow& to) {
  ForVectors(n, [=](auto d, int64_t k) HWY_ATTR {
    const auto f = hn::Set(d, factor.value);
    const auto z = hn::LoadU(d, x.values + k) - hn::LoadU(d, y.values + k);
    const auto dz = hn::LoadU(d, x.tangents + k) - hn::LoadU(d, y.tangents + k);
    const auto sum = hn::MulAdd(f, dz, hn::LoadU(d, to.tangents + k));
    hn::StoreU(hn::MulAdd(hn::Set(d, factor.tangent), z, sum), d, to.tangents + k);
    if (to.values == nullptr) return;
    hn::StoreU(hn::MulAdd(f, z, hn::LoadU(d, to.values + k)), d, to.values + k);
  });
}

// Like ForVectors, with fewer vector lengths, for long bodies.
template <size_t kCount = kLanes, class Body>
HWY_INLINE void ForLanes(int64_t n, const Body& body, int64_t k = 0) {
  const hn::CappedTag<Real, kCount> d;
  for (; k + static_cast<int64_t>(kCount) <= n; k += static_cast<int64_t>(kCount)) body(d, k);
  if constexpr (kCount > 1) {
    if (k < n) ForLanes<(kCount > 4 ? 4 : 1)>(n, body, k);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
