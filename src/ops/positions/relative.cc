#include <ATen/ATen.h>

#include <string>
#include <utility>
#include <vector>

#include "ops/catalogue/random_rows.h"
#include "ops/catalogue/registry.h"
#include "ops/operators/tensors.h"
#include "ops/positions/content_tables.h"

namespace gnomon {
namespace relative {
namespace {

bool HasValues(const Component& component) {
  return component.IsTensor("values") || component.Flag("values");
}

// Shaw et al. 2018 ("clip"), Huang et al. 2019, Music Transformer ("zero").
ContentTerm Content(const Component& component, const std::vector<at::Tensor>& tensors,
                    const ContentCall& call) {
  const int64_t most = component.Integer("max_offset");
  const std::string far = component.Choice("far");
  const bool has_query = component.IsTensor("query");
  const at::Tensor& query = has_query ? tensors.back() : call.q;
  TORCH_CHECK_VALUE(
      query.dim() == 4 && query.sym_sizes().slice(0, 3) == call.q.sym_sizes().slice(0, 3),
      "gnomon.attention: query of relative has shape ", query.sym_sizes(),
      "; expected (B, H, Lq, row size of the table) for q of shape ", call.q.sym_sizes());
  const at::Tensor keys = AsRows(component, "table", tensors[0], SizeOf(query, 3), call.heads);
  const int64_t rows = SizeOf(keys, 1);
  const bool both = rows == 2 * most + 1;
  TORCH_CHECK_VALUE(both || rows == most + 1, "gnomon.attention: table of relative has ", rows,
                    " rows, but max_offset is ", most, "; expected ", 2 * most + 1,
                    " rows (past to future) or ", most + 1, " (past only)");
  TORCH_CHECK_VALUE(both || call.causal, "gnomon.attention: table of relative has ", rows,
                    " rows (past only), but causal is False; expected ", 2 * most + 1,
                    " rows, or causal=True");
  ContentTerm term{.query = query,
                   .keys = keys,
                   .layout = both ? far : far + "_past",
                   .takes_scale = !has_query};
  if (tensors.size() > (has_query ? 2 : 1)) {
    term.values = AsRows(component, "values", tensors[1], call.value_dim, call.heads);
    TORCH_CHECK_VALUE(SizeOf(term.values, 1) == rows, "gnomon.attention: values of relative has ",
                      SizeOf(term.values, 1), " rows, but its table has ", rows,
                      "; expected the same number of rows");
  }
  return WithOwnScale(component, std::move(term));
}

int64_t RowsOf(const Component& component) {
  const int64_t most = component.Integer("max_offset");
  return component.Flag("past") ? most + 1 : 2 * most + 1;
}

at::Tensor TableStart(const Component& component, const ModuleShape& n) {
  return RandomRows(/*stream=*/1, TableRows(component, RowsOf(component), n), n.head_dim);
}

at::Tensor ValuesStart(const Component& component, const ModuleShape& n) {
  return RandomRows(/*stream=*/2, TableRows(component, RowsOf(component), n), n.value_dim);
}

// The parameter "values": the table that is added to the values or, in a module, a flag that
// creates this table.
Parameter Values() {
  Parameter values = Flag("values", "false")
                         .Means(
                             "(n, Dv) with as many rows as the table, or (H, n, Dv); the row for "
                             "the pair's offset is added to v_j");
  values.takes_tensor = true;
  values.index = Index::kNearOffsets;
  values.tensor = {.start = ValuesStart, .of_values = true, .present = HasValues};
  return values;
}

bool HasQuery(const Component& component) { return component.IsTensor("query"); }

// The parameter "query": a tensor that replaces q in the products with the rows.
Parameter Query() {
  Parameter query = Table("query", Index::kQueries, {.present = HasQuery})
                        .Means(
                            "(B, H, Lq, Dr), used instead of q in the products with the rows, "
                            "which then have size Dr; these products are not scaled")
                        .Otherwise("q");
  query.argument = CatalogueParameter::Argument::kOptional;
  return query;
}

const RegisterPosition relative({
    .catalogue =
        {.name = "relative",
         .title = "relative keys",
         .formula =
             "q_i.E[p_j - p_i + max_offset] scale, where the rows of E run from past to future; "
             "offsets beyond max_offset use the nearest row or, with far=\"zero\", no row. With "
             "values, W[p_j - p_i + max_offset] is added to v_j; with a separate query, r_i "
             "replaces q_i",
         .latex = R"(\frac{q_i \cdot E[p_j - p_i + m]}{\sqrt{D}})",
         .note = "m is max_offset, and the rows of E run from past to future. Offsets beyond m use "
                 "the nearest row or, with far=\"zero\", no row. With values, W[p_j - p_i + m] is "
                 "added to v_j. With a separate query r, the term is r_i.E[p_j - p_i + m]",
         .details = "If your table runs from future to past, pass table.flip(-2). If the separate "
                    "query is a low-dimensional projection of the tokens and all heads share one "
                    "table, the term is a content-conditioned bias (see content_bias).",
         .source = "Shaw et al. 2018, Self-Attention with Relative Position Representations; "
                   "Huang et al. 2019, Music Transformer",
         .role = CatalogueEntry::Role::kContent,
         .cost = "1 + 0, plus the product of q and the table; with values: 2 + 0",
         .class_name = "Relative"},
    .parameters =
        {Table("table", Index::kNearOffsets, {.start = TableStart})
             .Means("(2 max_offset + 1, D), or (max_offset + 1, D) for the past only, which "
                    "requires a causal mask; or (H, n, D), with either number of rows n, for one "
                    "table per head"),
         Integer("max_offset", "128")
             .Means("largest distance with a row of its own")
             .AtLeast(0)
             .AtMost((1 << 30) - 1)
             .Required(),
         Choice("far", {"clip", "zero"})
             .Means("for offsets beyond max_offset, \"clip\" uses the nearest row (Shaw et al.), "
                    "and \"zero\" adds nothing (Huang et al.)"),
         Values(), Query(), OwnScale(), TablePerHead(),
         Flag("past", "false")
             .Means("whether a module's table has rows for the past only")
             .NoArgument()},
    .content = Content,
});

}  // namespace
}  // namespace relative
}  // namespace gnomon
