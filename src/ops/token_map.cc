#include "ops/token_map.h"

#include <ATen/ATen.h>

#include <cmath>
#include <numbers>
#include <string>
#include <utility>

#include "ops/cone_map.h"
#include "ops/geometry.h"

namespace gnomon {
namespace {

// Directions and distances of tokens nearer to 0 than this are made smooth.
constexpr double kOrigin = 1e-6;

// (H) to (H, 1), to go with (B, H, Lq).
at::Tensor OverRows(const at::Tensor& heads) { return heads.unsqueeze(1); }

// (B, H, L) to (B, H, L, 1), to go with tokens.
at::Tensor OverColumns(const at::Tensor& x) { return x.unsqueeze(3); }

double PositiveNumber(const Component& component, const char* key, double default_value) {
  const double number = component.Number(key, default_value);
  TORCH_CHECK_VALUE(number > 0 && std::isfinite(number), "gnomon: ", component.name(), ":", key,
                    "=", number, "; expected a positive number");
  return number;
}

// A point of the upper half-space.
struct HalfSpacePoint {
  at::Tensor x;
  at::Tensor height;
};

// The map psi (Tseng et al. 2023, section 4).
HalfSpacePoint Psi(const at::Tensor& token) {
  const auto [x, z] = SplitLast(token);
  const at::Tensor height = z.clamp(-kFarthest, kFarthest).exp();
  return {x * OverColumns(height), height};
}

// sinh(n) / n of n^2.
at::Tensor SinhRatio(const at::Tensor& n, const at::Tensor& square) {
  const at::Tensor large = n > 1e-2;
  const at::Tensor safe = at::where(large, n, 1.0);
  return at::where(large, safe.sinh() / safe, 1 + square / 6 + square.square() / 120);
}

// The exponential map at (0, ..., 0, 1), of tangents in its orthonormal frame:
//   height = 1 / (cosh n - v_d sinh(n) / n), X = w sinh(n) / n height,  v = (w, v_d), n = |v|,
// with cosh n - v_d sinh(n) / n = e^-n + (n - v_d) sinh(n) / n, and n - v_d = |w|^2 / (n + v_d)
// where v_d > 0, so that nothing cancels.
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

// Tokens of the cones by the exponential map, in which heights depend on all columns: what
// cone_map makes of the points by the map none.
ConeTokens ByExponentialMap(const at::Tensor& q, const at::Tensor& k, const char* function,
                            double r) {
  const auto as_token = [](const HalfSpacePoint& point) {
    return at::cat({point.x, OverColumns(point.height)}, 3);
  };
  return CallConeMap(as_token(ExponentialMap(q)), as_token(ExponentialMap(k)), function, "none", r);
}

ConeTokens MapCones(const at::Tensor& q, const at::Tensor& k, const char* function,
                    const std::string& map, double r) {
  if (map == "exp") return ByExponentialMap(q, k, function, r);
  return CallConeMap(q, k, function, map, r);
}

// A token as src/definitions/hyperbolic-inl.h reads it.
struct HyperbolicToken {
  at::Tensor x;
  at::Tensor scalars;  // (3, B, H, L)
};

// offset = u - u0.
HyperbolicToken FromScalars(const at::Tensor& x, const at::Tensor& offset, const at::Tensor& u,
                            const at::Tensor& p) {
  const double root = std::numbers::sqrt2 / 2;
  return {x, at::stack({offset, root / u, p * root})};
}

// The point at that distance from the origin, e^distance - 1 = excess, in the direction of x.
HyperbolicToken FromPolar(const at::Tensor& x, const at::Tensor& excess, const at::Tensor& sinh) {
  return FromScalars(x, excess, 1 + excess, sinh);
}

HyperbolicToken InHalfSpace(const HalfSpacePoint& point) {
  const at::Tensor height = point.height.clamp(std::exp(-kFarthest), std::exp(kFarthest));
  return FromScalars(point.x, height, height, 1 / height);
}

// The vector that points to a token from the origin. Below kOrigin, where directions turn fast,
// `length` is a parabola that touches |x|, and `unit` is x / kOrigin: distances are smooth there
// too, with their true gradients at 0, and off by kOrigin^2.
struct Radius {
  at::Tensor unit;
  at::Tensor length;
  at::Tensor divisor;  // x = divisor * unit
};

Radius RadiusOf(const at::Tensor& x) {
  const at::Tensor square = SquaredNorm(x);
  const at::Tensor norm = SafeSqrt(square);
  const at::Tensor divisor = norm.clamp_min(kOrigin);
  return {x / OverColumns(divisor),
          at::where(norm > kOrigin, norm, square * (0.5 / kOrigin) + kOrigin / 2), divisor};
}

// The hyperboloid's normalised pseudopolar map (Gulcehre et al. 2019, Hyperbolic Attention
// Networks): direction x / |x|, at distance z from the origin; a negative distance turns it round.
HyperbolicToken Pseudopolar(const at::Tensor& token) {
  const auto [x, z] = SplitLast(token);
  const at::Tensor ahead = z >= 0;
  const at::Tensor distance = at::where(ahead, z, -z).clamp_max(kFarthest);
  const at::Tensor unit = RadiusOf(x).unit;
  return FromPolar(at::where(OverColumns(ahead), unit, -unit), distance.expm1(), distance.sinh());
}

// The exponential map at the origin. Distances do not depend on the model.
HyperbolicToken FromTangent(const at::Tensor& token) {
  const Radius radius = RadiusOf(token);
  return FromPolar(radius.unit, radius.length.clamp_max(kFarthest).expm1(),
                   radius.divisor.clamp_max(kFarthest).sinh());
}

// (x, sqrt(1 + |x|^2)), of which x suffices.
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

// Through the hyperboloid, x / sqrt(1 - |x|^2), to the ball.
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
  const std::string model =
      component.Choice("model", {"hyperboloid", "half_space", "ball", "klein"});
  if (model == "hyperboloid")
    return {model, component.Choice("map", {"pseudopolar", "exp", "none"})};
  if (model == "half_space") return {model, component.Choice("map", {"psi", "xi", "exp", "none"})};
  return {model, component.Choice("map", {"exp", "none"})};
}

HyperbolicToken MapToHyperbolic(const at::Tensor& token, const Chart& chart) {
  // The exponential maps of the half-space at (0, ..., 0, 1) and of the others at their origins are
  // the same up to an isometry.
  if (chart.map == "exp") return FromTangent(token);
  if (chart.map == "pseudopolar") return Pseudopolar(token);
  if (chart.model == "half_space") return InHalfSpace(MapToHalfSpace(token, chart.map));
  if (chart.model == "hyperboloid") return OnHyperboloid(token);
  return chart.model == "ball" ? InBall(token) : InKlein(token);
}

// The Poincare ball's exponential map at 0: tanh(|v| / 2) v / |v|.
at::Tensor IntoBall(const at::Tensor& token) {
  const at::Tensor square = SquaredNorm(token);
  const at::Tensor large = square > 1e-4;
  const at::Tensor n = at::where(large, square, 1.0).sqrt();
  const at::Tensor ratio =
      at::where(large, (n / 2).tanh() / n, 0.5 - square / 24 + square.square() / 240);
  return InUnitBall(token * OverColumns(ratio));
}

}  // namespace

