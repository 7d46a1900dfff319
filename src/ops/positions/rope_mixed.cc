#include <ATen/ATen.h>

#include <optional>
#include <vector>

#include "ops/catalogue/random_rows.h"
#include "ops/catalogue/registry.h"
#include "ops/coordinates/token_grid.h"
#include "ops/operators/tensors.h"
#include "ops/positions/rotation.h"

namespace gnomon {
namespace rope_mixed {
namespace {

// Heo et al. 2024, eq. 14.
at::Tensor Rotate(const Component& component, const std::vector<at::Tensor>& tensors,
                  const RotationCall& call) {
  const at::Tensor& frequencies = tensors[0];
  const std::vector<at::Tensor> coordinates =
      CoordinatesOf(component, call, TokenGrid::Find(component));
  const auto axes = static_cast<int64_t>(coordinates.size());
  const int64_t expected = component.FindInteger("axes").value_or(axes);
  TORCH_CHECK_VALUE(axes == expected, "gnomon.attention: ", component.name(),
                    " has axes = ", expected, ", but positions have ", axes,
                    "; expected the same number");
  const int64_t heads = frequencies.dim() == 3 ? SizeOf(frequencies, 0) : 0;
  TORCH_CHECK_VALUE((heads == 1 || heads == call.heads || heads == call.key_heads) &&
                        SizeOf(frequencies, 1) == axes,
                    "gnomon.attention: frequencies of ", component.name(), " has shape ",
                    frequencies.sym_sizes(), "; expected (H, axes, dims / 2) with H = ", call.heads,
                    call.heads == call.key_heads
                        ? std::string()
                        : ", " + std::to_string(call.key_heads) + " (the number of key heads),",
                    " or 1 if shared by all heads, and axes = ", axes);
  const at::Tensor exact = frequencies.to(at::kDouble);
  at::Tensor angles;
  for (int64_t axis = 0; axis < axes; ++axis) {
    // (L, 1) or (1 or B, 1, L, 1), times (heads, 1, pairs).
    const at::Tensor of_axis =
        coordinates[static_cast<size_t>(axis)].unsqueeze(-1) * exact.select(1, axis).unsqueeze(1);
    angles = angles.defined() ? angles + of_axis : of_axis;
  }
  if (angles.dim() == 3) angles = angles.unsqueeze(0);
  return RotateFirst(component, call, angles, component.Choice("layout") == "half");
}

int64_t AxesOf(const Component& component) {
  const std::optional<TokenGrid> grid = TokenGrid::Find(component);
  const std::optional<int64_t> axes = component.FindInteger("axes");
  TORCH_CHECK_VALUE(!grid || !axes || *axes == grid->axes(), "gnomon: ", component.name(),
                    ":axes=", axes.value_or(0), " is invalid; expected ", grid ? grid->axes() : 0,
                    ", the number of axes of its shape");
  return grid ? grid->axes() : axes.value_or(1);
}

// On a grid, a position is a single index.
int64_t AxesOfPositions(const Component& component) {
  return TokenGrid::Find(component) ? 1 : AxesOf(component);
}

// Pairs form one group per axis. Within a group, frequencies fall from 1 to almost 1 / base. In
// each head, the orthogonal directions of the groups are rotated at random.
at::Tensor Start(const Component& component, const ModuleShape& n) {
  const int64_t axes = AxesOf(component);
  const int64_t step = 2 * axes;
  const int64_t free = n.head_dim - (n.has_height ? 1 : 0);
  const int64_t dims = component.FindInteger("dims").value_or(free - free % step);
  TORCH_CHECK_VALUE(dims >= step && dims % step == 0 && dims <= free, "gnomon: ", component.name(),
                    " has dims = ", dims, "; expected a positive multiple of 2 * axes = ", step,
                    ", at most ", free);
  const at::Tensor drawn = RandomRows(/*stream=*/1, {n.heads, axes}, axes);
  auto [directions, triangle] = at::linalg_qr(drawn);
  directions = directions * triangle.diagonal(0, -2, -1).sign().unsqueeze(-2);
  // Makes the matrix a rotation; otherwise it might be a reflection.
  const at::Tensor turn = at::linalg_det(directions).sign().unsqueeze(-1);
  directions = at::cat(
      {directions.narrow(1, 0, axes - 1), directions.narrow(1, axes - 1, 1) * turn.unsqueeze(-1)},
      1);
  const int64_t pairs = dims / step;
  const at::Tensor falling =
      at::pow(component.Number("base"), at::arange(pairs, drawn.options()) * (-1.0 / pairs));
  // (heads, groups, axes, pairs) to (heads, axes, groups * pairs).
  return (directions.unsqueeze(3) * falling).transpose(1, 2).flatten(2);
}

std::vector<Parameter> Parameters() {
  return OnGrid(
      {Table("frequencies", Index::kNone, {.start = Start})
           .Means("(H, axes, dims / 2), radians per step along each axis; H may also be 1 (shared "
                  "by all heads) or the number of key heads"),
       Choice("layout", {"interleaved", "half"})
           .Means("\"interleaved\": pairs (2 i, 2 i + 1); \"half\": pairs (i, i + dims / 2)"),
       PositiveNumber("base", "10").Means("base of a module's initial frequencies").NoArgument(),
       Integer("dims", "")
           .Means("number of coordinates that a module rotates")
           .Otherwise("the largest multiple of 2 * axes that fits, excluding a height")
           .NoArgument(),
       Integer("axes", "")
           .Means("number of axes of the positions passed to a module")
           .Otherwise("1, or the number of axes of the shape")
           .AtLeast(1)
           .NoArgument()});
}

const RegisterPosition rope_mixed({
    .catalogue =
        {.name = "rope_mixed",
         .title = "mixed RoPE",
         .formula = "rotates each coordinate pair of q and k by the angle t_h x + u_h y for a "
                    "token at (x, y), with per-head frequencies t and u",
         .latex = R"(\theta_{h n} = \sum_a t_{h a n}\, p_a)",
         .note = "n is the index of the pair, and p_a is the token's coordinate along axis a",
         .details =
             "The angle of a pair depends on the position along all axes at once, so that diagonal "
             "offsets are treated like offsets along an axis. The rotation is applied before the "
             "similarity maps the tokens. If a shape is given, the first `prefix` tokens are not "
             "rotated, and the remaining tokens lie on a grid. Without a shape, the axes are those "
             "of the positions that the caller passes; by default, the sequence is the only axis. "
             "In a module, the frequencies are learned. Initially, each head has one direction per "
             "axis. These directions are orthogonal and rotated at random, and the frequencies "
             "along each direction are base^(-m / M) for m = 0 .. M - 1, where M = dims / (2 "
             "axes).",
         .source = "Heo et al. 2024, Rotary Position Embedding for Vision Transformer",
         .role = CatalogueEntry::Role::kRotation,
         .cost = "0 + 0",
         .class_name = "RoPEMixed"},
    .parameters = Parameters(),
    .rotate = Rotate,
    .may_wait = true,
    .axes = AxesOfPositions,
});

}  // namespace
}  // namespace rope_mixed
}  // namespace gnomon
