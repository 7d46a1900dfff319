#include <ATen/ATen.h>

#include <cmath>

#include "ops/catalogue/registry.h"

namespace gnomon {
namespace sandwich {
namespace {

// Chi et al. 2023, section 5: products of sinusoids, minus their sum at distance 0, a constant that
// does not affect the softmax.
at::Tensor Bias(const Component& component, const std::vector<at::Tensor>& tensors,
                const OffsetRange& range) {
  const at::Tensor& factor = tensors[0];
  const int64_t dims = component.Integer("dims");
  TORCH_CHECK_VALUE(dims % 2 == 0, "gnomon.attention: dims of sandwich is ", dims,
                    "; expected an even number");
  at::Tensor distances = range.Distances(factor.options()).abs();
  const c10::SymInt ahead = range.keys - 1 - range.query_offset;
  const c10::SymInt back = range.query_offset + range.queries - 1;
  // Offsets d and -d have the same distance, so its sum is computed only once.
  at::Tensor offsets;
  if (!range.query_offsets && ahead > 0 && back > 0) {
    offsets = distances;
    distances = at::arange(ahead.max(back) + 1, distances.options());
  }
  const double log_step = -2 * std::log(component.Number("base")) / static_cast<double>(dims);
  const at::Tensor wide = distances.to(at::kDouble);
  at::Tensor sum = at::full_like(wide, -static_cast<double>(dims / 2));
  for (int64_t i = 1; i <= dims / 2; ++i) {
    sum += (wide * std::exp(static_cast<double>(i) * log_step)).cos_();
  }
  if (offsets.defined()) sum = sum.index_select(0, offsets);
  return OverEntries(factor) * sum.to(factor.scalar_type());
}

// The paper divides by 8 h / H, the compression ratio of head h = 1 .. H.
at::Tensor FactorStart(const Component& /*component*/, const ModuleShape& n) {
  const at::Tensor head = at::arange(1, n.heads + 1, at::TensorOptions().dtype(at::kDouble));
  return static_cast<double>(n.heads) / (8 * head);
}

const RegisterPosition sandwich({
    .catalogue =
        {.name = "sandwich",
         .title = "Sandwich",
         .formula = "factor_h times the sum over n = 1 .. dims / 2 of (cos(base^(-2 n / dims) (p_i "
                    "- p_j)) - 1)",
         .latex =
             R"(\text{factor}_h \sum_{n=1}^{\text{dims}/2} )"
             R"(\left(\cos\!\left(\text{base}^{-2n/\text{dims}} (p_i - p_j)\right) - 1\right))",
         .source = "Chi et al. 2023, Dissecting Transformer Length Extrapolation via the Lens of "
                   "Receptive Field Analysis",
         .role = CatalogueEntry::Role::kBias,
         .cost = "1 + 0",
         .class_name = "Sandwich"},
    .parameters = OnAxis({PerHead("factor", "fixed", {.start = FactorStart})
                              .Means("per-head factor")
                              .Otherwise("H / (8 h) for head h = 1 .. H, as in the paper"),
                          Integer("dims", "128")
                              .AtLeast(2)
                              .AtMost(8192)
                              .Means("dimension of the sinusoids; must be even"),
                          PositiveNumber("base", "10000").Means("base of the wavelengths")}),
    .bias = Bias,
});

}  // namespace
}  // namespace sandwich
}  // namespace gnomon
