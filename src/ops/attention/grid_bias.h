// Biases that depend on the offset of a pair on a grid alone: a table (H, 2 n_1 - 1, 2 n_2 - 1,
// ...) whose entry n along an axis is for column - row = n - (n_axis - 1) there.
#ifndef GNOMON_OPS_ATTENTION_GRID_BIAS_H_
#define GNOMON_OPS_ATTENTION_GRID_BIAS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "ops/attention/call.h"
#include "ops/catalogue/registry.h"
#include "ops/coordinates/token_grid.h"

namespace gnomon {

// Whether a position is a bias of offsets, in the sequence or on a grid.
bool IsBias(const ResolvedPosition& position);

// The grid that all biases, and relative keys on a grid, lie on; nullopt where biases read the
// sequence.
std::optional<TokenGrid> FindGrid(const at::Tensor& q, const at::Tensor& k,
                                  const std::vector<ResolvedPosition>& positions,
                                  const CallArguments& arguments);

// The table of one bias, of size 1 along the axes that it does not read: an offset bias over the
// axis that it names, or its sum over all of them. options: the dtype and the device of the bias.
at::Tensor GridTable(const PositionEntry& entry, const Component& component,
                     const std::vector<at::Tensor>& tensors, const TokenGrid& grid, int64_t heads,
                     const at::TensorOptions& options);

// A sum of such tables as (H, (2 n_1 - 1) (2 n_2 - 1) ...).
at::Tensor FlatGridTable(const at::Tensor& table, const TokenGrid& grid);

}  // namespace gnomon

#endif  // GNOMON_OPS_ATTENTION_GRID_BIAS_H_
