// The order that cones define on points of the upper half-space.
#include <ATen/ATen.h>
#include <gnomon/torch/attention.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "ops/geometry/geometry.h"
#include "ops/grammar/component.h"

namespace gnomon {
namespace {

struct Light {
  bool penumbral;
  double r;
};

Light Check(const char* name, const at::Tensor& u, const at::Tensor& v, const std::string& cone,
            std::optional<double> radius) {
  TORCH_CHECK_TYPE(u.is_floating_point() && !c10::isFloat8Type(u.scalar_type()) &&
                       v.scalar_type() == u.scalar_type(),
                   "gnomon.cones.", name, ": u has dtype ", u.scalar_type(), " and v has ",
                   v.scalar_type(), "; expected the same floating-point dtype");
  TORCH_CHECK_TYPE(u.device() == v.device(), "gnomon.cones.", name, ": u is on ", u.device(),
                   ", but v is on ", v.device(), "; expected the same device");
  TORCH_CHECK_VALUE(
      u.dim() >= 1 && v.dim() >= 1 && u.sym_size(-1) >= 2 && v.sym_size(-1) == u.sym_size(-1),
      "gnomon.cones.", name, ": u has shape ", u.sym_sizes(), " and v has shape ", v.sym_sizes(),
      "; expected (..., D) with D >= 2 for both; the last coordinate is the height");
  for (int64_t axis = 2; axis <= std::min(u.dim(), v.dim()); ++axis) {
    const c10::SymInt m = u.sym_size(-axis);
    const c10::SymInt n = v.sym_size(-axis);
    TORCH_CHECK_VALUE(m == n || m == 1 || n == 1, "gnomon.cones.", name, ": u has shape ",
                      u.sym_sizes(), " and v has shape ", v.sym_sizes(),
                      "; expected shapes that broadcast, except for the last axis");
  }
  TORCH_CHECK_VALUE(cone == "umbral" || cone == "penumbral", "gnomon.cones.", name, ": cone is \"",
                    cone, "\"; expected penumbral or umbral");
  const bool penumbral = cone == "penumbral";
  const double r = radius.value_or(Component::Parse(cone).Number("r"));
  TORCH_CHECK_VALUE(r > 0 && std::isfinite(r), "gnomon.cones.", name, ": r is ", r,
                    "; expected a positive number");
  return {penumbral, r};
}

struct Pair {
  at::Tensor x;     // of u
  at::Tensor step;  // from u to v
  at::Tensor distance;
  at::Tensor u;
  at::Tensor v;  // heights
};

Pair Split(const at::Tensor& u, const at::Tensor& v) {
  const auto [x, height] = SplitLast(u);
  const auto [y, other_height] = SplitLast(v);
  const at::Tensor step = y - x;
  return {x, step, SafeSqrt(SquaredNorm(step)), height, other_height};
}

// sqrt(r^2 - h^2), the radius of a point's shadow.
at::Tensor Shadow(const at::Tensor& height, double r) {
  return SafeSqrt((r - height) * (r + height));
}

// The point at the given height, above the point at the fraction `along` of the way from u to v.
at::Tensor PointOnTheWay(const Pair& pair, const at::Tensor& along, const at::Tensor& height) {
  return at::cat({pair.x + along.unsqueeze(-1) * pair.step, height.unsqueeze(-1)}, -1);
}

}  // namespace

namespace cones {

torch::Tensor ancestor(const torch::Tensor& u, const torch::Tensor& v, const std::string& cone,
                       std::optional<double> radius) {
  const auto [penumbral, r] = Check("ancestor", u, v, cone, radius);
  const Pair pair = Split(u, v);
  if (!penumbral) return pair.distance <= (pair.u - pair.v) * std::sinh(r);
  return pair.distance <= Shadow(pair.v.clamp(0, r), r) - Shadow(pair.u.clamp(0, r), r);
}

torch::Tensor lowest_common_ancestor(const torch::Tensor& u, const torch::Tensor& v,
                                     const std::string& cone, std::optional<double> radius) {
  const auto [penumbral, r] = Check("lowest_common_ancestor", u, v, cone, radius);
  const Pair pair = Split(u, v);
  const at::Tensor divisor = at::where(pair.distance > 0, pair.distance, 1.0);
  // The lowest common ancestor lies between the points. Its horizontal distance from each point
  // equals the difference of their shadows' radii. If one point is an ancestor of the other, it is
  // also their lowest common ancestor.
  if (!penumbral) {
    const double by_height = std::sinh(r);
    const at::Tensor reach = at::maximum((pair.u - pair.v).abs(), pair.distance / by_height);
    const at::Tensor height = (pair.u + pair.v + reach) / 2;
    return PointOnTheWay(pair, ((height - pair.u) * by_height / divisor).clamp(0, 1), height);
  }
  const at::Tensor a = pair.u.clamp(0, r);
  const at::Tensor b = pair.v.clamp(0, r);
  const at::Tensor alpha = a.square() / (r + Shadow(a, r));
  const at::Tensor beta = b.square() / (r + Shadow(b, r));
  const at::Tensor reach = (alpha + beta + at::maximum((alpha - beta).abs(), pair.distance)) / 2;
  const at::Tensor within = reach <= r;
  // Without a common ancestor below the light source, the result is the top of the geodesic through
  // both points.
  const at::Tensor top = (1 + (b - a) * (b + a) / divisor.square()) / 2;
  const at::Tensor along = at::where(within, ((reach - alpha) / divisor).clamp(0, 1), top);
  const at::Tensor height =
      at::where(within, SafeSqrt(at::where(within, reach * (2 * r - reach), 1.0)),
                SafeSqrt((top * pair.distance).square() + a.square()));
  return PointOnTheWay(pair, along, height);
}

}  // namespace cones
}  // namespace gnomon
