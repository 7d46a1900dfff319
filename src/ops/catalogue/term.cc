#include <ATen/ATen.h>
#include <gnomon/torch/term.h>

#include "ops/catalogue/registry.h"

namespace gnomon {

Position operator+(const Position& a, const Position& b) {
  Position sum = a;
  sum.spec += "+" + b.spec;
  sum.tensors.insert(sum.tensors.end(), b.tensors.begin(), b.tensors.end());
  return sum;
}

namespace position {

Position Grid(const std::vector<int64_t>& shape, const std::vector<Position>& axes,
              int64_t prefix) {
  TORCH_CHECK_VALUE(!shape.empty() && axes.size() == shape.size(),
                    "gnomon.position.Grid: shape has ", shape.size(), " axes and axes ",
                    axes.size(), " biases; expected one bias for each axis");
  Position sum;
  for (size_t axis = 0; axis < axes.size(); ++axis) {
    const Component bias = Component::Parse(axes[axis].spec);
    TORCH_CHECK_VALUE(
        FindPosition(bias).role() == PositionEntry::Role::kBias && !bias.Find("shape"),
        "gnomon.position.Grid: axes have ", axes[axis].spec, "; expected biases of one offset");
    if (axis > 0) sum.spec += "+";
    sum.spec += axes[axis].spec + ":shape=" + SizesText(shape) + ":axis=" + std::to_string(axis) +
                ":prefix=" + std::to_string(prefix);
    sum.tensors.insert(sum.tensors.end(), axes[axis].tensors.begin(), axes[axis].tensors.end());
  }
  return sum;
}

}  // namespace position
}  // namespace gnomon
