#include "ops/attention/call_tensors.h"

#include <algorithm>
#include <limits>
#include <string_view>
#include <utility>
#include <vector>

#include "base/visible_keys.h"

namespace gnomon {
namespace {

std::vector<int64_t> ConcreteAll(c10::SymIntArrayRef numbers) {
  std::vector<int64_t> concrete;
  for (const c10::SymInt& number : numbers) concrete.push_back(Concrete(number));
  return concrete;
}

void ExpectRows(int64_t rows, int64_t expected) {
  TORCH_CHECK_VALUE(rows == expected, "gnomon.attention: the table of position has ", rows,
                    " rows; expected ", expected);
}

void ExpectPlaces(int64_t least, int64_t greatest, int64_t end, const char* what) {
  TORCH_CHECK_VALUE(least >= 0 && greatest < end, "gnomon.attention: positions are from ", least,
                    " to ", greatest, "; expected 0 to ", end - 1, ", ", what);
}

// Beyond 2^53 positions in float64 are no longer exact.
at::Tensor QueryOffsets(const OptionalTensor& offsets) {
  constexpr int64_t kLargestExact = int64_t{1} << 53;
  const at::Tensor contiguous = Contiguous(offsets);
  for (int64_t b = 0; contiguous.defined() && contiguous.is_cpu() && b < contiguous.numel(); ++b) {
    const int64_t offset = contiguous.const_data_ptr<int64_t>()[b];
    TORCH_CHECK_VALUE(offset >= -kLargestExact && offset <= kLargestExact,
                      "gnomon.attention: query_offset[", b, "] is ", offset,
                      "; expected -2^53 to 2^53");
  }
  return contiguous;
}

at::Tensor SegmentIds(const char* name, const OptionalTensor& segments) {
  if (!segments) return {};
  at::Tensor ids = segments->to(at::kInt).contiguous();
  TORCH_CHECK_VALUE(!segments->is_cpu() || ids.to(at::kLong).equal(*segments),
                    "gnomon.attention: ", name, " has numbers beyond int32");
  return ids;
}

}  // namespace

std::array<int64_t, 3> PairStrides(const at::Tensor& pairs) {
  return {pairs.size(0) > 1 ? pairs.stride(0) : 0, pairs.size(1) > 1 ? pairs.stride(1) : 0,
          pairs.stride(2)};
}

void FillEmpty(Outputs& outputs) {
  auto& [o, lse, statistics] = outputs;
  o.zero_();
  lse.fill_(-std::numeric_limits<double>::infinity());
  // No score, no weight, no key.
  statistics[0].fill_(-std::numeric_limits<double>::infinity());
  statistics[1].zero_();
  statistics[2].fill_(-1);
}

CallTensors::CallTensors(const OperatorArguments& a)
    : tolerance_(a.tolerance), query_offset_(Concrete(a.query_offset)) {
  function_ = &CheckedFunction(a, lengths_);
  shape_ = {*lengths_['B'], *lengths_['H'], *lengths_['G'], *lengths_['Q'],
            *lengths_['K'], *lengths_['D'], *lengths_['V']};
  x_ = WithRows(a.x);
  y_ = WithRows(a.y);
  v_ = WithRows(a.v);
  row_scalars_ = Contiguous(a.row_scalars);
  column_scalars_ = Contiguous(a.column_scalars);
  head_scalars_ = Contiguous(a.head_scalars);
  factor_ = a.factor.contiguous();
  key_bias_ = Contiguous(a.key_bias);
  key_bias_low_ = Contiguous(a.key_bias_low);
  key_bias_base_ = Contiguous(a.key_bias_base);
  temperature_ = Contiguous(a.temperature);
  if (a.pair_bias) pair_bias_ = WithRows(*a.pair_bias);
  if (a.mask) pair_mask_ = WithRows(*a.mask);
  query_offsets_ = QueryOffsets(a.query_offsets);
  SetMask(a);
  SetPositions(a);
  SetBias(a);
  SetRelative(a);
  if (a.dropout != 0) {
    TORCH_CHECK_VALUE(a.seed, "gnomon.attention: dropout is ", a.dropout, " without a seed");
    dropout_ = {a.dropout, static_cast<uint64_t>(a.seed->item<int64_t>())};
  }
}

void CallTensors::SetPositions(const OperatorArguments& a) {
  TORCH_CHECK_VALUE(a.query_positions.has_value() == a.key_positions.has_value(),
                    "gnomon.attention: query_positions and key_positions go together");
  TORCH_CHECK_VALUE(a.query_positions || !a.bias_parameters,
                    "gnomon.attention: bias_parameters go with positions");
  if (!a.query_positions) return;
  TORCH_CHECK_NOT_IMPLEMENTED(a.query_positions->is_cpu() && a.key_positions->is_cpu(),
                              "gnomon.attention: positions on a GPU; expected query_offset");
  query_positions_ = a.query_positions->contiguous();
  key_positions_ = a.key_positions->contiguous();
  bool any = false;
  for (int64_t b = 0; b < shape_.batch && shape_.queries > 0; ++b) {
    const int64_t* queries = Data<int64_t>(query_positions_) + b * shape_.queries;
    const int64_t* keys = Data<int64_t>(key_positions_) + b * shape_.keys;
    const KeyRange seen = BatchKeys(mask_, shape_.keys, b);
    if (seen.empty()) continue;
    const auto [low, high] = std::minmax_element(queries, queries + shape_.queries);
    const auto [first, last] = std::minmax_element(keys + seen.begin, keys + seen.end);
    // The core refuses others.
    constexpr int64_t kLargest = int64_t{1} << 53;
    if (std::min(*low, *first) < -kLargest || std::max(*high, *last) > kLargest) continue;
    const OffsetSpan own{*first - *high, *last - *low};
    span_ =
        any ? OffsetSpan{std::min(span_.first, own.first), std::max(span_.last, own.last)} : own;
    least_ = any ? std::min({least_, *low, *first}) : std::min(*low, *first);
    greatest_ = any ? std::max({greatest_, *high, *last}) : std::max(*high, *last);
    least_key_ = any ? std::min(least_key_, *first) : *first;
    greatest_key_ = any ? std::max(greatest_key_, *last) : *last;
    any = true;
  }
}

void CallTensors::SetBias(const OperatorArguments& a) {
  if (a.bias_parameters) {
    TORCH_CHECK_VALUE(!a.bias, "gnomon.attention: bias and bias_parameters are both given");
    // The table and the sums of its gradient have room for these.
    constexpr int64_t kMostOffsets = int64_t{1} << 22;
    TORCH_CHECK_VALUE(span_.last - span_.first < kMostOffsets,
                      "gnomon.attention: positions have offsets p_j - p_i from ", span_.first,
                      " to ", span_.last, "; biases by offset take at most 2^22 of them");
    bias_parameters_ = a.bias_parameters->contiguous();
    bias_terms_ = a.bias_terms;
    if (a.bias_shapes) bias_shapes_ = ConcreteAll(*a.bias_shapes);
    bias_ = PlacedBiasTable(bias_terms_, bias_shapes_, bias_parameters_, shape_.heads, span_);
    bias_layout_ =
        std::make_unique<OffsetLayout>(-span_.first, span_.last, OffsetLayout::Far::kClip);
    return;
  }
  if (!a.bias) return;
  TORCH_CHECK_VALUE(a.grid || !has_positions(),
                    "gnomon.attention: bias with positions; expected bias_parameters, or a grid");
  const AttentionShape& n = shape_;
  if (a.grid) bias_layout_ = MakeGrid(*a.grid, GridLayout::Kind::kTable);
  const int64_t entries =
      bias_layout_ ? bias_layout_->size() : std::max<int64_t>(n.queries + n.keys - 1, 0);
  TORCH_CHECK_VALUE(*lengths_['n'] == entries, "gnomon.attention: bias has ", *lengths_['n'],
                    " entries; expected ", entries);
  bias_ = a.bias->contiguous();
}

void CallTensors::SetRelative(const OperatorArguments& a) {
  TORCH_CHECK_VALUE(a.relative_query.has_value() == a.relative_keys.has_value(),
                    "gnomon.attention: relative_keys and relative_query go together");
  TORCH_CHECK_VALUE(a.relative_key.has_value() == a.relative_queries.has_value(),
                    "gnomon.attention: relative_queries and relative_key go together");
  if (!a.relative_keys && !a.relative_values && !a.relative_queries) return;
  if (a.relative_query) relative_query_ = WithRows(*a.relative_query);
  relative_keys_ = Contiguous(a.relative_keys);
  relative_values_ = Contiguous(a.relative_values);
  if (a.relative_key) relative_key_ = WithRows(*a.relative_key);
  relative_queries_ = Contiguous(a.relative_queries);
  relative_factor_ = a.relative_factor;
  relative_layout_ = MakeRelativeLayout(a, *lengths_['m']);
  TORCH_CHECK_VALUE(
      !a.relative_queries || (a.relative_layout != "grid" && a.relative_layout != "keys"),
      "gnomon.attention: relative_queries with relative_layout \"", a.relative_layout,
      "\"; expected one by offset");
}

std::unique_ptr<TableLayout> CallTensors::MakeRelativeLayout(const OperatorArguments& a,
                                                             int64_t rows) const {
  using Far = OffsetLayout::Far;
  const std::string_view name = a.relative_layout;
  if (name == "grid") {
    TORCH_CHECK_VALUE(a.grid, "gnomon.attention: relative keys on a grid without one");
    std::unique_ptr<GridLayout> layout = MakeGrid(*a.grid, GridLayout::Kind::kAxes);
    ExpectRows(rows, layout->size());
    return layout;
  }
  if (name == "keys" && has_positions()) {
    ExpectPlaces(least_key_, greatest_key_, rows, "the rows of the table of position");
    return std::make_unique<KeyLayout>(rows);
  }
  if (name == "keys") {
    ExpectRows(rows, shape_.keys);
    return std::make_unique<KeyLayout>(rows);
  }
  TORCH_CHECK_VALUE(rows >= 1, "gnomon.attention: a relative table has no rows");
  if (name == "clip" || name == "zero") {
    TORCH_CHECK_VALUE(rows % 2 == 1, "gnomon.attention: a relative table has ", rows,
                      " rows; expected an odd number");
    const int64_t most = rows / 2;
    return std::make_unique<OffsetLayout>(most, most, name == "clip" ? Far::kClip : Far::kZero);
  }
  TORCH_CHECK_VALUE(name == "clip_past" || name == "zero_past" || name == "past",
                    "gnomon.attention: relative_layout is \"", name, "\"");
  if (name == "past" && has_positions()) {
    TORCH_CHECK_VALUE(-span_.first < rows,
                      "gnomon.attention: the table of relative keys has rows for ", rows,
                      " distances, and positions have p_i - p_j = ", -span_.first,
                      "; expected more rows than that");
  } else if (name == "past") {
    int64_t offset = query_offset_;
    if (query_offsets_.defined() && query_offsets_.numel() > 0 && query_offsets_.is_cpu()) {
      offset = query_offsets_.max().item<int64_t>();
    }
    TORCH_CHECK_VALUE(
        shape_.queries + offset <= rows || shape_.queries == 0,
        "gnomon.attention: the table of relative keys has rows for ", rows,
        " distances; expected at least Lq + query_offset = ", shape_.queries + offset);
  }
  return std::make_unique<OffsetLayout>(rows - 1, 0, name == "clip_past" ? Far::kClip : Far::kZero);
}

std::unique_ptr<GridLayout> CallTensors::MakeGrid(c10::SymIntArrayRef grid,
                                                  GridLayout::Kind kind) const {
  const std::vector<int64_t> numbers = ConcreteAll(grid);
  TORCH_CHECK_VALUE(
      !numbers.empty(),
      "gnomon.attention: grid is empty; expected the prefix and the lengths of its axes");
  std::unique_ptr<GridLayout> layout;
  Translate([&] {
    layout = std::make_unique<GridLayout>(std::vector<int64_t>(numbers.begin() + 1, numbers.end()),
                                          numbers[0], kind);
  });
  if (has_positions()) {
    ExpectPlaces(least_, greatest_, layout->tokens(), "places of the grid");
    return layout;
  }
  TORCH_CHECK_VALUE(layout->tokens() == shape_.queries && layout->tokens() == shape_.keys,
                    "gnomon.attention: grid has ", layout->tokens(),
                    " tokens, Lq = ", shape_.queries, " and Lk = ", shape_.keys,
                    "; expected its tokens in both");
  return layout;
}

void CallTensors::SetMask(const OperatorArguments& a) {
  key_starts_ = KeyBounds("key_starts", a.key_starts);
  key_lengths_ = KeyBounds("key_lengths", a.key_lengths);
  query_segments_ = SegmentIds("query_segments", a.query_segments);
  key_segments_ = SegmentIds("key_segments", a.key_segments);
  mask_.query_segments = Data<int32_t>(query_segments_);
  mask_.key_segments = Data<int32_t>(key_segments_);
  if (pair_mask_.defined()) {
    // One byte, 0 or 1, for each pair.
    mask_.pairs = {static_cast<const uint8_t*>(pair_mask_.const_data_ptr()),
                   PairStrides(pair_mask_)};
  }
  mask_.key_starts = Data<int64_t>(key_starts_);
  mask_.key_lengths = Data<int64_t>(key_lengths_);
  if (a.left) mask_.left = Concrete(*a.left);
  if (a.right) mask_.right = Concrete(*a.right);
  if (!a.chunks) return;
  const std::vector<int64_t> chunks = ConcreteAll(*a.chunks);
  TORCH_CHECK_VALUE(chunks.size() == 3, "gnomon.attention: chunks has ", chunks.size(),
                    " numbers; expected 3");
  mask_.chunks = {chunks[0], chunks[1], chunks[2]};
}

at::Tensor CallTensors::KeyBounds(const char* name, const OptionalTensor& bounds) const {
  if (!bounds) return {};
  if (!bounds->is_cpu()) return bounds->clamp(0, shape_.keys);
  const at::Tensor contiguous = bounds->contiguous();
  const int64_t* values = contiguous.const_data_ptr<int64_t>();
  for (int64_t b = 0; b < contiguous.numel(); ++b) {
    TORCH_CHECK_VALUE(values[b] >= 0 && values[b] <= shape_.keys, "gnomon.attention: ", name, "[",
                      b, "] is ", values[b], "; expected 0 to Lk = ", shape_.keys);
  }
  return contiguous;
}

}  // namespace gnomon
