// Compiles one definition to a pair function: its table for every instruction set, and its fp64
// version. The including file defines
//   GNOMON_DEFINITION       the name of the struct
//   GNOMON_DEFINITION_FILE  the file that contains it
//   GNOMON_DEFINITION_NAME  the name of the pair function
// and gets `const PairFunction& gnomon::PairFunctionOf<name>()`. With GNOMON_INLINED, the attention
// passes are also compiled with this definition inlined.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/kernel_template.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// Must follow foreach_target.h:
#include "cpu/definition-inl.h"
#ifdef GNOMON_INLINED
#include "cpu/backward-inl.h"
#include "cpu/forward-inl.h"
#endif
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace HWY_NAMESPACE {
namespace {

using Definition = derived::Complete<GNOMON_DEFINITION, derived::GNOMON_DEFINITION>::Type;
using OfDuals =
    duals::derived::Complete<duals::GNOMON_DEFINITION, duals::derived::GNOMON_DEFINITION>::Type;

const PairTable* Table() { return &TableOf<Definition>(); }

const DualTable* TableOfDuals() {
  static const DualTable kTable = {Table(), duals::Slopes<OfDuals>};
  return &kTable;
}

#ifdef GNOMON_INLINED
void InlinedForward(const PairTable& table, const AttentionInput<float>& in,
                    const AttentionOutput<float>& out, const Executor& executor) {
  ForwardPass<Inlined<Definition>>(table, in, out, executor).Run();
}

void InlinedBackward(const PairTable& table, const AttentionInput<float>& in,
                     const AttentionBackwardInput<float>& saved,
                     const AttentionGradient<float>& gradient, const Executor& executor) {
  BackwardPass<Inlined<Definition>>(table, in, saved, gradient, executor).Run();
}
#endif

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "core/counting.h"
#include "core/dual_tables.h"
#include "core/engine.h"
#include "core/pair_function_name.h"
#include "reference/reference.h"
#include "reference/vocabulary.h"

namespace gnomon {
namespace reference {
namespace {

#include GNOMON_DEFINITION_FILE

namespace derived {
namespace vocabulary {
using namespace ::gnomon::reference;  // NOLINT: numbers
using namespace ::gnomon;             // NOLINT: dual numbers
}  // namespace vocabulary
#include "base/derived_gradient-inl.h"
#include GNOMON_DEFINITION_FILE
}  // namespace derived

using Definition = derived::Complete<GNOMON_DEFINITION, derived::GNOMON_DEFINITION>::Type;

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

HWY_EXPORT(Table);
HWY_EXPORT(TableOfDuals);
#ifdef GNOMON_INLINED
HWY_EXPORT(InlinedForward);
HWY_EXPORT(InlinedBackward);
#endif

// The table for the selected instruction set.
const PairTable& ChosenTable() { return *HWY_DYNAMIC_DISPATCH(Table)(); }

const DualTable* ChosenDualTable() { return HWY_DYNAMIC_DISPATCH(TableOfDuals)(); }

void Forward(const AttentionInput<float>& in, const AttentionOutput<float>& out,
             const Executor& executor) {
#ifdef GNOMON_INLINED
  HWY_DYNAMIC_DISPATCH(InlinedForward)(ChosenTable(), in, out, executor);
#else
  EngineForward(ChosenTable(), in, out, executor);
#endif
}

void Backward(const AttentionInput<float>& in, const AttentionBackwardInput<float>& saved,
              const AttentionGradient<float>& gradient, const Executor& executor) {
#ifdef GNOMON_INLINED
  HWY_DYNAMIC_DISPATCH(InlinedBackward)(ChosenTable(), in, saved, gradient, executor);
#else
  EngineBackward(ChosenTable(), in, saved, gradient, executor);
#endif
}

void ForwardOfGraph(const GraphInput<float>& in, const GraphOutput<float>& out,
                    const Executor& executor) {
  EngineGraphForward(ChosenTable(), in, out, executor);
}

void BackwardOfGraph(const GraphInput<float>& in, const GraphBackwardInput<float>& saved,
                     const GraphGradient<float>& gradient, const Executor& executor) {
  EngineGraphBackward(ChosenTable(), in, saved, gradient, executor);
}

}  // namespace

const PairFunction& GNOMON_PAIR_FUNCTION(GNOMON_DEFINITION)() {
  using Definition = reference::Definition;
  using InDouble = reference::Functions<Definition>;
  static const PairFunction kFunction = {
      GNOMON_DEFINITION_NAME,
      Definition::kRowScalars,
      Definition::kColumnScalars,
      Definition::kHeadScalars,
      Definition::kInput,
      Forward,
      Backward,
      InDouble::Forward,
      InDouble::Backward,
      InDouble::Value,
      ForwardOfGraph,
      BackwardOfGraph,
      InDouble::GraphForward,
      InDouble::GraphBackward,
      counting::Count<counting::GNOMON_DEFINITION>(),
      reference::BoundsOf<Definition>(),
  };
  [[maybe_unused]] static const bool kAdded = reference::AddTable(kFunction, InDouble::kTable);
  [[maybe_unused]] static const bool kAddedDuals = AddDualTable(kFunction, ChosenDualTable);
  return kFunction;
}

}  // namespace gnomon
#endif
