#include "core/grid_layout.h"

#include <string>
#include <utility>

namespace gnomon {

GridLayout::GridLayout(const std::vector<int64_t>& grid, int64_t queries, int64_t keys)
    : prefix_(grid.empty() ? 0 : grid[0]), codes_(1, 0) {
  bool matches = grid.size() > 1 && prefix_ >= 0 && prefix_ <= queries && keys == queries;
  int64_t cells = 1;
  for (size_t axis = 1; matches && axis < grid.size(); ++axis) {
    // Compared by a quotient: a product of any numbers may not fit.
    matches = grid[axis] >= 1 && cells <= (queries - prefix_) / grid[axis];
    cells *= matches ? grid[axis] : 1;
  }
  if (!matches || prefix_ + cells != queries) {
    std::string text;
    for (const int64_t length : grid) text += (text.empty() ? "" : ", ") + std::to_string(length);
    throw Error(ErrorKind::kValue,
                "gnomon.attention: grid is [" + text + "], Lq = " + std::to_string(queries) +
                    " and Lk = " + std::to_string(keys) +
                    "; expected a prefix and the positive lengths of one axis or more, with as "
                    "many tokens in all");
  }
  row_ = grid.back();
  // Axis by axis from the slowest: the codes of the axes so far, and each place of the next.
  for (size_t axis = 1; axis < grid.size(); ++axis) {
    const int64_t width = 2 * grid[axis] - 1;
    std::vector<int64_t> codes;
    for (const int64_t code : codes_) {
      for (int64_t n = 0; n < grid[axis]; ++n) codes.push_back(code * width + n);
    }
    codes_ = std::move(codes);
    table_size_ *= width;
  }
}

}  // namespace gnomon
