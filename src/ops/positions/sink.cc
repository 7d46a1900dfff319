#include <ATen/ATen.h>

#include "ops/catalogue/registry.h"

namespace gnomon {
namespace sink {
namespace {

at::Tensor Start(const Component& /*component*/, const ModuleShape& n) {
  return at::zeros({n.heads}, at::kDouble);
}

const RegisterPosition sink({
    .catalogue = {.name = "sink",
                  .title = "sink",
                  .formula = "adds one more score s[h] to each softmax, for a key without a value",
                  .latex = R"(o_i = \frac{\sum_j e^{s_{ij}} v_j}{e^{s_h} + \sum_j e^{s_{ij}}})",
                  .note = "s_h is the score of an additional key without a value",
                  .details = "This term has the same effect as the `sink` argument of a call, and "
                             "can be part of a module's position.",
                  .source =
                      "Agarwal et al. 2025, gpt-oss-120b and gpt-oss-20b Model Card; Xiao et al. "
                      "2023, Efficient Streaming Language Models with Attention Sinks",
                  .role = CatalogueEntry::Role::kSink,
                  .cost = "0 + 0",
                  .class_name = "Sink"},
    .parameters =
        {Table("score", Index::kNone, {.start = Start})
             .Means("(H,), () or (B, H, Lq); in modules, the score is learned and initialised to "
                    "0")},
});

}  // namespace
}  // namespace sink
}  // namespace gnomon
