// Tasks over an executor's workers.
#ifndef GNOMON_SRC_CORE_PARALLEL_H_
#define GNOMON_SRC_CORE_PARALLEL_H_

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "gnomon/attention.h"

namespace gnomon {

// How many workers a loop over `tasks` may use.
inline int WorkersFor(const Executor& executor, int64_t tasks) {
  return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(tasks, executor.max_workers())));
}

// Calls body(task, worker) for task = 0 .. tasks - 1, each once, in an order that is not fixed:
// whatever body writes must depend on the task alone. worker < WorkersFor(executor, tasks) names
// scratch memory that no other call uses at the same time.
template <class Body>
void ParallelTasks(const Executor& executor, int64_t tasks, const Body& body) {
  const int workers = WorkersFor(executor, tasks);
  if (workers == 1) {
    for (int64_t task = 0; task < tasks; ++task) body(task, 0);
    return;
  }
  std::atomic<int64_t> next{0};
  executor.Run(workers, [&](int worker) {
    for (int64_t task = next.fetch_add(1); task < tasks; task = next.fetch_add(1)) {
      body(task, worker);
    }
  });
}

}  // namespace gnomon

#endif  // GNOMON_SRC_CORE_PARALLEL_H_
