#ifndef GNOMON_OPS_OPERATORS_EXECUTOR_H_
#define GNOMON_OPS_OPERATORS_EXECUTOR_H_

#include <gnomon/attention.h>

#include <cstdint>
#include <functional>

namespace gnomon {

// Runs on PyTorch's threads: on at::get_num_threads() of them, or on one inside a parallel region.
const Executor& TorchExecutor();

// Calls body(first, last) for ranges of at least `grain` that cover [0, count), on PyTorch's
// threads. Rethrows an exception thrown by a call.
void ParallelFor(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body);

}  // namespace gnomon

#endif  // GNOMON_OPS_OPERATORS_EXECUTOR_H_
