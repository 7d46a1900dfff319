// Dropout's hash (base/dropout.h) for vectors of columns.
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
namespace HWY_NAMESPACE {

// Multiplies the weights of columns, from a first one on, by dropout's mask.
class Dropper {
 public:
  HWY_INLINE Dropper(const Dropout& dropout, int64_t b, int64_t h, int64_t i)
      : row_(HashRow(dropout.seed, b, h, i)),
        scale_(static_cast<float>(DropoutScale(dropout))),
        threshold_(DropoutThreshold(dropout)) {}

  HWY_INLINE VF Drop(int64_t column, VF weights) const {
    const DF d;
    const DU du;
    const auto first = hn::Set(du, kDropoutFirst);
    auto x = hn::Iota(du, static_cast<uint32_t>(column)) + hn::Set(du, row_.first);
    x = hn::Xor(x, hn::ShiftRight<16>(x)) * first;
    x = (hn::Xor(x, hn::ShiftRight<15>(x)) + hn::Set(du, row_.second)) *
        hn::Set(du, kDropoutSecond);
    x = hn::Xor(x, hn::ShiftRight<16>(x)) * first;
    x = hn::Xor(x, hn::ShiftRight<15>(x));
    const auto dropped = hn::RebindMask(d, hn::Lt(x, hn::Set(du, threshold_)));
    return hn::IfThenZeroElse(dropped, weights * hn::Set(d, scale_));
  }

 private:
  DropoutRow row_;
  float scale_;
  uint32_t threshold_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
