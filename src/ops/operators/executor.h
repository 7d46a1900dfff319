#ifndef GNOMON_OPS_OPERATORS_EXECUTOR_H_
#define GNOMON_OPS_OPERATORS_EXECUTOR_H_

#include <gnomon/attention.h>

namespace gnomon {

// Runs on PyTorch's threads: at::get_num_threads() of them, or one inside a parallel region.
const Executor& TorchExecutor();

}  // namespace gnomon

#endif  // GNOMON_OPS_OPERATORS_EXECUTOR_H_
