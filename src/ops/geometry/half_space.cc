#include "ops/geometry/half_space.h"

#include <ATen/ATen.h>

#include "ops/geometry/geometry.h"

namespace gnomon {
namespace {

// The map psi (Tseng et al. 2023, section 4).
HalfSpacePoint Psi(const at::Tensor& token) {
  const auto [x, z] = SplitLast(token);
  const at::Tensor height = z.clamp(-kFarthest, kFarthest).exp();
  return {x * OverColumns(height), height};
}

// sinh(n) / n, given n and n^2.
at::Tensor SinhRatio(const at::Tensor& n, const at::Tensor& square) {
  const at::Tensor large = n > 1e-2;
  const at::Tensor safe = at::where(large, n, 1.0);
  return at::where(large, safe.sinh() / safe, 1 + square / 6 + square.square() / 120);
}

}  // namespace

// The exponential map at (0, ..., 0, 1), for tangents in its orthonormal frame:
//   height = 1 / (cosh n - v_d sinh(n) / n), X = w sinh(n) / n height,  v = (w, v_d), n = |v|.
// The denominator is computed as e^-n + (n - v_d) sinh(n) / n, and n - v_d as |w|^2 / (n + v_d) if
// v_d > 0, which avoids cancellation.
HalfSpacePoint ExponentialMap(const at::Tensor& token) {
  const at::Tensor length = SafeSqrt(SquaredNorm(token));
  const at::Tensor v = token * OverColumns(kFarthest / length.clamp_min(kFarthest));
  const at::Tensor square = SquaredNorm(v);
  const at::Tensor n = SafeSqrt(square);
  const auto [w, last] = SplitLast(v);
  const at::Tensor up = last > 0;
  const at::Tensor gap = at::where(up, SquaredNorm(w) / at::where(up, n + last, 1.0), n - last);
  const at::Tensor ratio = SinhRatio(n, square);
  const at::Tensor height = 1 / ((-n).exp() + ratio * gap);
  return {w * OverColumns(ratio * height), height};
}

HalfSpacePoint MapToHalfSpace(const at::Tensor& token, const std::string& map) {
  if (map == "psi") return Psi(token);
  if (map == "exp") return ExponentialMap(token);
  const auto [x, z] = SplitLast(token);
  if (map == "none") return {x, z};
  const at::Tensor height = z.sigmoid();  // xi
  return {x * OverColumns(height), height};
}

}  // namespace gnomon
