// Forward-mode derivatives of attention and of its gradients.
//
// Each task processes a block of query rows of one head, with all keys to which they attend. It
// stores the weights of all pairs and the tangents of these weights, so that the outputs and the
// gradients can use them. Tasks add to the gradients of keys, values and biases in a fixed order,
// so results do not depend on the number of workers.
//
// The steps of a task are in dual_forward-inl.h and dual_backward-inl.h; they use the pair function
// (dual_pairs-inl.h), the biases (dual_biases-inl.h) and the relative tables (dual_terms-inl.h) of
// a block (dual_block-inl.h).
#include "cpu/few_targets.h"
// Must follow few_targets.h:
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/derivatives.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// Must follow foreach_target.h:
#include <algorithm>

#include "base/parallel.h"
#include "base/visible_keys.h"
#include "cpu/derivatives.h"
#include "cpu/dual_backward-inl.h"
#include "cpu/dual_biases-inl.h"
#include "cpu/dual_block-inl.h"
#include "cpu/dual_call-inl.h"
#include "cpu/dual_forward-inl.h"
#include "cpu/dual_pairs-inl.h"
#include "cpu/dual_scores-inl.h"
#include "cpu/dual_sums-inl.h"
#include "cpu/dual_terms-inl.h"
#include "cpu/head_slots.h"
#include "cpu/packing-inl.h"
#include "cpu/vocabulary-inl.h"
#include "cpu/workspace.h"
#include "gnomon/attention.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {
namespace {

class Pass {
 public:
  Pass(const AttentionDerivatives<Real>& of, const Executor& executor)
      : call_(of),
        n_(call_.n),
        executor_(executor),
        in_head_(call_.group * call_.row_blocks),
        tasks_(n_, executor, in_head_),
        head_sums_(n_, call_.row_blocks),
        pairs_(call_, head_sums_),
        biases_(call_),
        terms_(call_, tasks_),
        forward_(call_, tasks_, pairs_, biases_),
        backward_(call_, tasks_, pairs_, head_sums_) {}
  // Not copyable, because members point into this object.
  Pass(const Pass&) = delete;
  Pass& operator=(const Pass&) = delete;

  void Run() {
    const int64_t heads = n_.batch * n_.key_heads;
    const int64_t tasks = tasks_.whole() ? heads : heads * in_head_;
    ScratchParts parts;
    call_.Scratch(parts);
    const int64_t size = parts.size();
    const Buffer memory(size * WorkersFor(executor_, tasks));
    const auto scratch = [&](int worker) {
      ScratchParts of_worker(memory.data() + worker * size);
      return call_.Scratch(of_worker);
    };
    terms_.FillTables(executor_);
    if (tasks_.whole()) {
      ParallelTasks(executor_, heads, [&](int64_t head, int worker) {
        tasks_.Assign(head, worker);
        for (int64_t p = 0; p < call_.panels(); ++p) Pack(head, p);
        Start(head);
        for (int64_t index = 0; index < in_head_; ++index) RunRows(head, index, scratch(worker));
        Finish(head);
      });
    } else {
      ParallelTasks(executor_, heads * call_.panels(),
                    [&](int64_t task, int) { Pack(task / call_.panels(), task % call_.panels()); });
      ParallelTasks(executor_, heads, [&](int64_t head, int) { Start(head); });
      // Interleaves as many heads as there are workers, so that workers rarely wait for their turn.
      // If heads share gradients of pairs, the tasks of all heads of a block of rows are
      // consecutive.
      const int64_t workers = WorkersFor(executor_, tasks);
      const int64_t side_by_side = call_.shares_pairs ? heads : std::min(heads, workers);
      const int64_t heads_of_block = call_.shares_pairs ? call_.group : 1;
      ParallelTasks(executor_, tasks, [&](int64_t task, int worker) {
        const int64_t first = task / (side_by_side * in_head_) * side_by_side;
        const int64_t width = std::min(side_by_side, heads - first);
        const int64_t number = task - first * in_head_;
        const int64_t head = first + number / heads_of_block % width;
        RunRows(head, number / (heads_of_block * width) * heads_of_block + number % heads_of_block,
                scratch(worker));
      });
      ParallelTasks(executor_, heads, [&](int64_t head, int) { Finish(head); });
    }
    Merge();
  }

