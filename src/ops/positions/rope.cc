#include <ATen/ATen.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ops/catalogue/registry.h"
#include "ops/coordinates/token_grid.h"
#include "ops/positions/rope_frequencies.h"

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
at::Tensor RotateColumns(const at::Tensor& x, const at::Tensor& positions,
                         const RotationFrequencies& frequencies, bool half) {
  const int64_t dims = x.sym_size(3).guard_int(__FILE__, __LINE__);
  // In float64: float32 angles are off by 8e-3 at position a million.
  const at::Tensor angles = positions.unsqueeze(-1) * frequencies.of_pairs;
  const double factor = frequencies.attention_factor;
  const at::Tensor cosine = (angles.cos() * factor).to(x.scalar_type());
  const at::Tensor sine = (angles.sin() * factor).to(x.scalar_type());
  const at::Tensor first = half ? x.narrow(3, 0, dims / 2) : x.slice(3, 0, dims, 2);
  const at::Tensor second = half ? x.narrow(3, dims / 2, dims / 2) : x.slice(3, 1, dims, 2);
  const at::Tensor turned_first = first * cosine - second * sine;
  const at::Tensor turned_second = second * cosine + first * sine;
  return half ? at::cat({turned_first, turned_second}, 3)
              : at::stack({turned_first, turned_second}, 4).flatten(3);
}

// Sun et al. 2023, section 3: pair i of q grows by zeta_i^(p / 512) and that of k shrinks by it, so
// that their product decays with the distance. Only differences of positions count: those from the
// middle of the sequence keep the powers within float32 up to lengths of 65536.
at::Tensor Decay(const at::Tensor& x, const at::Tensor& positions, const at::Tensor& middle,
                 bool of_keys, bool half) {
  constexpr double kScaleBase = 512;
  const int64_t dims = x.sym_size(3).guard_int(__FILE__, __LINE__);
  const at::Tensor zeta =
      (at::arange(0, dims, 2, positions.options()) / static_cast<double>(dims) + 0.4) / 1.4;
  const at::Tensor powers = (positions - middle) * ((of_keys ? -1 : 1) / kScaleBase);
  const at::Tensor scale = zeta.pow(powers.unsqueeze(-1)).to(x.scalar_type());
  return x * (half ? at::cat({scale, scale}, -1) : scale.repeat_interleave(2, -1));
}

