#include "core/engine.h"

#include <string>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/engine.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// Must follow foreach_target.h:
#include "cpu/backward-inl.h"
#include "cpu/forward-inl.h"
#include "cpu/graph_backward-inl.h"
#include "cpu/graph_forward-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace HWY_NAMESPACE {
namespace {

void CheckTarget(const PairTable& table) {
  if (table.target == HWY_TARGET) return;
  throw Error(std::string("attention: the pair function was compiled for ") +
              hwy::TargetName(table.target) + ", but the current instruction set is " +
              hwy::TargetName(HWY_TARGET) +
              "; compile it for the current one, or set GNOMON_TARGET to " +
              hwy::TargetName(table.target));
}

void Forward(const PairTable& table, const AttentionInput<float>& in,
             const AttentionOutput<float>& out, const Executor& executor) {
  CheckTarget(table);
  ForwardPass<ByTable>(table, in, out, executor).Run();
}

void Backward(const PairTable& table, const AttentionInput<float>& in,
              const AttentionBackwardInput<float>& saved, const AttentionGradient<float>& gradient,
              const Executor& executor) {
  CheckTarget(table);
  BackwardPass<ByTable>(table, in, saved, gradient, executor).Run();
}

void GraphForwardKernel(const PairTable& table, const GraphInput<float>& in,
                        const GraphOutput<float>& out, const Executor& executor) {
  CheckTarget(table);
  GraphForwardPass(table, in, out, executor).Run();
}

void GraphBackwardKernel(const PairTable& table, const GraphInput<float>& in,
                         const GraphBackwardInput<float>& saved,
                         const GraphGradient<float>& gradient, const Executor& executor) {
  CheckTarget(table);
  GraphBackwardPass(table, in, saved, gradient, executor).Run();
}

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
HWY_EXPORT(GraphForwardKernel);
HWY_EXPORT(GraphBackwardKernel);

}  // namespace

void EngineForward(const PairTable& table, const AttentionInput<float>& in,
                   const AttentionOutput<float>& out, const Executor& executor) {
  HWY_DYNAMIC_DISPATCH(Forward)(table, in, out, executor);
}

void EngineBackward(const PairTable& table, const AttentionInput<float>& in,
                    const AttentionBackwardInput<float>& saved,
                    const AttentionGradient<float>& gradient, const Executor& executor) {
  HWY_DYNAMIC_DISPATCH(Backward)(table, in, saved, gradient, executor);
}

void EngineGraphForward(const PairTable& table, const GraphInput<float>& in,
                        const GraphOutput<float>& out, const Executor& executor) {
  HWY_DYNAMIC_DISPATCH(GraphForwardKernel)(table, in, out, executor);
}

void EngineGraphBackward(const PairTable& table, const GraphInput<float>& in,
                         const GraphBackwardInput<float>& saved,
                         const GraphGradient<float>& gradient, const Executor& executor) {
  HWY_DYNAMIC_DISPATCH(GraphBackwardKernel)(table, in, saved, gradient, executor);
}

}  // namespace gnomon
#endif
