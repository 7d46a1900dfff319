// Code that the rotations of q and k share: token coordinates, and the rotation of pairs.
#ifndef GNOMON_OPS_POSITIONS_ROTATION_H_
#define GNOMON_OPS_POSITIONS_ROTATION_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "ops/catalogue/registry.h"
#include "ops/coordinates/token_grid.h"
#include "ops/operators/pair_rotation.h"

namespace gnomon {

// The coordinates of a call's rows along each axis, (L,) or (1 or B, 1, L), float64: grid
// coordinates, user-supplied coordinates, or plain positions. Tokens before a grid are at 0. Throws
// c10::ValueError, naming the term, for positions outside the grid.
std::vector<at::Tensor> CoordinatesOf(const Component& component, const RotationCall& call,
                                      const std::optional<TokenGrid>& grid);

// The number of columns that a rotation may use.
int64_t FreeColumns(const RotationCall& call);

// Throws c10::ValueError unless `dims` columns exist and can be divided into pairs for each axis.
void CheckColumns(const Component& component, int64_t dims, int64_t axes, const RotationCall& call);

// The turns of angles, multiplied by a factor.
Turns TurnsOf(const at::Tensor& angles, at::ScalarType type, double factor = 1);

// Rotates the first columns of the call's tokens by angles (1 or B, heads, L, n), where `heads` is
// 1, or the number of heads of k or q. Repeats keys that have fewer heads than the angles.
at::Tensor RotateFirst(const Component& component, const RotationCall& call,
                       const at::Tensor& angles, bool half);

}  // namespace gnomon

#endif  // GNOMON_OPS_POSITIONS_ROTATION_H_
