// The arguments of attention_forward and attention_backward as kernels read them.
#ifndef GNOMON_OPS_ATTENTION_CALL_TENSORS_H_
#define GNOMON_OPS_ATTENTION_CALL_TENSORS_H_

#include <ATen/ATen.h>
#include <gnomon/attention.h>
#include <gnomon/table_layout.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "ops/attention/placed_bias.h"
#include "ops/operators/attention_operators.h"
#include "ops/operators/kernel_arguments.h"

namespace gnomon {

template <class T>
View<T> MutableRows(at::Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  return {tensor.data_ptr<T>(), {tensor.stride(0), tensor.stride(1), tensor.stride(2)}};
}

// The strides of an array (1 or B, 1 or H, Lq, Lk), 0 along what is shared.
std::array<int64_t, 3> PairStrides(const at::Tensor& pairs);

// What the operator returns where there is no pair of a query and a key.
void FillEmpty(Outputs& outputs);

// The operator's arguments, checked, with the last axis of each made contiguous. Keeps the tensors
// alive that views point into.
class CallTensors {
 public:
  // What a tensor holds is looked at where it is on the CPU; from a GPU it would have to be waited
  // for. There bounds of keys are clamped instead, and other numbers are taken as they are.
  explicit CallTensors(const OperatorArguments& a);

  const PairFunction& function() const { return *function_; }
  const AttentionShape& shape() const { return shape_; }
  AxisLengths<int64_t>& lengths() { return lengths_; }

  const at::Tensor& x() const { return x_; }
  const at::Tensor& y() const { return y_; }
  const at::Tensor& v() const { return v_; }
  const at::Tensor& relative_query() const { return relative_query_; }  // may be undefined

  template <class T>
  static View<const T> Rows(const at::Tensor& tensor) {
    return {tensor.const_data_ptr<T>(), {tensor.stride(0), tensor.stride(1), tensor.stride(2)}};
  }

  // The same of tokens, which may be of 16 bits beside T = float.
  template <class T>
  static TokensOf<T> TokenRows(const at::Tensor& tensor) {
    if constexpr (std::is_same_v<T, double>) {
      return Rows<T>(tensor);
    } else {
      const at::ScalarType type = tensor.scalar_type();
      return {tensor.const_data_ptr(),
              {tensor.stride(0), tensor.stride(1), tensor.stride(2)},
              type == at::kBFloat16 ? TokenType::kBFloat16
              : type == at::kHalf   ? TokenType::kFloat16
                                    : TokenType::kFloat32};
    }
  }

  // All but what is of the tokens' type: x, y, v, relative.query and relative.key.
  template <class T>
  AttentionInput<T> Terms() const {
    AttentionInput<T> input;
    input.shape = shape_;
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
      if (relative_keys_.defined()) input.relative.dim = relative_query_.size(3);
      input.relative.factor = static_cast<T>(relative_factor_);
      input.relative.keys = Data<T>(relative_keys_);
      input.relative.key_heads = PerHead(relative_keys_);
      input.relative.values = Data<T>(relative_values_);
      input.relative.value_heads = PerHead(relative_values_);
      if (relative_queries_.defined()) input.relative.key_dim = relative_key_.size(3);
      input.relative.queries = Data<T>(relative_queries_);
      input.relative.query_heads = PerHead(relative_queries_);
    }
    input.dropout = dropout_;
    input.tolerance = tolerance_;
    input.mask = mask_;
    input.query_offset = query_offset_;
    input.query_offsets = Data<int64_t>(query_offsets_);
    input.query_positions = Data<int64_t>(query_positions_);
    input.key_positions = Data<int64_t>(key_positions_);
    return input;
  }

  // The same with tokens of type T.
  template <class T>
  AttentionInput<T> Input() const {
    AttentionInput<T> input = Terms<T>();
    input.x = TokenRows<T>(x_);
    input.y = TokenRows<T>(y_);
    input.v = TokenRows<T>(v_);
    if (relative_query_.defined()) input.relative.query = Rows<T>(relative_query_);
    if (relative_key_.defined()) input.relative.key = Rows<T>(relative_key_);
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
  const at::Tensor& bias() const { return bias_; }
  at::Tensor ParameterGradient(const at::Tensor& d_bias) const {
    return PlacedBiasGradient(bias_terms_, bias_shapes_, bias_parameters_, span_, d_bias);
  }

 private:
  void SetPositions(const OperatorArguments& a);
  bool has_positions() const { return query_positions_.defined(); }
  void SetBias(const OperatorArguments& a);
  void SetRelative(const OperatorArguments& a);
  void SetMask(const OperatorArguments& a);
  std::unique_ptr<TableLayout> MakeRelativeLayout(const OperatorArguments& a, int64_t rows) const;
  std::unique_ptr<GridLayout> MakeGrid(c10::SymIntArrayRef grid, GridLayout::Kind kind) const;
  at::Tensor KeyBounds(const char* name, const OptionalTensor& bounds) const;

  int64_t BiasBatchStride() const {
    return bias_.defined() && bias_.size(0) > 1 ? bias_.size(1) * bias_.size(2) : 0;
  }
  static bool PerHead(const at::Tensor& table) { return table.defined() && table.size(0) > 1; }

  at::Tensor x_, y_, v_, row_scalars_, column_scalars_, head_scalars_, factor_, bias_, key_bias_,
      key_bias_low_, key_bias_base_, pair_bias_, pair_mask_, temperature_, relative_query_,
      relative_keys_, relative_values_, relative_key_, relative_queries_, key_starts_, key_lengths_,
      query_offsets_, query_segments_, key_segments_, query_positions_, key_positions_,
      bias_parameters_;
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
  Mask mask_;
  int64_t query_offset_;
};

}  // namespace gnomon

#endif  // GNOMON_OPS_ATTENTION_CALL_TENSORS_H_
