// Forward-mode derivatives of attention and of its gradients, on plain views. The tangents of the
// results are the derivatives in the direction of the input tangents. In the backward pass, they
// are Hessian-vector products. Plain loops in fp64 compute them, with memory linear in the lengths;
// the PyTorch operators use fused kernels for the calls that these support.
#ifndef GNOMON_DERIVATIVES_H_
#define GNOMON_DERIVATIVES_H_

#include "gnomon/attention.h"
#include "gnomon/graph.h"

namespace gnomon {

// A number and its directional derivative: value + tangent e, where e^2 = 0. Arrays of duals
// interleave values and tangents.
struct Dual {
  double value;
  double tangent;

  constexpr Dual(double number = 0, double derivative = 0)  // NOLINT: implicit
      : value(number), tangent(derivative) {}
};

// Check the arguments, throwing Error if one is invalid, and run the loops.
void AttentionForward(const PairFunction& function, const AttentionInput<Dual>& input,
                      const AttentionOutput<Dual>& output,
                      const Executor& executor = SerialExecutor());
void AttentionBackward(const PairFunction& function, const AttentionInput<Dual>& input,
                       const AttentionBackwardInput<Dual>& saved,
                       const AttentionGradient<Dual>& gradient,
                       const Executor& executor = SerialExecutor());
void GraphForward(const PairFunction& function, const GraphInput<Dual>& input,
                  const GraphOutput<Dual>& output, const Executor& executor = SerialExecutor());
void GraphBackward(const PairFunction& function, const GraphInput<Dual>& input,
                   const GraphBackwardInput<Dual>& saved, const GraphGradient<Dual>& gradient,
                   const Executor& executor = SerialExecutor());

}  // namespace gnomon

#endif  // GNOMON_DERIVATIVES_H_
