#include <ATen/ATen.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "ops/catalogue/registry.h"
#include "ops/coordinates/token_grid.h"

namespace gnomon {
namespace offset_bias {
namespace {

// The option that marks a table as indexed by positions. Complete() adds it to a component.
constexpr const char* kCentred = "centred";

Component Complete(Component component, const ComponentUse& use) {
  // Along a grid axis, the table is indexed by grid coordinates.
  if (use.has_tables_of_positions && !component.Find("shape")) {
    component.SetDefault(kCentred, "true");
  }
  return component;
}

// Selects the entries for a call from a module's table, (H, 2 n - 1), with offset 0 in the middle.
at::Tensor CentredEntries(const at::Tensor& table, const OffsetRange& range) {
  const c10::SymInt columns = table.dim() == 2 ? table.sym_size(1) : c10::SymInt(0);
  TORCH_CHECK_VALUE(table.dim() == 2 && table.sym_size(0) == range.heads && columns % 2 == 1,
                    "gnomon: the position-indexed table of OffsetBias has shape ",
                    table.sym_sizes(), "; expected (H, 2 n - 1) with H = ", range.heads);
  const c10::SymInt most = (columns - 1) / 2;
  c10::SymInt first = range.query_offset;
  c10::SymInt last = range.query_offset;
  if (range.query_offsets && range.query_offsets->numel() > 0) {
    first = range.query_offsets->min().item<int64_t>();
    last = range.query_offsets->max().item<int64_t>();
  }
  const c10::SymInt back = last + range.queries - 1;
  const c10::SymInt ahead = range.keys - 1 - first;
  TORCH_CHECK_VALUE(
      range.size() == 0 || (back <= most && ahead <= most),
      "gnomon: the position-indexed table of OffsetBias, (H, 2 n - 1), has n = ", most + 1,
      ", but p_j - p_i runs from ", -back, " to ", ahead, "; expected offsets within +-", most);
  if (!range.query_offsets) return table.slice_symint(1, most - back, most - back + range.size());
  return RowsOver(table.t(), -range.Distances(table.options()) + most);
}

at::Tensor Bias(const Component& component, const std::vector<at::Tensor>& tensors,
                const OffsetRange& range) {
  const at::Tensor& table = tensors[0];
  if (component.FindFlag(kCentred).value_or(false)) return CentredEntries(table, range);
  TORCH_CHECK_VALUE(
      table.dim() == 2 && table.sym_size(0) == range.heads && table.sym_size(1) == range.size(),
      "gnomon.attention: the table of OffsetBias has shape ", table.sym_sizes(),
      "; expected (H, Lq + Lk - 1) = (", range.heads, ", ", range.size(), ")");
  return table;
}

at::Tensor Start(const Component& component, const ModuleShape& n) {
  const std::optional<TokenGrid> grid = TokenGrid::Find(component);
  if (!grid) {
    return at::zeros({n.heads, 2 * *LengthOf(component, n.max_length) - 1},
                     at::TensorOptions().dtype(at::kDouble));
  }
  const std::vector<int64_t>& shape = grid->shape();
  const bool alike = std::equal(shape.begin() + 1, shape.end(), shape.begin());
  TORCH_CHECK_VALUE(alike || component.Find("axis"), "gnomon: ", component.name(),
                    ":shape=", SizesText(shape),
                    " has axes of different sizes, which cannot share one table; expected an axis, "
                    "such as axis=0");
  return at::zeros({n.heads, 2 * shape[component.FindInteger("axis").value_or(0)] - 1},
                   at::TensorOptions().dtype(at::kDouble));
}

std::optional<int64_t> MaxLength(const Component& component, int64_t otherwise) {
  return component.Find("shape") ? std::nullopt : LengthOf(component, otherwise);
}

const RegisterPosition offset_bias({
    .catalogue =
        {.name = "offset_bias",
         .title = "offset bias",
         .formula =
             "table[h, j - i + Lq - 1] (attention) or table[h, p_j - p_i + length - 1] (modules)",
         .latex = R"(\text{table}[h, j - i + L_q - 1])",
         .note = "This index applies to attention(); modules use table[h, p_j - p_i + length - 1]",
         .details =
             "In attention(), entry m applies to query i and key j with j - i = m - (Lq - 1), "
             "regardless of query_offset. -inf masks a pair. In a module, the table has shape (H, "
             "2 length - 1) and is indexed by positions: entry m applies to pairs with p_j - p_i = "
             "m - (length - 1). The same table is used in all calls with up to `length` tokens, "
             "including calls with a cache.",
         .source = "Shaw et al. 2018, Self-Attention with Relative Position Representations",
         .role = CatalogueEntry::Role::kBias,
         .cost = "1 + 0",
         .class_name = "OffsetBias"},
    .parameters = OnAxis(
        {Table("table", Index::kOffsets, {.start = Start}).Means("(H, Lq + Lk - 1)"), Length()}),
    .bias = Bias,
    .complete = Complete,
    .max_length = MaxLength,
});

}  // namespace
}  // namespace offset_bias
}  // namespace gnomon
