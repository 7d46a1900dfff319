#include "ops/coordinates/token_grid.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "ops/coordinates/token_positions.h"

namespace gnomon {

std::optional<TokenGrid> TokenGrid::Find(const Component& component) {
  const std::optional<std::vector<int64_t>> shape = component.FindShape("shape");
  const int64_t prefix = component.FindInteger("prefix").value_or(0);
  const std::optional<std::string> axis_text = component.Find("axis");
  const int64_t axis = component.FindInteger("axis").value_or(0);
  if (!shape) {
    TORCH_CHECK_VALUE(prefix == 0, "gnomon: ", component.name(), ":prefix=", prefix,
                      " needs a shape, such as shape=14x14");
    TORCH_CHECK_VALUE(!axis_text, "gnomon: ", component.name(), ":axis=", axis,
                      " needs a shape, such as shape=14x14");
    return std::nullopt;
  }
  const TokenGrid grid(*shape, prefix);
  TORCH_CHECK_VALUE(!axis_text || (axis >= 0 && axis < grid.axes()), "gnomon: ", component.name(),
                    ":axis is ", axis, "; expected an axis of the shape ", SizesText(*shape),
                    ", from 0 to ", grid.axes() - 1);
  return grid;
}

TokenGrid::TokenGrid(std::vector<int64_t> shape, int64_t prefix)
    : shape_(std::move(shape)), prefix_(prefix) {
  TORCH_CHECK_VALUE(!shape_.empty() && *std::min_element(shape_.begin(), shape_.end()) >= 1,
                    "gnomon: the shape of a grid is ", at::IntArrayRef(shape_),
                    "; expected positive sizes");
  constexpr int64_t kMost = int64_t{1} << 32;
  TORCH_CHECK_VALUE(prefix >= 0 && prefix < kMost, "gnomon: prefix is ", prefix,
                    "; expected 0 to 2^32 - 1 tokens");
  int64_t room = kMost - prefix;
  for (const int64_t length : shape_) room /= length;
  TORCH_CHECK_VALUE(room >= 1, "gnomon: a grid of shape ", at::IntArrayRef(shape_), " with prefix ",
                    prefix, " is too large; expected at most 2^32 tokens");
}

int64_t TokenGrid::tokens() const {
  return std::accumulate(shape_.begin(), shape_.end(), int64_t{1}, std::multiplies<>()) + prefix_;
}

std::string TokenGrid::Text() const {
  return SizesText(shape_) + (prefix_ == 0 ? "" : " after " + std::to_string(prefix_));
}

std::optional<int64_t> SmallestGrid(const std::vector<Component>& components) {
  std::optional<int64_t> tokens;
  for (const Component& component : components) {
    const std::optional<TokenGrid> grid = TokenGrid::Find(component);
    if (grid) tokens = std::min(tokens.value_or(grid->tokens()), grid->tokens());
  }
  return tokens;
}

std::vector<at::Tensor> TokenGrid::Coordinates(const char* what, const c10::SymInt& first,
                                               const c10::SymInt& count,
                                               const at::TensorOptions& options) const {
  TORCH_CHECK_VALUE(first >= 0 && first + count <= tokens(), what, ": token indices range from ",
                    first, " to ", first + count - 1, ", but the grid ", Text(), " has ", tokens(),
                    " tokens");
  return Split(at::arange(first, first + count, options.dtype(at::kLong)));
}

std::vector<at::Tensor> TokenGrid::CoordinatesAt(const char* what,
                                                 const at::Tensor& positions) const {
  CheckPositions(what, positions, tokens(),
                 "indices of the grid " + Text() + ", from 0 to " + std::to_string(tokens() - 1));
  return Split(positions);
}

std::vector<at::Tensor> TokenGrid::Split(const at::Tensor& positions) const {
  at::Tensor rest = (positions - prefix_).clamp_min(0);
  std::vector<at::Tensor> coordinates(shape_.size());
  for (size_t axis = shape_.size(); axis-- > 0;) {
    coordinates[axis] = rest.remainder(shape_[axis]);
    rest = rest.div(shape_[axis], "floor");
  }
  return coordinates;
}

at::Tensor TokenGrid::IsOnGrid(const c10::SymInt& first, const c10::SymInt& count,
                               const at::TensorOptions& options) const {
  return at::arange(first, first + count, options.dtype(at::kLong)) >= prefix_;
}

}  // namespace gnomon
