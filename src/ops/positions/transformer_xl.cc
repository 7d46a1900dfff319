#include <ATen/ATen.h>
#include <gnomon/torch/attention.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "ops/catalogue/random_rows.h"
#include "ops/catalogue/registry.h"
#include "ops/operators/attention_operators.h"
#include "ops/operators/tensors.h"
#include "ops/positions/content_tables.h"

namespace gnomon {
namespace transformer_xl {
namespace {

// Dai et al. 2019: (q + u).k_j + (q + v).r_(i - j).
ContentTerm Content(const Component& component, const std::vector<at::Tensor>& tensors,
                    const ContentCall& call) {
  for (const size_t n : {0, 1}) {
    TORCH_CHECK_VALUE(tensors[n].dim() == 2 && SizeOf(tensors[n], 0) == call.heads &&
                          SizeOf(tensors[n], 1) == call.head_dim,
                      "gnomon.attention: ", n == 0 ? "u" : "v", " of transformer_xl has shape ",
                      tensors[n].sym_sizes(), "; expected (H, D) = (", call.heads, ", ",
                      call.head_dim, ")");
  }
  const at::Tensor rows = AsRows(component, "r", tensors[2], call.head_dim, call.heads);
  return {.query = call.q + tensors[1].unsqueeze(1),
          .keys = rows.flip(1),
          .key_weights = tensors[0],
          .layout = "past"};
}

at::Tensor VectorStart(const Component&, const ModuleShape& n) {
  return at::zeros({n.heads, n.head_dim}, at::TensorOptions().dtype(at::kDouble));
}

// A tensor that comes with the specification is a table.
bool HasLearnedDistances(const Component& component) {
  if (component.IsTensor("r")) return true;
  return component.Choice("r") == "learned";
}

// A table of distances, or the map W_R of their sinusoids of E = H Dv columns.
at::Tensor DistancesStart(const Component& component, const ModuleShape& n) {
  if (!HasLearnedDistances(component)) {
    return RandomRows(/*stream=*/3, {n.heads, n.head_dim}, n.heads * n.value_dim);
  }
  return RandomRows(/*stream=*/3, {n.heads, *LengthOf(component, n.max_length)}, n.head_dim);
}

at::Tensor Distances(const Component& component, const at::Tensor& held,
                     const CallLengths& lengths) {
  if (HasLearnedDistances(component)) return held;
  const int64_t count =
      lengths.farthest
          ? NumberOf(*lengths.farthest, "gnomon.nn: transformer_xl with sinusoidal r") + 1
          : lengths.positions;
  const at::Tensor distances =
      at::arange(std::max<int64_t>(count, 1), held.options().dtype(at::kDouble));
  const at::Tensor waves = sinusoid(distances, SizeOf(held, 2), "split_xl").to(held.scalar_type());
  return at::matmul(waves, held.transpose(1, 2));
}

std::optional<int64_t> MaxLength(const Component& component, int64_t otherwise) {
  return HasLearnedDistances(component) ? LengthOf(component, otherwise) : std::nullopt;
}

// The table of distances, or in a module what it is.
Parameter DistancesParameter() {
  Parameter r = Choice("r", {"sinusoidal", "learned"})
                    .Means(
                        "(H, n, D): row n is the distance p_i - p_j = n, at least Lq + "
                        "query_offset rows")
                    .Required();
  r.takes_tensor = true;
  r.index = Index::kDistances;
  r.tensor = {.start = DistancesStart, .expand = Distances, .holds_table = HasLearnedDistances};
  return r;
}

const RegisterPosition transformer_xl({
    .catalogue = {.name = "transformer_xl",
                  .title = "Transformer-XL",
                  .formula = "(u_h.k_j + (q_i + v_h).r_h[p_i - p_j]) scale, r = W_R sinusoid, or "
                             "learned",
                  .latex = R"(\frac{u_h \cdot k_j + (q_i + v_h) \cdot r_h[p_i - p_j]}{\sqrt{D}})",
                  .note = "where r maps sinusoids of the distance, or is learned",
                  .details = "Only with dot and causal.",
                  .source = "Dai et al. 2019, Transformer-XL",
                  .role = CatalogueEntry::Role::kContent,
                  .cost = "2 + 0, and q times the rows",
                  .needs_causal = true,
                  .needs_dot = true,
                  .class_name = "TransformerXL"},
    .parameters = {Table("u", Index::kNone, {.start = VectorStart})
                       .Means("(H, D), the part of the query that asks for keys"),
                   Table("v", Index::kNone, {.start = VectorStart})
                       .Means("(H, D), the part of the query that asks for distances"),
                   DistancesParameter(),
                   Length().Means("number of distances in a module's learned r")},
    .content = Content,
    .max_length = MaxLength,
});

}  // namespace
}  // namespace transformer_xl
}  // namespace gnomon
