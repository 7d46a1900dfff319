// How much of attention the fused kernels compute, for measurements.
#ifndef GNOMON_SRC_BASE_PAIR_COUNT_H_
#define GNOMON_SRC_BASE_PAIR_COUNT_H_

#include <atomic>
#include <cstdint>

namespace gnomon {

// In pairs of a query and a key, by whole tiles, what the masks let see and what of that was
// computed: the rest was left out (AttentionInput::tolerance).
struct PairCount {
  std::atomic<int64_t> seen{0};
  std::atomic<int64_t> computed{0};
};

// All calls of all threads add to it from now on; null: to none.
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
