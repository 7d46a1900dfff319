// The count that kernels add to, if anyone counts.
#ifndef GNOMON_SRC_BASE_PAIR_COUNT_H_
#define GNOMON_SRC_BASE_PAIR_COUNT_H_

#include <atomic>
#include <cstdint>

#include "gnomon/attention.h"

namespace gnomon {

inline std::atomic<PairCount*> pair_count{nullptr};

inline bool CountsPairs() { return pair_count.load(std::memory_order_relaxed) != nullptr; }

inline void AddPairs(int64_t seen, int64_t computed) {
  PairCount* const count = pair_count.load(std::memory_order_relaxed);
  if (count == nullptr) return;
  count->seen.fetch_add(seen, std::memory_order_relaxed);
  count->computed.fetch_add(computed, std::memory_order_relaxed);
}

}  // namespace gnomon

#endif  // GNOMON_SRC_BASE_PAIR_COUNT_H_
