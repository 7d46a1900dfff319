#include "ops/operators/second_derivatives.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/csrc/autograd/custom_function.h>

#include <string>
#include <tuple>
#include <vector>

#include "ops/operators/autograd.h"

namespace gnomon {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The public function whose second derivatives an operator computes, for messages.
std::string CallOf(const std::string& operation) {
  if (operation == "gnomon::attention_backward_jvp") return "gnomon.attention";
  TORCH_INTERNAL_ASSERT(operation == "gnomon::graph_backward_jvp", operation);
  return "gnomon.graph_attention";
}

class RefusingFunction : public torch::autograd::Function<RefusingFunction> {
 public:
  // Autograd treats the tensors in the list as inputs, and ignores those in the tuple.
  static variable_list forward(AutogradContext* context, std::string call,
                               at::TensorList /*inputs*/,
                               const std::tuple<variable_list>& outputs) {
    context->saved_data["call"] = std::move(call);
    return std::get<0>(outputs);
  }

  static variable_list backward(AutogradContext* context, const variable_list& /*d_outputs*/) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, context->saved_data["call"].toStringRef(),
        ": third derivatives are not supported; detach the second derivative if it is a constant, "
        "or implement this attention with PyTorch operators");
    return {};
  }
};

void CallAndRefuse(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::string call = CallOf(op.schema().name());
  std::vector<at::Tensor> inputs;
  bool is_needed = false;
  const auto note = [&](const c10::IValue& value) {
    if (!value.isTensor() || !value.toTensor().defined()) return;
    inputs.push_back(value.toTensor());
    CheckNoTangent(call.c_str(), inputs.back());
    is_needed = is_needed || inputs.back().requires_grad();
  };
  for (const c10::IValue& argument : torch::jit::last(*stack, op.schema().arguments().size())) {
    note(argument);
    if (!argument.isList()) continue;
    for (const c10::IValue& element : argument.toListRef()) note(element);
  }
  BelowAutograd([&] { op.callBoxed(stack); });
  if (!is_needed || !at::GradMode::is_enabled()) return;
  const variable_list outputs = torch::jit::pop(*stack).toTensorVector();
  stack->emplace_back(
      ApplyFunction<RefusingFunction>(call, at::TensorList(inputs), std::tuple(outputs)));
}

}  // namespace

torch::CppFunction WithoutThirdDerivatives() {
  return torch::CppFunction::makeFromBoxedFunction<&CallAndRefuse>();
}

}  // namespace gnomon
