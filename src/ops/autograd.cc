// Autograd of attention_forward. The backward pass goes through the operator attention_backward,
// not its kernel: otherwise torch.compile would not see it.
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <string>
#include <utility>
#include <vector>

#include "ops/operators.h"

namespace gnomon {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class AttentionFunction : public torch::autograd::Function<AttentionFunction> {
 public:
  static variable_list forward(
      AutogradContext* context, const at::Tensor& x, const at::Tensor& y, const at::Tensor& v,
      const OptionalTensor& row_scalars, const OptionalTensor& column_scalars,
      const OptionalTensor& head_scalars, const at::Tensor& factor, const OptionalTensor& bias,
      const OptionalTensor& key_starts, const OptionalTensor& key_lengths,
      const OptionalTensor& query_offsets, const OptionalTensor& query_segments,
      const OptionalTensor& key_segments, std::string function, c10::SymInt query_offset,
      OptionalSymInt left, OptionalSymInt right, at::OptionalSymIntArrayRef grid,
      std::array<bool, kGradients> needed) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [o, lse] = CallAttentionForward(
        x, y, v, row_scalars, column_scalars, head_scalars, factor, bias, key_starts, key_lengths,
        query_offsets, query_segments, key_segments, function, query_offset, left, right, grid);
    context->save_for_backward({o, lse, x, y, v, OrUndefined(row_scalars),
                                OrUndefined(column_scalars), OrUndefined(head_scalars), factor,
                                OrUndefined(bias), OrUndefined(key_starts),
                                OrUndefined(key_lengths), OrUndefined(query_offsets),
                                OrUndefined(query_segments), OrUndefined(key_segments)});
    context->saved_data["function"] = std::move(function);
    context->saved_data["query_offset"] = std::move(query_offset);
    context->saved_data["left"] = std::move(left);
    context->saved_data["right"] = std::move(right);
    if (grid) context->saved_data["grid"] = grid->vec();
    context->saved_data["needed"] = c10::List<bool>(c10::ArrayRef<bool>(needed));
    context->set_materialize_grads(false);
    return {o, lse};
  }

  static variable_list backward(AutogradContext* context, const variable_list& d_outputs) {
    const variable_list saved = context->get_saved_variables();
    const auto symint = [&](const char* name) -> OptionalSymInt {
      const c10::IValue& value = context->saved_data[name];
      if (value.isNone()) return std::nullopt;
      return value.toSymInt();
    };
    std::array<bool, kGradients> needed;
    const c10::List<bool> flags = context->saved_data["needed"].toBoolList();
    for (size_t n = 0; n < kGradients; ++n) needed[n] = flags[n];
    const bool has_grid = context->saved_data.count("grid") > 0;
    const std::vector<c10::SymInt> grid =
        has_grid ? context->saved_data["grid"].toSymIntVector() : std::vector<c10::SymInt>();
    const at::Tensor& o = saved[0];
    const at::Tensor& d_o = d_outputs[0].defined() ? d_outputs[0] : at::zeros_like(o);
    const auto [d_x, d_y, d_v, d_row_scalars, d_column_scalars, d_head_scalars, d_factor, d_bias] =
        CallAttentionBackward(
            d_o, AsOptional(d_outputs[1]), o, saved[1], saved[2], saved[3], saved[4],
            AsOptional(saved[5]), AsOptional(saved[6]), AsOptional(saved[7]), saved[8],
            AsOptional(saved[9]), AsOptional(saved[10]), AsOptional(saved[11]),
            AsOptional(saved[12]), AsOptional(saved[13]), AsOptional(saved[14]),
            context->saved_data["function"].toStringRef(), *symint("query_offset"), symint("left"),
            symint("right"), has_grid ? at::OptionalSymIntArrayRef(grid) : std::nullopt, needed);
    variable_list gradients = {
        d_x, d_y, d_v, d_row_scalars, d_column_scalars, d_head_scalars, d_factor, d_bias};
    for (size_t n = 0; n < kGradients; ++n) {
      if (!needed[n]) gradients[n] = at::Tensor();
    }
    gradients.resize(kForwardArguments);
    return gradients;
  }

 private:
  static constexpr size_t kForwardArguments = 19;
};

std::tuple<at::Tensor, at::Tensor> ForwardAutograd(
    const at::Tensor& x, const at::Tensor& y, const at::Tensor& v,
    const OptionalTensor& row_scalars, const OptionalTensor& column_scalars,
    const OptionalTensor& head_scalars, const at::Tensor& factor, const OptionalTensor& bias,
    const OptionalTensor& key_starts, const OptionalTensor& key_lengths,
    const OptionalTensor& query_offsets, const OptionalTensor& query_segments,
    const OptionalTensor& key_segments, std::string_view function, c10::SymInt query_offset,
    OptionalSymInt left, OptionalSymInt right, at::OptionalSymIntArrayRef grid) {
  const auto needs = [](const OptionalTensor& tensor) { return tensor && tensor->requires_grad(); };
  const std::array<bool, kGradients> needed = {needs(x),
                                               needs(y),
                                               needs(v),
                                               needs(row_scalars),
                                               needs(column_scalars),
                                               needs(head_scalars),
                                               needs(factor),
                                               needs(bias)};
  variable_list outputs = AttentionFunction::apply(
      x, y, v, row_scalars, column_scalars, head_scalars, factor, bias, key_starts, key_lengths,
      query_offsets, query_segments, key_segments, std::string(function), std::move(query_offset),
      std::move(left), std::move(right), grid, needed);
  return {outputs[0], outputs[1]};
}

}  // namespace

TORCH_LIBRARY_IMPL(gnomon, Autograd, m) {
  m.impl("attention_forward", ForwardAutograd);
  m.impl("attention_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace gnomon
