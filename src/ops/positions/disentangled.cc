#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "ops/catalogue/random_rows.h"
#include "ops/catalogue/registry.h"
#include "ops/operators/tensors.h"
#include "ops/positions/content_tables.h"

namespace gnomon {
namespace disentangled {
namespace {

// The rows, in a table of 2 span rows, for distances p_i - p_j. Uses the published models' float32
// arithmetic, because bucket boundaries must match.
at::Tensor RowsOf(const at::Tensor& distances, int64_t span, int64_t max_distance) {
  at::Tensor bucket = distances;
  if (max_distance > 0) {
    const int64_t exact = span / 2;
    const double widest = static_cast<double>(max_distance - 1) / static_cast<double>(exact);
    const at::Tensor range = at::full({}, widest, distances.options().dtype(at::kFloat)).log();
    const at::Tensor far =
        ((distances.abs().clamp_min(1).to(at::kFloat) / exact).log() / range * (exact - 1))
            .ceil()
            .to(at::kLong)
            .add(exact);
    bucket = at::where(distances.abs() <= exact, distances, far * distances.sign());
  }
  return (bucket + span).clamp(0, 2 * span - 1);
}

void CheckBuckets(int64_t span, int64_t max_distance) {
  TORCH_CHECK_VALUE(max_distance == 0 || (span % 2 == 0 && max_distance - 1 > span / 2),
                    "gnomon: max_distance of disentangled is ", max_distance,
                    " and its span (half the rows of a table) is ", span,
                    "; expected a max_distance of 0, or an even span and a max_distance above ",
                    span / 2 + 1);
}

// He et al. 2021: q_i.K[p_i - p_j] + k_j.Q[p_i - p_j].
ContentTerm Content(const Component& component, const std::vector<at::Tensor>& tensors,
                    const ContentCall& call) {
  const at::Tensor keys = AsRows(component, "keys", tensors[0], call.head_dim, call.heads);
  const at::Tensor queries = AsRows(component, "queries", tensors[1], call.head_dim, call.heads);
  const int64_t rows = SizeOf(keys, 1);
  TORCH_CHECK_VALUE(rows > 0 && rows % 2 == 0, "gnomon.attention: keys of disentangled has ", rows,
                    " rows; expected an even number");
  TORCH_CHECK_VALUE(SizeOf(queries, 1) == rows, "gnomon.attention: queries of disentangled has ",
                    SizeOf(queries, 1), " rows, but its keys have ", rows,
                    "; expected the same number of rows");
  const int64_t span = rows / 2;
  const int64_t max_distance = component.Integer("max_distance");
  CheckBuckets(span, max_distance);
  // Larger distances share the last bucket, or do not occur in the call.
  const int64_t most = std::min(max_distance > 0 ? max_distance : span,
                                call.farthest.value_or(std::numeric_limits<int64_t>::max()));
  const at::Tensor distances = at::arange(-most, most + 1, keys.options().dtype(at::kLong));
  const at::Tensor entries = RowsOf(distances, span, max_distance);
  return WithOwnScale(component, {.query = call.q,
                                  .keys = keys.index_select(1, entries.flip(0)),
                                  .key = call.k,
                                  .queries = queries.index_select(1, entries),
                                  .layout = "clip"});
}

at::Tensor RowsStart(uint64_t stream, const Component& component, const ModuleShape& n) {
  CheckBuckets(component.Integer("span"), component.Integer("max_distance"));
  return RandomRows(stream, TableRows(component, 2 * component.Integer("span"), n), n.head_dim);
}
at::Tensor KeysStart(const Component& component, const ModuleShape& n) {
  return RowsStart(/*stream=*/1, component, n);
}
at::Tensor QueriesStart(const Component& component, const ModuleShape& n) {
  return RowsStart(/*stream=*/7, component, n);
}

const RegisterPosition disentangled({
    .catalogue =
        {.name = "disentangled",
         .title = "disentangled attention",
         .formula = "(q_i.K[r] + k_j.Q[r]) scale, where r = clamp(bucket(p_i - p_j) + n, 0, 2 n - "
                    "1) selects one of 2 n rows",
         .latex = R"(\frac{q_i \cdot K[r] + k_j \cdot Q[r]}{\sqrt{D}})",
         .note = "r = clamp(bucket(p_i - p_j) + n, 0, 2 n - 1), and the rows of K and Q run from "
                 "future to past. Without max_distance, each offset has its own bucket. With "
                 "max_distance, each offset up to n / 2 has its own bucket, and the buckets for "
                 "larger offsets widen logarithmically up to max_distance",
         .details = "These are the content-to-position and position-to-content terms of DeBERTa. "
                    "The tables are DeBERTa's relative position embeddings after the key and query "
                    "projections. In models with position buckets, n = position_buckets and "
                    "max_distance = max_relative_positions; in models without them, n = "
                    "max_relative_positions and max_distance = 0. With scale = 1 / sqrt(3 D), the "
                    "result equals DeBERTa's attention.",
         .source = "He et al. 2021, DeBERTa: Decoding-enhanced BERT with Disentangled Attention; "
                   "DeBERTaV3 (logarithmic buckets)",
         .role = CatalogueEntry::Role::kContent,
         .cost = "2 + 0, plus the products of q and k with the tables",
         .class_name = "Disentangled"},
    .parameters =
        {Table("keys", Index::kBucketRows, {.start = KeysStart})
             .Means("(2 n, D), or (H, 2 n, D) for one table per head; multiplied by the queries"),
         Table("queries", Index::kBucketRows, {.start = QueriesStart})
             .Means("a table of the same shape, multiplied by the keys"),
         Integer("max_distance", "0")
             .Means("distance at and beyond which offsets share the last bucket; must exceed n / 2 "
                    "+ 1, with n even. If 0, each offset has its own row, and offsets beyond the "
                    "table use the nearest row")
             .AtLeast(0)
             .AtMost(1 << 20),
         Integer("span", "256")
             .Means("n, half the number of rows of a module's tables")
             .AtLeast(1)
             .AtMost(1 << 20)
             .NoArgument(),
         OwnScale(), TablePerHead()},
    .content = Content,
});

}  // namespace
}  // namespace disentangled
}  // namespace gnomon
