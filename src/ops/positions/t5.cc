#include <ATen/ATen.h>
#include <gnomon/torch/attention.h>

#include <cmath>

#include "ops/catalogue/registry.h"

namespace gnomon {

// Uses the published models' float32 arithmetic, because bucket boundaries must match.
at::Tensor t5_bucket(const at::Tensor& relative_position, bool bidirectional, int64_t num_buckets,
                     int64_t max_distance) {
  TORCH_CHECK_TYPE(at::isIntegralType(relative_position.scalar_type(), /*includeBool=*/false),
                   "gnomon.t5_bucket: relative_position has dtype ",
                   relative_position.scalar_type(), "; expected integers");
  const int64_t one_side = bidirectional ? num_buckets / 2 : num_buckets;
  const int64_t exact = one_side / 2;
  TORCH_CHECK_VALUE(exact >= 1, "gnomon.t5_bucket: num_buckets is ", num_buckets,
                    "; expected at least ", bidirectional ? 4 : 2);
  TORCH_CHECK_VALUE(max_distance > exact, "gnomon.t5_bucket: max_distance is ", max_distance,
                    "; expected more than ", exact, ", the number of exact buckets");
  // All far distances share a bucket, so they can be clamped. Otherwise, the absolute value of the
  // lowest int64 would overflow.
  constexpr int64_t kFar = int64_t{1} << 40;
  const at::Tensor relative = relative_position.to(at::kLong).clamp(-kFar, kFar);
  const at::Tensor distance = bidirectional ? relative.abs() : -relative.clamp_max(0);
  const double log_range = std::log(static_cast<double>(max_distance) / static_cast<double>(exact));
  const at::Tensor far =
      ((distance.clamp_min(1).to(at::kFloat) / exact).log() / log_range * (one_side - exact))
          .to(at::kLong)
          .add(exact)
          .clamp_max(one_side - 1);
  const at::Tensor bucket = at::where(distance < exact, distance, far);
  return bidirectional ? bucket + (relative > 0).to(at::kLong) * one_side : bucket;
}

namespace t5 {
namespace {

at::Tensor Bias(const Component& component, const std::vector<at::Tensor>& tensors,
                const OffsetRange& range) {
  const at::Tensor& table = tensors[0];
  TORCH_CHECK_VALUE(table.dim() == 2 && table.sym_size(1) == range.heads,
                    "gnomon.attention: the table of T5 has shape ", table.sym_sizes(),
                    "; expected (buckets, H) with H = ", range.heads);
  const at::Tensor buckets = t5_bucket(-range.Distances(table.options()),
                                       component.FindFlag("bidirectional").value_or(true),
                                       table.size(0), component.Integer("max_distance"));
  return RowsOver(table, buckets);
}

Component Complete(Component component, const ComponentUse& use) {
  component.SetDefault("bidirectional", use.looks_ahead ? "true" : "false");
  return component;
}

at::Tensor Start(const Component& component, const ModuleShape& n) {
  return at::zeros({component.Integer("buckets"), n.heads}, at::TensorOptions().dtype(at::kDouble));
}

const RegisterPosition t5({
    .catalogue = {.name = "t5",
                  .title = "T5",
                  .formula = "table[bucket(p_j - p_i), h]",
                  .latex = R"(\text{table}[\text{bucket}(p_j - p_i), h])",
                  .details = "t5_bucket returns the bucket of a relative position.",
                  .source = "Raffel et al. 2020, Exploring the Limits of Transfer Learning",
                  .role = CatalogueEntry::Role::kBias,
                  .cost = "1 + 0",
                  .class_name = "T5"},
    .parameters =
        OnAxis({Table("table", Index::kBuckets, {.start = Start}).Means("(buckets, H)"),
                Integer("buckets", "32").Means("rows of a module's table").AtLeast(2).NoArgument(),
                Flag("bidirectional", "")
                    .Means("whether keys after the query have separate buckets")
                    .Otherwise("true, except with a causal mask on a sequence")
                    .Required(),
                Integer("max_distance", "128")
                    .Means("offsets at or beyond this distance share one bucket")
                    .AtLeast(1)}),
    .bias = Bias,
    .complete = Complete,
});

}  // namespace
}  // namespace t5
}  // namespace gnomon
