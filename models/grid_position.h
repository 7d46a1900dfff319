// Positions of tokens on a grid whose shape the model supplies.
#ifndef GNOMON_MODELS_GRID_POSITION_H_
#define GNOMON_MODELS_GRID_POSITION_H_

#include <string>

#include "ops/coordinates/token_grid.h"

namespace gnomon::models {

// The position with the grid's shape and prefix filled in: "shape=grid" is replaced by the shape,
// which is also added to components that require one; the prefix is added if none is given. For
// example, "rope:shape=grid+alibi" becomes "rope:shape=7x7:prefix=1+alibi". Syntax errors and other
// grids throw c10::ValueError; other errors are not checked.
std::string OnGrid(const std::string& position, const TokenGrid& grid);

// Moves each component on `grid` to `other`.
std::string OnOtherGrid(const std::string& position, const TokenGrid& grid, const TokenGrid& other);

}  // namespace gnomon::models

#endif  // GNOMON_MODELS_GRID_POSITION_H_
