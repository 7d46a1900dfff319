#include "core/derivatives.h"

#include "core/targets.h"

namespace gnomon {

void DifferentiateAttention(const AttentionDerivatives& of, const Executor& executor) {
  ChooseTargetOnce();
  DerivativesKernel(of, executor);
}

}  // namespace gnomon
