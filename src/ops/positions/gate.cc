#include <ATen/ATen.h>

#include "ops/catalogue/registry.h"

namespace gnomon {
namespace gate {
namespace {

int64_t ColumnsOf(const Component& /*component*/, const ModuleShape& n) { return n.value_dim; }

constexpr TokenProjection kGate = {.columns = ColumnsOf, .finish = at::sigmoid};

const RegisterPosition gate({
    .catalogue = {.name = "gate",
                  .title = "output gate",
                  .formula = "multiplies the output o_i of each head by the gate g_i of its query",
                  .latex = R"(g_i \odot o_i)",
                  .note = "g_i is the gate of the query. The attention weights do not change",
                  .details =
                      "A module computes the gates from its query tokens as g = sigmoid(W x).",
                  .source = "Qiu et al. 2025, Gated Attention for Large Language Models: "
                            "Non-linearity, Sparsity, and Attention-Sink-Free",
                  .role = CatalogueEntry::Role::kGate,
                  .cost = "0 + 0",
                  .class_name = "Gate"},
    .parameters = {Table("values", Index::kQueries, {.of_values = true, .projection = kGate})
                       .Means("(B, H, Lq, Dv), the gates g_i")},
});

}  // namespace
}  // namespace gate
}  // namespace gnomon
