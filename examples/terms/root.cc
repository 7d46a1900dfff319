#include <ATen/ATen.h>
#include <gnomon/torch/attention.h>

#include "ops/catalogue/registry.h"

namespace gnomon {
namespace root {
namespace {

at::Tensor Bias(const Component&, const std::vector<at::Tensor>& tensors,
                const OffsetRange& range) {
  const at::Tensor& slopes = tensors[0];
  return -OverEntries(slopes) * range.DistancesAs(slopes).abs().sqrt();
}

at::Tensor Start(const Component&, const ModuleShape& n) { return alibi_slopes(n.heads); }

const RegisterPosition root({
    .catalogue = {.name = "root",
                  .title = "root bias",
                  .formula = "-slopes_h sqrt(|p_i - p_j|)",
                  .latex = R"(-\text{slope}_h \sqrt{|p_i - p_j|})",
                  .source = "an example, 2026",
                  .role = CatalogueEntry::Role::kBias,
                  .cost = "1 + 0"},
    .parameters = OnAxis({PerHead("slopes", "fixed", {.start = Start}).Means("per-head slope")}),
    .bias = Bias,
});

}  // namespace
}  // namespace root
}  // namespace gnomon
