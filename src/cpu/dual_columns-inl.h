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

// Computes `to += factor * from` for dual numbers. Skips the values unless kValues.
template <bool kValues, class Columns>
HWY_INLINE void AddScaledDual(DualNumber factor, DualNumbers from, Columns n, const DualRow& to) {
  ForVectors(n, [=](auto d, int64_t k) HWY_ATTR {
    const auto f = hn::Set(d, factor.value);
    const auto df = hn::Set(d, factor.tangent);
    const auto x = hn::LoadU(d, from.values + k);
    const auto dx = hn::LoadU(d, from.tangents + k);
    if constexpr (kValues) {
      hn::StoreU(hn::MulAdd(f, x, hn::LoadU(d, to.values + k)), d, to.values + k);
    }
    hn::StoreU(hn::MulAdd(df, x, hn::MulAdd(f, dx, hn::LoadU(d, to.tangents + k))), d,
               to.tangents + k);
  });
}

// Computes `to += factor * (x - y)` in the same way.
template <bool kValues, class Columns>
HWY_INLINE void AddScaledDualDifference(DualNumber factor, DualNumbers x, DualNumbers y, Columns n,
                                        const DualRow& to) {
  ForVectors(n, [=](auto d, int64_t k) HWY_ATTR {
    const auto f = hn::Set(d, factor.value);
    const auto df = hn::Set(d, factor.tangent);
    const auto z = hn::LoadU(d, x.values + k) - hn::LoadU(d, y.values + k);
    const auto dz = hn::LoadU(d, x.tangents + k) - hn::LoadU(d, y.tangents + k);
    if constexpr (kValues) {
      hn::StoreU(hn::MulAdd(f, z, hn::LoadU(d, to.values + k)), d, to.values + k);
    }
    hn::StoreU(hn::MulAdd(df, z, hn::MulAdd(f, dz, hn::LoadU(d, to.tangents + k))), d,
               to.tangents + k);
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
