// Counts the query-key pairs that the fused kernels compute.
#ifndef GNOMON_SRC_BASE_PAIR_COUNT_H_
#define GNOMON_SRC_BASE_PAIR_COUNT_H_

#include <atomic>
#include <cstdint>

namespace gnomon {

// Numbers of query-key pairs, counted in entire tiles: pairs that the masks leave visible, and
// pairs that were computed. The remaining pairs were skipped (AttentionInput::tolerance).
struct PairCount {
  std::atomic<int64_t> seen{0};
  std::atomic<int64_t> computed{0};
};

// Makes all subsequent calls of all threads add to `count`; null disables counting.
void CountPairs(PairCount* count);

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
