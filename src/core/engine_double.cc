#include "cpu/double.h"
// Must follow double.h:
#include "core/engine.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/engine_double.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// Must follow foreach_target.h:
#include "cpu/backward-inl.h"
#include "cpu/forward-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace HWY_NAMESPACE {
namespace {

#if GNOMON_HAS_NO_KERNELS

// There are no tables with which these could be called.
void Forward(const PairTableOf<double>&, const AttentionInput<double>&,
             const AttentionOutput<double>&, const Executor&) {}
void Backward(const PairTableOf<double>&, const AttentionInput<double>&,
              const AttentionBackwardInput<double>&, const AttentionGradient<double>&,
              const Executor&) {}

#else

void Forward(const PairTableOf<double>& table, const AttentionInput<double>& in,
             const AttentionOutput<double>& out, const Executor& executor) {
  GNOMON_KERNELS::ForwardPass<GNOMON_KERNELS::ByTable>(table, in, out, executor).Run();
}

void Backward(const PairTableOf<double>& table, const AttentionInput<double>& in,
              const AttentionBackwardInput<double>& saved,
              const AttentionGradient<double>& gradient, const Executor& executor) {
  GNOMON_KERNELS::BackwardPass<GNOMON_KERNELS::ByTable>(table, in, saved, gradient, executor).Run();
}

#endif

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gnomon {
namespace {

HWY_EXPORT(Forward);
HWY_EXPORT(Backward);

}  // namespace

void EngineForward(const PairTableOf<double>& table, const AttentionInput<double>& in,
                   const AttentionOutput<double>& out, const Executor& executor) {
  HWY_DYNAMIC_DISPATCH(Forward)(table, in, out, executor);
}

void EngineBackward(const PairTableOf<double>& table, const AttentionInput<double>& in,
                    const AttentionBackwardInput<double>& saved,
                    const AttentionGradient<double>& gradient, const Executor& executor) {
  HWY_DYNAMIC_DISPATCH(Backward)(table, in, saved, gradient, executor);
}

}  // namespace gnomon
#endif
