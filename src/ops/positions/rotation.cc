#include "ops/positions/rotation.h"

#include <ATen/ATen.h>

#include <string>
#include <vector>

#include "ops/operators/tensors.h"

namespace gnomon {
namespace {

// The user-visible name, such as "RoPE".
const std::string& NameOf(const Component& component) {
  // Not FindPosition(), which would check the component's options again.
  return FindPositionEntry(component.name())->shown_name();
}

}  // namespace

std::vector<at::Tensor> CoordinatesOf(const Component& component, const RotationCall& call,
                                      const std::optional<TokenGrid>& grid) {
  const std::string what = "gnomon.attention: " + NameOf(component);
  TORCH_CHECK_VALUE(!grid || !call.firsts, what, " uses the grid ", grid ? grid->Text() : "",
                    ", but query_offset is a tensor; pass an integer or None");
  const at::TensorOptions options = call.x.options().dtype(at::kDouble);
  std::vector<at::Tensor> coordinates;
  if (grid) {
    TORCH_CHECK_VALUE(!call.positions || call.positions->of_tokens.dim() == 2, what,
                      " uses the grid ", grid->Text(),
                      ", so positions cannot have several axes; pass one index per token");
    coordinates = call.positions
                      ? grid->CoordinatesAt(what.c_str(), call.positions->of_tokens.unsqueeze(1))
                      : grid->Coordinates(what.c_str(), call.position, call.x.sym_size(2), options);
    for (at::Tensor& coordinate : coordinates) coordinate = coordinate.to(at::kDouble);
  } else if (call.positions) {
    const at::Tensor positions = call.positions->of_tokens.to(at::kDouble);
    if (positions.dim() == 2) return {positions.unsqueeze(1)};
    for (int64_t axis = 0; axis < SizeOf(positions, 2); ++axis) {
      coordinates.push_back(positions.select(2, axis).unsqueeze(1));
    }
  } else {
    const at::Tensor positions =
        at::arange(call.position, call.position + call.x.sym_size(2), options);
    coordinates.push_back(call.firsts ? positions + call.firsts->to(at::kDouble).reshape({-1, 1, 1})
                                      : positions);
  }
  return coordinates;
}

int64_t FreeColumns(const RotationCall& call) {
  return SizeOf(call.x, 3) - (call.last_is_height ? 1 : 0);
}

void CheckColumns(const Component& component, int64_t dims, int64_t axes,
                  const RotationCall& call) {
  const int64_t step = 2 * axes;
  const int64_t free = FreeColumns(call);
  TORCH_CHECK_VALUE(
      dims >= 0 && dims % step == 0 && dims <= free, call.operation, ": ", NameOf(component),
      " has dims = ", dims, "; expected ",
      axes > 1 ? "a multiple of 2 * axes = " + std::to_string(step) : std::string("an even number"),
      ", at most ", free, call.last_is_height ? " (the last coordinate is a height)" : "");
}

Turns TurnsOf(const at::Tensor& angles, at::ScalarType type, double factor) {
  const auto turn = [&](const at::Tensor& of_angles) {
    return (factor == 1 ? of_angles : of_angles * factor).to(type);
  };
  return {turn(angles.cos()), turn(angles.sin())};
}

at::Tensor RotateFirst(const Component& component, const RotationCall& call,
                       const at::Tensor& angles, bool half) {
  const int64_t dims = 2 * SizeOf(angles, 3);
  CheckColumns(component, dims, 1, call);
  const int64_t heads = SizeOf(angles, 1);
  const int64_t own = SizeOf(call.x, 1);
  at::Tensor x = call.x;
  at::Tensor turns = angles;
  if (heads > own) x = x.repeat_interleave(heads / own, 1);
  if (heads > 1 && heads < own) turns = turns.repeat_interleave(own / heads, 1);
  if (dims == 0) return x;
  return RotatePairs(x, TurnsOf(turns, ComputingType(x)), half, dims, {}, call.pending);
}

}  // namespace gnomon
