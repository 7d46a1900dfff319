#include <ATen/ATen.h>
#include <gnomon/torch/attention.h>

#include "ops/catalogue/registry.h"

namespace gnomon {
namespace kerple {
namespace {

// Chi et al. 2022, eq. 6 and eq. 7.
at::Tensor Bias(const Component& component, const std::vector<at::Tensor>& tensors,
                const OffsetRange& range) {
  const at::Tensor r1 = OverEntries(tensors[0]);
  const at::Tensor r2 = OverEntries(tensors[1]);
  const at::Tensor distance = range.DistancesAs(r1).abs();
  if (component.Choice("kind") == "log") return -r1 * (r2 * distance).log1p();
  // For a distance of 0, pow() would compute the second derivative with respect to r2 as 0 times
  // infinity, but it is 0.
  const at::Tensor is_zero = distance == 0;
  const at::Tensor power = at::where(is_zero, 1.0, distance).pow(r2);
  return -r1 * at::where(is_zero, (r2 == 0).to(power.scalar_type()), power);
}

// The power form starts as ALiBi. The log form starts at the quantiles of the uniform distributions
// on (0, 2) and (0, 1) that the paper's code samples from.
at::Tensor R1Start(const Component& component, const ModuleShape& n) {
  if (component.Choice("kind") == "power") return alibi_slopes(n.heads);
  return (at::arange(n.heads, at::TensorOptions().dtype(at::kDouble)) + 0.5) *
         (2.0 / static_cast<double>(n.heads));
}

at::Tensor R2Start(const Component& component, const ModuleShape& n) {
  return at::full({n.heads}, component.Choice("kind") == "power" ? 1.0 : 0.5,
                  at::TensorOptions().dtype(at::kDouble));
}

const RegisterPosition kerple({
    .catalogue =
        {.name = "kerple",
         .title = "KERPLE",
         .formula = "-r1_h log(1 + r2_h |p_i - p_j|) (log) or -r1_h |p_i - p_j|^r2_h (power)",
         .latex =
             R"(\begin{aligned}\text{log} && -r_{1h} \log(1 + r_{2h} |p_i - p_j|) \\ \text{power} && -r_{1h}\, |p_i - p_j|^{r_{2h}}\end{aligned})",
         .source = "Chi et al. 2022, KERPLE: Kernelized Relative Positional Embedding",
         .role = CatalogueEntry::Role::kBias,
         .cost = "1 + 0",
         .class_name = "Kerple"},
    .parameters = OnAxis({PerHead("r1", "learned", {.start = R1Start}).Means("per-head factor"),
                          PerHead("r2", "learned", {.start = R2Start})
                              .AtLeast(0)
                              .Means("per-head factor applied to the distance (log) or per-head "
                                     "exponent (power)"),
                          Choice("kind", {"log", "power"})
                              .Means("\"log\": -r1_h log(1 + r2_h |p_i - p_j|); \"power\": -r1_h "
                                     "|p_i - p_j|^r2_h")}),
    .bias = Bias,
});

}  // namespace
}  // namespace kerple
}  // namespace gnomon