MappedTokens MapDot(const Component&, const at::Tensor& q, const at::Tensor& k,
                    const at::Tensor& scale) {
  return {.function = "dot", .x = q, .y = k, .factor = scale};
}

MappedTokens MapLaplacian(const Component&, const at::Tensor& q, const at::Tensor& k,
                          const at::Tensor& gamma) {
  return {.function = "laplacian", .x = q, .y = k, .factor = -gamma};
}

MappedTokens MapGaussian(const Component&, const at::Tensor& q, const at::Tensor& k,
                         const at::Tensor& gamma) {
  return {.function = "gaussian", .x = q, .y = k, .factor = -gamma};
}

// Tseng et al. 2023, section 4.
MappedTokens MapUmbral(const Component& component, const at::Tensor& q, const at::Tensor& k,
                       const at::Tensor& gamma) {
  const std::string map = component.Choice("map", {"psi", "exp", "none"});
  const std::string score = component.Choice("score", {"height", "log"});
  const double r = PositiveNumber(component, "r", 0.1);
  const ConeTokens cones = MapCones(q, k, "umbral", map, r);
  MappedTokens tokens{.function = "umbral",
                      .x = cones.x,
                      .y = cones.y,
                      .factor = gamma * 0.5,
                      .row_scalars = cones.row_scalars,
                      .column_scalars = cones.column_scalars};
  if (score == "height") {
    tokens.row_constant = [gamma, height = cones.row_scalars.select(0, 0)] {
      return -OverRows(gamma) * height;
    };
  } else {
    tokens.function = "umbral_log";
    tokens.factor = -gamma;
    tokens.row_constant = [gamma] { return OverRows(gamma) * std::numbers::ln2; };
  }
  return tokens;
}

