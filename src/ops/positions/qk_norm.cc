#include <ATen/ATen.h>

#include <vector>

#include "ops/catalogue/registry.h"

namespace gnomon {
namespace qk_norm {
namespace {

at::Tensor Norm(const Component& component, const std::vector<at::Tensor>& tensors,
                const at::Tensor& x, bool of_keys) {
  const at::Tensor& weight = tensors[of_keys ? 1 : 0];
  TORCH_CHECK_VALUE(weight.dim() == 1 && weight.sym_size(0) == x.sym_size(3),
                    "gnomon.attention: ", of_keys ? "k" : "q", "_weight of ", component.name(),
                    " has shape ", weight.sym_sizes(), "; expected (D,) = (", x.sym_size(3), ",)");
  const double epsilon = component.Number("epsilon");
  return x * (x.square().mean(3, /*keepdim=*/true) + epsilon).rsqrt() * weight;
}

at::Tensor Start(const Component& /*component*/, const ModuleShape& n) {
  return at::ones({n.head_dim}, at::kDouble);
}

const RegisterPosition qk_norm({
    .catalogue =
        {.name = "qk_norm",
         .title = "QK-norm",
         .formula =
             "replaces q with q / rms(q) * w_q, and k with k / rms(k) * w_k, before any other term "
             "is applied",
         .latex = R"(\frac{w_q \odot q_i}{\sqrt{|q_i|^2 / D + \epsilon}},\quad )"
                  R"(\frac{w_k \odot k_j}{\sqrt{|k_j|^2 / D + \epsilon}})",
         .note = "w_q and w_k are learned weights",
         .source = "Henry et al. 2020, Query-Key Normalization for Transformers; Dehghani et al. "
                   "2023, Scaling Vision Transformers to 22 Billion Parameters",
         .role = CatalogueEntry::Role::kNorm,
         .cost = "0 + 0",
         .class_name = "QKNorm"},
    .parameters = {Table("q_weight", Index::kNone, {.start = Start})
                       .Means("(D,), the weight of the query norm"),
                   Table("k_weight", Index::kNone, {.start = Start})
                       .Means("(D,), the weight of the key norm"),
                   PositiveNumber("epsilon", "1e-6").Means("added to the mean square")},
    .norm = Norm,
});

}  // namespace
}  // namespace qk_norm
}  // namespace gnomon
