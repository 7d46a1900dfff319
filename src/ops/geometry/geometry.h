// Functions shared by token maps and cones: splitting off the last coordinate, and norms that are
// differentiable everywhere.
#ifndef GNOMON_OPS_GEOMETRY_GEOMETRY_H_
#define GNOMON_OPS_GEOMETRY_GEOMETRY_H_

#include <ATen/core/Tensor.h>

#include <utility>

namespace gnomon {

// Splits (..., D) into (..., D - 1) and (...).
std::pair<at::Tensor, at::Tensor> SplitLast(const at::Tensor& x);

// sqrt of x >= 0, with derivative 0 at 0.
at::Tensor SafeSqrt(const at::Tensor& x);

// |x|^2 over the last axis.
at::Tensor SquaredNorm(const at::Tensor& x);

// Directions and distances of tokens with a norm below this value are smoothed.
inline constexpr double kOrigin = 1e-6;

// The vector from the origin to a token. Below kOrigin, where directions change quickly, `length`
// is a parabola tangent to |x|, and `unit` is x / kOrigin. Distances are then smooth, 0 between
// equal tokens, and wrong by at most kOrigin / 2.
struct Radius {
  at::Tensor unit;
  at::Tensor length;
  at::Tensor divisor;  // x = divisor * unit
};
Radius RadiusOf(const at::Tensor& x);

// Multiplies (H,) by a number. For so few elements, PyTorch's multiplication would take a
// significant part of a short attention call, so plain tensors without autograd are multiplied in a
// loop. For other tensors, `number` is cached as a tensor.
at::Tensor TimesNumber(const at::Tensor& heads, double number);

// Reshapes (H,) to (H, 1), which broadcasts with (B, H, Lq).
at::Tensor OverRows(const at::Tensor& heads);

// Reshapes (B, H, L) to (B, H, L, 1), which broadcasts with tokens.
at::Tensor OverColumns(const at::Tensor& x);

// Projects sums of hyperboloid points (..., D), time first, back onto <x, x> = -1; 0 stays 0.
at::Tensor OntoHyperboloid(const at::Tensor& sums);

// Moves points on or outside the unit sphere to just inside it.
at::Tensor InUnitBall(const at::Tensor& x);

}  // namespace gnomon

#endif  // GNOMON_OPS_GEOMETRY_GEOMETRY_H_
