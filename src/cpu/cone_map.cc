// Heights are vectorised over tokens; the other columns are vectorised within a token. The last
// vector of columns overlaps the previous one.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/cone_map.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// Must follow foreach_target.h:
#include <algorithm>
#include <cmath>

#include "cpu/cone_map.h"
#include "cpu/packing-inl.h"
#include "cpu/vocabulary-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace HWY_NAMESPACE {

using hn::Abs;
using hn::Sqrt;

// Doubles are processed as scalars, with the standard library.
HWY_INLINE double Splat(double /*like*/, double value) { return value; }
HWY_INLINE double Abs(double a) { return std::fabs(a); }
HWY_INLINE double Sqrt(double a) { return std::sqrt(a); }
HWY_INLINE double Exp(double a) { return std::exp(a); }
HWY_INLINE double Select(bool mask, double yes, double no) { return mask ? yes : no; }

namespace {

HWY_INLINE VF Number(VF /*like*/, double value) { return hn::Set(DF(), static_cast<float>(value)); }
HWY_INLINE double Number(double /*like*/, double value) { return value; }
HWY_INLINE VF Get(const float* from) { return hn::Load(DF(), from); }
HWY_INLINE double Get(const double* from) { return *from; }
HWY_INLINE void Put(VF a, float* to) { hn::Store(a, DF(), to); }
HWY_INLINE void Put(double a, double* to) { *to = a; }
template <class T>
constexpr int64_t kHeightsAtOnce = sizeof(T) == sizeof(float) ? kLaneCount : 1;

// The number of tokens whose heights are computed together.
constexpr int64_t kTokens = 64;
static_assert(kTokens % kLaneCount == 0);

using Function = ConeMap::Function;

#include "base/cone_heights-inl.h"

// The HeightValues of kTokens tokens.
template <class T>
struct TokenValues {
  HWY_ALIGN T m[kTokens];
  HWY_ALIGN T dm[kTokens];
  HWY_ALIGN T scalar[ConeMap::kMostScalars][kTokens];
  HWY_ALIGN T d_scalar[ConeMap::kMostScalars][kTokens];
};

template <Function kFunction, bool kAsIs, class T>
HWY_INLINE void MapValuesOf(const ConeMap& map, const T* z, int64_t count, TokenValues<T>& values) {
  using V = decltype(Get(z));
  constexpr bool kUmbral = kFunction == Function::kUmbral;
  const V number = Number(Get(z), kUmbral ? 1 / std::sinh(map.r) : map.r);
  const V most = Number(Get(z), map.farthest);
  for (int64_t n = 0; n < count; n += kHeightsAtOnce<T>) {
    // All fields are set below.
    // NOLINTNEXTLINE(clang-analyzer-optin.cplusplus.UninitializedObject)
    HeightValues<V> of;
    if constexpr (kUmbral) {
      UmbralValues<kAsIs>(number, most, Get(z + n), of);
    } else {
      PenumbralValues<kAsIs>(number, Get(z + n), of);
    }
    Put(of.m, values.m + n);
    Put(of.dm, values.dm + n);
    for (int s = 0; s < (kFunction == Function::kPenumbral ? 2 : 1); ++s) {
      Put(of.scalar[s], values.scalar[s] + n);
      Put(of.d_scalar[s], values.d_scalar[s] + n);
    }
  }
}

template <class T>
void FindValues(const ConeMap& map, const T* z, int64_t count, TokenValues<T>& values) {
  switch (map.function) {
    case Function::kUmbral:
      return map.as_is ? MapValuesOf<Function::kUmbral, true>(map, z, count, values)
                       : MapValuesOf<Function::kUmbral, false>(map, z, count, values);
    case Function::kPenumbral:
      return map.as_is ? MapValuesOf<Function::kPenumbral, true>(map, z, count, values)
                       : MapValuesOf<Function::kPenumbral, false>(map, z, count, values);
  }
}

// Calls body(n, token n, values, index of token n in `values`) for tokens [begin, end).
template <class T, class Body>
HWY_INLINE void ForTokens(const MappedCones<T>& cones, int64_t begin, int64_t end,
                          const Body& body) {
  TokenValues<T> values;
  HWY_ALIGN T z[kTokens] = {};
  const T* tokens[kTokens];
  int64_t i = begin % cones.rows;
  int64_t h = begin / cones.rows % cones.heads;
  int64_t b = begin / cones.rows / cones.heads;
  for (int64_t first = begin; first < end; first += kTokens) {
    const int64_t count = std::min(kTokens, end - first);
    for (int64_t n = 0; n < count; ++n) {
      tokens[n] = cones.tokens.row(b, h, i);
      z[n] = tokens[n][cones.columns];
      if (++i < cones.rows) continue;
      i = 0;
      if (++h < cones.heads) continue;
      h = 0;
      ++b;
    }
    FindValues(cones.map, z, count, values);
    for (int64_t n = 0; n < count; ++n) body(first + n, tokens[n], values, n);
  }
}

template <class T>
HWY_INLINE void Forward(const MappedCones<T>& cones, int64_t begin, int64_t end) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t columns = cones.columns;
  ForTokens(cones, begin, end,
            [&](int64_t n, const T* token, const TokenValues<T>& values, int64_t index) HWY_ATTR {
              T* const x = cones.x + n * cones.width;
              const auto m = hn::Set(d, values.m[index]);
              int64_t e = 0;
              for (; e + lanes <= columns; e += lanes) {
                hn::StoreU(m * hn::LoadU(d, token + e), d, x + e);
              }
              if (e < columns && e > 0) {
                e = columns - lanes;
                hn::StoreU(m * hn::LoadU(d, token + e), d, x + e);
                e = columns;
              }
              for (; e < columns; ++e) x[e] = values.m[index] * token[e];
              std::fill(x + columns, x + cones.width, T(0));
              for (int s = 0; s < cones.map.scalars(); ++s) {
                cones.scalars[s * cones.count() + n] = values.scalar[s][index];
              }
            });
}

