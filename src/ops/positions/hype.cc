#include <ATen/ATen.h>
#include <gnomon/torch/attention.h>

#include <string>

#include "ops/catalogue/registry.h"

namespace gnomon {
namespace hype {
namespace {

constexpr double kMu = 0.001;

// mu * distance, clamped to +-80, because sinh overflows float32 at 89.
at::Tensor Angle(const at::Tensor& mu, const at::Tensor& distance) {
  return (mu * distance).clamp(-80, 80);
}

// Angelotti 2023, with the sign that penalises distance, because its eqs. 12 and 14 disagree. The
// paper's form is odd, so without a mask it favours the last key.
at::Tensor Bias(const Component& component, const std::vector<at::Tensor>& tensors,
                const OffsetRange& range) {
  const at::Tensor tau = OverEntries(tensors[0]);
  const at::Tensor mu = OverEntries(tensors[1]);
  const std::string mode = component.Choice("mode");
  const at::Tensor distance = range.DistancesAs(mu);
  if (mode == "abs") return -tau * Angle(mu, distance.abs()).sinh();
  if (mode == "odd") return -tau * Angle(mu, distance).sinh();
  return tau * (1 - Angle(mu, distance).cosh());
}

at::Tensor MuStart(const Component& component, const ModuleShape& n) {
  const double mu = ParseNumber(component.Find("mu").value_or("")).value_or(kMu);
  TORCH_CHECK_VALUE(mu > 0, "gnomon: hype:mu=", mu, " is invalid; expected a positive number");
  return at::full({n.heads}, mu, at::TensorOptions().dtype(at::kDouble));
}

// With this tau, the "abs" and "odd" biases are close to ALiBi where mu (p_i - p_j) is small.
at::Tensor TauStart(const Component& component, const ModuleShape& n) {
  return alibi_slopes(n.heads) / MuStart(component, n);
}

const RegisterPosition hype({
    .catalogue =
        {.name = "hype",
         .title = "HyPE",
         .formula = "-tau_h sinh(mu_h |p_i - p_j|) (abs), -tau_h sinh(mu_h (p_i - p_j)) (odd) or "
                    "tau_h (1 - cosh(mu_h (p_i - p_j))) (cosh)",
         .latex =
             R"(\begin{aligned}\text{abs} && -\tau_h \sinh(\mu_h |p_i - p_j|) \\ \text{odd} && -\tau_h \sinh(\mu_h (p_i - p_j)) \\ \text{cosh} && \tau_h \left(1 - \cosh(\mu_h (p_i - p_j))\right)\end{aligned})",
         .details = "With a causal mask, \"abs\" and \"odd\" are the same. Without one, \"odd\" "
                    "increases the scores of the keys after the query. The argument of sinh and "
                    "cosh is clamped to +-80; beyond that, the gradient with respect to mu is "
                    "zero.",
         .source = "Angelotti 2023, HyPE: Attention with Hyperbolic Biases for Relative "
                   "Positional Encoding",
         .role = CatalogueEntry::Role::kBias,
         .cost = "1 + 0",
         .class_name = "HyPE"},
    .parameters =
        OnAxis({PerHead("tau", "fixed", {.start = TauStart})
                    .Means("per-head amplitude")
                    .Otherwise("ALiBi's slopes / mu"),
                PerHead("mu", NumberText(kMu).c_str(), {.start = MuStart})
                    .Means("per-head factor applied to the distance"),
                Choice("mode", {"abs", "odd", "cosh"})
                    .Means("\"abs\": -tau_h sinh(mu_h |p_i - p_j|); \"odd\": -tau_h sinh(mu_h (p_i "
                           "- p_j)), the paper's form; \"cosh\": tau_h (1 - cosh(mu_h (p_i - "
                           "p_j)))")}),
    .bias = Bias,
});

}  // namespace
}  // namespace hype
}  // namespace gnomon
