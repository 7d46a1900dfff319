#include <ATen/ATen.h>

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "ops/catalogue/registry.h"
#include "ops/coordinates/token_grid.h"

namespace gnomon {
namespace {

// A multiple of 2 * axes.
int64_t RotatedColumns(const Component& component, int64_t head_dim, bool last_is_height,
                       const std::optional<TokenGrid>& grid) {
  const int64_t free = last_is_height ? head_dim - 1 : head_dim;
  const int64_t step = grid ? 2 * grid->axes() : 2;
  if (!component.Find("dims")) {
    TORCH_CHECK_VALUE(grid || last_is_height || head_dim % 2 == 0,
                      "gnomon.attention: RoPE rotates pairs and q has ", head_dim,
                      " columns; expected an even number, or a smaller even dims");
    TORCH_CHECK_VALUE(!grid || free >= step, "gnomon.attention: RoPE over the grid ", grid->Text(),
                      " rotates a pair for each axis and has ", free,
                      " columns to do so; expected at least ", step);
    return free - free % step;
  }
  const int64_t dims = component.Integer("dims");
  TORCH_CHECK_VALUE(dims >= 0 && dims % step == 0 && dims <= free,
                    "gnomon.attention: RoPE has dims = ", dims, "; expected ",
                    grid ? "a multiple of 2 * axes = " + std::to_string(step) : "an even number",
                    ", at most ", free, last_is_height ? " (the last coordinate is a height)" : "");
  return dims;
}

// All columns of x (B, H, L, C), C even, by positions (L,) or (B, 1, L), float64.
at::Tensor RotateColumns(const at::Tensor& x, const at::Tensor& positions, double base, bool half) {
  const int64_t dims = x.sym_size(3).guard_int(__FILE__, __LINE__);
  // In float64: float32 angles are off by 8e-3 at position a million.
  const at::Tensor frequencies = (at::arange(dims / 2, positions.options()) *
                                  (-2.0 / static_cast<double>(dims)) * std::log(base))
                                     .exp();
  const at::Tensor angles = positions.unsqueeze(-1) * frequencies;
  const at::Tensor cosine = angles.cos().to(x.scalar_type());
  const at::Tensor sine = angles.sin().to(x.scalar_type());
  const at::Tensor first = half ? x.narrow(3, 0, dims / 2) : x.slice(3, 0, dims, 2);
  const at::Tensor second = half ? x.narrow(3, dims / 2, dims / 2) : x.slice(3, 1, dims, 2);
  const at::Tensor turned_first = first * cosine - second * sine;
  const at::Tensor turned_second = second * cosine + first * sine;
  return half ? at::cat({turned_first, turned_second}, 3)
              : at::stack({turned_first, turned_second}, 4).flatten(3);
}

// Su et al. 2021, eq. 34. Over a grid each axis rotates an equal part of the columns by its own
// coordinate.
at::Tensor Rotate(const Component& component, const at::Tensor& x, const c10::SymInt& position,
                  const std::optional<at::Tensor>& firsts, bool last_is_height) {
  const std::optional<TokenGrid> grid = TokenGrid::Find(component);
  TORCH_CHECK_VALUE(!grid || !firsts,
                    "gnomon.attention: query_offset is a tensor and RoPE lies on ", "the grid ",
                    grid ? grid->Text() : "", "; expected an integer, or None");
  const int64_t dims =
      RotatedColumns(component, x.sym_size(3).guard_int(__FILE__, __LINE__), last_is_height, grid);
  const double base = component.Number("base");
  const bool half = component.Choice("layout") == "half";
  if (dims == 0) return x;

  const at::TensorOptions options = x.options().dtype(at::kDouble);
  std::vector<at::Tensor> coordinates;
  if (grid) {
    coordinates = grid->Coordinates("gnomon.attention: RoPE", position, x.sym_size(2), x.options());
    for (at::Tensor& coordinate : coordinates) coordinate = coordinate.to(at::kDouble);
  } else {
    const at::Tensor positions = at::arange(position, position + x.sym_size(2), options);
    coordinates.push_back(firsts ? positions + firsts->to(at::kDouble).reshape({-1, 1, 1})
                                 : positions);
  }
  const int64_t columns = dims / static_cast<int64_t>(coordinates.size());
  std::vector<at::Tensor> parts;
  for (size_t axis = 0; axis < coordinates.size(); ++axis) {
    const int64_t begin = static_cast<int64_t>(axis) * columns;
    parts.push_back(RotateColumns(x.narrow(3, begin, columns), coordinates[axis], base, half));
  }
  parts.push_back(x.slice(3, dims));
  return at::cat(parts, 3);
}

Parameter Dims() {
  Parameter dims = Integer("dims", "");
  dims.otherwise = "all (all but the height)";
  return dims;
}

const RegisterPosition rope({
    .catalogue = {.name = "rope",
                  .title = "RoPE",
                  .formula = "q and k rotated by p base^(-2 i / dims); on a grid, dims / axes by "
                             "each coordinate",
                  .latex = R"(\theta_i = p\; \text{base}^{-2i/\text{dims}})",
                  .note = "is the angle by which pair i of the coordinates of q and k is rotated; "
                          "on a grid, dims / axes of them by each coordinate",
                  .source = "Su et al. 2021, RoFormer",
                  .role = CatalogueEntry::Role::kRotation,
                  .cost = "0 + 0"},
    .parameters = OnGrid({PositiveNumber("base", "10000"),
                          Choice("layout", {"interleaved", "half"}), Dims()}),
    .rotate = Rotate,
});

}  // namespace
}  // namespace gnomon
