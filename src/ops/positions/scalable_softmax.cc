#include <ATen/ATen.h>

#include <cmath>
#include <vector>

#include "ops/catalogue/registry.h"

namespace gnomon {
namespace scalable_softmax {
namespace {

at::Tensor Temperature(const Component& /*component*/, const std::vector<at::Tensor>& tensors,
                       const TemperatureCall& call) {
  return tensors[0].to(at::kDouble).unsqueeze(1) * call.seen.log();
}

// With s = 1 / log(100), a row with 100 keys has the same scores as with the plain softmax.
at::Tensor Start(const Component& /*component*/, const ModuleShape& n) {
  return at::full({n.heads}, 1 / std::log(100.0), at::kDouble);
}

const RegisterPosition scalable_softmax({
    .catalogue = {.name = "scalable_softmax",
                  .title = "scalable softmax",
                  .formula = "multiplies the scores of query i by s[h] log n_i, where n_i is the "
                             "number of keys, up to the query's own position if there is a causal "
                             "mask",
                  .latex = R"(s_h \log n_i)",
                  .note = "With a causal mask, n_i is the number of keys up to the query's own "
                          "position; otherwise, it is the number of all keys",
                  .details = "Keys in other segments, or hidden by key_starts or key_lengths, are "
                             "not counted. Other masks do not affect n_i, except that a window "
                             "that excludes keys after the query is treated as a causal mask.",
                  .source = "Nakanishi 2025, Scalable-Softmax Is Superior for Attention",
                  .role = CatalogueEntry::Role::kTemperature,
                  .cost = "1 + 0",
                  .class_name = "ScalableSoftmax"},
    .parameters = {PerHead("s", "learned", {.start = Start}).Means("per-head factor")},
    .temperature = Temperature,
});

}  // namespace
}  // namespace scalable_softmax
}  // namespace gnomon
