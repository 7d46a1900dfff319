#include "core/derivatives.h"

#include "core/targets.h"

namespace gnomon {

void DifferentiateAttention(const AttentionDerivatives<float>& of, const Executor& executor) {
  ChooseTargetOnce();
  DerivativesKernel(of, executor);
}

void DifferentiateAttention(const AttentionDerivatives<double>& of, const Executor& executor) {
  ChooseTargetOnce();
  DerivativesKernel(of, executor);
}

}  // namespace gnomon
