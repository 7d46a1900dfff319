#include <ATen/ATen.h>

#include "ops/catalogue/random_rows.h"
#include "ops/catalogue/registry.h"
#include "ops/operators/tensors.h"
#include "ops/positions/content_tables.h"

namespace gnomon {
namespace absolute_keys {
namespace {

ContentTerm Content(const Component& component, const std::vector<at::Tensor>& tensors,
                    const ContentCall& call) {
  return WithOwnScale(component,
                      {.query = call.q,
                       .keys = AsRows(component, "table", tensors[0], call.head_dim, call.heads),
                       .layout = "keys"});
}

at::Tensor Start(const Component& component, const ModuleShape& n) {
  return RandomRows(/*stream=*/1, TableRows(component, *LengthOf(component, n.max_length), n),
                    n.head_dim);
}

// The table rows of the existing keys, or all rows if positions are explicit.
at::Tensor FirstKeys(const Component& component, const at::Tensor& held,
                     const CallLengths& lengths) {
  if (lengths.farthest) return held;
  TORCH_CHECK_VALUE(lengths.keys <= SizeOf(held, -2), "gnomon.nn: ", component.name(),
                    ":length is ", SizeOf(held, -2), ", but there are ", lengths.keys,
                    " keys; expected a length of at least ", lengths.keys);
  return held.slice(-2, 0, lengths.keys);
}

const RegisterPosition absolute_keys({
    .catalogue = {.name = "absolute_keys",
                  .title = "absolute keys",
                  .formula = "q_i.R[j] scale, where R is a table of absolute position embeddings",
                  .latex = R"(\frac{q_i \cdot R[j]}{\sqrt{D}})",
                  .note = "R is a learned table of absolute position embeddings",
                  .source = "Ke et al. 2021, Rethinking Positional Encoding in Language "
                            "Pre-training",
                  .role = CatalogueEntry::Role::kContent,
                  .cost = "1 + 0, plus the product of q and the table",
                  .class_name = "AbsoluteKeys"},
    .parameters = {Table("table", Index::kKeys, {.start = Start, .expand = FirstKeys})
                       .Means("(Lk, D), or (H, Lk, D)"),
                   OwnScale(), Length(), TablePerHead()},
    .content = Content,
    .max_length = LengthOf,
});

}  // namespace
}  // namespace absolute_keys
}  // namespace gnomon
