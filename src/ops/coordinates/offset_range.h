// Biases that depend only on the offset of a pair: (H, Lq + Lk - 1), where entry n belongs to
// column - row = n - (Lq - 1); or (B, H, Lq + Lk - 1) if batches have their own query offsets.
#ifndef GNOMON_OPS_COORDINATES_OFFSET_RANGE_H_
#define GNOMON_OPS_COORDINATES_OFFSET_RANGE_H_

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <optional>
#include <vector>

namespace gnomon {

struct OffsetRange {
  c10::SymInt queries;
  c10::SymInt keys;
  c10::SymInt query_offset;
  int64_t heads;
  std::optional<at::Tensor> query_offsets;  // (B,), added to query_offset
  // The dtype and device of the bias, for terms without tensors.
  at::TensorOptions options = {};

  c10::SymInt size() const;
  // (1 or B, Lq), int64: the positions of the queries.
  at::Tensor QueryPositions(const at::TensorOptions& like) const;
  // p_i - p_j of every entry, int64: (entries,), or (B, 1, entries).
  at::Tensor Distances(const at::TensorOptions& like) const;
  // The distances in the dtype of a tensor.
  at::Tensor DistancesAs(const at::Tensor& like) const;
};

// Reshapes (H) to (H, 1), which broadcasts with (entries).
at::Tensor OverEntries(const at::Tensor& heads);

// The rows of a table (n, H) selected by indices (entries,) or (B, 1, entries): (H, entries), or
// (B, H, entries). The gradient is summed in a fixed order.
at::Tensor RowsOver(const at::Tensor& table, const at::Tensor& entries);

}  // namespace gnomon

#endif  // GNOMON_OPS_COORDINATES_OFFSET_RANGE_H_
