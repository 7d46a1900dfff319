#include <ATen/ATen.h>

#include <string>

#include "ops/catalogue/registry.h"
#include "ops/geometry/cone_map.h"
#include "ops/geometry/geometry.h"

namespace gnomon {
namespace penumbral {
namespace {

// Tseng et al. 2023, eq. 23.
MappedTokens Map(const Component& component, const RawTokens& raw, const at::Tensor& gamma) {
  const std::string score = component.Choice("score");
  const double r = component.Number("r");
  MappedTokens tokens = MapCones(raw, "penumbral", component.Choice("map"), r);
  if (score == "height") {
    tokens.factor = TimesNumber(gamma, -r / 2);
  } else if (score == "height2") {
    tokens.function = "penumbral_square";
    tokens.factor = TimesNumber(gamma, -r * r / 4);
  } else {
    TakeLogarithm("penumbral_log", gamma, &tokens);
  }
  return tokens;
}

const RegisterSimilarity penumbral({
    .catalogue =
        {.name = "penumbral",
         .title = "penumbral cones",
         .formula =
             "-gamma h, -gamma h^2 or gamma log(r / h), where h is the height of the lowest common "
             "ancestor of q and k under penumbral cones, whose light source is the horosphere of "
             "height r",
         .latex =
             R"(-\gamma_h\, \text{height}, \quad -\gamma_h\, \text{height}^2 \quad\text{or}\quad \gamma_h \log\frac{r}{\text{height}})",
         .note = "In the formula, height is the height of the lowest common ancestor of q and k. "
                 "Ancestry is defined by penumbral cones, whose light source is the horosphere of "
                 "height r; no point lies above it",
         .details = "D must be at least 2: the last coordinate z of a token determines its height, "
                    "and x contains the others. Points that are too far apart have no common "
                    "ancestor below the horosphere; the height is then that of the top of the "
                    "geodesic through both, which is larger than r. The authors' code uses score = "
                    "\"height2\", with 1e-6 added in a few places.",
         .source = "Tseng et al. 2023, Coneheads: Hierarchy Aware Attention",
         .class_name = "Penumbral"},
    .parameters = {PerHead("gamma", "learned").Means("per-head factor"),
                   PositiveNumber("r", "1").Means("height of the horosphere"),
                   Choice("map", {"xi", "exp", "none"})
                       .Points("none")
                       .Means("\"xi\": height r sigmoid(z), X = x r sigmoid(z); \"exp\": the "
                              "exponential map of the half-space at (0, ..., 0, 1), with heights "
                              "clamped to r; \"none\": (X, height) = (x, z), with z clamped to [0, "
                              "r]"),
                   Choice("score", {"height", "height2", "log"})
                       .Means("\"height\": -gamma h; \"height2\": -gamma h^2; \"log\": gamma "
                              "log(r / h)")},
    .raw_map = Map,
    .functions = {{"height", "penumbral"},
                  {"height2", "penumbral_square"},
                  {"log", "penumbral_log"}},
    .has_height = [](const Component&) { return true; },
});

}  // namespace
}  // namespace penumbral
}  // namespace gnomon