template <class T>
HWY_INLINE void Backward(const MappedCones<T>& cones, int64_t begin, int64_t end) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t columns = cones.columns;
  ForTokens(cones, begin, end,
            [&](int64_t n, const T* token, const TokenValues<T>& values, int64_t index) HWY_ATTR {
              T* const d_token = cones.d_tokens + n * (columns + 1);
              T d_z = 0;
              if (cones.d_x == nullptr) {
                std::fill_n(d_token, columns, T(0));
              } else {
                const T* const d_x = cones.d_x + n * cones.width;
                const auto m = hn::Set(d, values.m[index]);
                auto product = hn::Zero(d);
                int64_t e = 0;
                for (; e + lanes <= columns; e += lanes) {
                  const auto slope = hn::LoadU(d, d_x + e);
                  hn::StoreU(m * slope, d, d_token + e);
                  product = hn::MulAdd(slope, hn::LoadU(d, token + e), product);
                }
                if (e < columns && e > 0) {
                  const auto known = hn::FirstN(d, Size(e - (columns - lanes)));
                  e = columns - lanes;
                  const auto slope = hn::LoadU(d, d_x + e);
                  hn::StoreU(m * slope, d, d_token + e);
                  const auto all = hn::MulAdd(slope, hn::LoadU(d, token + e), product);
                  product = hn::IfThenElse(known, product, all);
                  e = columns;
                }
                T sum = hn::GetLane(hn::SumOfLanes(d, product));
                for (; e < columns; ++e) {
                  d_token[e] = values.m[index] * d_x[e];
                  sum += d_x[e] * token[e];
                }
                d_z = values.dm[index] * sum;
              }
              for (int s = 0; cones.d_scalars != nullptr && s < cones.map.scalars(); ++s) {
                d_z += values.d_scalar[s][index] * cones.d_scalars[s * cones.count() + n];
              }
              d_token[columns] = d_z;
            });
}

template <class T>
HWY_INLINE void Run(const MappedCones<T>& cones, int64_t begin, int64_t end) {
  cones.d_tokens == nullptr ? Forward(cones, begin, end) : Backward(cones, begin, end);
}

void OfFloats(const MappedCones<float>& cones, int64_t begin, int64_t end) {
  Run(cones, begin, end);
}
void OfDoubles(const MappedCones<double>& cones, int64_t begin, int64_t end) {
  Run(cones, begin, end);
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gnomon {
namespace {
HWY_EXPORT(OfFloats);
HWY_EXPORT(OfDoubles);
}  // namespace

void ConeMapKernel(const MappedCones<float>& cones, int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(OfFloats)(cones, begin, end);
}
void ConeMapKernel(const MappedCones<double>& cones, int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(OfDoubles)(cones, begin, end);
}

}  // namespace gnomon
#endif
