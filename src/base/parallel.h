// Parallel loops on an executor's workers.
#ifndef GNOMON_SRC_BASE_PARALLEL_H_
#define GNOMON_SRC_BASE_PARALLEL_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "gnomon/attention.h"

namespace gnomon {

// Observes the tasks of parallel loops and the turns that they take, for simulations of many
// threads (benchmarks/thread_scaling.cc). All calls come from the thread of the task.
class TaskObserver {
 public:
  virtual ~TaskObserver() = default;
  virtual void StartLoop() = 0;
  virtual void StartTask() = 0;
  virtual void Wait(const void* turns, int64_t sum) = 0;
  virtual void Pass(const void* turns, int64_t sum) = 0;
  virtual void EndTask() = 0;
  virtual void EndLoop() = 0;
};

// Null unless a simulation is recording. Set this only while no loop is running.
inline TaskObserver* task_observer = nullptr;

// The number of workers that a loop over `tasks` may use.
inline int WorkersFor(const Executor& executor, int64_t tasks) {
  return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(tasks, executor.max_workers())));
}

// Runs all tasks in order on the calling thread.
template <class Body>
void ObservedTasks(int64_t tasks, const Body& body) {
  task_observer->StartLoop();
  for (int64_t task = 0; task < tasks; ++task) {
    task_observer->StartTask();
    body(task, 0);
    task_observer->EndTask();
  }
  task_observer->EndLoop();
}

// Calls body(task, worker) once for each task = 0 .. tasks - 1. Tasks start in this order but may
// run concurrently, so the results of body must depend only on the task. `worker` is less than
// WorkersFor(executor, tasks) and differs between concurrent calls, so it can select a call's
// scratch memory.
template <class Body>
void ParallelTasks(const Executor& executor, int64_t tasks, const Body& body) {
  const int workers = WorkersFor(executor, tasks);
  if (task_observer != nullptr) return ObservedTasks(tasks, body);
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

// Makes tasks add to shared sums in the order of their numbers. A task waits only for tasks with
// lower numbers, which have already started, because ParallelTasks starts tasks in order.
class Turns {
 public:
  explicit Turns(int64_t sums) : next_(new std::atomic<int64_t>[static_cast<size_t>(sums)]) {}

  // Sets the number of the first task of a sum. Call this before any task starts.
  void Start(int64_t sum, int64_t number) {
    next_[static_cast<size_t>(sum)].store(number, std::memory_order_relaxed);
  }
  void Wait(int64_t sum, int64_t number) const {
    if (task_observer != nullptr) task_observer->Wait(this, sum);
    constexpr int kSpins = 64;
    const std::atomic<int64_t>& next = next_[static_cast<size_t>(sum)];
    for (int spin = 0; next.load(std::memory_order_acquire) != number; ++spin) {
      if (spin >= kSpins) std::this_thread::yield();
    }
  }
  void Pass(int64_t sum, int64_t number) {
    if (task_observer != nullptr) task_observer->Pass(this, sum);
    next_[static_cast<size_t>(sum)].store(number + 1, std::memory_order_release);
  }

 private:
  std::unique_ptr<std::atomic<int64_t>[]> next_;
};

}  // namespace gnomon

#endif  // GNOMON_SRC_BASE_PARALLEL_H_
