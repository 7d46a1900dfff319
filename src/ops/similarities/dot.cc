#include <ATen/ATen.h>

#include "ops/catalogue/registry.h"

namespace gnomon {
namespace {

MappedTokens Map(const Component&, const at::Tensor& q, const at::Tensor& k,
                 const at::Tensor& scale) {
  return {.function = "dot", .x = q, .y = k, .factor = scale};
}

const RegisterSimilarity dot({
    .catalogue = {.name = "dot",
                  .title = "dot product",
                  .formula = "q.k / sqrt(D)",
                  .latex = R"(\frac{q \cdot k}{\sqrt{D}})",
                  .source = "Vaswani et al. 2017, Attention Is All You Need",
                  .takes_scale = true},
    .map = Map,
});

}  // namespace
}  // namespace gnomon
