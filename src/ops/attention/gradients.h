// The gradients of attention_backward as kernels write them.
#ifndef GNOMON_OPS_ATTENTION_GRADIENTS_H_
#define GNOMON_OPS_ATTENTION_GRADIENTS_H_

#include <ATen/ATen.h>
#include <gnomon/attention.h>

#include <string_view>
#include <utility>
#include <vector>

#include "ops/attention/kernel_call.h"
#include "ops/operators/attention_operators.h"
#include "ops/operators/kernel_arguments.h"
#include "ops/operators/tensors.h"

namespace gnomon {

// Sets the members of a kernel's gradient to views of the gradient tensors. rows(name) returns the
// view of the gradient of a token argument.
template <class T, class Gradients, class Gradient, class Rows>
void SetViews(Gradients& of, const Bias<T>& bias, Rows& rows, Gradient& to) {
  to.x = rows("x");
  to.y = rows("y");
  to.v = rows("v");
  to.row_scalars = MutableData<T>(of("row_scalars"));
  to.column_scalars = MutableData<T>(of("column_scalars"));
  to.head_scalars = MutableData<T>(of("head_scalars"));
  to.factor = MutableData<T>(of("factor"));
  to.bias = bias;
  to.key_bias = MutableData<T>(of("key_bias"));
  to.pair_bias = PairGradient<T>(of("pair_bias"));
  to.temperature = MutableData<T>(of("temperature"));
  to.relative_query = rows("relative_query");
  to.relative_keys = MutableData<T>(of("relative_keys"));
  to.relative_values = MutableData<T>(of("relative_values"));
  to.relative_key = rows("relative_key");
  to.relative_queries = MutableData<T>(of("relative_queries"));
  if constexpr (requires { of.Done(); }) of.Done();
}

// Views of token gradients for CPU kernels of type T. Gradients of any other type are written to
// wider buffers first.
template <class T>
class WideRows {
 public:
  explicit WideRows(NamedGradients<OperatorArguments>& of) : of_(of) {}

  View<T> operator()(std::string_view name) {
    constexpr at::ScalarType kType = c10::CppTypeToScalarType<T>::value;
    at::Tensor& gradient = of_(name);
    if (gradient.scalar_type() == kType) return MutableRows<T>(gradient);
    at::Tensor wide = at::empty(gradient.sizes(), gradient.options().dtype(kType));
    return MutableRows<T>(buffers_.emplace_back(name, std::move(wide)).second);
  }

  // Rounds the buffers to the types of their gradients.
  void Round(std::vector<at::Tensor>& gradients) const {
    for (const auto& [name, wide] : buffers_) {
      at::Tensor& gradient = gradients[IndexOf<OperatorArguments>(name)];
      gradient = InType(wide, gradient.scalar_type());
    }
  }

 private:
  NamedGradients<OperatorArguments>& of_;
  std::vector<std::pair<std::string_view, at::Tensor>> buffers_;
};

}  // namespace gnomon

#endif  // GNOMON_OPS_ATTENTION_GRADIENTS_H_
