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
                  .details =
                      "Scores lie between -scale and scale, regardless of the norms of q and k. "
                      "Tokens with a norm below 1e-6 are divided by 1e-6 instead of their norm.",
                  .source = "Liu et al. 2022, Swin Transformer V2: Scaling Up Capacity and "
                            "Resolution, section 3.3",
                  .class_name = "Cosine"},
    .parameters = {PerHead("scale", "learned").Means("per-head factor, 1 / tau in the paper")},
    .map = Map,
    .functions = {{"", "dot"}},
});

}  // namespace
}  // namespace cosine
}  // namespace gnomon
