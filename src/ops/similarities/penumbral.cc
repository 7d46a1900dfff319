#include <ATen/ATen.h>

#include <numbers>
#include <string>

#include "ops/catalogue/registry.h"
#include "ops/geometry/cone_map.h"
#include "ops/geometry/geometry.h"

namespace gnomon {
namespace {

// Tseng et al. 2023, eq. 23.
MappedTokens Map(const Component& component, const at::Tensor& q, const at::Tensor& k,
                 const at::Tensor& gamma) {
  const std::string map = component.Choice("map");
  const std::string score = component.Choice("score");
  const double r = component.Number("r");
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

bool HasHeight(const Component&) { return true; }

const RegisterSimilarity penumbral({
    .catalogue =
        {.name = "penumbral",
         .title = "penumbral cones",
         .formula = "-gamma h, -gamma h^2 or gamma log(r / h), h the height of the lowest "
                    "common ancestor of penumbral cones below the horosphere of height r",
         .latex =
             R"(-\gamma_h\, \text{height}, \quad -\gamma_h\, \text{height}^2 \quad\text{or}\quad \gamma_h \log\frac{r}{\text{height}})",
         .note = "the height is that of the lowest common ancestor of penumbral cones "
                 "below the horosphere of height r",
         .source = "Tseng et al. 2023, Coneheads: Hierarchy Aware Attention"},
    .parameters = {PerHead("gamma", "learned"), PositiveNumber("r", "1"),
                   Choice("map", {"xi", "exp", "none"}),
                   Choice("score", {"height", "height2", "log"})},
    .map = Map,
    .functions = {{"height", "penumbral"},
                  {"height2", "penumbral_square"},
                  {"log", "penumbral_log"}},
    .has_height = HasHeight,
});

}  // namespace
}  // namespace gnomon
