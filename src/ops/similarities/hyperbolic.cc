#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>
#include <vector>

#include "ops/catalogue/registry.h"
#include "ops/geometry/geometry.h"
#include "ops/geometry/half_space.h"

namespace gnomon {
namespace hyperbolic {
namespace {

// A token in the form that src/definitions/hyperbolic-inl.h reads.
struct HyperbolicToken {
  at::Tensor x;
  at::Tensor scalars;  // (3, B, H, L)
};

// The scalars of a point; offset = u - u0, as in the definition.
HyperbolicToken FromScalars(const at::Tensor& x, const at::Tensor& offset, const at::Tensor& u,
                            const at::Tensor& p) {
  const double root = std::numbers::sqrt2 / 2;
  return {x, at::stack({offset, root / u, p * root})};
}

// The point at distance log(1 + excess) from the origin, in the direction of x.
HyperbolicToken FromPolar(const at::Tensor& x, const at::Tensor& excess, const at::Tensor& sinh) {
  return FromScalars(x, excess, 1 + excess, sinh);
}

HyperbolicToken InHalfSpace(const HalfSpacePoint& point) {
  const at::Tensor height = point.height.clamp(std::exp(-kFarthest), std::exp(kFarthest));
  return FromScalars(point.x, height, height, 1 / height);
}

// The normalised pseudopolar map of the hyperboloid (Gulcehre et al. 2019, Hyperbolic Attention
// Networks): direction x / |x|, at distance z from the origin. A negative distance reverses the
// direction.
HyperbolicToken Pseudopolar(const at::Tensor& token) {
  const auto [x, z] = SplitLast(token);
  const at::Tensor ahead = z >= 0;
  const at::Tensor distance = at::where(ahead, z, -z).clamp_max(kFarthest);
  const at::Tensor unit = RadiusOf(x).unit;
  return FromPolar(at::where(OverColumns(ahead), unit, -unit), distance.expm1(), distance.sinh());
}

// The exponential map at the origin. Distances are the same in all models.
HyperbolicToken FromTangent(const at::Tensor& token) {
  const Radius radius = RadiusOf(token);
  return FromPolar(radius.unit, radius.length.clamp_max(kFarthest).expm1(),
                   radius.divisor.clamp_max(kFarthest).sinh());
}

// The point (x, sqrt(1 + |x|^2)); the last coordinate of the token is ignored.
HyperbolicToken OnHyperboloid(const at::Tensor& token) {
  const Radius radius = RadiusOf(SplitLast(token).first);
  const double most = std::sinh(kFarthest);
  const at::Tensor sinh = radius.length.clamp_max(most);
  const at::Tensor square = sinh * sinh;
  return FromPolar(radius.unit, sinh + square / (1 + (1 + square).sqrt()),
                   radius.divisor.clamp_max(most));
}

HyperbolicToken InBall(const at::Tensor& token) {
  const at::Tensor x = InUnitBall(token);
  const at::Tensor p = 2 / (1 - SquaredNorm(x));
  const at::Tensor one = at::ones_like(p);
  return FromScalars(x, one, one, p);
}

// Maps the Klein model to the ball, through the hyperboloid at x / sqrt(1 - |x|^2).
HyperbolicToken InKlein(const at::Tensor& token) {
  const at::Tensor x = InUnitBall(token);
  const at::Tensor root = (1 - SquaredNorm(x)).sqrt();
  const at::Tensor one = at::ones_like(root);
  return FromScalars(x / OverColumns(1 + root), one, one, 1 + 1 / root);
}

// The model of a hyperbolic similarity and the map into it.
struct Chart {
  std::string model;
  std::string map;
};

Chart ChartOf(const Component& component) {
  const std::string model = component.Choice("model");
  std::vector<std::string> maps = {"exp", "none"};
  if (model == "half_space") maps = {"psi", "xi", "exp", "none"};
  if (model == "hyperboloid") maps = {"pseudopolar", "exp", "none"};
  const std::string map = component.Find("map").value_or(maps.front());
  if (std::find(maps.begin(), maps.end(), map) == maps.end()) {
    std::string expected = maps.front();
    for (size_t n = 1; n < maps.size(); ++n) {
      expected += (n + 1 < maps.size() ? ", " : " or ") + maps[n];
    }
    TORCH_CHECK_VALUE(false, "gnomon: ", component.name(), ":map=", map, " with model=", model,
                      " is invalid; expected ", expected);
  }
  return {model, map};
}

HyperbolicToken MapToHyperbolic(const at::Tensor& token, const Chart& chart) {
  // The exponential maps of the half-space at (0, ..., 0, 1) and of the other models at their
  // origins agree up to an isometry.
  if (chart.map == "exp") return FromTangent(token);
  if (chart.map == "pseudopolar") return Pseudopolar(token);
  if (chart.model == "half_space") return InHalfSpace(MapToHalfSpace(token, chart.map));
  if (chart.model == "hyperboloid") return OnHyperboloid(token);
  return chart.model == "ball" ? InBall(token) : InKlein(token);
}

MappedTokens Map(const Component& component, const at::Tensor& q, const at::Tensor& k,
                 const at::Tensor& beta) {
  const Chart chart = ChartOf(component);
  const HyperbolicToken query = MapToHyperbolic(q, chart);
  const HyperbolicToken key = MapToHyperbolic(k, chart);
  return {.function = "hyperbolic",
          .x = query.x,
          .y = key.x,
          .factor = TimesNumber(beta, -1),
          .row_scalars = query.scalars,
          .column_scalars = key.scalars};
}

// Whether the last coordinate of a token is a height, a time, or the distance from the origin.
bool HasHeight(const Component& component) {
  const Chart chart = ChartOf(component);
  return chart.model == "half_space" || (chart.model == "hyperboloid" && chart.map != "exp");
}

Parameter MapParameter() {
  Parameter map = Choice("map", {"pseudopolar", "psi", "xi", "exp", "none"})
                      .Points("none")
                      .Means("map from a token to a point of the model")
                      .Otherwise("pseudopolar (hyperboloid), psi (half_space), exp (others)");
  map.default_value = "";
  return map;
}

const RegisterSimilarity hyperbolic({
    .catalogue =
        {.name = "hyperbolic",
         .title = "hyperbolic distance",
         .formula = "-beta d, where d is the hyperbolic distance between q and k",
         .latex = R"(-\beta_h\, d(q, k))",
         .note = "d is the hyperbolic distance between q and k",
         .details =
             "The model determines the available maps, of which the first one listed is the "
             "default, and the input that the map \"none\" expects. Below, z is the last "
             "coordinate of a token, and x contains the others.\n\n- \"hyperboloid\": "
             "\"pseudopolar\" gives the point at distance z from the origin in the direction of x; "
             "\"exp\" is the exponential map at the origin, applied to D-dimensional tangent "
             "vectors; \"none\" expects points (x, t), and sets the time t to sqrt(1 + |x|^2)\n- "
             "\"half_space\": \"psi\" and \"exp\" are the same maps as for umbral cones; \"xi\" "
             "gives the height sigmoid(z) and X = x sigmoid(z); \"none\" expects (X, height), and "
             "clamps heights to [e^-30, e^30]\n- \"ball\" (the Poincare ball) and \"klein\": "
             "\"exp\" is the exponential map at the origin; \"none\" expects points of the unit "
             "ball, and projects points outside onto its boundary\n\nD must be at least 2, except "
             "for the models \"ball\" and \"klein\", and for the map \"exp\" of the hyperboloid. "
             "The distance of mapped points from the origin is at most 30. A direction x shorter "
             "than 1e-6 is divided by 1e-6 instead of its length, so distances between such tokens "
             "are approximate.",
         .source = "Gulcehre et al. 2019, Hyperbolic Attention Networks",
         .class_name = "Hyperbolic"},
    .parameters = {PerHead("beta", "learned").Means("per-head factor"),
                   Choice("model", {"hyperboloid", "half_space", "ball", "klein"})
                       .Means("the model of hyperbolic space"),
                   MapParameter()},
    .map = Map,
    .has_height = HasHeight,
});

}  // namespace
}  // namespace hyperbolic
}  // namespace gnomon
