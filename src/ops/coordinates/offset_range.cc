#include "ops/coordinates/offset_range.h"

#include <ATen/ATen.h>

namespace gnomon {

c10::SymInt OffsetRange::size() const { return (queries + keys - 1).max(0); }

at::Tensor OffsetRange::QueryPositions(const at::TensorOptions& like) const {
  const at::Tensor positions =
      at::arange(queries, like.dtype(at::kLong)).unsqueeze(0) + query_offset;
  return query_offsets ? positions + query_offsets->unsqueeze(1) : positions;
}

at::Tensor OffsetRange::Distances(const at::TensorOptions& like) const {
  const c10::SymInt first = query_offset + queries - 1;
  const at::Tensor distances = at::arange(first, first - size(), -1, like.dtype(at::kLong));
  if (!query_offsets) return distances;
  return distances + query_offsets->reshape({-1, 1, 1});
}

at::Tensor OffsetRange::DistancesAs(const at::Tensor& like) const {
  return Distances(like.options()).to(like.scalar_type());
}

at::Tensor OverEntries(const at::Tensor& heads) { return heads.unsqueeze(1); }

at::Tensor RowsOver(const at::Tensor& table, const at::Tensor& entries) {
  // On each device, the gradient of the other operator would be summed in thread order.
  const at::Tensor named = entries.flatten();
  const at::Tensor rows = table.is_cuda() ? table.index({named}) : table.index_select(0, named);
  if (entries.dim() == 1) return rows.t();
  return rows.reshape_symint({entries.sym_size(0), entries.sym_size(2), rows.sym_size(1)})
      .transpose(1, 2);
}

}  // namespace gnomon
