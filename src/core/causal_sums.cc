#include "core/causal_sums.h"

#include "core/targets.h"

namespace gnomon {

void SumCausally(const CausalSums& sums, const Executor& executor) {
  ChooseTargetOnce();
  if (sums.batch * sums.heads * sums.rows == 0) return;
  CausalSumsKernel(sums, executor);
}

}  // namespace gnomon
