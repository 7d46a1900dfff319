#include <ATen/ATen.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "ops/catalogue/random_rows.h"
#include "ops/catalogue/registry.h"
#include "ops/coordinates/token_grid.h"
#include "ops/operators/tensors.h"
#include "ops/positions/content_tables.h"

namespace gnomon {
namespace relative2d {
namespace {

// Bello et al. 2019; Ramachandran et al. 2019; Srinivas et al. 2021.
ContentTerm Content(const Component& component, const std::vector<at::Tensor>& tensors,
                    const ContentCall& call) {
  const std::optional<TokenGrid> grid = TokenGrid::Find(component);
  TORCH_CHECK_VALUE(grid && grid->axes() == 2, "gnomon: ", component.name(),
                    " needs a shape with two axes, such as shape=14x14");
  std::vector<at::Tensor> tables;
  for (const size_t axis : {0, 1}) {
    const char* name = axis == 0 ? "rows" : "columns";
    const int64_t expected = 2 * grid->shape()[axis] - 1;
    tables.push_back(AsRows(component, name, tensors[axis], call.head_dim, call.heads));
    TORCH_CHECK_VALUE(SizeOf(tables.back(), 1) == expected, "gnomon.attention: ", name, " of ",
                      component.name(), " has ", SizeOf(tables.back(), 1), " rows; expected ",
                      expected, " = 2 ", axis == 0 ? "height" : "width", " - 1");
  }
  // If only one of the tables is per head, the other is expanded.
  const int64_t heads = std::max(SizeOf(tables[0], 0), SizeOf(tables[1], 0));
  for (at::Tensor& table : tables) table = table.expand({heads, -1, -1});
  return WithOwnScale(component, {.query = call.q, .keys = at::cat(tables, 1), .layout = "grid"});
}

at::Tensor AxisTableStart(uint64_t stream, const Component& component, const ModuleShape& n,
                          size_t axis) {
  const std::optional<TokenGrid> grid = TokenGrid::Find(component);
  TORCH_CHECK_VALUE(grid && grid->axes() == 2, "gnomon: ", component.name(),
                    " in a module needs a shape with two axes, such as ", component.name(),
                    ":shape=14x14");
  return RandomRows(stream, TableRows(component, 2 * grid->shape()[axis] - 1, n), n.head_dim);
}

at::Tensor RowsStart(const Component& component, const ModuleShape& n) {
  return AxisTableStart(/*stream=*/4, component, n, 0);
}

at::Tensor ColumnsStart(const Component& component, const ModuleShape& n) {
  return AxisTableStart(/*stream=*/5, component, n, 1);
}

std::vector<Parameter> Parameters() {
  std::vector<Parameter> parameters =
      OnGrid({Table("rows", Index::kFirstAxis, {.start = RowsStart})
                  .Means("(2 height - 1, D), or (H, 2 height - 1, D)"),
              Table("columns", Index::kSecondAxis, {.start = ColumnsStart})
                  .Means("(2 width - 1, D), or (H, 2 width - 1, D)"),
              TablePerHead()},
             Shape().OfAxes({"height", "width"}).Required());
  parameters.push_back(OwnScale());
  return parameters;
}

const RegisterPosition relative2d({
    .catalogue =
        {.name = "relative2d",
         .title = "2-D relative keys",
         .formula = "q_i.(R[dy + height - 1] + C[dx + width - 1]) scale, where dy = y_j - y_i and "
                    "dx = x_j - x_i",
         .latex =
             R"(\frac{q_i \cdot \left(R[y_j - y_i + \text{height} - 1] + C[x_j - x_i + \text{width} - 1]\right)}{\sqrt{D}})",
         .note = "y is the row of a token on the grid, and x is its column",
         .details = "R is the row table, and C is the column table. As in Grid, the first `prefix` "
                    "tokens do not have this term, and the remaining tokens lie on a grid in "
                    "row-major order.",
         .source = "Ramachandran et al. 2019, Stand-Alone Self-Attention; Srinivas et al. "
                   "2021, Bottleneck Transformers",
         .role = CatalogueEntry::Role::kContent,
         .cost = "2 + 0, plus the products of q and the tables",
         .needs_grid = true,
         .class_name = "Relative2D"},
    .parameters = Parameters(),
    .content = Content,
});

}  // namespace
}  // namespace relative2d
}  // namespace gnomon
