// Predicts the time of parallel loops on many workers from the times of their tasks on one.
#ifndef GNOMON_BENCHMARKS_TASK_SIMULATION_H_
#define GNOMON_BENCHMARKS_TASK_SIMULATION_H_

#include <time.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <queue>
#include <utility>
#include <vector>

#include "base/parallel.h"

namespace gnomon::benchmarks {

// A task either waits for its turn to add to a sum, or passes the turn on. `at` is the time since
// the task's start, in seconds.
struct Turn {
  double at;
  bool waits;
  std::pair<const void*, int64_t> sum;
};
struct Task {
  double seconds = 0;
  std::vector<Turn> turns;
};
// The tasks of a parallel loop, in the order in which they start, and the time between the end of
// the previous loop and the start of this one.
struct Loop {
  double seconds_before = 0;
  std::vector<Task> tasks;
};
struct Recording {
  std::vector<Loop> loops;
  double seconds_after = 0;  // after the last loop

  // Replaces times by shorter ones of another recording of the same call. Turns keep their share of
  // a task's time.
  void TakeLeast(const Recording& other) {
    seconds_after = std::min(seconds_after, other.seconds_after);
    for (size_t n = 0; n < loops.size(); ++n) {
      const Loop& from = other.loops[n];
      loops[n].seconds_before = std::min(loops[n].seconds_before, from.seconds_before);
      for (size_t k = 0; k < loops[n].tasks.size(); ++k) {
        Task& task = loops[n].tasks[k];
        if (from.tasks[k].seconds >= task.seconds) continue;
        for (Turn& turn : task.turns) turn.at *= from.tasks[k].seconds / task.seconds;
        task.seconds = from.tasks[k].seconds;
      }
    }
  }
};

// Records all loops during its lifetime. Times are processor times of the calling thread, so other
// programs hardly affect them.
class Recorder final : public TaskObserver {
 public:
  Recorder() : last_(Now()) { task_observer = this; }
  ~Recorder() override { task_observer = nullptr; }
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  void StartLoop() override { recording_.loops.push_back({Now() - last_, {}}); }
  void StartTask() override {
    recording_.loops.back().tasks.emplace_back();
    start_ = Now();
  }
  void Wait(const void* turns, int64_t sum) override { Add({Now() - start_, true, {turns, sum}}); }
  void Pass(const void* turns, int64_t sum) override { Add({Now() - start_, false, {turns, sum}}); }
  void EndTask() override { recording_.loops.back().tasks.back().seconds = Now() - start_; }
  void EndLoop() override { last_ = Now(); }

  Recording Finish() {
    recording_.seconds_after = Now() - last_;
    return std::move(recording_);
  }

 private:
  static double Now() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
  }
  void Add(const Turn& turn) { recording_.loops.back().tasks.back().turns.push_back(turn); }

  Recording recording_;
  double last_;
  double start_ = 0;
};

// The seconds that a recorded call takes with this many workers. Each task starts on the first free
// worker, in order. Its turns come after those of all earlier tasks that add to the same sum. Each
// loop takes `seconds_per_loop` longer. Memory bandwidth, shared caches and clock rates are not
// simulated, so the result is a lower bound.
inline double Simulate(const Recording& recording, int workers, double seconds_per_loop) {
  double now = 0;
  for (const Loop& loop : recording.loops) {
    now += loop.seconds_before;
    if (loop.tasks.empty()) continue;
    if (workers > 1) now += seconds_per_loop;
    std::priority_queue<double, std::vector<double>, std::greater<>> free;
    for (int worker = 0; worker < workers; ++worker) free.push(now);
    std::map<std::pair<const void*, int64_t>, double> passed;
    for (const Task& task : loop.tasks) {
      double delayed = free.top();  // the task's start plus its waiting times
      free.pop();
      for (const Turn& turn : task.turns) {
        if (turn.waits) {
          const auto earlier = passed.find(turn.sum);
          if (earlier != passed.end()) delayed = std::max(delayed, earlier->second - turn.at);
        } else {
          passed[turn.sum] = delayed + turn.at;
        }
      }
      free.push(delayed + task.seconds);
      now = std::max(now, delayed + task.seconds);
    }
  }
  return now + recording.seconds_after;
}

}  // namespace gnomon::benchmarks

#endif  // GNOMON_BENCHMARKS_TASK_SIMULATION_H_
