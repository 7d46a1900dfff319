#include <ATen/ATen.h>
#include <gnomon/torch/attention.h>

#include "ops/catalogue/registry.h"

namespace gnomon {

at::Tensor alibi_slopes(int64_t num_heads) {
  TORCH_CHECK_VALUE(num_heads >= 1, "gnomon.alibi_slopes: num_heads is ", num_heads,
                    "; expected at least 1");
  int64_t below = 1;
  while (2 * below <= num_heads) below *= 2;
  const at::TensorOptions options = at::TensorOptions().dtype(at::kDouble);
  const auto slopes = [&](int64_t begin, int64_t step, int64_t count, int64_t of) {
    return (at::arange(count, options) * step + begin).mul(-8.0 / static_cast<double>(of)).exp2();
  };
  return at::cat({slopes(1, 1, below, below), slopes(1, 2, num_heads - below, 2 * below)});
}

namespace alibi {
namespace {

// Press et al. 2022, section 3.
at::Tensor Bias(const Component&, const std::vector<at::Tensor>& tensors,
                const OffsetRange& range) {
  const at::Tensor& slopes = tensors[0];
  return -OverEntries(slopes) * range.DistancesAs(slopes).abs();
}

at::Tensor Start(const Component&, const ModuleShape& n) { return alibi_slopes(n.heads); }

const RegisterPosition alibi({
    .catalogue = {.name = "alibi",
                  .title = "ALiBi",
                  .formula = "-slopes_h |p_i - p_j|",
                  .latex = R"(-\text{slope}_h\, |p_i - p_j|)",
                  .source = "Press et al. 2022, Train Short, Test Long",
                  .role = CatalogueEntry::Role::kBias,
                  .cost = "1 + 0",
                  .class_name = "ALiBi"},
    .parameters = OnAxis({PerHead("slopes", "fixed", {.start = Start})
                              .Means("per-head slope; alibi_slopes returns the paper's values")}),
    .bias = Bias,
});

}  // namespace
}  // namespace alibi
}  // namespace gnomon