 private:
  // Packs panel p of key head `head`, which is counted across the batch.
  void Pack(int64_t head, int64_t p) const {
    const int64_t b = head / n_.key_heads;
    const int64_t h = head % n_.key_heads;
    const KeyRange keys = BatchKeys(call_.in.mask, n_.keys, b);
    const int64_t begin = std::max(keys.begin, p * kWidth);
    const int64_t end = std::min(keys.end, (p + 1) * kWidth);
    forward_.Pack(b, h, p, begin, end);
    backward_.Pack(b, h, p, begin, end);
    terms_.Pack(b, h, begin, end);
    pairs_.SetNorms(head, begin, end);
  }

  // Clears the sums of a key head, and completes them.
  void Start(int64_t head) {
    pairs_.Start(head);
    biases_.Start(head);
    terms_.Start(head);
    backward_.Start(head);
  }
  void Finish(int64_t head) const {
    terms_.Finish(head);
    backward_.Finish(head);
  }

  // Computes block `index` of a key head.
  void RunRows(int64_t head, int64_t index, const DualScratch& scratch) {
    DualBlock block = call_.Block(head, index, scratch);
    if (block.keys.empty()) {
      forward_.WriteEmpty(block);
      biases_.Skip(block);
      terms_.Skip(block);
      return backward_.WriteEmpty(block);
    }
    forward_.MultiplyQueries(block);
    terms_.SetTerms(block);
    if (call_.function != nullptr) pairs_.SetScalars(block);
    for (int64_t r = 0; r < block.rows(); ++r) forward_.SetRow(block, r);
    if (call_.wants_any) backward_.PackRows(block);
    if (call_.wants_scores) {
      backward_.MultiplyValues(block);
      for (int64_t r = 0; r < block.rows(); ++r) backward_.SetScoreGradientRow(block, r);
      biases_.AddScoreGradients(block);
      terms_.AddScoreGradients(block);
      if (call_.function != nullptr) pairs_.SetProductGradients(block);
    }
    for (int64_t r = 0; call_.drops() && r < block.rows(); ++r) {
      DropRow(call_.DropperOf(block, r), block.first, block.seen[r], block.Row(block.weights, r));
    }
    terms_.AddWeights(block);
    forward_.WriteOutputs(block);
    if (call_.wants_x && call_.has_product()) backward_.WriteQueryGradients(block);
    terms_.AddTableGradients(block);
    backward_.AddKeyGradients(block);
  }

  // Adds up, in a fixed order, the gradients of tensors that all sequences of the batch share.
  void Merge() {
    terms_.Merge();
    biases_.Merge();
    for (const bool is_tangent : {false, true}) {
      const AttentionGradient<Real>& gradient = call_.Gradient(is_tangent);
      for (int64_t h = 0; h < n_.heads; ++h) {
        const DualHeadSums::Sums sums = head_sums_.Total(is_tangent, h);
        if (gradient.factor != nullptr) gradient.factor[h] = static_cast<Real>(sums.factor);
        for (int s = 0; gradient.head_scalars != nullptr && s < call_.head_scalars(); ++s) {
          gradient.head_scalars[s * n_.heads + h] = static_cast<Real>(sums.t[s]);
        }
      }
    }
  }

  const DualAttention call_;
  const AttentionShape& n_;
  const Executor& executor_;
  int64_t in_head_;  // blocks per key head
  HeadTasks tasks_;
  DualHeadSums head_sums_;
  DualPairs pairs_;
  DualBiases biases_;
  DualTerms terms_;
  DualForward forward_;
  DualBackward backward_;
};

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS

namespace HWY_NAMESPACE {
namespace {

void Differentiate(const AttentionDerivatives<GNOMON_REAL>& of, const Executor& executor) {
#if GNOMON_HAS_NO_KERNELS
  static_cast<void>(of);
  static_cast<void>(executor);
  HWY_ABORT("this instruction set has no derivatives for doubles");
#else
  GNOMON_KERNELS::Pass(of, executor).Run();
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
HWY_EXPORT(Differentiate);
}  // namespace

void DerivativesKernel(const AttentionDerivatives<GNOMON_REAL>& of, const Executor& executor) {
  HWY_DYNAMIC_DISPATCH(Differentiate)(of, executor);
}

}  // namespace gnomon
#endif
