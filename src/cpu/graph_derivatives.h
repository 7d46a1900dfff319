// The kernel for forward-mode and second derivatives of graph attention, on plain views.
#ifndef GNOMON_SRC_CPU_GRAPH_DERIVATIVES_H_
#define GNOMON_SRC_CPU_GRAPH_DERIVATIVES_H_

#include "cpu/dual_table.h"
#include "gnomon/attention.h"
#include "gnomon/graph.h"

namespace gnomon {

// A graph attention call and its derivative in the direction of its inputs' tangents. All inputs
// except the bias must be finite. A null pointer means a tangent of 0, or a result that is not
// needed.
template <class T>
struct GraphDerivatives {
  // The pair function; null means the inner product.
  const DualTableOf<T>* function = nullptr;
  GraphInput<T> input;
  // The tangents of tokens, scalars, factor and bias, in the same layout as the inputs, except that
  // views may have different strides.
  GraphInput<T> tangent;

  GraphOutput<T> output;
  View<T> o_tangent;
  T* lse_tangent = nullptr;  // 0 for a row without edges

  // The gradients of o and lse, and the tangents of these gradients.
  View<const T> d_o;
  View<const T> d_o_tangent;
  const T* d_lse = nullptr;
  const T* d_lse_tangent = nullptr;
  GraphGradient<T> gradient;
  GraphGradient<T> gradient_tangent;
};

// Dispatch to the selected instruction set, or to a lower one that has these kernels (see
// cpu/few_targets.h). The graph must be valid.
void GraphDerivativesKernel(const GraphDerivatives<float>& of, const Executor& executor);
void GraphDerivativesKernel(const GraphDerivatives<double>& of, const Executor& executor);

}  // namespace gnomon

#endif  // GNOMON_SRC_CPU_GRAPH_DERIVATIVES_H_
