// Grids of tokens, and positions on grids, whose shape the model supplies.
#ifndef GNOMON_MODELS_GRID_POSITION_H_
#define GNOMON_MODELS_GRID_POSITION_H_

#include <cstdint>
#include <string>
#include <vector>

namespace gnomon::lab {

// A grid of tokens in row-major order, preceded by `prefix` tokens outside the grid (such as a
// class token).
struct TokenGrid {
  std::vector<int64_t> shape;
  int64_t prefix = 0;

  // The number of tokens, including the prefix.
  int64_t tokens() const;
};

// Inserts the grid's shape and prefix into a position specification: the shape replaces
// "shape=grid" and is added to components that require one, and the prefix is added where none is
// given. For example, "rope:shape=grid+alibi" becomes "rope:shape=7x7:prefix=1+alibi". Throws
// c10::ValueError for syntax errors and if a component has a different grid; checks nothing else.
std::string OnGrid(const std::string& position, const TokenGrid& grid);

// Replaces `grid` with `other` in each component that has it.
std::string OnOtherGrid(const std::string& position, const TokenGrid& grid, const TokenGrid& other);

}  // namespace gnomon::lab

#endif  // GNOMON_MODELS_GRID_POSITION_H_
