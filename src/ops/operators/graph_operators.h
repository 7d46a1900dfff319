// The operators gnomon::graph_forward and gnomon::graph_backward, called through the PyTorch
// dispatcher.
#ifndef GNOMON_OPS_OPERATORS_GRAPH_OPERATORS_H_
#define GNOMON_OPS_OPERATORS_GRAPH_OPERATORS_H_

#include <ATen/core/Tensor.h>

#include <string_view>

#include "ops/operators/argument_list.h"

namespace gnomon {

// The arguments, as in gnomon/graph.h. Axes: N nodes of q, M nodes of k and v, H query heads, G key
// heads, D columns of x and y, V columns of v, E edges, P = N + 1; r, c and s are the scalars of
// the pair function. `function` is the name of the pair function.
#define GNOMON_GRAPH_ARGUMENTS(ARGUMENT)                                 \
  ARGUMENT(at::Tensor, x, {}, kDifferentiable, "N H D")                  \
  ARGUMENT(at::Tensor, y, {}, kDifferentiable, "M G D")                  \
  ARGUMENT(at::Tensor, v, {}, kDifferentiable, "M G V")                  \
  ARGUMENT(OptionalTensor, row_scalars, {}, kDifferentiable, "r H N")    \
  ARGUMENT(OptionalTensor, column_scalars, {}, kDifferentiable, "c G M") \
  ARGUMENT(OptionalTensor, head_scalars, {}, kDifferentiable, "s H")     \
  ARGUMENT(at::Tensor, factor, {}, kDifferentiable, "H")                 \
  ARGUMENT(OptionalTensor, edge_bias, {}, kDifferentiable, "E H")        \
  ARGUMENT(at::Tensor, indptr, {}, kInteger, "P")                        \
  ARGUMENT(at::Tensor, indices, {}, kInteger, "E")                       \
  ARGUMENT(OptionalTensor, seed, {}, kHostInteger, "1")                  \
  ARGUMENT(std::string_view, function, {}, kOption, "")                  \
  ARGUMENT(double, dropout, 0, kOption, "")

inline constexpr const char* kGraphAttention = "gnomon.graph_attention";

struct GraphArguments {
  GNOMON_ARGUMENTS(GNOMON_GRAPH_ARGUMENTS)
  static constexpr const char* kName = "graph";
  static constexpr const char* kOperation = kGraphAttention;
  static constexpr AxisLetters kOutputs[] = {"N H V", "N H", "3 N H"};
};

using GraphOperator = FusedOperator<GraphArguments>;

}  // namespace gnomon

#endif  // GNOMON_OPS_OPERATORS_GRAPH_OPERATORS_H_
