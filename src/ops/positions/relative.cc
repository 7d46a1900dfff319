#include <ATen/ATen.h>

#include <string>
#include <vector>

#include "ops/attention/operators.h"
#include "ops/catalogue/registry.h"
#include "ops/positions/content_tables.h"

namespace gnomon {
namespace {

bool HasValues(const Component& component) {
  return component.IsTensor("values") || component.Flag("values");
}

// Shaw et al. 2018 ("clip"), Huang et al. 2019, Music Transformer ("zero").
ContentTerm Content(const Component& component, const std::vector<at::Tensor>& tensors,
                    const ContentCall& call) {
  const int64_t most = component.Integer("max_offset");
  const std::string far = component.Choice("far");
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

int64_t RowsOf(const Component& component) {
  const int64_t most = component.Integer("max_offset");
  return component.Flag("past") ? most + 1 : 2 * most + 1;
}

at::Tensor TableStart(const Component& component, const ModuleShape& n) {
  return RandomRows(Stream::kTable, TableRows(component, RowsOf(component), n), n.head_dim);
}

at::Tensor ValuesStart(const Component& component, const ModuleShape& n) {
  return RandomRows(Stream::kValues, TableRows(component, RowsOf(component), n), n.value_dim);
}

// The table of what is added to the values, or whether a module has one.
Parameter Values() {
  Parameter values = Flag("values", "false")
                         .Means(
                             "(n, Dv) of as many rows as the table, or (H, n, Dv): their row is "
                             "added to v_j");
  values.takes_tensor = true;
  values.index = Index::kNearOffsets;
  values.tensor = {.start = ValuesStart, .of_values = true, .present = HasValues};
  return values;
}

const RegisterPosition relative({
    .catalogue =
        {.name = "relative",
         .title = "relative keys",
         .formula = "q_i.E[p_j - p_i + max_offset] scale, past first; with values, v_j + "
                    "W[p_j - p_i + max_offset] for v_j; far: the nearest row, or none",
         .latex = R"(\frac{q_i \cdot E[p_j - p_i + m]}{\sqrt{D}})",
         .note = "where m is max_offset, past first; beyond it the nearest row, or none. "
                 "With values, W[p_j - p_i + m] is added to the value",
         .details = "A table that has the future first is this one with its rows reversed, "
                    "table.flip(-2).",
         .source = "Shaw et al. 2018, Self-Attention with Relative Position Representations; "
                   "Huang et al. 2019, Music Transformer",
         .role = CatalogueEntry::Role::kContent,
         .cost = "1 + 0, and q times the rows; with values: 2 + 0",
         .class_name = "Relative"},
    .parameters =
        {Table("table", Index::kNearOffsets, {.start = TableStart})
             .Means("(2 max_offset + 1, D), or max_offset + 1 rows for the past alone, which needs "
                    "causal; or (H, n, D), a table of each head"),
         Integer("max_offset", "128")
             .Means("the offset of the table's last row")
             .AtLeast(0)
             .AtMost((1 << 30) - 1)
             .Required(),
         Choice("far", {"clip", "zero"})
             .Means("the row beyond max_offset: \"clip\" is the nearest one (Shaw et al.), "
                    "\"zero\" none (Huang et al.)"),
         Values(), TablePerHead(),
         Flag("past", "false").Means("rows of a module for the past alone").NoArgument()},
    .content = Content,
});

}  // namespace
}  // namespace gnomon
