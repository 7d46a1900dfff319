// Autograd of attention_forward. The backward pass goes through the operator attention_backward,
// not its kernel: otherwise torch.compile would not see it.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "ops/attention/autograd.h"
#include "ops/attention/operators.h"
#include "ops/attention/second_derivatives.h"

namespace gnomon {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

template <class T>
constexpr bool kIsTensor = std::is_same_v<std::remove_const_t<T>, at::Tensor> ||
                           std::is_same_v<std::remove_const_t<T>, OptionalTensor>;

// Calls body(tensor) for every member that is or may be a tensor, in order.
template <class Arguments, class Body>
void ForEachTensor(Arguments& arguments, const Body& body) {
  const auto call = [&](auto& member) {
    if constexpr (kIsTensor<std::remove_reference_t<decltype(member)>>) body(member);
  };
  std::apply([&](auto&... members) { (call(members), ...); }, OperatorArguments::Tie(arguments));
}

c10::IValue ToList(const at::OptionalSymIntArrayRef& numbers) {
  if (!numbers) return {};
  return std::vector<c10::SymInt>(numbers->begin(), numbers->end());
}

// Keeps the numbers that an OptionalSymIntArrayRef points to.
class SavedNumbers {
 public:
  explicit SavedNumbers(const c10::IValue& saved) {
    if (!saved.isNone()) numbers_ = saved.toSymIntVector();
  }
  at::OptionalSymIntArrayRef ref() const {
    if (!numbers_) return std::nullopt;
    return at::OptionalSymIntArrayRef(*numbers_);
  }

 private:
  std::optional<std::vector<c10::SymInt>> numbers_;
};

OptionalSymInt ToSymInt(const c10::IValue& value) {
  if (value.isNone()) return std::nullopt;
  return value.toSymInt();
}

class AttentionFunction : public torch::autograd::Function<AttentionFunction> {
 public:
  // The members of OperatorArguments one by one: autograd finds its inputs among them.
  template <class... Members>
  static variable_list forward(AutogradContext* context, const Outputs& outputs, Needed needed,
                               const Members&... members) {
    const OperatorArguments arguments{members...};
    const auto& [o, lse, statistics] = outputs;
    variable_list saved = {o, lse, statistics};
    ForEachTensor(arguments,
                  [&](const OptionalTensor& tensor) { saved.push_back(OrUndefined(tensor)); });
    context->save_for_backward(std::move(saved));
    auto& data = context->saved_data;
    data["function"] = std::string(arguments.function);
    data["query_offset"] = arguments.query_offset;
    data["left"] = arguments.left;
    data["right"] = arguments.right;
    data["chunks"] = ToList(arguments.chunks);
    data["grid"] = ToList(arguments.grid);
    data["relative_layout"] = std::string(arguments.relative_layout);
    data["relative_factor"] = arguments.relative_factor;
    data["dropout"] = arguments.dropout;
    data["bfloat16"] = arguments.bfloat16;
    data["needed"] = c10::List<bool>(c10::ArrayRef<bool>(needed));
    context->set_materialize_grads(false);
    return {o, lse};
  }

  static variable_list backward(AutogradContext* context, const variable_list& d_outputs) {
    const variable_list saved = context->get_saved_variables();
    auto& data = context->saved_data;
    const SavedNumbers chunks(data["chunks"]);
    const SavedNumbers grid(data["grid"]);
    OperatorArguments arguments;
    arguments.function = data["function"].toStringRef();
    arguments.query_offset = data["query_offset"].toSymInt();
    arguments.left = ToSymInt(data["left"]);
    arguments.right = ToSymInt(data["right"]);
    arguments.chunks = chunks.ref();
    arguments.grid = grid.ref();
    arguments.relative_layout = data["relative_layout"].toStringRef();
    arguments.relative_factor = data["relative_factor"].toDouble();
    arguments.dropout = data["dropout"].toDouble();
    arguments.bfloat16 = data["bfloat16"].toBool();
    size_t next = 3;
    ForEachTensor(arguments, [&](auto& member) {
      const at::Tensor& tensor = saved[next++];
      if (tensor.defined()) member = tensor;
    });
    Needed needed;
    const c10::List<bool> flags = data["needed"].toBoolList();
    for (size_t n = 0; n < kGradients; ++n) needed[n] = flags[n];
    const at::Tensor& o = saved[0];
    const at::Tensor d_o = d_outputs[0].defined() ? d_outputs[0] : at::zeros_like(o);
    const Gradients gradients = CallAttentionBackward(
        {d_o, AsOptional(d_outputs[1]), o, saved[1], saved[2]}, arguments, needed);
    // One for each argument of forward(), of which the first are `outputs` and `needed`.
    constexpr size_t kMembers =
        std::tuple_size_v<decltype(OperatorArguments::Tie(std::declval<OperatorArguments&>()))>;
    variable_list all(2 + kMembers);
    std::apply(
        [&](const auto&... gradient) {
          size_t n = 0;
          ((all[2 + n] = needed[n] ? gradient : at::Tensor(), ++n), ...);
        },
        gradients);
    return all;
  }
};

Outputs ForwardAutograd(const OperatorArguments& arguments) {
  Needed needed;
  size_t next = 0;
  ForEachTensor(arguments, [&](const OptionalTensor& tensor) {
    CheckNoTangent("gnomon.attention", tensor);
    if (next < kGradients) needed[next++] = tensor && tensor->requires_grad();
  });
  const Outputs outputs = BelowAutograd([&] { return CallAttentionForward(arguments); });
  if (!RecordsGradients(needed)) return outputs;
  const variable_list recorded = std::apply(
      [&](const auto&... members) {
        return Record<AttentionFunction>(outputs, needed, members...);
      },
      OperatorArguments::Tie(arguments));
  return {recorded[0], recorded[1], std::get<2>(outputs)};
}

}  // namespace

TORCH_LIBRARY_IMPL(gnomon, Autograd, m) {
  m.impl("attention_forward", &AttentionOperator::RunForward<ForwardAutograd>);
  m.impl("attention_backward", WithoutSecondDerivatives());
}

}  // namespace gnomon
