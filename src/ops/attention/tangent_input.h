// The tangents of an attention call's arguments as kernels of type T read them.
#ifndef GNOMON_SRC_OPS_ATTENTION_TANGENT_INPUT_H_
#define GNOMON_SRC_OPS_ATTENTION_TANGENT_INPUT_H_

#include <ATen/ATen.h>
#include <gnomon/attention.h>

#include <deque>
#include <string_view>
#include <utility>

#include "ops/attention/kernel_call.h"
#include "ops/operators/attention_operators.h"
#include "ops/operators/kernel_arguments.h"

namespace gnomon {

// Owns the tensors that the views point into. Tokens have the types of the arguments.
template <class T>
class TangentInput {
 public:
  TangentInput(const OperatorArguments& a, const Tangents& tangents, const KernelCall<T>& call)
      : tangents_(tangents) {
    SetTokens("x", a.x, input_.x);
    SetTokens("y", a.y, input_.y);
    SetTokens("v", a.v, input_.v);
    input_.row_scalars = Numbers("row_scalars");
    input_.column_scalars = Numbers("column_scalars");
    input_.head_scalars = Numbers("head_scalars");
    input_.factor = Numbers("factor");
    const Bias<const T> bias = call.input().bias;
    input_.bias = {Numbers("bias"), bias.batch_stride, bias.layout};
    direction_ = Of("bias_parameters");
    if (direction_.defined()) {
      direction_ = direction_.to(a.bias_parameters->scalar_type());
      input_.bias.table =
          Keep(call.BiasTangent(direction_).contiguous()).template const_data_ptr<T>();
    }
    input_.key_bias = Numbers("key_bias");
    input_.temperature = Numbers("temperature");
    input_.relative.keys = Numbers("relative_keys");
    input_.relative.values = Numbers("relative_values");
    input_.relative.queries = Numbers("relative_queries");
    const at::Tensor keys = Of("relative_key");
    if (keys.defined()) input_.relative.key = Rows<T>(Keep(WithRows(keys.to(kType))));
    const at::Tensor pairs = Of("pair_bias");
    if (!pairs.defined()) return;
    const at::Tensor& wide = Keep(WithRows(pairs.to(kType)));
    input_.pair_bias = {wide.template const_data_ptr<T>(), PairStrides(wide)};
  }

  TangentInput(const TangentInput&) = delete;
  TangentInput& operator=(const TangentInput&) = delete;

  // Without relative.query, because kernels differ in its type.
  const AttentionInput<T>& input() const { return input_; }
  // The tangent of the relative query in the given type, with contiguous rows; may be undefined.
  at::Tensor RelativeQuery(at::ScalarType type) {
    const at::Tensor queries = Of("relative_query");
    return queries.defined() ? Keep(WithRows(queries.to(type))) : queries;
  }
  // The tangent of the bias parameters; undefined if it is 0.
  const at::Tensor& direction() const { return direction_; }

 private:
  static constexpr at::ScalarType kType = c10::CppTypeToScalarType<T>::value;

  at::Tensor Of(std::string_view name) const {
    return tangents_.empty() ? at::Tensor()
                             : OrUndefined(tangents_.get(IndexOf<OperatorArguments>(name)));
  }
  void SetTokens(std::string_view name, const at::Tensor& tokens, TokensOf<T>& to) {
    const at::Tensor tangent = Of(name);
    if (!tangent.defined()) return;
    to = TokenRows<T>(Keep(WithRows(tangent.to(tokens.scalar_type()))));
  }
  const T* Numbers(std::string_view name) {
    const at::Tensor tangent = Of(name);
    if (!tangent.defined()) return nullptr;
    return Keep(tangent.to(kType).contiguous()).template const_data_ptr<T>();
  }
  const at::Tensor& Keep(at::Tensor tensor) { return kept_.emplace_back(std::move(tensor)); }

  const Tangents& tangents_;
  std::deque<at::Tensor> kept_;
  at::Tensor direction_;
  AttentionInput<T> input_;
};

}  // namespace gnomon

#endif  // GNOMON_SRC_OPS_ATTENTION_TANGENT_INPUT_H_
