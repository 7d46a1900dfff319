#include <ATen/ATen.h>

#include "ops/catalogue/registry.h"

namespace gnomon {
namespace {

MappedTokens Map(const Component&, const at::Tensor& q, const at::Tensor& k,
                 const at::Tensor& gamma) {
  return {.function = "laplacian", .x = q, .y = k, .factor = -gamma};
}

const RegisterSimilarity laplacian({
    .catalogue = {.name = "laplacian",
                  .title = "Laplacian",
                  .formula = "-gamma |q - k|",
                  .latex = R"(-\gamma_h\, |q - k|)",
                  .source = "Tseng et al. 2023, Coneheads: Hierarchy Aware Attention"},
    .parameters = {PerHead("gamma", "learned")},
    .map = Map,
});

}  // namespace
}  // namespace gnomon
