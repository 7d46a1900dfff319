#include <ATen/ATen.h>
#include <gnomon/torch/attention.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "ops/catalogue/random_rows.h"
#include "ops/catalogue/registry.h"
#include "ops/operators/tensors.h"
#include "ops/positions/content_tables.h"

namespace gnomon {
namespace transformer_xl {
namespace {

bool IsBidirectional(const Component& component) { return component.Flag("bidirectional"); }

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
  const bool both = IsBidirectional(component);
  if (both) {
    const int64_t count = SizeOf(rows, 1);
    TORCH_CHECK_VALUE(count % 2 == 1 && (!call.farthest || *call.farthest <= count / 2),
                      "gnomon.attention: r of transformer_xl has ", count,
                      " rows, and bidirectional is True; expected 2 n - 1 rows for distances ",
                      "below n",
                      call.farthest ? c10::str(" (here, at least ", *call.farthest + 1, ")") : "");
  }
  return WithOwnScale(component, {.query = call.q + tensors[1].unsqueeze(1),
                                  .keys = rows.flip(1),
                                  .key_weights = tensors[0],
                                  .layout = both ? "clip" : "past"});
}

at::Tensor VectorStart(const Component&, const ModuleShape& n) {
  return at::zeros({n.heads, n.head_dim}, at::TensorOptions().dtype(at::kDouble));
}

// A tensor given with the specification is a table.
bool HasLearnedDistances(const Component& component) {
  if (component.IsTensor("r")) return true;
  return component.Choice("r") == "learned";
}

// A table with a row per distance, or the map W_R, which has E = H Dv columns and multiplies the
// sinusoids of the distances.
at::Tensor DistancesStart(const Component& component, const ModuleShape& n) {
  if (!HasLearnedDistances(component)) {
    return RandomRows(/*stream=*/3, {n.heads, n.head_dim}, n.heads * n.value_dim);
  }
  const int64_t length = *LengthOf(component, n.max_length);
  return RandomRows(/*stream=*/3, {n.heads, IsBidirectional(component) ? 2 * length - 1 : length},
                    n.head_dim);
}

at::Tensor Distances(const Component& component, const at::Tensor& held,
                     const CallLengths& lengths) {
  if (HasLearnedDistances(component)) return held;
  constexpr const char* kName = "gnomon.nn: transformer_xl with sinusoidal r";
  const bool both = IsBidirectional(component);
  int64_t count = lengths.farthest ? NumberOf(*lengths.farthest, kName) + 1 : lengths.positions;
  if (both && !lengths.farthest) count = std::max(count, lengths.keys);
  count = std::max<int64_t>(count, 1);
  const at::Tensor distances =
      at::arange(both ? 1 - count : 0, count, held.options().dtype(at::kDouble));
  const at::Tensor waves = sinusoid(distances, SizeOf(held, 2), "split_xl").to(held.scalar_type());
  return at::matmul(waves, held.transpose(1, 2));
}

std::optional<int64_t> MaxLength(const Component& component, int64_t otherwise) {
  return HasLearnedDistances(component) ? LengthOf(component, otherwise) : std::nullopt;
}

// The parameter "r": a table or, in a module, whether r is sinusoidal or learned.
Parameter DistancesParameter() {
  Parameter r = Choice("r", {"sinusoidal", "learned"})
                    .Means(
                        "(H, n, D) with n >= Lq + query_offset, where row m is for the distance "
                        "p_i - p_j = m. If bidirectional, (H, 2 n - 1, D), for distances from 1 - "
                        "n to n - 1")
                    .Required();
  r.takes_tensor = true;
  r.index = Index::kDistances;
  r.tensor = {.start = DistancesStart, .expand = Distances, .holds_table = HasLearnedDistances};
  return r;
}

const RegisterPosition transformer_xl({
    .catalogue = {.name = "transformer_xl",
                  .title = "Transformer-XL",
                  .formula = "(u_h.k_j + (q_i + v_h).r_h[p_i - p_j]) scale, where r is a linear "
                             "map W_R of sinusoids of the distance, or a learned table",
                  .latex = R"(\frac{u_h \cdot k_j + (q_i + v_h) \cdot r_h[p_i - p_j]}{\sqrt{D}})",
                  .note = "r is a linear map of sinusoids of the distance, or a learned table",
                  .details = "This term works only with the dot product, and requires a causal "
                             "mask unless it is bidirectional (as in Conformers, Gulati et al. "
                             "2020).",
                  .source = "Dai et al. 2019, Transformer-XL",
                  .role = CatalogueEntry::Role::kContent,
                  .cost = "2 + 0, plus the product of q and the table",
                  .needs_causal = true,
                  .needs_dot = true,
                  .class_name = "TransformerXL"},
    .parameters =
        {Table("u", Index::kNone, {.start = VectorStart})
             .Means("(H, D), added to the query in its product with the key"),
         Table("v", Index::kNone, {.start = VectorStart})
             .Means("(H, D), added to the query in its product with r"),
         DistancesParameter(),
         Flag("bidirectional", "false").Means("whether r also has rows for keys after the query"),
         OwnScale(), Length().Means("number of distances in a module's learned r")},
    .content = Content,
    .max_length = MaxLength,
});

}  // namespace
}  // namespace transformer_xl
}  // namespace gnomon
