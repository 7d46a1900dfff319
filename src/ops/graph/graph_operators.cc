#include "ops/graph/graph_operators.h"

#include <ATen/core/dispatch/Dispatcher.h>

namespace gnomon {

Outputs CallGraphForward(const at::Tensor& x, const at::Tensor& y, const at::Tensor& v,
                         const OptionalTensor& row_scalars, const OptionalTensor& column_scalars,
                         const OptionalTensor& head_scalars, const at::Tensor& factor,
                         const at::Tensor& indptr, const at::Tensor& indices,
                         std::string_view function) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("gnomon::graph_forward", "")
                             .typed<GraphForwardSignature>();
  return op.call(x, y, v, row_scalars, column_scalars, head_scalars, factor, indptr, indices,
                 function);
}

GraphGradients CallGraphBackward(
    const at::Tensor& d_o, const OptionalTensor& d_lse, const at::Tensor& o, const at::Tensor& lse,
    const at::Tensor& statistics, const at::Tensor& x, const at::Tensor& y, const at::Tensor& v,
    const OptionalTensor& row_scalars, const OptionalTensor& column_scalars,
    const OptionalTensor& head_scalars, const at::Tensor& factor, const at::Tensor& indptr,
    const at::Tensor& indices, std::string_view function,
    std::array<bool, kGraphGradients> needed) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("gnomon::graph_backward", "")
                             .typed<GraphBackwardSignature>();
  return op.call(d_o, d_lse, o, lse, statistics, x, y, v, row_scalars, column_scalars, head_scalars,
                 factor, indptr, indices, function, needed);
}

}  // namespace gnomon
