#include <ATen/ATen.h>

#include "ops/catalogue/registry.h"

namespace gnomon {
namespace {

MappedTokens Map(const Component&, const at::Tensor& q, const at::Tensor& k,
                 const at::Tensor& gamma) {
  return {.function = "gaussian", .x = q, .y = k, .factor = -gamma};
}

const RegisterSimilarity gaussian({
    .catalogue = {.name = "gaussian",
                  .title = "Gaussian",
                  .formula = "-gamma |q - k|^2",
                  .latex = R"(-\gamma_h\, |q - k|^2)",
                  .source = "Chen et al. 2021, Skyformer"},
    .parameters = {PerHead("gamma", "learned")},
    .map = Map,
});

}  // namespace
}  // namespace gnomon