// Su et al. 2021, eq. 34. Over a grid each axis rotates an equal part of the columns by its own
// coordinate.
at::Tensor Rotate(const Component& component, const RotationCall& call) {
  const at::Tensor& x = call.x;
  const std::optional<TokenGrid> grid = TokenGrid::Find(component);
  TORCH_CHECK_VALUE(!grid || !call.firsts,
                    "gnomon.attention: query_offset is a tensor and RoPE lies on ", "the grid ",
                    grid ? grid->Text() : "", "; expected an integer, or None");
  const int64_t dims = RotatedColumns(component, x.sym_size(3).guard_int(__FILE__, __LINE__),
                                      call.last_is_height, grid);
  const bool half = component.Choice("layout") == "half";
  const bool xpos = component.Flag("xpos");
  TORCH_CHECK_VALUE(!xpos || call.is_product,
                    "gnomon.attention: RoPE has xpos, which scales inner ",
                    "products; expected the similarity dot");
  TORCH_CHECK_VALUE(!xpos || !grid, "gnomon.attention: RoPE has xpos on the grid ",
                    grid ? grid->Text() : "", "; expected a sequence");
  TORCH_CHECK_VALUE(!grid || !DependOnLength(component), "gnomon.attention: RoPE on a grid has ",
                    "scaling=", component.Choice("scaling"), ", which goes by the length");
  if (dims == 0) return x;

  const at::TensorOptions options = x.options().dtype(at::kDouble);
  std::vector<at::Tensor> coordinates;
  if (grid) {
    constexpr const char* kWhat = "gnomon.attention: RoPE";
    coordinates = call.positions
                      ? grid->CoordinatesAt(kWhat, call.positions->of_tokens.unsqueeze(1))
                      : grid->Coordinates(kWhat, call.position, x.sym_size(2), x.options());
    for (at::Tensor& coordinate : coordinates) coordinate = coordinate.to(at::kDouble);
  } else if (call.positions) {
    coordinates.push_back(call.positions->of_tokens.unsqueeze(1).to(at::kDouble));
  } else {
    const at::Tensor positions = at::arange(call.position, call.position + x.sym_size(2), options);
    coordinates.push_back(call.firsts ? positions + call.firsts->to(at::kDouble).reshape({-1, 1, 1})
                                      : positions);
  }
  const int64_t columns = dims / static_cast<int64_t>(coordinates.size());
  int64_t length = 0;
  if (DependOnLength(component)) {
    length = call.positions ? NumberOf(call.positions->last, "gnomon.attention: RoPE by length") + 1
                            : call.length.guard_int(__FILE__, __LINE__);
  }
  const RotationFrequencies frequencies = FrequenciesOf(component, columns, length, options);
  std::vector<at::Tensor> parts;
  for (size_t axis = 0; axis < coordinates.size(); ++axis) {
    const int64_t begin = static_cast<int64_t>(axis) * columns;
    at::Tensor part =
        RotateColumns(x.narrow(3, begin, columns), coordinates[axis], frequencies, half);
    if (xpos) {
      const at::Tensor middle =
          call.positions ? (call.positions->first + call.positions->last).to(at::kDouble) / 2
                         : at::scalar_tensor(call.length, options) / 2;
      part = Decay(part, coordinates[axis], middle, call.of_keys, half);
    }
    parts.push_back(part);
  }
  parts.push_back(x.slice(3, dims));
  return at::cat(parts, 3);
}

std::vector<Parameter> Parameters() {
  std::vector<Parameter> parameters = OnGrid(
      {PositiveNumber("base", "10000").Means("the base of the frequencies"),
       Choice("layout", {"interleaved", "half"})
           .Means("\"interleaved\": pairs (2 i, 2 i + 1); \"half\": pairs (i, i + dims / 2)"),
       Integer("dims", "")
           .Means(
               "how many coordinates are rotated; by default D, or the largest even number <= D "
               "- 1 where the last coordinate is a height; on a grid the largest multiple of 2 * "
               "axes")
           .Otherwise("all (all but the height)")});
  for (Parameter& parameter : FrequencyParameters()) parameters.push_back(std::move(parameter));
  parameters.push_back(
      Flag("xpos", "false")
          .Means("whether products of pairs decay with the distance, for dot alone "
                 "and lengths up to 65536 (Sun et al. 2023)"));
  return parameters;
}

const RegisterPosition rope({
    .catalogue = {.name = "rope",
                  .title = "RoPE",
                  .formula = "q and k rotated by p base^(-2 i / dims); on a grid, dims / axes by "
                             "each coordinate",
                  .latex = R"(\theta_i = p\; \text{base}^{-2i/\text{dims}})",
                  .note = "is the angle by which pair i of the coordinates of q and k is rotated; "
                          "on a grid, dims / axes of them by each coordinate",
                  .details =
                      "Pair i of the first dims coordinates is rotated, before the map of the "
                      "similarity. With a shape, tokens lie on a grid, after `prefix` tokens that "
                      "are not rotated. The rotated coordinates are split evenly over its axes, "
                      "each of which rotates its part by its own coordinate, with dims / axes for "
                      "dims.",
                  .source = "Su et al. 2021, RoFormer",
                  .role = CatalogueEntry::Role::kRotation,
                  .cost = "0 + 0",
                  .class_name = "RoPE"},
    .parameters = Parameters(),
    .rotate = Rotate,
});

}  // namespace
}  // namespace gnomon
