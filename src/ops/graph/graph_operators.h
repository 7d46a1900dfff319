// The operators gnomon::graph_forward and gnomon::graph_backward, called through Torch's
// dispatcher.
#ifndef GNOMON_OPS_GRAPH_GRAPH_OPERATORS_H_
#define GNOMON_OPS_GRAPH_GRAPH_OPERATORS_H_

#include <ATen/core/Tensor.h>

#include <array>
#include <string_view>
#include <tuple>

#include "ops/attention/operators.h"

namespace gnomon {

// Gradients in the order of the forward operator's arguments: x, y, v, row scalars, column scalars,
// head scalars, factor.
inline constexpr size_t kGraphGradients = 7;
using GraphGradients =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// As gnomon/graph.h has it: x (N, H, D), y (Nk, Hkv, D), v (Nk, Hkv, Dv), row_scalars (R, H, N),
// column_scalars (C, Hkv, Nk), head_scalars (S, H), factor (H), indptr (N + 1,) and indices (E,)
// int64; function names a pair function. Returns o (N, H, Dv), lse (N, H)
// and the rows' statistics (3, N, H).
using GraphForwardSignature = Outputs(const at::Tensor& x, const at::Tensor& y, const at::Tensor& v,
                                      const OptionalTensor& row_scalars,
                                      const OptionalTensor& column_scalars,
                                      const OptionalTensor& head_scalars, const at::Tensor& factor,
                                      const at::Tensor& indptr, const at::Tensor& indices,
                                      std::string_view function);

// The gradients that are needed; the others are empty.
using GraphBackwardSignature = GraphGradients(
    const at::Tensor& d_o, const OptionalTensor& d_lse, const at::Tensor& o, const at::Tensor& lse,
    const at::Tensor& statistics, const at::Tensor& x, const at::Tensor& y, const at::Tensor& v,
    const OptionalTensor& row_scalars, const OptionalTensor& column_scalars,
    const OptionalTensor& head_scalars, const at::Tensor& factor, const at::Tensor& indptr,
    const at::Tensor& indices, std::string_view function, std::array<bool, kGraphGradients> needed);

GraphForwardSignature CallGraphForward;
GraphBackwardSignature CallGraphBackward;

}  // namespace gnomon

#endif  // GNOMON_OPS_GRAPH_GRAPH_OPERATORS_H_
