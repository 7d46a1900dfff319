#include "ops/catalogue/registry.h"

namespace gnomon {
namespace pair_bias {
namespace {

const RegisterPosition pair_bias({
    .catalogue =
        {.name = "pair_bias",
         .title = "pair bias",
         .formula = "bias[b, h, i, j]",
         .latex = R"(\text{bias}[b, h, i, j])",
         .note = "The bias is an array that is passed with each call",
         .details = "PyTorch calls this a float mask. -inf masks a pair. If batch elements or "
                    "heads share the bias, its gradient is summed over them in a fixed order. A "
                    "bias of shape (Lq, 1) or (1, Lk) takes no memory per pair; the former shape "
                    "changes the weights only with a sink or score_softcap. Finite values are "
                    "clamped to +-1e37, so that a query whose biases all equal the lowest float32 "
                    "value attends to all keys equally.",
         .source = "Jumper et al. 2021, AlphaFold; Ying et al. 2021, Graphormer",
         .role = CatalogueEntry::Role::kPairBias,
         .cost = "2 + 0",
         .class_name = "PairBias"},
    .parameters = {Table("bias", Index::kPairs, {})
                       .Means("(1 or B, 1 or H, Lq, Lk), or a shape that broadcasts to it")},
});

}  // namespace
}  // namespace pair_bias
}  // namespace gnomon
