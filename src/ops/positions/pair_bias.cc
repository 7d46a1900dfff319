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
         .note = "an array that comes with each call",
         .details =
             "-inf masks a pair: this is what other libraries call a float mask, added to the "
             "scores. Where batches or heads share it, its gradient is summed over them in order. "
             "One that all queries share, or all keys, costs no memory for pairs. In float32 "
             "finite numbers count as at most 1e37 in size, so that a row of nothing but the "
             "least number there is weighs all its keys alike; one number for all keys of a row, "
             "(Lq, 1), changes no weight.",
         .source = "Jumper et al. 2021, AlphaFold; Ying et al. 2021, Graphormer",
         .role = CatalogueEntry::Role::kPairBias,
         .cost = "2 + 0",
         .class_name = "PairBias"},
    .parameters = {Table("bias", Index::kPairs, {})
                       .Means("(1 or B, 1 or H, Lq, Lk), or what broadcasts to it")},
});

}  // namespace
}  // namespace pair_bias
}  // namespace gnomon
