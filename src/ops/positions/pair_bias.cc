#include "ops/catalogue/registry.h"

namespace gnomon {
namespace pair_bias {
namespace {

const RegisterPosition pair_bias({
    .catalogue = {.name = "pair_bias",
                  .title = "pair bias",
                  .formula = "bias[b, h, i, j]",
                  .latex = R"(\text{bias}[b, h, i, j])",
                  .note = "is an array that is passed with each call",
                  .details =
                      "Other libraries call this a float mask: it is added to the scores, and -inf "
                      "masks a pair. If batches or heads share it, its gradient is summed over "
                      "them in a fixed order. A bias that all queries or all keys share needs no "
                      "memory per pair. In float32, finite values are clamped to +-1e37, so that a "
                      "row that contains only the smallest float32 weighs all keys equally. A "
                      "value shared by all keys of a row, (Lq, 1), changes no weight.",
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
