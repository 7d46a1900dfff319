// The memory layout of packed heads.
#ifndef GNOMON_SRC_CPU_HEAD_SLOTS_H_
#define GNOMON_SRC_CPU_HEAD_SLOTS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/parallel.h"
#include "gnomon/attention.h"

namespace gnomon {

// The slots of a batch's heads in packed memory.
struct HeadSlots {
  int64_t heads;  // per batch element
  int64_t group;  // heads per key head
  int64_t count;  // total number of slots
  // For each key head, the worker whose slots it uses; null if each head has its own slots.
  const int32_t* workers = nullptr;

  int64_t Of(int64_t b, int64_t h) const {
    const int64_t head = b * heads + h;
    if (workers == nullptr) return head;
    return group == 1 ? workers[head] : workers[head / group] * group + head % group;
  }
};

// Decides whether each task is a whole key head. If so, packed data is in the worker's memory: it
// is still in cache when it is used, and many short sequences need little memory.
class HeadTasks {
 public:
  // `blocks` is the number of tasks per key head if tasks are not whole heads; 0 if no packed
  // memory is used.
  HeadTasks(const AttentionShape& n, const Executor& executor, int64_t blocks)
      : n_(n), heads_(n.batch * n.key_heads), workers_(WorkersFor(executor, heads_)) {
    if (blocks == 0) return;
    // With this many heads per worker, no worker idles for long at the end.
    constexpr int64_t kManyPerWorker = 16;
    const int64_t least = (blocks > 1 ? kManyPerWorker : 1) * workers_;
    const bool serial = WorkersFor(executor, heads_ * blocks) == 1;
    if (serial || heads_ >= least) of_head_.resize(static_cast<size_t>(heads_));
  }

  bool whole() const { return !of_head_.empty(); }
  // Call this before accessing the slots of key head `head`, counted across the batch.
  void Assign(int64_t head, int worker) { of_head_[static_cast<size_t>(head)] = worker; }
  HeadSlots keys() const { return Slots(n_.key_heads, 1); }
  HeadSlots queries() const {
    return Slots(n_.heads, n_.heads / std::max<int64_t>(1, n_.key_heads));
  }

 private:
  HeadSlots Slots(int64_t heads, int64_t group) const {
    if (!whole()) return {heads, group, n_.batch * heads};
    return {heads, group, workers_ * group, of_head_.data()};
  }

  const AttentionShape& n_;
  int64_t heads_;
  int64_t workers_;
  std::vector<int32_t> of_head_;
};

}  // namespace gnomon

#endif  // GNOMON_SRC_CPU_HEAD_SLOTS_H_
