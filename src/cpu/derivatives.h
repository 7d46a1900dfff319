// The kernel for forward-mode and second derivatives of attention, on plain views.
#ifndef GNOMON_SRC_CPU_DERIVATIVES_H_
#define GNOMON_SRC_CPU_DERIVATIVES_H_

#include "cpu/dual_table.h"
#include "gnomon/attention.h"

namespace gnomon {

// An attention call and its derivative in the direction of its inputs' tangents. All inputs must be
// finite. A null pointer means a tangent of 0, or a result that is not needed.
struct AttentionDerivatives {
  // The pair function; null means the inner product.
  const DualTable* function = nullptr;
  // Relative queries are not supported.
  AttentionInput<float> input;
  // The tangents of tokens, scalars, factor, temperature, biases and relative tables, in the same
  // layout as the inputs, except that pair biases may have different strides.
  AttentionInput<float> tangent;

  AttentionOutput<float> output;
  View<float> o_tangent;
  float* lse_tangent = nullptr;  // 0 for a row that attends to no key

  // The gradients of o and lse, and the tangents of these gradients.
  View<const float> d_o;
  View<const float> d_o_tangent;
  const float* d_lse = nullptr;
  const float* d_lse_tangent = nullptr;
  // The gradients of all inputs that may have tangents, and the tangents of these gradients.
  AttentionGradient<float> gradient;
  AttentionGradient<float> gradient_tangent;
};

// Dispatches to the selected instruction set.
void DerivativesKernel(const AttentionDerivatives& of, const Executor& executor);

}  // namespace gnomon

#endif  // GNOMON_SRC_CPU_DERIVATIVES_H_
