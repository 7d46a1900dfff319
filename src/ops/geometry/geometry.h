// Functions shared by token maps and cones: tokens with a separate last coordinate, and norms that
// are differentiable everywhere.
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

// Directions and distances of tokens with a smaller norm than this are smoothed.
inline constexpr double kOrigin = 1e-6;

// The vector from the origin to a token. Below kOrigin, where directions change quickly, `length`
// is a parabola tangent to |x|, and `unit` is x / kOrigin. Distances are smooth there and exact at
// 0; their error is at most kOrigin / 2.
struct Radius {
  at::Tensor unit;
  at::Tensor length;
  at::Tensor divisor;  // x = divisor * unit
};
Radius RadiusOf(const at::Tensor& x);

// (H) times a number. PyTorch's product of a few numbers would take a significant part of a short
// attention call, so it is avoided for plain tensors without autograd; for other tensors, the
// factor is cached.
at::Tensor TimesNumber(const at::Tensor& heads, double number);

// (H) to (H, 1), to broadcast with (B, H, Lq).
at::Tensor OverRows(const at::Tensor& heads);

// (B, H, L) to (B, H, L, 1), to broadcast with tokens.
at::Tensor OverColumns(const at::Tensor& x);

// Projects sums of hyperboloid points (..., D), time first, back onto <x, x> = -1; 0 stays 0.
at::Tensor OntoHyperboloid(const at::Tensor& sums);

// Moves points on or outside the unit sphere to just inside it.
at::Tensor InUnitBall(const at::Tensor& x);

}  // namespace gnomon

#endif  // GNOMON_OPS_GEOMETRY_GEOMETRY_H_
