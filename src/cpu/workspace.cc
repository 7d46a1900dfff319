#include "cpu/workspace.h"

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace gnomon {
namespace {

// Set when the thread's cache is destroyed. Buffers freed later are not cached.
thread_local bool thread_ends = false;

// The cached blocks of one thread, most recently freed last.
class KeptBlocks {
 public:
  ~KeptBlocks() { thread_ends = true; }

  // Removes and returns the smallest cached block of at least `size` and at most 2 * `size` floats,
  // or an empty block if there is none.
  Buffer::Block Take(size_t size) {
    auto best = blocks_.end();
    for (auto block = blocks_.begin(); block != blocks_.end(); ++block) {
      const bool fits = block->size >= size && block->size <= 2 * size;
      if (fits && (best == blocks_.end() || block->size < best->size)) best = block;
    }
    if (best == blocks_.end()) return {};
    Buffer::Block taken = std::move(*best);
    blocks_.erase(best);
    kept_ -= taken.size;
    return taken;
  }

  void Keep(Buffer::Block block) {
    constexpr size_t kMost = (size_t{32} << 20) / sizeof(float);
    if (block.size > kMost) return;
    kept_ += block.size;
    blocks_.push_back(std::move(block));
    // Evicts the oldest blocks, because the most recent ones are likely to be reused first.
    while (kept_ > kMost) {
      kept_ -= blocks_.front().size;
      blocks_.erase(blocks_.begin());
    }
  }

 private:
  std::vector<Buffer::Block> blocks_;
  size_t kept_ = 0;
};

KeptBlocks& OfThread() {
  static thread_local KeptBlocks kept;
  return kept;
}

}  // namespace

void Buffer::Reset(int64_t size) {
  Free();
  const auto needed = static_cast<size_t>(std::max<int64_t>(1, size));
  if (!thread_ends) block_ = OfThread().Take(needed);
  if (block_.memory == nullptr) {
    block_ = {hwy::AllocateAligned<float>(needed), needed};
  }
}

void Buffer::Free() {
  Block block = std::exchange(block_, {});
  if (block.memory != nullptr && !thread_ends) OfThread().Keep(std::move(block));
}

}  // namespace gnomon
