// The forward pass of the fused operator, for one instruction set.
//
// A tile is a block of query rows by a block of keys (forward_tile-inl.h). The shape selects the
// plan:
//
//   Key heads with many queries: all keys are packed first, and each block of queries is a task
//   (forward_blocks-inl.h).
//
//   Key heads with few queries: a task is a range of keys with all queries (forward_parts-inl.h).
//   If packing would cost as much as the products, keys and values are read in place.
//
// The shape alone determines how row sums are split into parts, and the parts are merged in a fixed
// order. Results therefore do not depend on the number of workers.
#if defined(GNOMON_SRC_CPU_FORWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_FORWARD_INL_H_
#undef GNOMON_SRC_CPU_FORWARD_INL_H_
#else
#define GNOMON_SRC_CPU_FORWARD_INL_H_
#endif

#include "base/call_log.h"
#include "base/parallel.h"
#include "cpu/forward_blocks-inl.h"
#include "cpu/forward_parts-inl.h"
#include "cpu/forward_tile-inl.h"
#include "cpu/rows-inl.h"
#include "cpu/skipping-inl.h"
#include "cpu/vocabulary-inl.h"
#include "gnomon/attention.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {

// Functions is ByTable or Inlined.
template <class Functions>
class ForwardPass {
 public:
  ForwardPass(const PairTable& table, const AttentionInput<Real>& in,
              const AttentionOutput<Real>& out, const Executor& executor)
      : table_(table),
        executor_(executor),
        tile_(table, in, out),
        skipping_(in, table),
        packs_all_(tile_.group() * in.shape.queries > kFewRows) {}

  void Run() {
    if (call_plan != nullptr) *call_plan = plan();
    if (packs_all_) {
      ForwardBlocks<Functions>(table_, tile_, skipping_, executor_).Run();
    } else {
      ForwardParts<Functions>(table_, tile_, skipping_, executor_).Run();
    }
  }

 private:
  // With at most this many rows per key head, tasks pack their own keys.
  static constexpr int64_t kFewRows = 256;

  CallPlan plan() const {
    const char* const keys = packs_all_         ? "packs all keys first"
                             : tile_.in_place() ? "reads keys and values in place"
                                                : "packs keys within each task";
    return {keys, tile_.pairs(), skipping_.active()};
  }

  const PairTable& table_;
  const Executor& executor_;
  ForwardTile<Functions> tile_;
  Skipping skipping_;
  bool packs_all_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
