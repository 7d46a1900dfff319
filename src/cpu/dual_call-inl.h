// What the passes for derivatives of attention and of graph attention share: the parts of a call,
// scratch memory, and sums of dual numbers.
#if defined(GNOMON_SRC_CPU_DUAL_CALL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_DUAL_CALL_INL_H_
#undef GNOMON_SRC_CPU_DUAL_CALL_INL_H_
#else
#define GNOMON_SRC_CPU_DUAL_CALL_INL_H_
#endif

#include <cmath>

#include "cpu/dual_scores-inl.h"
#include "cpu/dual_table.h"
#include "cpu/packing-inl.h"
#include "cpu/rows-inl.h"
#include "cpu/vocabulary-inl.h"
#include "cpu/workspace.h"
#include "gnomon/attention.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {

// The pair function of a call, its inputs with their tangents, and the results that it needs.
template <class Derivatives>
struct DualCall {
  explicit DualCall(const Derivatives& call)
      : of(call),
        function(call.function),
        in(call.input),
        tangent(call.tangent),
        n(call.input.shape) {}

  bool has_product() const { return function == nullptr || function->pairs->has_product(); }
  bool is_distance() const { return function != nullptr && function->pairs->is_distance(); }
  int row_scalars() const { return function == nullptr ? 0 : function->pairs->row_scalars; }
  int column_scalars() const { return function == nullptr ? 0 : function->pairs->column_scalars; }
  int head_scalars() const { return function == nullptr ? 0 : function->pairs->head_scalars; }

  const auto& Gradient(bool is_tangent) const {
    return is_tangent ? of.gradient_tangent : of.gradient;
  }
  // Whether one of these gradients, or the tangent of one, is needed.
  template <class... Member>
  bool Wants(Member... members) const {
    return ((Exists(of.gradient.*members) || Exists(of.gradient_tangent.*members)) || ...);
  }
  // The gradient of the lse of a row.
  DualNumber DLse(int64_t row) const {
    return {of.d_lse != nullptr ? of.d_lse[row] : 0.0f,
            of.d_lse_tangent != nullptr ? of.d_lse_tangent[row] : 0.0f};
  }

  // Writes the lse, its tangent and the statistics of one of `rows` rows. `top` is the key of the
  // largest score, or -1.
  void WriteStatistics(int64_t rows, int64_t row, Real largest, const RowTotals& totals,
                       int64_t top) const {
    if (of.lse_tangent != nullptr) of.lse_tangent[row] = totals.mean;
    const bool is_empty = totals.weight == 0.0f;
    if (of.output.lse != nullptr) {
      of.output.lse[row] =
          is_empty ? -kInfinity : (largest + std::log(totals.weight) * kLog2E) * kLn2;
    }
    if (of.output.statistics == nullptr) return;
    of.output.statistics[row] = is_empty ? -kInfinity : largest;
    of.output.statistics[rows + row] = totals.weight;
    of.output.statistics[2 * rows + row] = TopKey(totals.weight, top);
  }

  const Derivatives& of;
  const DualTableOf<Real>* function;
  const decltype(Derivatives::input)& in;
  const decltype(Derivatives::input)& tangent;
  const decltype(Derivatives::input.shape)& n;

 private:
  static bool Exists(const View<Real>& view) { return view.data != nullptr; }
  static bool Exists(const Bias<Real>& bias) { return bias.table != nullptr; }
  static bool Exists(const Real* numbers) { return numbers != nullptr; }
};

// Divides memory into aligned parts. Without memory, it only adds up their sizes.
class ScratchParts {
 public:
  explicit ScratchParts(Real* memory = nullptr) : memory_(memory) {}

  Real* Take(int64_t size) {
    Real* const part = memory_ == nullptr ? nullptr : memory_ + size_;
    size_ += RoundUp(size, kWidth);
    return part;
  }
  int64_t size() const { return size_; }

 private:
  Real* memory_;
  int64_t size_ = 0;
};

// A dual number in each lane.
template <class V>
struct DualLanes {
  V value;
  V tangent;
  // GCC generates implicit constructors outside the region that selects the instruction set.
  HWY_INLINE DualLanes() {}
  HWY_INLINE DualLanes(V x, V dx) : value(x), tangent(dx) {}
  // Adds the product of x and y.
  HWY_INLINE void Add(const DualLanes& x, const DualLanes& y) {
    value = hn::MulAdd(x.value, y.value, value);
    tangent = hn::MulAdd(x.tangent, y.value, hn::MulAdd(x.value, y.tangent, tangent));
  }
};
template <class V>
HWY_INLINE DualLanes<V> operator+(const DualLanes<V>& x, const DualLanes<V>& y) {
  return {x.value + y.value, x.tangent + y.tangent};
}
template <class V>
HWY_INLINE DualLanes<V> operator-(const DualLanes<V>& x, const DualLanes<V>& y) {
  return {x.value - y.value, x.tangent - y.tangent};
}
template <class V>
HWY_INLINE DualLanes<V> operator*(const DualLanes<V>& x, const DualLanes<V>& y) {
  return {x.value * y.value, hn::MulAdd(x.tangent, y.value, x.value * y.tangent)};
}
template <class D>
HWY_INLINE DualLanes<hn::Vec<D>> LoadDual(D d, const DualRow& from) {
  return {hn::LoadU(d, from.values), hn::LoadU(d, from.tangents)};
}
template <class D>
HWY_INLINE void StoreDual(const DualLanes<hn::Vec<D>>& from, D d, const DualRow& to) {
  hn::StoreU(from.value, d, to.values);
  hn::StoreU(from.tangent, d, to.tangents);
}
// Adds the product of x and y to a sum in memory.
template <class D>
HWY_INLINE void AddProduct(D d, const DualLanes<hn::Vec<D>>& x, const DualLanes<hn::Vec<D>>& y,
                           const DualRow& to) {
  auto sum = LoadDual(d, to);
  sum.Add(x, y);
  StoreDual(sum, d, to);
}

// Computes the tangents of f for the vector of pairs at index q, from the slopes of f.
template <class Derivatives>
HWY_INLINE VF ValueTangent(const DualCall<Derivatives>& call, const SlopeArrays& slopes,
                           const PairArrays& tangents, int64_t q) {
  const DF d;
  VF sum = hn::Zero(d);
  const auto add = [&](const Real* of_slopes, const Real* of_tangents, int scalars) HWY_ATTR {
    for (int s = 0; s < scalars; ++s) {
      const int64_t at = s * tangents.stride + q;
      sum = hn::MulAdd(hn::Load(d, of_slopes + at), hn::LoadU(d, of_tangents + at), sum);
    }
  };
  add(slopes.g, tangents.g, call.has_product() ? 1 : 0);
  add(slopes.a, tangents.a, call.row_scalars());
  add(slopes.b, tangents.b, call.column_scalars());
  add(slopes.t, tangents.t, call.head_scalars());
  return sum;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
