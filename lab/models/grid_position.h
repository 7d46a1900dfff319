// Tokens on a grid, and positions of such tokens, whose grid the model supplies.
#ifndef GNOMON_MODELS_GRID_POSITION_H_
#define GNOMON_MODELS_GRID_POSITION_H_

#include <cstdint>
#include <string>
#include <vector>

namespace gnomon::lab {

// Tokens in row-major order, after `prefix` tokens (a class token) outside the grid.
struct TokenGrid {
  std::vector<int64_t> shape;
  int64_t prefix = 0;

  // The prefix and the product of the shape.
  int64_t tokens() const;
};

// The position with the grid's shape and prefix filled in: "shape=grid" is replaced by the shape,
// which is also added to components that require one; the prefix is added if none is given. For
// example, "rope:shape=grid+alibi" becomes "rope:shape=7x7:prefix=1+alibi". Syntax errors and other
// grids throw c10::ValueError; other errors are not checked.
std::string OnGrid(const std::string& position, const TokenGrid& grid);

// Moves each component on `grid` to `other`.
std::string OnOtherGrid(const std::string& position, const TokenGrid& grid, const TokenGrid& other);

}  // namespace gnomon::lab

#endif  // GNOMON_MODELS_GRID_POSITION_H_
