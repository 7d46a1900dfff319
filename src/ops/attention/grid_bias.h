// Biases that depend only on the offset of a pair on a grid: a table (H, 2 n_1 - 1, 2 n_2 - 1, ...)
// whose entry n along an axis belongs to column - row = n - (n_axis - 1).
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

// Whether a position is an offset bias, in the sequence or on a grid.
bool IsBias(const ResolvedPosition& position);

// The grid of all biases and of relative keys on a grid; nullopt if the biases depend on positions
// in the sequence.
std::optional<TokenGrid> FindGrid(const at::Tensor& q, const at::Tensor& k,
                                  const std::vector<ResolvedPosition>& positions,
                                  const CallArguments& arguments);

// The table of one bias, with size 1 along the axes that the bias does not depend on. An offset
// bias depends on its `axis` or, without one, is summed over all axes. options: dtype and device of
// the bias.
at::Tensor GridTable(const PositionEntry& entry, const Component& component,
                     const std::vector<at::Tensor>& tensors, const TokenGrid& grid, int64_t heads,
                     const at::TensorOptions& options);

// A sum of such tables, expanded and flattened to (H, (2 n_1 - 1) (2 n_2 - 1) ...).
at::Tensor FlatGridTable(const at::Tensor& table, const TokenGrid& grid);

}  // namespace gnomon

#endif  // GNOMON_OPS_ATTENTION_GRID_BIAS_H_
