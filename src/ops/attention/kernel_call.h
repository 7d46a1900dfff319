// The arguments of attention_forward and attention_backward as kernels read them.
#ifndef GNOMON_OPS_ATTENTION_KERNEL_CALL_H_
#define GNOMON_OPS_ATTENTION_KERNEL_CALL_H_

#include <ATen/ATen.h>
#include <c10/util/SmallVector.h>
#include <gnomon/attention.h>
#include <gnomon/table_layout.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "ops/attention/placed_bias.h"
#include "ops/operators/attention_operators.h"
#include "ops/operators/kernel_arguments.h"

namespace gnomon {

template <class T>
View<const T> Rows(const at::Tensor& tensor) {
  return {tensor.const_data_ptr<T>(), {tensor.stride(0), tensor.stride(1), tensor.stride(2)}};
}

template <class T>
View<T> MutableRows(at::Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  return {tensor.data_ptr<T>(), {tensor.stride(0), tensor.stride(1), tensor.stride(2)}};
}

// Like Rows, for tokens, which may be 16-bit if T = float.
template <class T>
TokensOf<T> TokenRows(const at::Tensor& tensor) {
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

// The strides of an array (1 or B, 1 or H, Lq, Lk), 0 along shared axes.
std::array<int64_t, 3> PairStrides(const at::Tensor& pairs);

// The view to which kernels write the gradient of the pair bias, summed over batches or heads that
// share the bias.
template <class T>
View<T> PairGradient(at::Tensor& gradient) {
  if (gradient.numel() == 0) return {};
  return {gradient.data_ptr<T>(), PairStrides(gradient)};
}

// Fills the operator's results for a call without query-key pairs.
void FillEmpty(Outputs& outputs);

// The checked arguments of the operator for kernels of type T, float or double. Owns the tensors
// that the views point into, each with a contiguous last axis.
template <class T>
class KernelCall {
 public:
  // The tokens must have types that kernels of T read. Values of tensors are checked only on the
  // CPU, because a check on a GPU would require a synchronisation. On a GPU, key bounds are clamped
  // instead, and other values are used unchecked, except for positions, which are copied to the
  // CPU with the key bounds and segments.
  explicit KernelCall(const OperatorArguments& a);

  const PairFunction& function() const { return *function_; }
  const AttentionInput<T>& input() const { return input_; }
  AxisLengths<int64_t>& lengths() { return lengths_; }
  // Whether there are no query-key pairs.
  bool empty() const {
    const AttentionShape& n = input_.shape;
    return n.batch * n.heads * n.queries * n.keys == 0;
  }

  // The query that is multiplied by relative keys, and the key that is multiplied by relative
  // queries; may be undefined. input() contains them only if they have type T.
  const at::Tensor& relative_query() const { return relative_query_; }
  const at::Tensor& relative_key() const { return relative_key_; }
  // The contiguous page table; undefined if there is none.
  const at::Tensor& page_table() const { return page_table_; }

  // A view of the gradient of the bias, which has the layout of the bias.
  Bias<T> BiasGradient(T* table) const {
    return {table, input_.bias.batch_stride, input_.bias.layout};
  }

  // For offset biases that the operator computes itself: their table, and the gradient of the bias
  // parameters from the gradient of the table.
  const at::Tensor& bias() const { return bias_; }
  at::Tensor ParameterGradient(const at::Tensor& d_bias) const;
  // Forward-mode derivatives of both: the tangent of the table from that of the parameters, and the
  // tangent of the gradient of the parameters.
  at::Tensor BiasTangent(const at::Tensor& d_parameters) const;
  at::Tensor ParameterGradientTangent(const at::Tensor& d_bias, const at::Tensor& d_bias_tangent,
                                      const at::Tensor& d_parameters) const;

 private:
  // Keeps a tensor alive as long as this object.
  const at::Tensor& Keep(at::Tensor tensor) { return kept_.emplace_back(std::move(tensor)); }
  // The contiguous data of a tensor, which stays alive as long as this object; null if absent.
  template <class Number>
  const Number* Numbers(const OptionalTensor& tensor) {
    return tensor ? Keep(tensor->contiguous()).template const_data_ptr<Number>() : nullptr;
  }

  void SetTokens(const OperatorArguments& a);
  void SetMask(const OperatorArguments& a);
  // Positions, and the part of the mask that decides which of them form pairs, on the CPU.
  struct HostPositions {
    const int64_t* queries;
    const int64_t* keys;
    Mask mask;
  };
  HostPositions PositionsOnHost(const OperatorArguments& a);
  void SetPositions(const OperatorArguments& a);
  // If the distance of every visible pair equals its distance in columns plus one offset per batch
  // element, these offsets replace the positions. Terms that depend only on distance then give the
  // same result at lower cost.
  void ReplaceByOffsets(const OperatorArguments& a, const HostPositions& host);
  std::optional<std::vector<int64_t>> OffsetsOfPositions(const HostPositions& host) const;
  void SetBias(const OperatorArguments& a);
  // The bias of each batch from the table of all offsets, and the gradient of that table.
  at::Tensor BiasOfTable(const at::Tensor& table) const;
  at::Tensor TableGradient(const at::Tensor& d_bias) const;
  void SetRelative(const OperatorArguments& a);
  std::unique_ptr<TableLayout> MakeRelativeLayout(const OperatorArguments& a, int64_t rows) const;
  std::unique_ptr<GridLayout> MakeGrid(c10::SymIntArrayRef grid, GridLayout::Kind kind) const;
  const int64_t* KeyBounds(const char* name, const OptionalTensor& bounds);
  const int32_t* SegmentIds(const char* name, const OptionalTensor& segments);

  const PairFunction* function_;
  AxisLengths<int64_t> lengths_;
  AttentionInput<T> input_;
  c10::SmallVector<at::Tensor, 16> kept_;
  std::unique_ptr<TableLayout> bias_layout_;
  std::unique_ptr<TableLayout> relative_layout_;
  at::Tensor relative_query_, relative_key_, page_table_, bias_, bias_parameters_;
  std::string bias_terms_;
  std::vector<int64_t> bias_shapes_;
  // If positions are given: the range of their offsets, and the smallest and largest position of
  // all tokens and of the keys.
  bool has_positions_ = false;
  OffsetSpan span_{0, 0};
  // The offsets that replace positions, one per batch; empty if there are none.
  std::vector<int64_t> offsets_;
  int64_t least_ = 0;
  int64_t greatest_ = 0;
  int64_t least_key_ = 0;
  int64_t greatest_key_ = 0;
};

extern template class KernelCall<float>;
extern template class KernelCall<double>;

}  // namespace gnomon

#endif  // GNOMON_OPS_ATTENTION_KERNEL_CALL_H_
