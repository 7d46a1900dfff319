// What rotations of q and k share: where tokens lie, and the turning of pairs.
#ifndef GNOMON_OPS_POSITIONS_ROTATION_H_
#define GNOMON_OPS_POSITIONS_ROTATION_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "ops/catalogue/registry.h"
#include "ops/coordinates/token_grid.h"

namespace gnomon {

// The coordinates of the rows of a call along each axis, (L,) or (1 or B, 1, L), float64: of their
// positions on the grid, or those that the caller gives, or the positions themselves. Tokens before
// a grid are at 0. Throws c10::ValueError, naming the term, where the grid does not know them.
std::vector<at::Tensor> CoordinatesOf(const Component& component, const RotationCall& call,
                                      const std::optional<TokenGrid>& grid);

// How many columns a rotation may turn.
int64_t FreeColumns(const RotationCall& call);

// Throws c10::ValueError unless that many columns can be turned, in pairs for each of `axes`.
void CheckColumns(const Component& component, int64_t dims, int64_t axes, const RotationCall& call);

// Cosines and sines of angles (..., n), times a factor.
struct Turns {
  at::Tensor cosine;
  at::Tensor sine;
};
Turns TurnsOf(const at::Tensor& angles, at::ScalarType type, double factor = 1);

// Tokens (B, heads, L, D), of which the first 2 n columns are turned by what broadcasts to (B,
// heads, L, n), and the others are as they were. Each `block` of columns is turned by itself: its
// pairs are (i, i + block / 2) where `half`, else (2 i, 2 i + 1). On a CPU without copies of parts,
// unless a call is traced, transformed or differentiated by its angles.
at::Tensor RotatePairs(const at::Tensor& x, const Turns& turns, bool half, int64_t block);

// The first columns of the call's tokens turned by angles (1 or B, heads, L, n), which may be those
// of one head, of k's heads or of q's: keys are repeated where they have fewer.
at::Tensor RotateFirst(const Component& component, const RotationCall& call,
                       const at::Tensor& angles, bool half);

}  // namespace gnomon

#endif  // GNOMON_OPS_POSITIONS_ROTATION_H_
