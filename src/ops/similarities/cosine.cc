#include <ATen/ATen.h>

#include "ops/catalogue/registry.h"
#include "ops/geometry/geometry.h"

namespace gnomon {
namespace cosine {
namespace {

MappedTokens Map(const Component& /*component*/, const at::Tensor& q, const at::Tensor& k,
                 const at::Tensor& scale) {
  return {.function = "dot", .x = RadiusOf(q).unit, .y = RadiusOf(k).unit, .factor = scale};
}

const RegisterSimilarity cosine({
    .catalogue = {.name = "cosine",
                  .title = "cosine",
                  .formula = "scale q.k / (|q| |k|)",
                  .latex = R"(s_h \frac{q \cdot k}{|q| |k|})",
                  .details = "Scores lie between -scale and scale, however large tokens grow. "
                             "Tokens nearer to 0 than 1e-6 have no direction: they are divided by "
                             "1e-6 instead of their norms.",
                  .source = "Liu et al. 2022, Swin Transformer V2: Scaling Up Capacity and "
                            "Resolution, section 3.3",
                  .class_name = "Cosine"},
    .parameters = {PerHead("scale", "learned").Means("factor of each head, 1 / tau of the paper")},
    .map = Map,
    .functions = {{"", "dot"}},
});

}  // namespace
}  // namespace cosine
}  // namespace gnomon
