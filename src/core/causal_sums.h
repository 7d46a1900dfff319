// Causal linear sums on plain views, used for causal linear attention and its gradients.
#ifndef GNOMON_SRC_CORE_CAUSAL_SUMS_H_
#define GNOMON_SRC_CORE_CAUSAL_SUMS_H_

#include "cpu/causal_sums.h"
#include "gnomon/attention.h"

namespace gnomon {

// Results do not depend on the number of workers.
void SumCausally(const CausalSums& sums, const Executor& executor);

}  // namespace gnomon

#endif  // GNOMON_SRC_CORE_CAUSAL_SUMS_H_
