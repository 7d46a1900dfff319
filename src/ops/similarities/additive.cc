#include <ATen/ATen.h>

#include "ops/catalogue/registry.h"

namespace gnomon {
namespace additive {
namespace {

// Velickovic et al. 2018, eq. 3, where q and k are its two per-node scores.
MappedTokens Map(const Component& component, const at::Tensor& q, const at::Tensor& k,
                 const at::Tensor& one) {
  return {.function = "additive",
          .x = q.narrow(3, 0, 0),
          .y = k.narrow(3, 0, 0),
          .factor = one,
          .row_scalars = q.select(3, 0).unsqueeze(0),
          .column_scalars = k.select(3, 0).unsqueeze(0),
          .head_scalars = (one * component.Number("slope")).unsqueeze(0)};
}

const RegisterSimilarity additive({
    .catalogue =
        {.name = "additive",
         .title = "additive",
         .formula = "LeakyReLU(q + k), where q and k have head_dim 1",
         .latex = R"(\text{LeakyReLU}(q + k))",
         .note = "q and k must have head_dim 1",
         .details =
             "q and k, of shape (B, H, L, 1), are the two per-node scores of graph attention (eq. "
             "3 of the paper).",
         .source = "Velickovic et al. 2018, Graph Attention Networks",
         .class_name = "Additive"},
    .parameters = {Number("slope", "0.2").Means("slope of the LeakyReLU below 0")},
    .map = Map,
    .columns = 1,
});

}  // namespace
}  // namespace additive
}  // namespace gnomon
