// Biases that depend on the offset of a pair alone: (H, Lq + Lk - 1), entry n for
// column - row = n - (Lq - 1); or (B, H, Lq + Lk - 1) where batches have query offsets of their
// own.
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
  std::optional<at::Tensor> query_offsets;  // (B,), on top of query_offset
  // The dtype and the device of the bias, for what has no tensors to tell them.
  at::TensorOptions options = {};

  c10::SymInt size() const;
  // (1 or B, Lq), int64: where the queries stand.
  at::Tensor QueryPositions(const at::TensorOptions& like) const;
  // p_i - p_j of every entry, int64: (entries,), or (B, 1, entries).
  at::Tensor Distances(const at::TensorOptions& like) const;
  // The same in the type of a tensor.
  at::Tensor DistancesAs(const at::Tensor& like) const;
};

// (H) to (H, 1), to go with (entries).
at::Tensor OverEntries(const at::Tensor& heads);

// The rows of a table (n, H) that entries name, (entries,) or (B, 1, entries): (H, entries), or
// (B, H, entries). Its gradient is summed in one order, the same on every run.
at::Tensor RowsOver(const at::Tensor& table, const at::Tensor& entries);

}  // namespace gnomon

#endif  // GNOMON_OPS_COORDINATES_OFFSET_RANGE_H_