// Tseng et al. 2023, eq. 23.
MappedTokens MapPenumbral(const Component& component, const at::Tensor& q, const at::Tensor& k,
                          const at::Tensor& gamma) {
  const std::string map = component.Choice("map", {"xi", "exp", "none"});
  const std::string score = component.Choice("score", {"height", "height2", "log"});
  const double r = PositiveNumber(component, "r", 1.0);
  const char* function = score == "height2" ? "penumbral_square" : "penumbral";
  const ConeTokens cones = MapCones(q, k, function, map, r);
  MappedTokens tokens{.function = function,
                      .x = cones.x,
                      .y = cones.y,
                      .factor = gamma * (score == "height2" ? r * r / 4 : -r / 2),
                      .row_scalars = cones.row_scalars,
                      .column_scalars = cones.column_scalars};
  if (score == "height2") {
    tokens.row_constant = [gamma, r] { return -OverRows(gamma) * (r * r); };
  } else if (score == "log") {
    tokens.function = "penumbral_log";
    tokens.factor = -gamma;
    tokens.row_constant = [gamma] { return OverRows(gamma) * std::numbers::ln2; };
  }
  return tokens;
}

MappedTokens MapHyperbolic(const Component& component, const at::Tensor& q, const at::Tensor& k,
                           const at::Tensor& beta) {
  const Chart chart = ChartOf(component);
  const HyperbolicToken query = MapToHyperbolic(q, chart);
  const HyperbolicToken key = MapToHyperbolic(k, chart);
  return {.function = "hyperbolic",
          .x = query.x,
          .y = key.x,
          .factor = -beta,
          .row_scalars = query.scalars,
          .column_scalars = key.scalars};
}

bool HyperbolicHasHeight(const Component& component) {
  const Chart chart = ChartOf(component);
  return chart.model == "half_space" || (chart.model == "hyperboloid" && chart.map != "exp");
}

// Ganea et al. 2018, eqs. 26 and 28.
MappedTokens MapEntailment(const Component& component, const at::Tensor& q, const at::Tensor& k,
                           const at::Tensor& gamma) {
  const std::string map = component.Choice("map", {"ball", "none"});
  const double aperture = PositiveNumber(component, "K", 0.1);
  const at::Tensor query = map == "ball" ? IntoBall(q) : InUnitBall(q);
  const at::Tensor key = map == "ball" ? IntoBall(k) : InUnitBall(k);
  const at::Tensor square = SquaredNorm(query);
  // Near the origin, where no cone is defined, half of space.
  const at::Tensor sine = aperture * (1 - square) / SafeSqrt(square).clamp_min(kOrigin);
  const at::Tensor narrow = sine < 1;
  const at::Tensor psi =
      at::where(narrow, at::where(narrow, sine, 0.0).asin(), std::numbers::pi / 2);
  return {.function = "entailment",
          .x = query,
          .y = key,
          .factor = -gamma,
          .row_scalars = at::stack({square, psi}),
          .column_scalars = SquaredNorm(key).unsqueeze(0)};
}

// Velickovic et al. 2018, eq. 3, of the two scores.
MappedTokens MapAdditive(const Component& component, const at::Tensor& q, const at::Tensor& k,
                         const at::Tensor& one) {
  return {.function = "additive",
          .x = q.narrow(3, 0, 0),
          .y = k.narrow(3, 0, 0),
          .factor = one,
          .row_scalars = q.select(3, 0).unsqueeze(0),
          .column_scalars = k.select(3, 0).unsqueeze(0),
          .head_scalars = (one * component.Number("slope", 0.2)).unsqueeze(0)};
}

}  // namespace gnomon
