#include <ATen/ATen.h>

#include "ops/catalogue/registry.h"
#include "ops/geometry/geometry.h"

namespace gnomon {
namespace adaptive {
namespace {

// The last coordinate of a query is the logarithm of its precision; that of a key is ignored.
MappedTokens Map(const Component& component, const at::Tensor& q, const at::Tensor& k,
                 const at::Tensor& gamma) {
  const double limit = component.Number("limit");
  const auto [x, z] = SplitLast(q);
  return {.function = "adaptive",
          .x = x,
          .y = SplitLast(k).first,
          .factor = -gamma,
          .row_scalars = z.clamp(-limit, limit).exp().unsqueeze(0)};
}

const RegisterSimilarity adaptive({
    .catalogue = {.name = "adaptive",
                  .title = "adaptive Gaussian",
                  .formula = "-gamma e^z |x - y|^2, where (x, z) is the query and y is the key "
                             "without its last coordinate",
                  .latex = R"(-\gamma_h\, e^z\, |x - y|^2)",
                  .note = "where (x, z) is the query and y is the key without its last coordinate",
                  .details = "Needs D >= 2.",
                  .source = "an example, 2026"},
    .parameters = {PerHead("gamma", "learned").Means("per-head factor"),
                   PositiveNumber("limit", "8").Means("z is clamped to [-limit, limit]")},
    .map = Map,
    .has_height = [](const Component&) { return true; },
});

}  // namespace
}  // namespace adaptive
}  // namespace gnomon
