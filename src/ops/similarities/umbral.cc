#include <ATen/ATen.h>

#include "ops/catalogue/registry.h"
#include "ops/geometry/cone_map.h"
#include "ops/geometry/geometry.h"

namespace gnomon {
namespace umbral {
namespace {

// Tseng et al. 2023, section 4.
MappedTokens Map(const Component& component, const RawTokens& raw, const at::Tensor& gamma) {
  MappedTokens tokens = MapCones(raw, "umbral", component.Choice("map"), component.Number("r"));
  if (component.Choice("score") == "log") {
    TakeLogarithm("umbral_log", gamma, &tokens);
    return tokens;
  }
  tokens.factor = TimesNumber(gamma, 0.5);
  tokens.row_constant = [gamma, heights = tokens.row_scalars] {
    return -OverRows(gamma) * heights.select(0, 0);
  };
  return tokens;
}

const RegisterSimilarity umbral({
    .catalogue =
        {.name = "umbral",
         .title = "umbral cones",
         .formula = "-gamma h or -gamma log h, where h is the height of the lowest common ancestor "
                    "of q and k under umbral cones of radius r",
         .latex = R"(-\gamma_h\, \text{height} \quad\text{or}\quad -\gamma_h \log \text{height})",
         .note = "In the formula, height is the height of the lowest common ancestor of q and k. "
                 "Ancestry is defined by umbral cones of radius r",
         .details = "D must be at least 2: the last coordinate z of a token determines its height, "
                    "and x contains the others. A cone is the shadow of a ball of radius r. The "
                    "authors' code uses r = 1 and divides z by D first.",
         .source = "Tseng et al. 2023, Coneheads: Hierarchy Aware Attention",
         .class_name = "Umbral"},
    .parameters =
        {PerHead("gamma", "learned").Means("per-head factor"),
         PositiveNumber("r", "0.1").Means("radius of the balls"),
         Choice("map", {"psi", "exp", "none"})
             .Points("none")
             .Means("\"psi\": height e^z, X = x e^z, with z clamped to +-30; \"exp\": the "
                    "exponential map of the half-space at (0, ..., 0, 1), with tangent vectors "
                    "clamped to length 30; \"none\": (X, height) = (x, z)"),
         Choice("score", {"height", "log"}).Means("\"height\": -gamma h; \"log\": -gamma log h")},
    .raw_map = Map,
    .functions = {{"height", "umbral"}, {"log", "umbral_log"}},
    .has_height = [](const Component&) { return true; },
});

}  // namespace
}  // namespace umbral
}  // namespace gnomon
