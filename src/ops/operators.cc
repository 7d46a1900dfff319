#include "ops/operators.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <utility>

namespace gnomon {

std::tuple<at::Tensor, at::Tensor> CallAttentionForward(
    const at::Tensor& x, const at::Tensor& y, const at::Tensor& v,
    const OptionalTensor& row_scalars, const OptionalTensor& column_scalars,
    const OptionalTensor& head_scalars, const at::Tensor& factor, const OptionalTensor& bias,
    const OptionalTensor& key_starts, const OptionalTensor& key_lengths,
    const OptionalTensor& query_offsets, const OptionalTensor& query_segments,
    const OptionalTensor& key_segments, std::string_view function, c10::SymInt query_offset,
    OptionalSymInt left, OptionalSymInt right, at::OptionalSymIntArrayRef grid) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("gnomon::attention_forward", "")
                             .typed<ForwardSignature>();
  return op.call(x, y, v, row_scalars, column_scalars, head_scalars, factor, bias, key_starts,
                 key_lengths, query_offsets, query_segments, key_segments, function,
                 std::move(query_offset), std::move(left), std::move(right), grid);
}

Gradients CallAttentionBackward(
    const at::Tensor& d_o, const OptionalTensor& d_lse, const at::Tensor& o, const at::Tensor& lse,
    const at::Tensor& x, const at::Tensor& y, const at::Tensor& v,
    const OptionalTensor& row_scalars, const OptionalTensor& column_scalars,
    const OptionalTensor& head_scalars, const at::Tensor& factor, const OptionalTensor& bias,
    const OptionalTensor& key_starts, const OptionalTensor& key_lengths,
    const OptionalTensor& query_offsets, const OptionalTensor& query_segments,
    const OptionalTensor& key_segments, std::string_view function, c10::SymInt query_offset,
    OptionalSymInt left, OptionalSymInt right, at::OptionalSymIntArrayRef grid,
    std::array<bool, kGradients> needed) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("gnomon::attention_backward", "")
                             .typed<BackwardSignature>();
  return op.call(d_o, d_lse, o, lse, x, y, v, row_scalars, column_scalars, head_scalars, factor,
                 bias, key_starts, key_lengths, query_offsets, query_segments, key_segments,
                 function, std::move(query_offset), std::move(left), std::move(right), grid,
                 needed);
}

}  // namespace gnomon
