#include "ops/attention/kernel_call.h"

#include <algorithm>
#include <limits>
#include <string_view>
#include <utility>
#include <vector>

#include "base/visible_keys.h"
#include "ops/attention/pages.h"
#include "ops/operators/tensors.h"

namespace gnomon {
namespace {

std::vector<int64_t> ConcreteAll(c10::SymIntArrayRef numbers) {
  std::vector<int64_t> concrete;
  for (const c10::SymInt& number : numbers) concrete.push_back(Concrete(number));
  return concrete;
}

void ExpectRows(int64_t rows, int64_t expected) {
  TORCH_CHECK_VALUE(rows == expected, "gnomon.attention: the table of the position has ", rows,
                    " rows; expected ", expected);
}

void ExpectPositions(int64_t least, int64_t greatest, int64_t end, const char* what) {
  TORCH_CHECK_VALUE(least >= 0 && greatest < end, "gnomon.attention: positions range from ", least,
                    " to ", greatest, "; expected ", what, ", 0 to ", end - 1);
}

// Positions beyond 2^53 are not exact in float64.
void CheckOffsets(const at::Tensor& offsets) {
  constexpr int64_t kLargestExact = int64_t{1} << 53;
  if (!offsets.is_cpu()) return;
  for (int64_t b = 0; b < offsets.numel(); ++b) {
    const int64_t offset = offsets.const_data_ptr<int64_t>()[b];
    TORCH_CHECK_VALUE(offset >= -kLargestExact && offset <= kLargestExact,
                      "gnomon.attention: query_offset[", b, "] is ", offset,
                      "; expected a value from -2^53 to 2^53");
  }
}

// Whether each head has its own table.
bool IsPerHead(const OptionalTensor& table) { return table && table->size(0) > 1; }

}  // namespace

std::array<int64_t, 3> PairStrides(const at::Tensor& pairs) {
  return {pairs.size(0) > 1 ? pairs.stride(0) : 0, pairs.size(1) > 1 ? pairs.stride(1) : 0,
          pairs.stride(2)};
}

void FillEmpty(Outputs& outputs) {
  auto& [o, lse, statistics] = outputs;
  o.zero_();
  lse.fill_(-std::numeric_limits<double>::infinity());
  // The statistics of a row without keys: the maximum, the sum of weights, and no key (-1).
  statistics[0].fill_(-std::numeric_limits<double>::infinity());
  statistics[1].zero_();
  statistics[2].fill_(-1);
}

template <class T>
KernelCall<T>::KernelCall(const OperatorArguments& a) {
  function_ = &CheckedFunction(a, lengths_);
  input_.shape = {*lengths_['B'], *lengths_['H'], *lengths_['G'], *lengths_['Q'],
                  *lengths_['K'], *lengths_['D'], *lengths_['V']};
  CheckPages(a);
  page_table_ = Contiguous(a.page_table);
  SetTokens(a);
  SetMask(a);
  SetPositions(a);
  SetBias(a);
  SetRelative(a);
  input_.tolerance = a.tolerance;
  input_.softcap = a.softcap;
  if (a.dropout != 0) {
    TORCH_CHECK_VALUE(a.seed, "gnomon.attention: dropout is ", a.dropout,
                      ", but seed is missing; pass a seed");
    input_.dropout = {a.dropout, static_cast<uint64_t>(a.seed->item<int64_t>())};
  }
}

template <class T>
void KernelCall<T>::SetTokens(const OperatorArguments& a) {
  input_.x = TokenRows<T>(Keep(WithRows(a.x)));
  input_.y = TokenRows<T>(Keep(WithRows(a.y)));
  input_.v = TokenRows<T>(Keep(WithRows(a.v)));
  input_.row_scalars = Numbers<T>(a.row_scalars);
  input_.column_scalars = Numbers<T>(a.column_scalars);
  input_.head_scalars = Numbers<T>(a.head_scalars);
  input_.factor = Numbers<T>(a.factor);
  input_.temperature = Numbers<T>(a.temperature);
}

template <class T>
void KernelCall<T>::SetMask(const OperatorArguments& a) {
  Mask& mask = input_.mask;
  mask.key_starts = KeyBounds("key_starts", a.key_starts);
  mask.key_lengths = KeyBounds("key_lengths", a.key_lengths);
  mask.query_segments = SegmentIds("query_segments", a.query_segments);
  mask.key_segments = SegmentIds("key_segments", a.key_segments);
  if (a.mask) {
    // One byte per pair, 0 or 1.
    const at::Tensor& pairs = Keep(WithRows(*a.mask));
    mask.pairs = {static_cast<const uint8_t*>(pairs.const_data_ptr()), PairStrides(pairs)};
  }
  if (a.left) mask.left = Concrete(*a.left);
  if (a.right) mask.right = Concrete(*a.right);
  if (!a.chunks) return;
  const std::vector<int64_t> chunks = ConcreteAll(*a.chunks);
  TORCH_CHECK_VALUE(chunks.size() == 3, "gnomon.attention: chunks has ", chunks.size(),
                    " elements; expected 3");
  mask.chunks = {chunks[0], chunks[1], chunks[2]};
}

template <class T>
void KernelCall<T>::SetPositions(const OperatorArguments& a) {
  input_.query_offset = Concrete(a.query_offset);
  input_.query_offsets = Numbers<int64_t>(a.query_offsets);
  if (a.query_offsets) CheckOffsets(kept_.back());
  TORCH_CHECK_VALUE(a.query_positions.has_value() == a.key_positions.has_value(),
                    "gnomon.attention: one of query_positions and key_positions is missing; "
                    "expected both or neither");
  TORCH_CHECK_VALUE(a.query_positions || !a.bias_parameters,
                    "gnomon.attention: bias_parameters is given without positions; pass both");
  if (!a.query_positions) return;
  has_positions_ = true;
  input_.query_positions = Numbers<int64_t>(a.query_positions);
  input_.key_positions = Numbers<int64_t>(a.key_positions);
  const HostPositions host = PositionsOnHost(a);
  const AttentionShape& n = input_.shape;
  bool any = false;
  for (int64_t b = 0; b < n.batch && n.queries > 0; ++b) {
    const int64_t* queries = host.queries + b * n.queries;
    const int64_t* keys = host.keys + b * n.keys;
    const KeyRange seen = BatchKeys(host.mask, n.keys, b);
    if (seen.empty()) continue;
    const auto [low, high] = std::minmax_element(queries, queries + n.queries);
    const auto [first, last] = std::minmax_element(keys + seen.begin, keys + seen.end);
    constexpr int64_t kLargest = int64_t{1} << 53;
    const int64_t least = std::min(*low, *first);
    const int64_t greatest = std::max(*high, *last);
    const bool is_far = least < -kLargest || greatest > kLargest;
    // The core checks positions on the CPU.
    TORCH_CHECK_VALUE(a.x.is_cpu() || !(is_far || greatest - least >= kMostApart),
                      "gnomon.attention: positions of batch element ", b, " range from ", least,
                      " to ", greatest, "; expected values within +-2^53 and less than 2^30 apart");
    if (is_far) continue;
    const OffsetSpan own{*first - *high, *last - *low};
    span_ =
        any ? OffsetSpan{std::min(span_.first, own.first), std::max(span_.last, own.last)} : own;
    least_ = any ? std::min(least_, least) : least;
    greatest_ = any ? std::max(greatest_, greatest) : greatest;
    least_key_ = any ? std::min(least_key_, *first) : *first;
    greatest_key_ = any ? std::max(greatest_key_, *last) : *last;
    any = true;
  }
  if (any) ReplaceByOffsets(a, host);
}

template <class T>
typename KernelCall<T>::HostPositions KernelCall<T>::PositionsOnHost(const OperatorArguments& a) {
  if (a.x.is_cpu()) return {input_.query_positions, input_.key_positions, input_.mask};
  const auto copy = [&](const OptionalTensor& tensor, at::ScalarType type) {
    return tensor ? Keep(tensor->to(at::kCPU, type).contiguous()).const_data_ptr() : nullptr;
  };
  const auto numbers = [&](const OptionalTensor& tensor) {
    return static_cast<const int64_t*>(copy(tensor, at::kLong));
  };
  const auto segments = [&](const OptionalTensor& tensor) {
    return static_cast<const int32_t*>(copy(tensor, at::kInt));
  };
  HostPositions host;
  host.queries = numbers(a.query_positions);
  host.keys = numbers(a.key_positions);
  host.mask.key_starts = numbers(a.key_starts);
  host.mask.key_lengths = numbers(a.key_lengths);
  host.mask.query_segments = segments(a.query_segments);
  host.mask.key_segments = segments(a.key_segments);
  return host;
}

namespace {

// Adjacent tokens of one segment with consecutive positions; `ahead` is the position of a token
// minus its column. FindRuns returns false if adjacent tokens of a segment do not have consecutive
// positions.
struct PlacedRun {
  int32_t segment;
  int64_t ahead;
};
bool FindRuns(const int64_t* positions, const int32_t* segments, KeyRange tokens,
              std::vector<PlacedRun>* runs) {
  runs->clear();
  for (int64_t n = tokens.begin; n < tokens.end; ++n) {
    const int32_t segment = segments == nullptr ? 0 : segments[n];
    const int64_t ahead = positions[n] - n;
    if (runs->empty() || runs->back().segment != segment) {
      runs->push_back({segment, ahead});
    } else if (runs->back().ahead != ahead) {
      return false;
    }
  }
  std::sort(runs->begin(), runs->end(), [](const PlacedRun& a, const PlacedRun& b) {
    return a.segment != b.segment ? a.segment < b.segment : a.ahead < b.ahead;
  });
  const auto same = [](const PlacedRun& a, const PlacedRun& b) {
    return a.segment == b.segment && a.ahead == b.ahead;
  };
  runs->erase(std::unique(runs->begin(), runs->end(), same), runs->end());
  return true;
}

}  // namespace

template <class T>
std::optional<std::vector<int64_t>> KernelCall<T>::OffsetsOfPositions(
    const HostPositions& host) const {
  const AttentionShape& n = input_.shape;
  const Mask& mask = host.mask;
  std::vector<int64_t> offsets;
  std::vector<PlacedRun> of_queries;
  std::vector<PlacedRun> of_keys;
  for (int64_t b = 0; b < n.batch; ++b) {
    const auto segments = [b](const int32_t* all, int64_t count) {
      return all == nullptr ? nullptr : all + b * count;
    };
    if (!FindRuns(host.queries + b * n.queries, segments(mask.query_segments, n.queries),
                  {0, n.queries}, &of_queries) ||
        !FindRuns(host.keys + b * n.keys, segments(mask.key_segments, n.keys),
                  BatchKeys(mask, n.keys, b), &of_keys)) {
      return std::nullopt;
    }
    std::optional<int64_t> offset;
    size_t key = 0;
    for (const PlacedRun& query : of_queries) {
      while (key < of_keys.size() && of_keys[key].segment < query.segment) ++key;
      for (size_t k = key; k < of_keys.size() && of_keys[k].segment == query.segment; ++k) {
        const int64_t own = query.ahead - of_keys[k].ahead;
        if (offset && *offset != own) return std::nullopt;
        offset = own;
      }
    }
    // For a batch element without visible keys, any value works.
    offsets.push_back(offset.value_or(offsets.empty() ? 0 : offsets.back()));
  }
  return offsets;
}

template <class T>
void KernelCall<T>::ReplaceByOffsets(const OperatorArguments& a, const HostPositions& host) {
  // Chunks, grids and tables indexed by key depend on the positions themselves, and so does the
  // check that a table for the past has enough rows.
  const bool by_distance = !a.chunks && !a.grid &&
                           ((!a.relative_keys && !a.relative_values && !a.relative_queries) ||
                            a.relative_layout == "clip" || a.relative_layout == "zero" ||
                            a.relative_layout == "clip_past" || a.relative_layout == "zero_past");
  if (!by_distance || span_.last - span_.first >= kMostApart) return;
  std::optional<std::vector<int64_t>> offsets = OffsetsOfPositions(host);
  if (!offsets) return;
  const auto [least, most] = std::minmax_element(offsets->begin(), offsets->end());
  const AttentionShape& n = input_.shape;
  const OffsetSpan span{1 - n.queries - *most, n.keys - 1 - *least};
  // The table for the offsets of all batches must not be much larger than the table for one batch.
  if (*most - *least > 2 * (n.queries + n.keys)) return;
  // Biases may be defined only for the offsets of these positions.
  if (a.bias_parameters && (span.first < span_.first || span.last > span_.last)) return;
  span_ = span;
  offsets_ = std::move(*offsets);
  input_.query_positions = nullptr;
  input_.key_positions = nullptr;
  if (*least == *most) {
    input_.query_offset = *most;
  } else {
    input_.query_offsets = Numbers<int64_t>(at::tensor(offsets_, at::kLong).to(a.x.device()));
  }
}

template <class T>
at::Tensor KernelCall<T>::BiasOfTable(const at::Tensor& table) const {
  if (offsets_.empty() || input_.query_offsets == nullptr) return table;
  const AttentionShape& n = input_.shape;
  const int64_t most = *std::max_element(offsets_.begin(), offsets_.end());
  std::vector<at::Tensor> of_batches;
  for (const int64_t offset : offsets_) {
    of_batches.push_back(table.narrow(2, most - offset, n.queries + n.keys - 1));
  }
  return at::cat(of_batches);
}

template <class T>
at::Tensor KernelCall<T>::TableGradient(const at::Tensor& d_bias) const {
  if (offsets_.empty() || input_.query_offsets == nullptr) return d_bias;
  const int64_t most = *std::max_element(offsets_.begin(), offsets_.end());
  const int64_t entries = d_bias.size(2);
  at::Tensor d_table =
      at::zeros({1, d_bias.size(1), span_.last - span_.first + 1}, d_bias.options());
  for (int64_t b = 0; b < d_bias.size(0); ++b) {
    d_table.narrow(2, most - offsets_[static_cast<size_t>(b)], entries)
        .add_(d_bias.narrow(0, b, 1));
  }
  return d_table;
}

template <class T>
at::Tensor KernelCall<T>::ParameterGradient(const at::Tensor& d_bias) const {
  return PlacedBiasGradient(bias_terms_, bias_shapes_, bias_parameters_, span_,
                            TableGradient(d_bias));
}

template <class T>
at::Tensor KernelCall<T>::BiasTangent(const at::Tensor& d_parameters) const {
  return BiasOfTable(PlacedBiasTangent(bias_terms_, bias_shapes_, bias_parameters_,
                                       input_.shape.heads, span_, d_parameters));
}

template <class T>
at::Tensor KernelCall<T>::ParameterGradientTangent(const at::Tensor& d_bias,
                                                   const at::Tensor& d_bias_tangent,
                                                   const at::Tensor& d_parameters) const {
  return ParameterGradient(d_bias_tangent) +
         PlacedBiasGradientTangent(bias_terms_, bias_shapes_, bias_parameters_, span_,
                                   TableGradient(d_bias), d_parameters);
}

template <class T>
void KernelCall<T>::SetBias(const OperatorArguments& a) {
  input_.key_bias = Numbers<T>(a.key_bias);
  input_.key_bias_low = Numbers<T>(a.key_bias_low);
  input_.key_bias_base = Numbers<T>(a.key_bias_base);
  if (a.pair_bias) {
    const at::Tensor& pairs = Keep(WithRows(*a.pair_bias));
    input_.pair_bias = {pairs.const_data_ptr<T>(), PairStrides(pairs)};
  }
  const AttentionShape& n = input_.shape;
  if (a.bias_parameters) {
    TORCH_CHECK_VALUE(
        !a.bias,
        "gnomon.attention: bias and bias_parameters are both given; pass only one of them");
    // Up to this number, the table and the sums of its gradient fit into memory.
    constexpr int64_t kMostOffsets = int64_t{1} << 22;
    TORCH_CHECK_VALUE(span_.last - span_.first < kMostOffsets,
                      "gnomon.attention: the offsets p_j - p_i of the positions range from ",
                      span_.first, " to ", span_.last,
                      "; expected a range of at most 2^22 offsets");
    bias_parameters_ = a.bias_parameters->contiguous();
    bias_terms_ = a.bias_terms;
    if (a.bias_shapes) bias_shapes_ = ConcreteAll(*a.bias_shapes);
    bias_ = PlacedBiasTable(bias_terms_, bias_shapes_, bias_parameters_, n.heads, span_);
    if (offsets_.empty()) {
      bias_layout_ =
          std::make_unique<OffsetLayout>(-span_.first, span_.last, OffsetLayout::Far::kClip);
    } else {
      bias_ = BiasOfTable(bias_);
    }
  } else if (a.bias) {
    TORCH_CHECK_VALUE(a.grid || !has_positions_,
                      "gnomon.attention: bias and positions are given without grid; pass "
                      "bias_parameters instead of bias, or also pass grid");
    if (a.grid) bias_layout_ = MakeGrid(*a.grid, GridLayout::Kind::kTable);
    const int64_t entries =
        bias_layout_ ? bias_layout_->size() : std::max<int64_t>(n.queries + n.keys - 1, 0);
    TORCH_CHECK_VALUE(*lengths_['n'] == entries, "gnomon.attention: bias has ", *lengths_['n'],
                      " elements; expected ", entries);
    bias_ = a.bias->contiguous();
  } else {
    return;
  }
  input_.bias = {bias_.const_data_ptr<T>(), bias_.size(0) > 1 ? bias_.size(1) * bias_.size(2) : 0,
                 bias_layout_.get()};
}

template <class T>
void KernelCall<T>::SetRelative(const OperatorArguments& a) {
  TORCH_CHECK_VALUE(a.relative_query.has_value() == a.relative_keys.has_value(),
                    "gnomon.attention: one of relative_keys and relative_query is missing; "
                    "expected both or neither");
  TORCH_CHECK_VALUE(a.relative_key.has_value() == a.relative_queries.has_value(),
                    "gnomon.attention: one of relative_queries and relative_key is missing; "
                    "expected both or neither");
  if (!a.relative_keys && !a.relative_values && !a.relative_queries) return;
  relative_layout_ = MakeRelativeLayout(a, *lengths_['m']);
  TORCH_CHECK_VALUE(
      !a.relative_queries || (a.relative_layout != "grid" && a.relative_layout != "keys"),
      "gnomon.attention: relative_queries is given with relative_layout \"", a.relative_layout,
      "\"; expected a layout indexed by offset");
  Relative<T>& relative = input_.relative;
  relative.layout = relative_layout_.get();
  relative.factor = static_cast<T>(a.relative_factor);
  constexpr at::ScalarType kType = c10::CppTypeToScalarType<T>::value;
  if (a.relative_query) {
    relative_query_ = WithRows(*a.relative_query);
    relative.dim = relative_query_.size(3);
    if (relative_query_.scalar_type() == kType) relative.query = Rows<T>(relative_query_);
  }
  relative.keys = Numbers<T>(a.relative_keys);
  relative.key_heads = IsPerHead(a.relative_keys);
  relative.values = Numbers<T>(a.relative_values);
  relative.value_heads = IsPerHead(a.relative_values);
  if (a.relative_key) {
    relative_key_ = WithRows(*a.relative_key);
    relative.key_dim = relative_key_.size(3);
    if (relative_key_.scalar_type() == kType) relative.key = Rows<T>(relative_key_);
  }
  relative.queries = Numbers<T>(a.relative_queries);
  relative.query_heads = IsPerHead(a.relative_queries);
}

template <class T>
std::unique_ptr<TableLayout> KernelCall<T>::MakeRelativeLayout(const OperatorArguments& a,
                                                               int64_t rows) const {
  const AttentionShape& n = input_.shape;
  using Far = OffsetLayout::Far;
  const std::string_view name = a.relative_layout;
  if (name == "grid") {
    TORCH_CHECK_VALUE(
        a.grid,
        "gnomon.attention: relative_layout is \"grid\", but grid is missing; pass the grid");
    std::unique_ptr<GridLayout> layout = MakeGrid(*a.grid, GridLayout::Kind::kAxes);
    ExpectRows(rows, layout->size());
    return layout;
  }
  if (name == "keys" && has_positions_) {
    ExpectPositions(least_key_, greatest_key_, rows, "row indices of the position's table");
    return std::make_unique<KeyLayout>(rows);
  }
  if (name == "keys") {
    ExpectRows(rows, n.keys);
    return std::make_unique<KeyLayout>(rows);
  }
  TORCH_CHECK_VALUE(rows >= 1,
                    "gnomon.attention: a relative table has no rows; expected at least one");
  if (name == "clip" || name == "zero") {
    TORCH_CHECK_VALUE(rows % 2 == 1, "gnomon.attention: a relative table has ", rows,
                      " rows; expected an odd number");
    const int64_t most = rows / 2;
    return std::make_unique<OffsetLayout>(most, most, name == "clip" ? Far::kClip : Far::kZero);
  }
  TORCH_CHECK_VALUE(name == "clip_past" || name == "zero_past" || name == "past",
                    "gnomon.attention: relative_layout is \"", name,
                    "\"; expected grid, keys, clip, zero, past, clip_past or zero_past");
  if (name == "past" && has_positions_) {
    TORCH_CHECK_VALUE(
        -span_.first < rows, "gnomon.attention: the table of relative keys has rows for ", rows,
        " distances, but the positions contain the distance p_i - p_j = ", -span_.first,
        "; expected at least ", 1 - span_.first, " rows");
  } else if (name == "past") {
    int64_t offset = input_.query_offset;
    if (a.query_offsets && a.query_offsets->numel() > 0 && a.query_offsets->is_cpu()) {
      offset = a.query_offsets->max().item<int64_t>();
    }
    TORCH_CHECK_VALUE(n.queries + offset <= rows || n.queries == 0,
                      "gnomon.attention: the table of relative keys has rows for ", rows,
                      " distances; expected at least Lq + query_offset = ", n.queries + offset,
                      " rows");
  }
  return std::make_unique<OffsetLayout>(rows - 1, 0, name == "clip_past" ? Far::kClip : Far::kZero);
}

template <class T>
std::unique_ptr<GridLayout> KernelCall<T>::MakeGrid(c10::SymIntArrayRef grid,
                                                    GridLayout::Kind kind) const {
  const AttentionShape& n = input_.shape;
  const std::vector<int64_t> numbers = ConcreteAll(grid);
  TORCH_CHECK_VALUE(
      !numbers.empty(),
      "gnomon.attention: grid is empty; expected the prefix, followed by the length of each axis");
  std::unique_ptr<GridLayout> layout;
  Translate([&] {
    layout = std::make_unique<GridLayout>(std::vector<int64_t>(numbers.begin() + 1, numbers.end()),
                                          numbers[0], kind);
  });
  if (has_positions_) {
    ExpectPositions(least_, greatest_, layout->tokens(), "token indices on the grid");
    return layout;
  }
  // Keys beyond the grid have no bias.
  const int64_t offset = input_.query_offset;
  TORCH_CHECK_VALUE(
      offset >= 0 && offset + n.queries <= layout->tokens(), "gnomon.attention: grid has ",
      layout->tokens(), " tokens, but Lq is ", n.queries, " and query_offset is ", offset,
      "; expected query_offset >= 0 and query_offset + Lq at most the number of tokens");
  return layout;
}

template <class T>
const int64_t* KernelCall<T>::KeyBounds(const char* name, const OptionalTensor& bounds) {
  const int64_t most = input_.shape.keys;
  if (bounds && !bounds->is_cpu()) return Numbers<int64_t>(bounds->clamp(0, most));
  const int64_t* values = Numbers<int64_t>(bounds);
  for (int64_t b = 0; bounds && b < bounds->numel(); ++b) {
    TORCH_CHECK_VALUE(values[b] >= 0 && values[b] <= most, "gnomon.attention: ", name, "[", b,
                      "] is ", values[b], "; expected a value from 0 to Lk = ", most);
  }
  return values;
}

template <class T>
const int32_t* KernelCall<T>::SegmentIds(const char* name, const OptionalTensor& segments) {
  if (!segments) return nullptr;
  const at::Tensor& ids = Keep(segments->to(at::kInt).contiguous());
  TORCH_CHECK_VALUE(!segments->is_cpu() || ids.to(at::kLong).equal(*segments),
                    "gnomon.attention: ", name,
                    " has values outside int32; expected values from -2^31 to 2^31 - 1");
  return ids.const_data_ptr<int32_t>();
}

template class KernelCall<float>;
template class KernelCall<double>;

}  // namespace gnomon
