// Positions of tokens on a grid whose shape the model knows, and its user need not.
#ifndef GNOMON_MODELS_GRID_POSITION_H_
#define GNOMON_MODELS_GRID_POSITION_H_

#include <string>

#include "ops/coordinates/token_grid.h"

namespace gnomon::models {

// The position with what a specification leaves to the grid filled in: "shape=grid" becomes its
// shape, as do shapes that a component lacks and cannot do without, with its prefix where none is
// given. "rope:shape=grid+alibi" is "rope:shape=7x7:prefix=1+alibi". Mistakes of the grammar and
// other grids throw c10::ValueError; other mistakes are left.
std::string OnGrid(const std::string& position, const TokenGrid& grid);

// With each component that is on `grid` on `other`.
std::string OnOtherGrid(const std::string& position, const TokenGrid& grid, const TokenGrid& other);

}  // namespace gnomon::models

#endif  // GNOMON_MODELS_GRID_POSITION_H_
