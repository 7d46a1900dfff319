#include "ops/attention/attention_weights.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "ops/attention/attention.h"
#include "ops/attention/call_checks.h"
#include "ops/attention/compose.h"
#include "ops/operators/attention_operators.h"
#include "ops/operators/tensors.h"

namespace gnomon {
namespace {

constexpr const char* kName = "gnomon.attention_weights";

// The weights are the outputs for unit vectors as values, computed for this many keys at a time.
constexpr int64_t kKeys = 256;

at::Tensor WeightsOfAllRows(const at::Tensor& q, const at::Tensor& k,
                            const ResolvedSimilarity& similarity,
                            const std::vector<ResolvedPosition>& positions,
                            const CallArguments& arguments) {
  const int64_t keys = SizeOf(k, 2);
  std::vector<at::Tensor> parts;
  for (int64_t first = 0; first < keys; first += kKeys) {
    const int64_t columns = std::min(kKeys, keys - first);
    const at::Tensor unit =
        at::arange(keys, k.options().dtype(at::kLong)).unsqueeze(1) ==
        at::arange(first, first + columns, k.options().dtype(at::kLong)).unsqueeze(0);
    const at::Tensor v =
        unit.to(k.scalar_type()).expand({SizeOf(k, 0), SizeOf(k, 1), keys, columns});
    parts.push_back(std::get<0>(Compose(q, k, v, similarity, positions, arguments)));
  }
  if (parts.empty()) return q.new_zeros({SizeOf(q, 0), SizeOf(q, 1), SizeOf(q, 2), 0});
  return at::cat(parts, 3);
}

// Whether a tensor of a position is indexed by the rows of the call.
bool HasRows(const Parameter& parameter) {
  return parameter.index == Index::kQueries || parameter.index == Index::kPairs;
}

// Whether a position has a tensor whose rows belong to both queries and keys.
bool OfTokens(const ResolvedPosition& position) {
  const std::vector<const Parameter*> parameters = position.entry->Tensors(*position.component);
  return std::any_of(parameters.begin(), parameters.end(),
                     [](const Parameter* parameter) { return parameter->index == Index::kTokens; });
}

// Whether a term can be computed for a subset of the rows, given the offset of the first row.
bool StandsAlone(const ResolvedPosition& position) {
  // A module's tables are indexed by position, not by the rows of the call.
  const bool by_row = position.entry->catalogue.HasTable(Index::kOffsets) && !position.of_module;
  return !by_row && !OfTokens(position) && !position.entry->GoesByLength(*position.component) &&
         !position.entry->catalogue.needs_grid && !position.component->Find("shape");
}

}  // namespace

at::Tensor AttentionWeights(const at::Tensor& q, const at::Tensor& k,
                            const std::vector<int64_t>& rows, const ResolvedSimilarity& similarity,
                            std::vector<ResolvedPosition> positions, const CallArguments& call) {
  const int64_t queries = SizeOf(q, 2);
  std::vector<int64_t> chosen;
  for (const int64_t row : rows) {
    TORCH_CHECK_VALUE(row >= -queries && row < queries, kName, ": rows contains ", row,
                      "; expected ", -queries, " to ", queries - 1, ", because Lq is ", queries);
    chosen.push_back(row < 0 ? row + queries : row);
  }
  CallArguments arguments = call;
  arguments.dropout = 0;
  arguments.aggregation = "mean";
  // All weights are requested, so no tile may be skipped.
  arguments.tolerance = 0;
  for (ResolvedPosition& position : positions) position.of_weights_alone = true;
  const bool knows_offset =
      call.query_offset || call.query_offsets || call.positions || queries == SizeOf(k, 2);
  const bool alone = knows_offset && std::all_of(positions.begin(), positions.end(), StandsAlone);
  if (!alone) {
    const at::Tensor all = WeightsOfAllRows(q, k, similarity, positions, arguments);
    std::vector<at::Tensor> of_rows;
    for (const int64_t row : chosen) of_rows.push_back(all.narrow(2, row, 1));
    return of_rows.empty() ? all.narrow(2, 0, 0) : at::cat(of_rows, 2);
  }
  // Consecutive rows are computed in one call.
  std::vector<at::Tensor> parts;
  for (size_t begin = 0; begin < chosen.size();) {
    size_t end = begin + 1;
    while (end < chosen.size() && chosen[end] == chosen[end - 1] + 1) ++end;
    const int64_t first = chosen[begin];
    const auto count = static_cast<int64_t>(end - begin);
    CallArguments part = arguments;
    if (call.positions) {
      TORCH_CHECK_VALUE(call.key_positions || queries == SizeOf(k, 2), kName,
                        ": key_positions is None, but Lq = ", queries, " and Lk = ", SizeOf(k, 2),
                        " differ; pass the positions of the keys");
      part.key_positions = call.key_positions.value_or(*call.positions);
    }
    // Only rotations read coordinates; masks use the offset.
    if (!call.positions || call.positions->dim() == 3) {
      if (call.query_offsets) {
        part.query_offsets = *call.query_offsets + first;
      } else {
        part.query_offset = call.query_offset.value_or(0) + first;
      }
    }
    const auto rows_of = [&](std::string_view name, const at::Tensor& tensor, int64_t axis,
                             bool may_be_shared) {
      const int64_t size = SizeOf(tensor, axis);
      if (may_be_shared && size == 1) return tensor;
      TORCH_CHECK_VALUE(size == queries, kName, ": ", name, " has shape ", tensor.sym_sizes(),
                        ", with ", size, " rows; expected Lq = ", queries, " rows");
      return tensor.narrow(axis, first, count);
    };
    static constexpr auto kFields = CallArguments::Fields();
    FusedOperator<CallArguments>::ForEachTensor(part, [&](size_t n, OptionalTensor& tensor) {
      if (!tensor) return;
      const ArgumentField& field = kFields[n];
      if (const auto axis = AxisOf(field.shape.text, 'Q', tensor->dim())) {
        tensor = rows_of(field.name, *tensor, *axis, field.kind != ArgumentKind::kInteger);
      }
    });
    std::vector<ResolvedPosition> of_rows = positions;
    for (ResolvedPosition& position : of_rows) {
      auto tensor = position.tensors.begin();
      for (const Parameter* parameter : position.entry->Tensors(*position.component)) {
        const bool is_sink = position.entry->role() == PositionEntry::Role::kSink;
        if (parameter->tensor.of_values) {
          // The weights do not depend on this tensor.
        } else if (HasRows(*parameter) && tensor->dim() >= 2) {
          *tensor = rows_of(parameter->name, *tensor, -2, /*may_be_shared=*/true);
        } else if (is_sink && tensor->dim() == 3) {
          *tensor = rows_of(parameter->name, *tensor, -1, /*may_be_shared=*/true);
        }
        ++tensor;
      }
    }
    parts.push_back(WeightsOfAllRows(q.narrow(2, first, count), k, similarity, of_rows, part));
    begin = end;
  }
  if (parts.empty()) return q.new_zeros({SizeOf(q, 0), SizeOf(q, 1), 0, SizeOf(k, 2)});
  return at::cat(parts, 2);
}

at::Tensor AttentionWeights(const at::Tensor& q, const at::Tensor& k,
                            const std::vector<int64_t>& rows, const std::string& similarity,
                            at::TensorList similarity_tensors,
                            const std::vector<std::string>& positions,
                            at::TensorList position_tensors, const CallArguments& arguments) {
  const WithoutAutocast guard;
  CheckTokens(kName, q, k, k);
  return AttentionWeights(q, k, rows, ResolveSimilarity(kName, similarity, similarity_tensors, q),
                          ResolvePositions(positions, position_tensors, q), arguments);
}

}  // namespace gnomon
