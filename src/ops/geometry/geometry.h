// What token maps and cones share: tokens of which the last coordinate is told apart, and norms
// with derivatives everywhere.
#ifndef GNOMON_OPS_GEOMETRY_GEOMETRY_H_
#define GNOMON_OPS_GEOMETRY_GEOMETRY_H_

#include <ATen/core/Tensor.h>

#include <utility>

namespace gnomon {

// (..., D) to (..., D - 1) and (...).
std::pair<at::Tensor, at::Tensor> SplitLast(const at::Tensor& x);

// sqrt of x >= 0, with derivative 0 at 0.
at::Tensor SafeSqrt(const at::Tensor& x);

// |x|^2 over the last axis.
at::Tensor SquaredNorm(const at::Tensor& x);

// Directions and distances of tokens nearer to 0 than this are made smooth.
inline constexpr double kOrigin = 1e-6;

// (H) to (H, 1), to go with (B, H, Lq).
at::Tensor OverRows(const at::Tensor& heads);

// (B, H, L) to (B, H, L, 1), to go with tokens.
at::Tensor OverColumns(const at::Tensor& x);

// Points on or outside the unit sphere, pulled to just inside it.
at::Tensor InUnitBall(const at::Tensor& x);

}  // namespace gnomon

#endif  // GNOMON_OPS_GEOMETRY_GEOMETRY_H_
