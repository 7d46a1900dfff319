#ifndef GNOMON_CORE_GRID_LAYOUT_H_
#define GNOMON_CORE_GRID_LAYOUT_H_

#include <gnomon/attention.h>

#include <cstdint>
#include <vector>

namespace gnomon {

// A table over the offsets of tokens on a grid, row-major over (2 n_1 - 1, 2 n_2 - 1, ...), entry n
// along an axis for key - query = n - (n_axis - 1). Tokens are row-major, after a prefix without a
// bias. Offsets are differences of codes, the table's index of a token's coordinates.
class GridLayout final : public BiasLayout {
 public:
  // grid is the prefix and the lengths of the axes. Throws Error unless there are as many queries,
  // and as many keys, as tokens of the grid.
  GridLayout(const std::vector<int64_t>& grid, int64_t queries, int64_t keys);

  int64_t table_size() const override { return table_size_; }
  int64_t Entry(int64_t query, int64_t key) const override {
    if (query < prefix_ || key < prefix_) return -1;
    return codes_[key - prefix_] - codes_[query - prefix_] + table_size_ / 2;
  }
  // Along the last axis, to the end of the key's row of the grid.
  int64_t RunLength(int64_t query, int64_t key) const override {
    if (query < prefix_) return prefix_ + static_cast<int64_t>(codes_.size()) - key;
    return key < prefix_ ? prefix_ - key : row_ - (key - prefix_) % row_;
  }

 private:
  int64_t prefix_;
  int64_t row_ = 1;  // the length of the last axis
  int64_t table_size_ = 1;
  std::vector<int64_t> codes_;
};

}  // namespace gnomon

#endif  // GNOMON_CORE_GRID_LAYOUT_H_
