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

// The public function that a user called, given the name of its backward operator.
std::string CallOf(const std::string& operation) {
  if (operation == "gnomon::attention_backward") return "gnomon.attention";
  if (operation == "gnomon::graph_backward") return "gnomon.graph_attention";
  TORCH_INTERNAL_ASSERT(operation == "gnomon::cone_map_backward", operation);
  return "gnomon.attention and gnomon.graph_attention with cones";
}

class RefusingFunction : public torch::autograd::Function<RefusingFunction> {
 public:
  // Autograd treats only arguments passed in a list as inputs.
  static variable_list forward(AutogradContext* context, std::string call,
                               at::TensorList /*inputs*/,
                               const std::tuple<variable_list>& outputs) {
    context->saved_data["call"] = std::move(call);
    return std::get<0>(outputs);
  }

  static variable_list backward(AutogradContext* context, const variable_list& /*d_outputs*/) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, context->saved_data["call"].toStringRef(),
        ": second derivatives (gradients of gradients, as with create_graph=True) are not "
        "supported; detach the gradient if it is a constant, or write this attention "
        "with PyTorch's own operations");
    return {};
  }
};

void CallAndRefuse(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::string call = CallOf(op.schema().name());
  std::vector<at::Tensor> inputs;
  bool is_needed = false;
  for (const c10::IValue& argument : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (!argument.isTensor() || !argument.toTensor().defined()) continue;
    inputs.push_back(argument.toTensor());
    CheckNoTangent(call.c_str(), inputs.back());
    is_needed = is_needed || inputs.back().requires_grad();
  }
  BelowAutograd([&] { op.callBoxed(stack); });
  if (!is_needed || !at::GradMode::is_enabled()) return;
  variable_list outputs;
  for (c10::IValue& output : torch::jit::pop(*stack, op.schema().returns().size())) {
    outputs.push_back(std::move(output).toTensor());
  }
  for (at::Tensor& recorded :
       ApplyFunction<RefusingFunction>(call, at::TensorList(inputs), std::tuple(outputs))) {
    stack->emplace_back(std::move(recorded));
  }
}

}  // namespace

torch::CppFunction WithoutSecondDerivatives() {
  return torch::CppFunction::makeFromBoxedFunction<&CallAndRefuse>();
}

}  // namespace gnomon
