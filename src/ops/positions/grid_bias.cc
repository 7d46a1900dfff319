#include <ATen/ATen.h>

#include <optional>
#include <vector>

#include "ops/catalogue/registry.h"
#include "ops/coordinates/token_grid.h"

namespace gnomon {
namespace grid_bias {
namespace {

at::Tensor Start(const Component& component, const ModuleShape& n) {
  const std::optional<TokenGrid> grid = TokenGrid::Find(component);
  std::vector<int64_t> sizes = {n.heads};
  for (const int64_t length : grid->shape()) sizes.push_back(2 * length - 1);
  return at::zeros(sizes, at::TensorOptions().dtype(at::kDouble));
}

const RegisterPosition grid_bias({
    .catalogue =
        {.name = "grid_bias",
         .title = "grid bias",
         .formula = "table[h, dy + height - 1, dx + width - 1], where dy = y_j - y_i and dx = x_j "
                    "- x_i, or the equivalent for any other number of axes",
         .latex = R"(\text{table}[h, y_j - y_i + \text{height} - 1, x_j - x_i + \text{width} - 1])",
         .note = "A grid with any other number of axes works in the same way",
         .details = "As in Grid, the first `prefix` tokens have no bias, and the remaining tokens "
                    "lie on a grid in row-major order. Swin's tables are indexed by query minus "
                    "key coordinates: flip these tables along both axes, as from_query_minus_key "
                    "does in Python.",
         .source = "Liu et al. 2021, Swin Transformer",
         .role = CatalogueEntry::Role::kGridBias,
         .cost = "1 + 0",
         .needs_grid = true,
         .class_name = "GridBias"},
    .parameters = OnGrid(
        {Table("table", Index::kGrid, {.start = Start})
             .Means(
                 "(H, 2 height - 1, 2 width - 1), or the equivalent for any other number of axes")},
        Shape().NoArgument()),
});

}  // namespace
}  // namespace grid_bias
}  // namespace gnomon
