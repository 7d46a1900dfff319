#include <ATen/ATen.h>

#include <numbers>
#include <string>

#include "ops/catalogue/registry.h"
#include "ops/geometry/cone_map.h"
#include "ops/geometry/geometry.h"

namespace gnomon {
namespace {

// Tseng et al. 2023, section 4.
MappedTokens Map(const Component& component, const at::Tensor& q, const at::Tensor& k,
                 const at::Tensor& gamma) {
  const std::string map = component.Choice("map");
  const std::string score = component.Choice("score");
  const double r = component.Number("r");
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

bool HasHeight(const Component&) { return true; }

const RegisterSimilarity umbral({
    .catalogue =
        {.name = "umbral",
         .title = "umbral cones",
         .formula = "-gamma h or -gamma log h, h the height of the lowest common ancestor "
                    "of umbral cones of radius r",
         .latex = R"(-\gamma_h\, \text{height} \quad\text{or}\quad -\gamma_h \log \text{height})",
         .note = "the height is that of the lowest common ancestor of umbral cones of "
                 "radius r",
         .source = "Tseng et al. 2023, Coneheads: Hierarchy Aware Attention"},
    .parameters = {PerHead("gamma", "learned"), PositiveNumber("r", "0.1"),
                   Choice("map", {"psi", "exp", "none"}), Choice("score", {"height", "log"})},
    .map = Map,
    .functions = {{"height", "umbral"}, {"log", "umbral_log"}},
    .has_height = HasHeight,
});

}  // namespace
}  // namespace gnomon
