// Argument checks for all kernels of graph_forward and graph_backward.
#ifndef GNOMON_OPS_GRAPH_GRAPH_CHECKS_H_
#define GNOMON_OPS_GRAPH_GRAPH_CHECKS_H_

#include "ops/operators/graph_operators.h"
#include "ops/operators/kernel_arguments.h"

namespace gnomon {

// Checks the arguments, sets the axis lengths, and returns the pair function that the arguments
// name.
inline const PairFunction& CheckedGraph(const GraphArguments& a, AxisLengths<int64_t>& lengths) {
  const PairFunction& function = CheckedFunction(a, lengths);
  TORCH_CHECK_VALUE(*lengths['P'] == *lengths['N'] + 1, GraphArguments::kOperation,
                    ": indptr has shape ", a.indptr.sizes(), "; expected (N + 1,) = (",
                    *lengths['N'] + 1, ",)");
  TORCH_CHECK_VALUE(a.dropout == 0 || a.seed, GraphArguments::kOperation, ": dropout is ",
                    a.dropout, ", but seed is missing; pass a seed");
  return function;
}

inline Dropout DropoutOf(const GraphArguments& a) {
  if (a.dropout == 0) return {};
  return {a.dropout, static_cast<uint64_t>(a.seed->item<int64_t>())};
}

}  // namespace gnomon

#endif  // GNOMON_OPS_GRAPH_GRAPH_CHECKS_H_
