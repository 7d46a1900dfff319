// The tangents of an attention call's arguments as kernels of type T read them.
#ifndef GNOMON_SRC_OPS_ATTENTION_TANGENT_INPUT_H_
#define GNOMON_SRC_OPS_ATTENTION_TANGENT_INPUT_H_

#include <ATen/ATen.h>
#include <gnomon/attention.h>

#include <string_view>

#include "ops/attention/kernel_call.h"
#include "ops/operators/attention_operators.h"
#include "ops/operators/kernel_arguments.h"
#include "ops/operators/tangent_tensors.h"

namespace gnomon {

// Owns the tensors that the views point into. Tokens have the types of the arguments.
template <class T>
class TangentInput {
 public:
  // The tangents of the relative query and key get the type `type`, because kernels differ in it.
  TangentInput(const OperatorArguments& a, const Tangents& tangents, const KernelCall<T>& call,
               at::ScalarType type)
      : tangents_(tangents) {
    SetTokens("x", a.x, input_.x);
    SetTokens("y", a.y, input_.y);
    SetTokens("v", a.v, input_.v);
    input_.row_scalars = tangents_.Numbers<T>("row_scalars");
    input_.column_scalars = tangents_.Numbers<T>("column_scalars");
    input_.head_scalars = tangents_.Numbers<T>("head_scalars");
    input_.factor = tangents_.Numbers<T>("factor");
    const Bias<const T> bias = call.input().bias;
    input_.bias = {tangents_.Numbers<T>("bias"), bias.batch_stride, bias.layout};
    direction_ = tangents_("bias_parameters");
    if (direction_.defined()) {
      direction_ = direction_.to(a.bias_parameters->scalar_type());
      input_.bias.table =
          tangents_.Keep(call.BiasTangent(direction_).contiguous()).template const_data_ptr<T>();
    }
    input_.key_bias = tangents_.Numbers<T>("key_bias");
    input_.temperature = tangents_.Numbers<T>("temperature");
    input_.relative.keys = tangents_.Numbers<T>("relative_keys");
    input_.relative.values = tangents_.Numbers<T>("relative_values");
    input_.relative.queries = tangents_.Numbers<T>("relative_queries");
    const at::Tensor pairs = tangents_("pair_bias");
    if (pairs.defined()) {
      const at::Tensor& wide = tangents_.Keep(WithRows(pairs.to(kType)));
      input_.pair_bias = {wide.template const_data_ptr<T>(), PairStrides(wide)};
    }
    const at::Tensor queries = tangents_("relative_query");
    if (queries.defined()) relative_query_ = WithRows(queries.to(type));
    const at::Tensor keys = tangents_("relative_key");
    if (keys.defined()) relative_key_ = WithRows(keys.to(type));
    tangents_.Done();
  }

  TangentInput(const TangentInput&) = delete;
  TangentInput& operator=(const TangentInput&) = delete;

  // Without relative.query and relative.key.
  const AttentionInput<T>& input() const { return input_; }
  // The tangents of the relative query and key, with contiguous rows; undefined if they are 0.
  const at::Tensor& relative_query() const { return relative_query_; }
  const at::Tensor& relative_key() const { return relative_key_; }
  // The tangent of the bias parameters; undefined if it is 0.
  const at::Tensor& direction() const { return direction_; }

 private:
  static constexpr at::ScalarType kType = c10::CppTypeToScalarType<T>::value;

  void SetTokens(std::string_view name, const at::Tensor& tokens, TokensOf<T>& to) {
    const at::Tensor tangent = tangents_(name);
    if (!tangent.defined()) return;
    to = TokenRows<T>(tangents_.Keep(WithRows(tangent.to(tokens.scalar_type()))));
  }

  NamedTangents<OperatorArguments> tangents_;
  at::Tensor direction_, relative_query_, relative_key_;
  AttentionInput<T> input_;
};

}  // namespace gnomon

#endif  // GNOMON_SRC_OPS_ATTENTION_TANGENT_INPUT_H_
