#include "ops/positions/content_tables.h"

#include <ATen/ATen.h>

#include <optional>
#include <utility>

#include "ops/operators/tensors.h"

namespace gnomon {

at::Tensor AsRows(const Component& component, const char* name, const at::Tensor& table,
                  int64_t columns, int64_t heads) {
  const bool per_head = table.dim() == 3;
  TORCH_CHECK_VALUE((table.dim() == 2 || per_head) && SizeOf(table, -1) == columns &&
                        (!per_head || SizeOf(table, 0) == heads),
                    "gnomon.attention: ", name, " of ", component.name(), " has shape ",
                    table.sym_sizes(), "; expected (n, ", columns, ") or (", heads, ", n, ",
                    columns, ")");
  return per_head ? table : table.unsqueeze(0);
}

Parameter OwnScale() {
  return Number("scale", "")
      .Means("factor that multiplies the products in this term; 1 leaves them unscaled")
      .Otherwise("the call's scale");
}

ContentTerm WithOwnScale(const Component& component, ContentTerm term) {
  const std::optional<double> scale = component.FindNumber("scale");
  if (!scale) return term;
  term.takes_scale = false;
  term.factor = *scale;
  return term;
}

std::vector<int64_t> TableRows(const Component& component, int64_t rows, const ModuleShape& n) {
  if (component.Flag("per_head")) return {n.heads, rows};
  return {rows};
}

}  // namespace gnomon
