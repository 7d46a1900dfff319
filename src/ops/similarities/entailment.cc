#include <ATen/ATen.h>

#include <numbers>
#include <string>

#include "ops/catalogue/registry.h"
#include "ops/geometry/geometry.h"

namespace gnomon {
namespace entailment {
namespace {

// The exponential map of the Poincare ball at 0: tanh(|v| / 2) v / |v|.
at::Tensor IntoBall(const at::Tensor& token) {
  const at::Tensor square = SquaredNorm(token);
  const at::Tensor large = square > 1e-4;
  const at::Tensor n = at::where(large, square, 1.0).sqrt();
  const at::Tensor ratio =
      at::where(large, (n / 2).tanh() / n, 0.5 - square / 24 + square.square() / 240);
  return InUnitBall(token * OverColumns(ratio));
}

// Ganea et al. 2018, eqs. 26 and 28.
MappedTokens Map(const Component& component, const at::Tensor& q, const at::Tensor& k,
                 const at::Tensor& gamma) {
  const std::string map = component.Choice("map");
  const double aperture = component.Number("K");
  const at::Tensor query = map == "ball" ? IntoBall(q) : InUnitBall(q);
  const at::Tensor key = map == "ball" ? IntoBall(k) : InUnitBall(k);
  const at::Tensor square = SquaredNorm(query);
  // Near the origin, where no cone is defined, a half-space is used.
  const at::Tensor sine = aperture * (1 - square) / SafeSqrt(square).clamp_min(kOrigin);
  const at::Tensor narrow = sine < 1;
  const at::Tensor psi =
      at::where(narrow, at::where(narrow, sine, 0.0).asin(), std::numbers::pi / 2);
  return {.function = "entailment",
          .x = query,
          .y = key,
          .factor = TimesNumber(gamma, -1),
          .row_scalars = at::stack({square, psi}),
          .column_scalars = SquaredNorm(key).unsqueeze(0)};
}

const RegisterSimilarity entailment({
    .catalogue =
        {.name = "entailment",
         .title = "entailment cones",
         .formula =
             "-gamma max(0, Xi - psi), where Xi is the angle between k and the axis of q's cone in "
             "the Poincare ball, and psi = arcsin(K (1 - |q|^2) / |q|) is the cone's aperture",
         .latex =
             R"(-\gamma_h \max(0, \Xi - \psi), \qquad \psi = \arcsin\left(K\, \frac{1 - |q|^2}{|q|}\right))",
         .note = "Xi is the angle between k and the axis of q's cone in the Poincare ball, and psi "
                 "is the aperture of the cone",
         .details = "The score measures how far k lies outside the entailment cone of q (eqs. 26 "
                    "and 28 of the paper). Near the origin, where the aperture is undefined, it is "
                    "set to pi / 2.",
         .source = "Ganea et al. 2018, Hyperbolic Entailment Cones",
         .class_name = "Entailment"},
    .parameters =
        {PerHead("gamma", "learned").Means("per-head factor"),
         PositiveNumber("K", "0.1").Means("constant K in the aperture formula"),
         Choice("map", {"ball", "none"})
             .Points("none")
             .Means("\"ball\": a token x becomes tanh(|x| / 2) x / |x|; \"none\": tokens are "
                    "points of the unit ball, and points outside are projected onto its boundary")},
    .map = Map,
});

}  // namespace
}  // namespace entailment
}  // namespace gnomon
