// Autograd of graph_forward, in the way of attention_forward (autograd.cc).
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <string>
#include <utility>

#include "ops/attention/autograd.h"
#include "ops/attention/second_derivatives.h"
#include "ops/graph/graph_operators.h"

namespace gnomon {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class GraphFunction : public torch::autograd::Function<GraphFunction> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& y,
                               const at::Tensor& v, const OptionalTensor& row_scalars,
                               const OptionalTensor& column_scalars,
                               const OptionalTensor& head_scalars, const at::Tensor& factor,
                               const at::Tensor& indptr, const at::Tensor& indices,
                               std::string function, std::array<bool, kGraphGradients> needed,
                               const Outputs& outputs) {
    const auto& [o, lse, statistics] = outputs;
    context->save_for_backward({o, lse, statistics, x, y, v, OrUndefined(row_scalars),
                                OrUndefined(column_scalars), OrUndefined(head_scalars), factor,
                                indptr, indices});
    context->saved_data["function"] = std::move(function);
    context->saved_data["needed"] = c10::List<bool>(c10::ArrayRef<bool>(needed));
    context->set_materialize_grads(false);
    return {o, lse};
  }

  static variable_list backward(AutogradContext* context, const variable_list& d_outputs) {
    const variable_list saved = context->get_saved_variables();
    std::array<bool, kGraphGradients> needed;
    const c10::List<bool> flags = context->saved_data["needed"].toBoolList();
    for (size_t n = 0; n < kGraphGradients; ++n) needed[n] = flags[n];
    const at::Tensor& o = saved[0];
    const at::Tensor& d_o = d_outputs[0].defined() ? d_outputs[0] : at::zeros_like(o);
    const auto [d_x, d_y, d_v, d_row_scalars, d_column_scalars, d_head_scalars, d_factor] =
        CallGraphBackward(d_o, AsOptional(d_outputs[1]), o, saved[1], saved[2], saved[3], saved[4],
                          saved[5], AsOptional(saved[6]), AsOptional(saved[7]),
                          AsOptional(saved[8]), saved[9], saved[10], saved[11],
                          context->saved_data["function"].toStringRef(), needed);
    variable_list gradients = {d_x,     d_y, d_v, d_row_scalars, d_column_scalars, d_head_scalars,
                               d_factor};
    for (size_t n = 0; n < kGraphGradients; ++n) {
      if (!needed[n]) gradients[n] = at::Tensor();
    }
    gradients.resize(kForwardArguments);
    return gradients;
  }

 private:
  static constexpr size_t kForwardArguments = 12;
};

Outputs ForwardAutograd(const at::Tensor& x, const at::Tensor& y, const at::Tensor& v,
                        const OptionalTensor& row_scalars, const OptionalTensor& column_scalars,
                        const OptionalTensor& head_scalars, const at::Tensor& factor,
                        const at::Tensor& indptr, const at::Tensor& indices,
                        std::string_view function) {
  const auto needs = [](const OptionalTensor& tensor) { return tensor && tensor->requires_grad(); };
  const std::array<bool, kGraphGradients> needed = {needs(x),
                                                    needs(y),
                                                    needs(v),
                                                    needs(row_scalars),
                                                    needs(column_scalars),
                                                    needs(head_scalars),
                                                    needs(factor)};
  CheckNoTangents("gnomon.graph_attention", x, y, v, row_scalars, column_scalars, head_scalars,
                  factor);
  const Outputs outputs = BelowAutograd([&] {
    return CallGraphForward(x, y, v, row_scalars, column_scalars, head_scalars, factor, indptr,
                            indices, function);
  });
  if (!RecordsGradients(needed)) return outputs;
  const variable_list recorded =
      Record<GraphFunction>(x, y, v, row_scalars, column_scalars, head_scalars, factor, indptr,
                            indices, std::string(function), needed, outputs);
  return {recorded[0], recorded[1], std::get<2>(outputs)};
}

}  // namespace

TORCH_LIBRARY_IMPL(gnomon, Autograd, m) {
  m.impl("graph_forward", ForwardAutograd);
  m.impl("graph_backward", WithoutSecondDerivatives());
}

}  // namespace gnomon
