// The kernels of one definition for every instruction set. The including file defines
//   GNOMON_DEFINITION       the struct's name
//   GNOMON_DEFINITION_FILE  the file that has it
//   GNOMON_DEFINITION_NAME  the pair function's name
// and gets `const PairFunction& gnomon::PairFunctionOf<name>()`.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/kernel_template.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h:
#include "cpu/backward-inl.h"
#include "cpu/forward-inl.h"
#include "cpu/graph_backward-inl.h"
#include "cpu/graph_forward-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace HWY_NAMESPACE {
namespace {

#include GNOMON_DEFINITION_FILE

void Forward(const AttentionInput<float>& in, const AttentionOutput<float>& out,
             const Executor& executor) {
  ForwardPass<GNOMON_DEFINITION>(in, out, executor).Run();
}

void Backward(const AttentionInput<float>& in, const AttentionBackwardInput<float>& saved,
              const AttentionGradient<float>& gradient, const Executor& executor) {
  BackwardPass<GNOMON_DEFINITION>(in, saved, gradient, executor).Run();
}

void GraphForwardKernel(const GraphInput<float>& in, const GraphOutput<float>& out,
                        const Executor& executor) {
  GraphForwardPass<GNOMON_DEFINITION>(in, out, executor).Run();
}

void GraphBackwardKernel(const GraphInput<float>& in, const GraphBackwardInput<float>& saved,
                         const GraphGradient<float>& gradient, const Executor& executor) {
  GraphBackwardPass<GNOMON_DEFINITION>(in, saved, gradient, executor).Run();
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "core/counting.h"
#include "core/pair_function_name.h"
#include "reference/attention-inl.h"
#include "reference/graph-inl.h"
#include "reference/vocabulary.h"

namespace gnomon {
namespace reference {
namespace {

#include GNOMON_DEFINITION_FILE

double Value(double g, const double* a, const double* b, const double* t) {
  return GNOMON_DEFINITION::Value(g, a, b, t);
}

struct Range {
  double least;
  double most;
};

template <class Definition>
constexpr auto BoundsOf() -> decltype(PairFunction::bounds) {
  if constexpr (requires(Range g, const double* scalars, const Range* ranges) {
                  Definition::Bounds(g, scalars, ranges, scalars);
                }) {
    return [](const double* g, const double* a, const double* b, const double* t, double* f) {
      Range ranges[Definition::kColumnScalars + 1] = {};
      for (int s = 0; s < Definition::kColumnScalars; ++s) ranges[s] = {b[2 * s], b[2 * s + 1]};
      const Range range = Definition::Bounds(Range{g[0], g[1]}, a, ranges, t);
      f[0] = range.least;
      f[1] = range.most;
    };
  } else {
    return nullptr;
  }
}

}  // namespace
}  // namespace reference

namespace counting {
namespace {

#include GNOMON_DEFINITION_FILE

}  // namespace
}  // namespace counting

namespace {

HWY_EXPORT(Forward);
HWY_EXPORT(Backward);
HWY_EXPORT(GraphForwardKernel);
HWY_EXPORT(GraphBackwardKernel);

void DispatchForward(const AttentionInput<float>& in, const AttentionOutput<float>& out,
                     const Executor& executor) {
  HWY_DYNAMIC_DISPATCH(Forward)(in, out, executor);
}

void DispatchBackward(const AttentionInput<float>& in, const AttentionBackwardInput<float>& saved,
                      const AttentionGradient<float>& gradient, const Executor& executor) {
  HWY_DYNAMIC_DISPATCH(Backward)(in, saved, gradient, executor);
}

void DispatchGraphForward(const GraphInput<float>& in, const GraphOutput<float>& out,
                          const Executor& executor) {
  HWY_DYNAMIC_DISPATCH(GraphForwardKernel)(in, out, executor);
}

void DispatchGraphBackward(const GraphInput<float>& in, const GraphBackwardInput<float>& saved,
                           const GraphGradient<float>& gradient, const Executor& executor) {
  HWY_DYNAMIC_DISPATCH(GraphBackwardKernel)(in, saved, gradient, executor);
}

}  // namespace

const PairFunction& GNOMON_PAIR_FUNCTION(GNOMON_DEFINITION)() {
  using Definition = reference::GNOMON_DEFINITION;
  static const PairFunction kFunction = {
      GNOMON_DEFINITION_NAME,
      Definition::kRowScalars,
      Definition::kColumnScalars,
      Definition::kHeadScalars,
      Definition::kInput,
      DispatchForward,
      DispatchBackward,
      reference::Forward<Definition>,
      reference::Backward<Definition>,
      reference::Value,
      DispatchGraphForward,
      DispatchGraphBackward,
      reference::GraphForward<Definition>,
      reference::GraphBackward<Definition>,
      counting::Count<counting::GNOMON_DEFINITION>(),
      reference::BoundsOf<Definition>(),
  };
  return kFunction;
}

}  // namespace gnomon
#endif
