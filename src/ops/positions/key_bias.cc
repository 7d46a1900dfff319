#include "ops/catalogue/registry.h"

namespace gnomon {
namespace key_bias {
namespace {

const RegisterPosition key_bias({
    .catalogue = {.name = "key_bias",
                  .title = "key bias",
                  .formula = "bias[h, j]; the bias is the same for all queries",
                  .latex = R"(\text{bias}[h, j])",
                  .note = "The bias of a key is the same for all queries",
                  .details =
                      "The bias, one number per key, is passed with each call. -inf masks a key.",
                  .source = "Dai et al. 2019, Transformer-XL: Attentive Language Models beyond a "
                            "Fixed-Length Context (the term u.k_j)",
                  .role = CatalogueEntry::Role::kKeyBias,
                  .cost = "1 + 0",
                  .class_name = "KeyBias"},
    .parameters = {Table("bias", Index::kKeyEntries, {}).Means("(1 or B, 1 or H, Lk)")},
});

}  // namespace
}  // namespace key_bias
}  // namespace gnomon
