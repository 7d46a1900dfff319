// The CPU kernels of attention_forward and attention_backward.
#include <ATen/ATen.h>
#include <gnomon/attention.h>
#include <gnomon/table_layout.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/visible_keys.h"
#include "ops/attention/executor.h"
#include "ops/attention/kernel_arguments.h"
#include "ops/attention/operators.h"
#include "ops/attention/placed_bias.h"

namespace gnomon {
namespace {

std::vector<int64_t> ConcreteAll(c10::SymIntArrayRef numbers) {
  std::vector<int64_t> concrete;
  for (const c10::SymInt& number : numbers) concrete.push_back(Concrete(number));
  return concrete;
}

// The operator's arguments with the last axis of each made contiguous, which keeps the tensors
// alive that the views of Input() point into.
class Arguments {
 public:
  explicit Arguments(const OperatorArguments& a)
      : tolerance_(a.tolerance), bfloat16_(a.bfloat16), query_offset_(Concrete(a.query_offset)) {
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

  const PairFunction& function() const { return *function_; }
  const AttentionShape& shape() const { return shape_; }
  AxisLengths<int64_t>& lengths() { return lengths_; }

  template <class T>
  static View<const T> Rows(const at::Tensor& tensor) {
    return {tensor.const_data_ptr<T>(), {tensor.stride(0), tensor.stride(1), tensor.stride(2)}};
  }

  template <class T>
  AttentionInput<T> Input() const {
    AttentionInput<T> input;
    input.shape = shape_;
    input.x = Rows<T>(x_);
    input.y = Rows<T>(y_);
    input.v = Rows<T>(v_);
    input.row_scalars = Data<T>(row_scalars_);
    input.column_scalars = Data<T>(column_scalars_);
    input.head_scalars = Data<T>(head_scalars_);
    input.factor = Data<T>(factor_);
    input.bias = {Data<T>(bias_), BiasBatchStride(), bias_layout_.get()};
    input.key_bias = Data<T>(key_bias_);
    input.key_bias_low = Data<T>(key_bias_low_);
    input.key_bias_base = Data<T>(key_bias_base_);
    input.temperature = Data<T>(temperature_);
    if (pair_bias_.defined()) {
      input.pair_bias = {pair_bias_.const_data_ptr<T>(), PairStrides(pair_bias_)};
    }
    if (relative_layout_) {
      input.relative.layout = relative_layout_.get();
      if (relative_keys_.defined()) {
        input.relative.query = Rows<T>(relative_query_);
        input.relative.dim = relative_query_.size(3);
      }
      input.relative.factor = static_cast<T>(relative_factor_);
      input.relative.keys = Data<T>(relative_keys_);
      input.relative.key_heads = PerHead(relative_keys_);
      input.relative.values = Data<T>(relative_values_);
      input.relative.value_heads = PerHead(relative_values_);
    }
    input.dropout = dropout_;
    input.tolerance = tolerance_;
    input.bfloat16 = bfloat16_;
    input.mask = mask_;
    input.query_offset = query_offset_;
    input.query_offsets = Data<int64_t>(query_offsets_);
    input.query_positions = Data<int64_t>(query_positions_);
    input.key_positions = Data<int64_t>(key_positions_);
    return input;
  }

  // The gradient of the bias is read as the bias is.
  template <class T>
  Bias<T> BiasGradient(T* table) const {
    return {table, BiasBatchStride(), bias_layout_.get()};
  }

  // The same of the bias of pairs: what batch or heads share is summed over them.
  template <class T>
  static View<T> PairGradient(at::Tensor& gradient) {
    if (gradient.numel() == 0) return {};
    return {gradient.data_ptr<T>(), PairStrides(gradient)};
  }

  // No pair of a query and a key.
  bool empty() const { return shape_.batch * shape_.heads * shape_.queries * shape_.keys == 0; }

  // Where the operator makes the bias by offset itself: its table, and the gradient of what it is
  // made of from that of the table.
  bool makes_bias() const { return bias_parameters_.defined(); }
  const at::Tensor& bias() const { return bias_; }
  at::Tensor ParameterGradient(const at::Tensor& d_bias) const {
    return PlacedBiasGradient(bias_terms_, bias_shapes_, bias_parameters_, span_, d_bias);
  }

 private:
  void SetPositions(const OperatorArguments& a) {
    TORCH_CHECK_VALUE(a.query_positions.has_value() == a.key_positions.has_value(),
                      "gnomon.attention: query_positions and key_positions go together");
    TORCH_CHECK_VALUE(a.query_positions || !a.bias_parameters,
                      "gnomon.attention: bias_parameters go with positions");
    if (!a.query_positions) return;
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
  bool has_positions() const { return query_positions_.defined(); }

  void ExpectPlaces(int64_t least, int64_t greatest, int64_t end, const char* what) const {
    TORCH_CHECK_VALUE(least >= 0 && greatest < end, "gnomon.attention: positions are from ", least,
                      " to ", greatest, "; expected 0 to ", end - 1, ", ", what);
  }

  void SetBias(const OperatorArguments& a) {
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

  int64_t BiasBatchStride() const {
    return bias_.defined() && bias_.size(0) > 1 ? bias_.size(1) * bias_.size(2) : 0;
  }

  // Of an array (1 or B, 1 or H, Lq, Lk): 0 along what is shared.
  static std::array<int64_t, 3> PairStrides(const at::Tensor& pairs) {
    return {pairs.size(0) > 1 ? pairs.stride(0) : 0, pairs.size(1) > 1 ? pairs.stride(1) : 0,
            pairs.stride(2)};
  }

  static bool PerHead(const at::Tensor& table) { return table.defined() && table.size(0) > 1; }

  void SetRelative(const OperatorArguments& a) {
    TORCH_CHECK_VALUE(a.relative_query.has_value() == a.relative_keys.has_value(),
                      "gnomon.attention: relative_keys and relative_query go together");
    if (!a.relative_keys && !a.relative_values) return;
    if (a.relative_query) relative_query_ = WithRows(*a.relative_query);
    relative_keys_ = Contiguous(a.relative_keys);
    relative_values_ = Contiguous(a.relative_values);
    relative_factor_ = a.relative_factor;
    relative_layout_ = MakeRelativeLayout(a, *lengths_['m']);
  }

  std::unique_ptr<TableLayout> MakeRelativeLayout(const OperatorArguments& a, int64_t rows) const {
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
      TORCH_CHECK_VALUE(-span_.first < rows, "gnomon.attention: r of transformer_xl has rows for ",
                        rows, " distances, and positions have p_i - p_j = ", -span_.first,
                        "; expected more rows than that");
    } else if (name == "past") {
      int64_t offset = query_offset_;
      if (query_offsets_.defined() && query_offsets_.numel() > 0) {
        offset = query_offsets_.max().item<int64_t>();
      }
      TORCH_CHECK_VALUE(
          shape_.queries + offset <= rows || shape_.queries == 0,
          "gnomon.attention: r of transformer_xl has rows for ", rows,
          " distances; expected at least Lq + query_offset = ", shape_.queries + offset);
    }
    return std::make_unique<OffsetLayout>(rows - 1, 0,
                                          name == "clip_past" ? Far::kClip : Far::kZero);
  }

  static void ExpectRows(int64_t rows, int64_t expected) {
    TORCH_CHECK_VALUE(rows == expected, "gnomon.attention: the table of position has ", rows,
                      " rows; expected ", expected);
  }

  std::unique_ptr<GridLayout> MakeGrid(c10::SymIntArrayRef grid, GridLayout::Kind kind) const {
    const std::vector<int64_t> numbers = ConcreteAll(grid);
    TORCH_CHECK_VALUE(!numbers.empty(), "gnomon.attention: grid is empty; expected the prefix and ",
                      "the lengths of its axes");
    std::unique_ptr<GridLayout> layout;
    Translate([&] {
      layout = std::make_unique<GridLayout>(
          std::vector<int64_t>(numbers.begin() + 1, numbers.end()), numbers[0], kind);
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

  void SetMask(const OperatorArguments& a) {
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

  // Beyond 2^53 positions in float64 are no longer exact.
  static at::Tensor QueryOffsets(const OptionalTensor& offsets) {
    constexpr int64_t kLargestExact = int64_t{1} << 53;
    const at::Tensor contiguous = Contiguous(offsets);
    for (int64_t b = 0; contiguous.defined() && b < contiguous.numel(); ++b) {
      const int64_t offset = contiguous.const_data_ptr<int64_t>()[b];
      TORCH_CHECK_VALUE(offset >= -kLargestExact && offset <= kLargestExact,
                        "gnomon.attention: query_offset[", b, "] is ", offset,
                        "; expected -2^53 to 2^53");
    }
    return contiguous;
  }

  at::Tensor KeyBounds(const char* name, const OptionalTensor& bounds) const {
    if (!bounds) return {};
    const at::Tensor contiguous = bounds->contiguous();
    const int64_t* values = contiguous.const_data_ptr<int64_t>();
    for (int64_t b = 0; b < contiguous.numel(); ++b) {
      TORCH_CHECK_VALUE(values[b] >= 0 && values[b] <= shape_.keys, "gnomon.attention: ", name, "[",
                        b, "] is ", values[b], "; expected 0 to Lk = ", shape_.keys);
    }
    return contiguous;
  }

  static at::Tensor SegmentIds(const char* name, const OptionalTensor& segments) {
    if (!segments) return {};
    at::Tensor ids = segments->to(at::kInt).contiguous();
    TORCH_CHECK_VALUE(ids.to(at::kLong).equal(*segments), "gnomon.attention: ", name,
                      " has numbers beyond int32");
    return ids;
  }

  at::Tensor x_, y_, v_, row_scalars_, column_scalars_, head_scalars_, factor_, bias_, key_bias_,
      key_bias_low_, key_bias_base_, pair_bias_, pair_mask_, temperature_, relative_query_,
      relative_keys_, relative_values_, key_starts_, key_lengths_, query_offsets_, query_segments_,
      key_segments_, query_positions_, key_positions_, bias_parameters_;
  std::string bias_terms_;
  std::vector<int64_t> bias_shapes_;
  OffsetSpan span_{0, 0};  // of the positions, and what is below
  int64_t least_ = 0;
  int64_t greatest_ = 0;
  int64_t least_key_ = 0;
  int64_t greatest_key_ = 0;
  const PairFunction* function_;
  AxisLengths<int64_t> lengths_;
  AttentionShape shape_;
  std::unique_ptr<TableLayout> bias_layout_;
  std::unique_ptr<TableLayout> relative_layout_;
  double relative_factor_ = 1;
  Dropout dropout_;
  double tolerance_;
  bool bfloat16_;
  Mask mask_;
  int64_t query_offset_;
};

template <class T>
View<T> MutableRows(at::Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  return {tensor.data_ptr<T>(), {tensor.stride(0), tensor.stride(1), tensor.stride(2)}};
}

template <class T>
void RunForward(const Arguments& arguments, at::Tensor& o, at::Tensor& lse,
                at::Tensor& statistics) {
  const AttentionOutput<T> output{MutableRows<T>(o), MutableData<T>(lse),
                                  MutableData<T>(statistics)};
  Translate([&] {
    AttentionForward(arguments.function(), arguments.Input<T>(), output, TorchExecutor());
  });
}

Outputs ForwardCpu(const OperatorArguments& a) {
  const Arguments arguments(a);
  Outputs outputs = EmptyOutputs(a);
  auto& [o, lse, statistics] = outputs;
  if (arguments.empty()) {
    o.zero_();
    lse.fill_(-std::numeric_limits<double>::infinity());
    // No score, no weight, no key.
    statistics[0].fill_(-std::numeric_limits<double>::infinity());
    statistics[1].zero_();
    statistics[2].fill_(-1);
  } else if (a.x.scalar_type() == at::kDouble) {
    RunForward<double>(arguments, o, lse, statistics);
  } else {
    RunForward<float>(arguments, o, lse, statistics);
  }
  return outputs;
}

template <class T>
void RunBackward(const Arguments& arguments, const SavedOutputs& outputs,
                 std::vector<at::Tensor>& gradients) {
  const at::Tensor o = WithRows(outputs.o);
  const at::Tensor lse = outputs.lse.contiguous();
  const at::Tensor d_o = WithRows(outputs.d_o);
  const at::Tensor d_lse = Contiguous(outputs.d_lse);
  const at::Tensor statistics = outputs.statistics.contiguous();
  const AttentionBackwardInput<T> saved{Arguments::Rows<T>(o), lse.const_data_ptr<T>(),
                                        Arguments::Rows<T>(d_o), Data<T>(d_lse),
                                        statistics.const_data_ptr<T>()};
  const auto of = [&](std::string_view name) -> at::Tensor& {
    return gradients[IndexOf<OperatorArguments>(name)];
  };
  AttentionGradient<T> gradient;
  gradient.x = MutableRows<T>(of("x"));
  gradient.y = MutableRows<T>(of("y"));
  gradient.v = MutableRows<T>(of("v"));
  gradient.row_scalars = MutableData<T>(of("row_scalars"));
  gradient.column_scalars = MutableData<T>(of("column_scalars"));
  gradient.head_scalars = MutableData<T>(of("head_scalars"));
  gradient.factor = MutableData<T>(of("factor"));
  at::Tensor& d_parameters = of("bias_parameters");
  at::Tensor d_bias = d_parameters.numel() > 0 ? at::empty_like(arguments.bias()) : of("bias");
  gradient.bias = arguments.BiasGradient(MutableData<T>(d_bias));
  gradient.key_bias = MutableData<T>(of("key_bias"));
  gradient.pair_bias = Arguments::PairGradient<T>(of("pair_bias"));
  gradient.temperature = MutableData<T>(of("temperature"));
  gradient.relative_query = MutableRows<T>(of("relative_query"));
  gradient.relative_keys = MutableData<T>(of("relative_keys"));
  gradient.relative_values = MutableData<T>(of("relative_values"));
  Translate([&] {
    AttentionBackward(arguments.function(), arguments.Input<T>(), saved, gradient, TorchExecutor());
  });
  if (d_parameters.numel() > 0) d_parameters = arguments.ParameterGradient(d_bias);
}

std::vector<at::Tensor> BackwardCpu(const SavedOutputs& saved, const OperatorArguments& a,
                                    const AttentionOperator::Needed& needed) {
  Arguments arguments(a);
  CheckSaved(saved, a, arguments.lengths());
  std::vector<at::Tensor> gradients = EmptyGradients(saved, a, needed);
  if (arguments.empty()) {
    for (at::Tensor& gradient : gradients) gradient.zero_();
  } else if (a.x.scalar_type() == at::kDouble) {
    RunBackward<double>(arguments, saved, gradients);
  } else {
    RunBackward<float>(arguments, saved, gradients);
  }
  return gradients;
}

}  // namespace

TORCH_LIBRARY_IMPL(gnomon, CPU, m) {
  m.impl("attention_forward", &AttentionOperator::RunForward<ForwardCpu>);
  m.impl("attention_backward", &AttentionOperator::RunBackward<BackwardCpu>);
}

}  // namespace gnomon
