// The dropout hash (base/dropout.h) for vectors of columns.
#if defined(GNOMON_SRC_CPU_DROPOUT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_DROPOUT_INL_H_
#undef GNOMON_SRC_CPU_DROPOUT_INL_H_
#else
#define GNOMON_SRC_CPU_DROPOUT_INL_H_
#endif

#include "base/dropout.h"
#include "cpu/vocabulary-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {

// Multiplies weights by the dropout mask.
class Dropper {
 public:
  HWY_INLINE Dropper(const Dropout& dropout, int64_t b, int64_t h, int64_t i)
      : row_(HashRow(dropout.seed, b, h, i)),
        scale_(static_cast<Real>(DropoutScale(dropout))),
        threshold_(DropoutThreshold(dropout)) {}

  HWY_INLINE VF Drop(int64_t column, VF weights) const {
    const DF d;
    const hn::Rebind<uint32_t, DF> du;
    const auto first = hn::Set(du, kDropoutFirst);
    auto x = hn::Iota(du, static_cast<uint32_t>(column)) + hn::Set(du, row_.first);
    x = hn::Xor(x, hn::ShiftRight<16>(x)) * first;
    x = (hn::Xor(x, hn::ShiftRight<15>(x)) + hn::Set(du, row_.second)) *
        hn::Set(du, kDropoutSecond);
    x = hn::Xor(x, hn::ShiftRight<16>(x)) * first;
    x = hn::Xor(x, hn::ShiftRight<15>(x));
#ifdef GNOMON_DOUBLE
    const auto hash = hn::PromoteTo(DU(), x);
#else
    const auto hash = x;
#endif
    const auto dropped = hn::RebindMask(d, hn::Lt(hash, hn::Set(DU(), threshold_)));
    return hn::IfThenZeroElse(dropped, weights * hn::Set(d, scale_));
  }

 private:
  DropoutRow row_;
  Real scale_;
  uint32_t threshold_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
