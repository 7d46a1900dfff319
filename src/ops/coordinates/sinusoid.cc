#include <ATen/ATen.h>
#include <gnomon/torch/attention.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "ops/coordinates/sinusoid.h"
#include "ops/coordinates/token_grid.h"

namespace gnomon {

at::Tensor sinusoid(const at::Tensor& positions, int64_t dim, const std::string& layout) {
  TORCH_CHECK_VALUE(dim >= 2 && dim % 2 == 0, "gnomon.sinusoid: dim is ", dim,
                    "; expected a positive even number");
  const std::vector<std::string> layouts = SinusoidLayouts();
  TORCH_CHECK_VALUE(std::find(layouts.begin(), layouts.end(), layout) != layouts.end(),
                    "gnomon.sinusoid: layout is \"", layout, "\"; expected one of ",
                    c10::Join(", ", layouts));
  TORCH_CHECK_TYPE(!positions.is_complex() && positions.scalar_type() != at::kBool,
                   "gnomon.sinusoid: positions have dtype ", positions.scalar_type(),
                   "; expected integers or floating-point numbers");
  const double half = static_cast<double>(dim / 2);
  const double divisor = layout == "split" ? std::max(half - 1, 1.0) : half;
  const at::Tensor frequencies =
      (at::arange(dim / 2, positions.options().dtype(at::kDouble)) * (-std::log(1e4) / divisor))
          .exp();
  const at::Tensor angles = positions.to(at::kDouble).unsqueeze(-1) * frequencies;
  const at::Tensor table = layout == "interleaved"
                               ? at::stack({angles.sin(), angles.cos()}, -1).flatten(-2)
                               : at::cat({angles.sin(), angles.cos()}, -1);
  return table.to(positions.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

at::Tensor grid_sinusoid(const std::vector<int64_t>& shape, int64_t dim, const std::string& layout,
                         int64_t prefix) {
  const TokenGrid grid(shape, prefix);
  const int64_t axes = grid.axes();
  TORCH_CHECK_VALUE(dim >= 2 * axes && dim % (2 * axes) == 0, "gnomon.grid_sinusoid: dim is ", dim,
                    "; expected a positive multiple of 2 * axes = ", 2 * axes);
  const at::TensorOptions options = at::TensorOptions().dtype(at::kLong);
  std::vector<at::Tensor> parts;
  for (const at::Tensor& coordinate :
       grid.Coordinates("gnomon.grid_sinusoid", 0, grid.tokens(), options)) {
    parts.push_back(sinusoid(coordinate, dim / axes, layout));
  }
  const at::Tensor on_grid = grid.IsOnGrid(0, grid.tokens(), options).unsqueeze(1);
  return at::where(on_grid, at::cat(parts, 1), 0.0);
}

}  // namespace gnomon
