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

// The vector that points to a token from the origin. Below kOrigin, where directions turn fast,
// `length` is a parabola that touches |x|, and `unit` is x / kOrigin: distances are smooth there
// too, with their true gradients at 0, and off by kOrigin^2.
struct Radius {
  at::Tensor unit;
  at::Tensor length;
  at::Tensor divisor;  // x = divisor * unit
};
Radius RadiusOf(const at::Tensor& x);

// (H) times a number. Torch's own product of a few numbers takes as long as a part of attention
// over a few tokens: it is left out for plain numbers of which nothing is recorded, and for others
// the factor is made once.
at::Tensor TimesNumber(const at::Tensor& heads, double number);

// (H) to (H, 1), to go with (B, H, Lq).
at::Tensor OverRows(const at::Tensor& heads);

// (B, H, L) to (B, H, L, 1), to go with tokens.
at::Tensor OverColumns(const at::Tensor& x);

// Sums of points of hyperboloids (..., D), times first, back on that of <x, x> = -1; 0 stays 0.
at::Tensor OntoHyperboloid(const at::Tensor& sums);

// Points on or outside the unit sphere, pulled to just inside it.
at::Tensor InUnitBall(const at::Tensor& x);

}  // namespace gnomon

#endif  // GNOMON_OPS_GEOMETRY_GEOMETRY_H_
