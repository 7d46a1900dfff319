#include <ATen/ATen.h>

#include <vector>

#include "ops/catalogue/registry.h"

namespace gnomon {
namespace log_temperature {
namespace {

at::Tensor Temperature(const Component& component, const std::vector<at::Tensor>& /*tensors*/,
                       const TemperatureCall& call) {
  const double scale = component.Number("scale");
  const double length = component.Number("length");
  if (component.Choice("kind") == "steps") {
    return 1 + scale * ((call.positions + 1) / length).floor().clamp_min(0).log1p();
  }
  return 1 + scale * (call.seen / length).clamp_min(1).log();
}

const RegisterPosition log_temperature({
    .catalogue =
        {.name = "log_temperature",
         .title = "length-dependent temperature",
         .formula =
             "multiplies the scores of query i by 1 + scale log(1 + floor((p_i + 1) / length)) "
             "with kind = \"steps\", or by 1 + scale log(max(1, n_i / length)) with kind = "
             "\"smooth\", where n_i is the number of keys, up to the query's own position if there "
             "is a causal mask",
         .latex = R"(\begin{aligned}\text{steps} && 1 + a \log(1 + \lfloor (p_i + 1) / n_0 )"
                  R"(\rfloor) \\ \text{smooth} && 1 + a \log \max(1, n_i / n_0)\end{aligned})",
         .note = "a is `scale`, n_0 is `length`, below which the factor is 1, and n_i is the "
                 "number of keys, up to the query's own position if there is a causal mask",
         .details = "Keys in other segments, or hidden by key_starts or key_lengths, are not "
                    "counted. Other masks do not affect n_i, except that a window that excludes "
                    "keys after the query is treated as a causal mask. With \"steps\", padding "
                    "before a query counts towards its position p_i.",
         .source = "Meta 2025, Llama 4 (steps); Inkling 2026 (smooth)",
         .role = CatalogueEntry::Role::kTemperature,
         .cost = "1 + 0",
         .class_name = "LogTemperature"},
    .parameters =
        {PositiveNumber("scale", "0.1").Means("growth rate of the temperature"),
         PositiveNumber("length", "8192").Means("length below which the temperature is 1"),
         Choice("kind", {"steps", "smooth"})
             .Means("\"steps\": the temperature grows in steps of `length` positions; \"smooth\": "
                    "it grows with each key")},
    .temperature = Temperature,
});

}  // namespace
}  // namespace log_temperature
}  // namespace gnomon
