// The kernel for forward-mode and second derivatives of attention, on plain views.
#ifndef GNOMON_SRC_CPU_DERIVATIVES_H_
#define GNOMON_SRC_CPU_DERIVATIVES_H_

#include "cpu/dual_table.h"
#include "gnomon/attention.h"

namespace gnomon {

// An attention call and its derivative in the direction of its inputs' tangents. All inputs must be
// finite. A null pointer means a tangent of 0, or a result that is not needed.
template <class T>
struct AttentionDerivatives {
  // The pair function; null means the inner product.
  const DualTableOf<T>* function = nullptr;
  AttentionInput<T> input;
  // The tangents of tokens, scalars, factor, temperature, biases and relative tables, in the same
  // layout as the inputs, except that pair biases may have different strides.
  AttentionInput<T> tangent;

  AttentionOutput<T> output;
  View<T> o_tangent;
  T* lse_tangent = nullptr;  // 0 for a row that attends to no key

  // The gradients of o and lse, and the tangents of these gradients.
  View<const T> d_o;
  View<const T> d_o_tangent;
  const T* d_lse = nullptr;
  const T* d_lse_tangent = nullptr;
  // The gradients of all inputs that may have tangents, and the tangents of these gradients.
  AttentionGradient<T> gradient;
  AttentionGradient<T> gradient_tangent;
};

// Dispatch to the selected instruction set, or to a lower one that has these kernels (see
// cpu/few_targets.h).
void DerivativesKernel(const AttentionDerivatives<float>& of, const Executor& executor);
void DerivativesKernel(const AttentionDerivatives<double>& of, const Executor& executor);

}  // namespace gnomon

#endif  // GNOMON_SRC_CPU_DERIVATIVES_H_
