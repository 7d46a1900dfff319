#include <ATen/ATen.h>

#include "ops/catalogue/registry.h"

namespace gnomon {
namespace dot {
namespace {

MappedTokens Map(const Component& component, const at::Tensor& q, const at::Tensor& k,
                 const at::Tensor& scale) {
  if (!component.Find("softcap")) return {.function = "dot", .x = q, .y = k, .factor = scale};
  const double cap = component.Number("softcap");
  return {.function = "softcap",
          .x = q,
          .y = k,
          .factor = at::full_like(scale, cap),
          .head_scalars = (scale / cap).unsqueeze(0)};
}

const RegisterSimilarity dot({
    .catalogue =
        {.name = "dot",
         .title = "dot product",
         .formula = "q.k / sqrt(D), or c tanh(q.k / (c sqrt(D))) with a soft cap c",
         .latex =
             R"(\frac{q \cdot k}{\sqrt{D}} \quad\text{or}\quad c \tanh\frac{q \cdot k}{c \sqrt{D}})",
         .details = "The `scale` argument of attention() replaces 1 / sqrt(D).",
         .source = "Vaswani et al. 2017, Attention Is All You Need; Riviere et al. 2024, Gemma 2 "
                   "(the soft cap)",
         .takes_scale = true,
         .class_name = "Dot"},
    .parameters = {PositiveNumber("softcap", "")
                       .Means("the soft cap c. Scores then lie between -c and c; masks and biases "
                              "are applied afterwards")
                       .Otherwise("none")},
    .map = Map,
    .keeps_tokens = true,
    .is_product = true,
    .functions = {{"", "dot"}, {"softcap", "softcap"}},
});

}  // namespace
}  // namespace dot
}  // namespace gnomon
