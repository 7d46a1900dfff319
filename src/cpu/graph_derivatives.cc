// Forward-mode derivatives of graph attention and of its gradients.
//
// Each task processes a few rows with all of their edges: it computes the weights of all pairs of
// an edge and a head, with their tangents, then the outputs and the gradients of the rows. A second
// loop over the transposed graph computes the sums over each key's edges from numbers that the
// tasks have stored per edge and head. Each row and each key belongs to one task, so results do not
// depend on the number of workers.
//
// As in the first-order kernels (graph_pairs-inl.h), sums over columns are vectorised along the
// columns, and elementwise work over all pairs. Pair functions are called through a table of
// functions (cpu/dual_table.h); the inner product itself does not need a table.
#include "cpu/few_targets.h"
// Must follow few_targets.h:
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/graph_derivatives.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// Must follow foreach_target.h:
#include <algorithm>

#include "base/parallel.h"
#include "cpu/dual_call-inl.h"
#include "cpu/graph_derivatives.h"
#include "cpu/graph_dual_backward-inl.h"
#include "cpu/graph_dual_forward-inl.h"
#include "cpu/graph_dual_keys-inl.h"
#include "cpu/graph_dual_tasks-inl.h"
#include "cpu/vocabulary-inl.h"
#include "cpu/workspace.h"
#include "gnomon/graph.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {
namespace {

class GraphPass {
 public:
  GraphPass(const GraphDerivatives<Real>& of, const Executor& executor)
      : call_(of), executor_(executor), keys_(call_), forward_(call_), backward_(call_, keys_) {}

  void Run() {
    call_.PackScalars(executor_);
    ScratchParts parts;
    call_.Scratch(parts);
    const int64_t size = parts.size();
    const Buffer memory(size * WorkersFor(executor_, call_.tasks.count()));
    ParallelTasks(executor_, call_.tasks.count(), [&](int64_t task, int worker) {
      ScratchParts of_worker(memory.data() + worker * size);
      RunTask(call_.Task(task, call_.Scratch(of_worker)));
    });
    backward_.SumHeads();
    for (const bool is_tangent : {false, true}) {
      if (call_.has_product()) break;
      Clear(call_.Gradient(is_tangent).x, call_.n.heads, call_.n.queries);
      Clear(call_.Gradient(is_tangent).y, call_.n.key_heads, call_.n.keys);
    }
    if (call_.wants_keys) keys_.Run(executor_);
  }

 private:
  void RunTask(const GraphTask& task) {
    if (call_.has_product()) {
      if (call_.is_distance()) {
        call_.Multiply<true>(task, call_.x, call_.y, call_.dim, task.g);
      } else {
        call_.Multiply<false>(task, call_.x, call_.y, call_.dim, task.g);
      }
    }
    forward_.SetScores(task);
    forward_.SetWeights(task);
    forward_.WriteOutputs(task);
    keys_.KeepWeights(task);
    if (!call_.wants_scores) return;
    call_.Multiply<false>(task, call_.d_o, call_.v, call_.n.value_dim, task.d_scores);
    backward_.SetScoreGradients(task);
    if (call_.centres) backward_.SetTops(task);
    if (call_.wants_slopes) backward_.SetProductGradients(task);
    if (call_.centres) backward_.FinishSums(task);
    if (call_.wants_x) backward_.WriteQueryGradients(task);
    keys_.KeepProducts(task);
  }

  // Clears the gradient of tokens that the pair function does not use.
  void Clear(const View<Real>& view, int64_t heads, int64_t nodes) const {
    for (int64_t i = 0; view.data != nullptr && i < nodes; ++i) {
      for (int64_t h = 0; h < heads; ++h) std::fill_n(view.row(0, h, i), call_.n.dim, 0.0f);
    }
  }

  const GraphCall call_;
  const Executor& executor_;
  GraphKeys keys_;
  GraphForward forward_;
  GraphBackward backward_;
};

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS

namespace HWY_NAMESPACE {
namespace {

void DifferentiateEdges(const GraphDerivatives<GNOMON_REAL>& of, const Executor& executor) {
#if GNOMON_HAS_NO_KERNELS
  static_cast<void>(of);
  static_cast<void>(executor);
  HWY_ABORT("this instruction set has no derivatives for doubles");
#else
  GNOMON_KERNELS::GraphPass(of, executor).Run();
#endif
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gnomon {
namespace {
HWY_EXPORT(DifferentiateEdges);
}  // namespace

void GraphDerivativesKernel(const GraphDerivatives<GNOMON_REAL>& of, const Executor& executor) {
  HWY_DYNAMIC_DISPATCH(DifferentiateEdges)(of, executor);
}

}  // namespace gnomon
#endif
