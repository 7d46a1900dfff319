// Vectorised sums and products over the columns of tokens, for one head or for all heads of a node.
#if defined(GNOMON_SRC_CPU_COLUMNS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_COLUMNS_INL_H_
#undef GNOMON_SRC_CPU_COLUMNS_INL_H_
#else
#define GNOMON_SRC_CPU_COLUMNS_INL_H_
#endif

#include <cstdint>
#include <type_traits>

#include "cpu/vocabulary-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {

// Calls body(tag, first) for the vectors that cover numbers [k, n); `first` is the index of the
// first number in the vector. The last vectors are shorter, so that nothing past n is accessed:
// with full vectors of 16 lanes, a row of 8 numbers is a single vector of 8 lanes.
template <size_t kCount = kLanes, class Body>
HWY_INLINE void ForVectors(int64_t n, const Body& body, int64_t k = 0) {
  const hn::CappedTag<Real, kCount> d;
  for (; k + static_cast<int64_t>(kCount) <= n; k += static_cast<int64_t>(kCount)) body(d, k);
  if constexpr (kCount > 1) {
    if (k < n) ForVectors<kCount / 2>(n, body, k);
  }
}

HWY_INLINE void CopyNumbers(const Real* from, int64_t n, Real* to) {
  ForVectors(n, [=](auto d, int64_t k) HWY_ATTR { hn::StoreU(hn::LoadU(d, from + k), d, to + k); });
}

// Computes `to += from`.
HWY_INLINE void AddNumbers(const Real* from, int64_t n, Real* to) {
  ForVectors(n, [=](auto d, int64_t k) HWY_ATTR {
    hn::StoreU(hn::LoadU(d, to + k) + hn::LoadU(d, from + k), d, to + k);
  });
}

// Computes `to += factor * from`.
HWY_INLINE void AddScaled(Real factor, const Real* from, int64_t n, Real* to) {
  ForVectors(n, [=](auto d, int64_t k) HWY_ATTR {
    hn::StoreU(hn::MulAdd(hn::Set(d, factor), hn::LoadU(d, from + k), hn::LoadU(d, to + k)), d,
               to + k);
  });
}

// Computes `to += factor * (x - y)`.
HWY_INLINE void AddScaledDifference(Real factor, const Real* x, const Real* y, int64_t n,
                                    Real* to) {
  ForVectors(n, [=](auto d, int64_t k) HWY_ATTR {
    const auto difference = hn::LoadU(d, x + k) - hn::LoadU(d, y + k);
    hn::StoreU(hn::MulAdd(hn::Set(d, factor), difference, hn::LoadU(d, to + k)), d, to + k);
  });
}

// The inner product of two rows, or the squared norm of their difference.
template <bool kDistance, size_t kCount = kLanes>
HWY_INLINE Real SumOfProducts(const Real* x, const Real* y, int64_t n) {
  const hn::CappedTag<Real, kCount> d;
  constexpr auto kStep = static_cast<int64_t>(kCount);
  Real total = 0;
  int64_t k = 0;
  if (n >= kStep) {
    auto sum = hn::Zero(d);
    for (; k + kStep <= n; k += kStep) {
      if constexpr (kDistance) {
        const auto difference = hn::LoadU(d, x + k) - hn::LoadU(d, y + k);
        sum = hn::MulAdd(difference, difference, sum);
      } else {
        sum = hn::MulAdd(hn::LoadU(d, x + k), hn::LoadU(d, y + k), sum);
      }
    }
    total = hn::GetLane(hn::SumOfLanes(d, sum));
  }
  if constexpr (kCount > 1) {
    if (k < n) total += SumOfProducts<kDistance, kCount / 2>(x + k, y + k, n - k);
  }
  return total;
}

// The increments of a pointer to rows, as it moves through the heads: `query` is added after each
// query head, and `key` after each group of query heads. Rows of query heads have key = 0, and rows
// of key heads have query = 0.
struct HeadSteps {
  int64_t query;
  int64_t key;
};
inline HeadSteps QuerySteps(int64_t step) { return {step, 0}; }
inline HeadSteps KeySteps(int64_t step) { return {0, step}; }

// Calls body(columns) with common column counts as compile-time constants, so that loops unroll.
template <class Body>
HWY_INLINE void WithColumns(int64_t columns, const Body& body) {
  switch (columns) {
    case 8:
      return body(std::integral_constant<int64_t, 8>());
    case 16:
      return body(std::integral_constant<int64_t, 16>());
    default:
      return body(columns);
  }
}

// Computes `to += factor * from` for every query head.
inline void AddScaledHeads(int64_t key_heads, int64_t group, const Real* factors, const Real* from,
                           HeadSteps from_steps, int64_t columns, Real* to, HeadSteps to_steps) {
  WithColumns(columns, [=](auto n) HWY_ATTR {
    const Real* factor = factors;
    const Real* source = from;
    Real* sum = to;
    for (int64_t key_head = 0; key_head < key_heads; ++key_head) {
      for (int64_t g = 0; g < group; ++g) {
        AddScaled(*factor++, source, n, sum);
        source += from_steps.query;
        sum += to_steps.query;
      }
      source += from_steps.key;
      sum += to_steps.key;
    }
  });
}

// Computes SumOfProducts for all query heads; x has one row per query head, and y has one row per
// key head.
template <bool kDistance>
inline void HeadProducts(int64_t key_heads, int64_t group, const Real* x, int64_t x_step,
                         const Real* y, int64_t y_step, int64_t columns, Real* products) {
  WithColumns(columns, [=](auto n) HWY_ATTR {
    const Real* query = x;
    const Real* key = y;
    Real* to = products;
    for (int64_t key_head = 0; key_head < key_heads; ++key_head, key += y_step) {
      for (int64_t g = 0; g < group; ++g, query += x_step) {
        *to++ = SumOfProducts<kDistance>(query, key, n);
      }
    }
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
