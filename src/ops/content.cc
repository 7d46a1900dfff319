#include "ops/content.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <optional>

#include "ops/operators.h"
#include "ops/token_grid.h"

namespace gnomon {
namespace {

constexpr int64_t kDefaultMaxOffset = 128;

// A table (n, columns) or (H, n, columns) as (1 or H, n, columns).
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

}  // namespace

int64_t MaxOffset(const Component& component) {
  const int64_t most = component.Integer("max_offset", kDefaultMaxOffset);
  TORCH_CHECK_VALUE(most >= 0 && most < int64_t{1} << 30, "gnomon: ", component.name(),
                    ":max_offset=", most, "; expected 0 to 2^30");
  return most;
}

bool HasRelativeValues(const Component& component) {
  return component.IsTensor("values") || component.FindFlag("values").value_or(false);
}

// Shaw et al. 2018 ("clip"), Huang et al. 2019, Music Transformer ("zero").
ContentTerm RelativeContent(const Component& component, const std::vector<at::Tensor>& tensors,
                            const ContentCall& call) {
  const int64_t most = MaxOffset(component);
  const std::string far = component.Choice("far", {"clip", "zero"});
  const at::Tensor keys = AsRows(component, "table", tensors[0], call.head_dim, call.heads);
  const int64_t rows = SizeOf(keys, 1);
  const bool both = rows == 2 * most + 1;
  TORCH_CHECK_VALUE(both || rows == most + 1, "gnomon.attention: table of relative has ", rows,
                    " rows and max_offset is ", most, "; expected ", 2 * most + 1,
                    ", past first, or ", most + 1, " for the past alone");
  TORCH_CHECK_VALUE(both || call.causal, "gnomon.attention: table of relative has ", rows,
                    " rows, for the past alone, and causal is False; expected ", 2 * most + 1,
                    " rows, or causal");
  ContentTerm term{.query = call.q, .keys = keys, .layout = both ? far : far + "_past"};
  if (tensors.size() > 1) {
    term.values = AsRows(component, "values", tensors[1], call.value_dim, call.heads);
    TORCH_CHECK_VALUE(SizeOf(term.values, 1) == rows, "gnomon.attention: values of relative has ",
                      SizeOf(term.values, 1), " rows and its table ", rows, "; expected the same");
  }
  return term;
}

// Dai et al. 2019: (q + u).k_j + (q + v).r_(i - j).
ContentTerm TransformerXlContent(const Component& component, const std::vector<at::Tensor>& tensors,
                                 const ContentCall& call) {
  TORCH_CHECK_VALUE(call.is_dot, "gnomon.attention: transformer_xl goes with dot alone");
  TORCH_CHECK_VALUE(call.causal, "gnomon.attention: transformer_xl with causal = False; expected ",
                    "causal, for its distances are those to the past");
  for (const size_t n : {0, 1}) {
    TORCH_CHECK_VALUE(tensors[n].dim() == 2 && SizeOf(tensors[n], 0) == call.heads &&
                          SizeOf(tensors[n], 1) == call.head_dim,
                      "gnomon.attention: ", n == 0 ? "u" : "v", " of transformer_xl has shape ",
                      tensors[n].sym_sizes(), "; expected (H, D) = (", call.heads, ", ",
                      call.head_dim, ")");
  }
  const at::Tensor rows = AsRows(component, "r", tensors[2], call.head_dim, call.heads);
  return {.query = call.q + tensors[1].unsqueeze(1),
          .keys = rows.flip(1),
          .key_weights = tensors[0],
          .layout = "past"};
}

// Bello et al. 2019; Ramachandran et al. 2019; Srinivas et al. 2021.
ContentTerm Relative2dContent(const Component& component, const std::vector<at::Tensor>& tensors,
                              const ContentCall& call) {
  const std::optional<TokenGrid> grid = TokenGrid::Find(component);
  TORCH_CHECK_VALUE(grid && grid->axes() == 2, "gnomon: ", component.name(),
                    " needs a shape of two axes, as in shape=14x14");
  std::vector<at::Tensor> tables;
  for (const size_t axis : {0, 1}) {
    const char* name = axis == 0 ? "rows" : "columns";
    const int64_t expected = 2 * grid->shape()[axis] - 1;
    tables.push_back(AsRows(component, name, tensors[axis], call.head_dim, call.heads));
    TORCH_CHECK_VALUE(SizeOf(tables.back(), 1) == expected, "gnomon.attention: ", name, " of ",
                      component.name(), " has ", SizeOf(tables.back(), 1), " rows; expected ",
                      expected, " = 2 ", axis == 0 ? "height" : "width", " - 1");
  }
  // If one of them is shared by the heads and the other is not.
  const int64_t heads = std::max(SizeOf(tables[0], 0), SizeOf(tables[1], 0));
  for (at::Tensor& table : tables) table = table.expand({heads, -1, -1});
  return {.query = call.q, .keys = at::cat(tables, 1), .layout = "grid"};
}

ContentTerm AbsoluteKeysContent(const Component& component, const std::vector<at::Tensor>& tensors,
                                const ContentCall& call) {
  return {.query = call.q,
          .keys = AsRows(component, "table", tensors[0], call.head_dim, call.heads),
          .layout = "keys"};
}

}  // namespace gnomon
