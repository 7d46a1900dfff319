#include <ATen/ATen.h>

#include <vector>

#include "ops/catalogue/random_rows.h"
#include "ops/catalogue/registry.h"
#include "ops/operators/tensors.h"
#include "ops/positions/content_tables.h"

namespace gnomon {
namespace content_bias {
namespace {

int64_t ColumnsOf(const Component& component, const ModuleShape& /*n*/) {
  return component.Integer("columns");
}

ContentTerm Content(const Component& component, const std::vector<at::Tensor>& tensors,
                    const ContentCall& call) {
  const at::Tensor& query = tensors[0];
  TORCH_CHECK_VALUE(
      query.dim() == 4 && query.sym_sizes().slice(0, 3) == call.q.sym_sizes().slice(0, 3),
      "gnomon.attention: query of content_bias has shape ", query.sym_sizes(),
      "; expected (B, H, Lq, row size of the table) for q of shape ", call.q.sym_sizes());
  const at::Tensor keys = AsRows(component, "table", tensors[1], SizeOf(query, 3), call.heads);
  const int64_t extent = component.Integer("extent");
  const int64_t rows = SizeOf(keys, 1);
  const bool both = rows == 2 * extent - 1;
  TORCH_CHECK_VALUE(both || rows == extent, "gnomon.attention: table of content_bias has ", rows,
                    " rows, but extent is ", extent, "; expected ", 2 * extent - 1,
                    " rows (past to future) or ", extent, " (past only)");
  TORCH_CHECK_VALUE(both || call.causal, "gnomon.attention: table of content_bias has ", rows,
                    " rows (past only), but causal is False; expected ", 2 * extent - 1,
                    " rows, or causal=True");
  return {
      .query = query, .keys = keys, .layout = both ? "zero" : "zero_past", .takes_scale = false};
}

at::Tensor TableStart(const Component& component, const ModuleShape& n) {
  const int64_t extent = component.Integer("extent");
  const int64_t rows = component.Flag("past") ? extent : 2 * extent - 1;
  return RandomRows(/*stream=*/1, TableRows(component, rows, n), ColumnsOf(component, n));
}

constexpr TokenProjection kQuery = {.columns = ColumnsOf};

const RegisterPosition content_bias({
    .catalogue = {.name = "content_bias",
                  .title = "content-conditioned bias",
                  .formula = "r_i.E[p_j - p_i + extent - 1], where the rows of E run from past to "
                             "future; nothing is added where |p_i - p_j| >= extent",
                  .latex = R"(r_i \cdot E[p_j - p_i + n - 1])",
                  .note = "n is `extent`, and the rows of E run from past to future. Nothing is "
                          "added at distances of n or more",
                  .details = "A module projects its tokens to r_i, a short vector per head, and by "
                             "default has one table for all heads. The term is equivalent to "
                             "\"relative\" with far=\"zero\" and a separate query.",
                  .source = "Shaw et al. 2018, Self-Attention with Relative Position "
                            "Representations. In the paper, r is q; in some 2026 models, r is a "
                            "projection of the tokens",
                  .role = CatalogueEntry::Role::kContent,
                  .cost = "1 + 0, plus the product of r and the table",
                  .class_name = "ContentBias"},
    .parameters =
        {Table("query", Index::kQueries, {.projection = kQuery})
             .Means("(B, H, Lq, Dr), the vectors r_i"),
         Table("table", Index::kNearOffsets, {.start = TableStart})
             .Means("(2 extent - 1, Dr), or (extent, Dr) for the past only, which requires a "
                    "causal mask; or (H, n, Dr), with either number of rows n, for one table per "
                    "head"),
         Integer("extent", "1024")
             .Means("smallest distance at which nothing is added")
             .AtLeast(1)
             .AtMost(1 << 30),
         Integer("columns", "16").Means("row size of a module's table").AtLeast(1).NoArgument(),
         TablePerHead(),
         Flag("past", "false")
             .Means("whether a module's table has rows for the past only")
             .NoArgument()},
    .content = Content,
});

}  // namespace
}  // namespace content_bias
}  // namespace gnomon
