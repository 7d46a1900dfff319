// Supplies the statistics for a backward pass if the caller has not saved them.
#ifndef GNOMON_SRC_CORE_WITH_STATISTICS_H_
#define GNOMON_SRC_CORE_WITH_STATISTICS_H_

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

namespace gnomon {

// Saved is AttentionBackwardInput or GraphBackwardInput.
template <class Saved>
class WithStatistics {
  using T = std::remove_cvref_t<decltype(*Saved::statistics)>;

 public:
  // If the statistics are null, recomputes them with an additional forward pass: forward(o, lse,
  // statistics) writes all three as contiguous arrays of `rows` rows.
  template <class Forward>
  WithStatistics(const Saved& saved, int64_t rows, int64_t value_dim, const Forward& forward)
      : saved_(saved) {
    if (saved.statistics != nullptr) return;
    memory_.resize(static_cast<size_t>(rows * (4 + value_dim)));
    T* const statistics = memory_.data();
    // lse and o are not used.
    T* const lse = statistics + 3 * rows;
    T* const o = lse + rows;
    forward(o, lse, statistics);
    saved_.statistics = statistics;
  }

  const Saved& saved() const { return saved_; }

 private:
  Saved saved_;
  std::vector<T> memory_;
};

}  // namespace gnomon

#endif  // GNOMON_SRC_CORE_WITH_STATISTICS_H_
