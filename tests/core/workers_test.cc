// Tests how workers share a call, and that results do not depend on which worker is late.
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/parallel.h"
#include "core/random_problem.h"
#include "cpu/head_slots.h"
#include "gnomon/attention.h"
#include "gnomon/table_layout.h"
#include "gtest/gtest.h"
#include "task_simulation.h"

namespace gnomon::testing {
namespace {

using std::chrono::microseconds;

constexpr microseconds kStall(500);

extern "C" void Stall(int) {
  const timespec time = {0, std::chrono::nanoseconds(kStall).count()};
  nanosleep(&time, nullptr);
}

// Stops one of its threads again and again, at arbitrary points of its work, and each time for long
// enough that the other threads process many tasks.
class StallingExecutor final : public Executor {
 public:
  int max_workers() const override { return 4; }
  void Run(int workers, const std::function<void(int)>& body) const override {
    struct sigaction action = {};
    struct sigaction before = {};
    action.sa_handler = Stall;
    action.sa_flags = SA_RESTART;
    sigaction(SIGUSR1, &action, &before);
    std::atomic<int> started{0};
    std::atomic<int> finished{0};
    std::vector<std::thread> threads;
    for (int worker = 0; worker < workers; ++worker) {
      threads.emplace_back([&, worker] {
        started.fetch_add(1);
        body(worker);
        finished.fetch_add(1);
      });
    }
    static std::mt19937 engine(1);
    const pthread_t late = threads[engine() % threads.size()].native_handle();
    const auto wait = [&finished, workers](microseconds time) {
      const auto end = std::chrono::steady_clock::now() + time;
      while (finished.load() < workers && std::chrono::steady_clock::now() < end) {
        std::this_thread::yield();
      }
    };
    while (started.load() < workers) std::this_thread::yield();
    while (finished.load() < workers) {
      wait(microseconds(engine() % 50));
      pthread_kill(late, SIGUSR1);
      wait(kStall);
    }
    for (std::thread& thread : threads) thread.join();
    sigaction(SIGUSR1, &before, nullptr);
  }
};

// With few heads and many keys, blocks of keys take turns adding to the rows and, if there are more
// blocks than partial sums, to the tables. With chunks, no two blocks share a visible row, so only
// the turns for the tables determine the order.
TEST(LateWorkersTest, ChangeNoBit) {
  static const OffsetLayout layout(40, 40, OffsetLayout::Far::kClip);
  const ProblemOptions all[] = {
      {.shape = {1, 1, 1, 48, 7000, 8, 8}, .bias = ProblemOptions::kSharedBias},
      {.shape = {1, 1, 1, 48, 7000, 8, 8}, .relative = &layout},
      {.shape = {1, 4, 2, 200, 2500, 8, 8}, .key_bias = true},
      {.shape = {1, 1, 1, 24000, 24000, 4, 4},
       .chunks = {96, 0, 0},
       .bias = ProblemOptions::kSharedBias},
      {.shape = {1, 1, 1, 24000, 24000, 4, 4}, .chunks = {96, 0, 0}, .relative = &layout},
  };
  for (const ProblemOptions& options : all) {
    const Problem<float> p = RandomProblem(FindPairFunction("dot"), options);
    OnEveryTarget([&] {
      const Results<float> serial = p.Run();
      for (int repeat = 0; repeat < 3; ++repeat) ExpectSame(p.Run(StallingExecutor()), serial);
    });
  }
}

// Few heads are divided among the workers; whole heads are tasks only if no worker idles.
TEST(HeadTasksTest, KeepAllWorkersBusy) {
  const auto whole = [](int64_t batch, int64_t key_heads, int workers, int64_t blocks) {
    const AttentionShape shape = {batch, 4 * key_heads, key_heads, 100, 100, 8, 8};
    return HeadTasks(shape, ThreadExecutor(workers), blocks).whole();
  };
  for (const int workers : {2, 4, 7}) {
    SCOPED_TRACE(workers);
    EXPECT_FALSE(whole(1, 1, workers, 100));
    EXPECT_FALSE(whole(2, 1, workers, 100));
    EXPECT_FALSE(whole(1, workers, workers, 100));
    EXPECT_TRUE(whole(16, workers, workers, 100));
    EXPECT_TRUE(whole(1, 1, workers, 1));
  }
  EXPECT_TRUE(whole(1, 1, 1, 100));
}

// Simulated times of tasks (benchmarks/task_simulation.h), for loops whose times are known.
TEST(TaskSimulationTest, TasksStartInOrderAndWaitForTheirTurns) {
  using benchmarks::Loop;
  using benchmarks::Recording;
  using benchmarks::Simulate;
  using benchmarks::Task;
  // Three tasks of 2, 3 and 4 seconds between serial parts of 1 and 0.5 seconds.
  Recording recording{{Loop{1, {Task{2, {}}, Task{3, {}}, Task{4, {}}}}}, 0.5};
  EXPECT_DOUBLE_EQ(Simulate(recording, 1, 0.25), 1 + 9 + 0.5);
  EXPECT_DOUBLE_EQ(Simulate(recording, 2, 0.25), 1 + 0.25 + 6 + 0.5);
  EXPECT_DOUBLE_EQ(Simulate(recording, 3, 0.25), 1 + 0.25 + 4 + 0.5);
  EXPECT_DOUBLE_EQ(Simulate(recording, 9, 0.25), 1 + 0.25 + 4 + 0.5);
  // Each task adds to one sum, from its second `from` to its second `to`.
  const auto task = [](double seconds, double from, double to) {
    return Task{seconds, {{from, true, {nullptr, 7}}, {to, false, {nullptr, 7}}}};
  };
  recording.loops[0].tasks = {task(4, 2, 3), task(4, 1, 2), task(4, 3.5, 4)};
  // The second task waits from 1 to 3 and ends at 6; the third may add at 3.5, but waits until 4.
  EXPECT_DOUBLE_EQ(Simulate(recording, 3, 0), 1 + 6 + 0.5);
  // On two workers, the third task starts at 4, after its predecessor has passed.
  EXPECT_DOUBLE_EQ(Simulate(recording, 2, 0), 1 + 8 + 0.5);
  EXPECT_DOUBLE_EQ(Simulate(recording, 1, 0), 1 + 12 + 0.5);
  // Sums of different loops and of different numbers are independent.
  recording.loops[0].tasks[1].turns[0].sum.second = 8;
  EXPECT_DOUBLE_EQ(Simulate(recording, 3, 0), 1 + 4 + 0.5);
  recording.loops.push_back(recording.loops[0]);
  EXPECT_DOUBLE_EQ(Simulate(recording, 3, 0), 1 + 4 + 1 + 4 + 0.5);
  // The first loop's first task takes 2 seconds instead of 4, and passes its turn at 1.5.
  Recording other = recording;
  other.loops[0].tasks = {task(2, 0, 0), task(5, 0, 0), task(9, 0, 0)};
  other.seconds_after = 0.25;
  recording.TakeLeast(other);
  EXPECT_DOUBLE_EQ(recording.loops[0].tasks[0].turns[1].at, 1.5);
  EXPECT_DOUBLE_EQ(Simulate(recording, 1, 0), 1 + 10 + 1 + 12 + 0.25);
}

TEST(TaskSimulationTest, RecordsEveryLoop) {
  const ThreadExecutor executor(3);
  benchmarks::Recorder recorder;
  Turns turns(2);
  turns.Start(0, 0);
  turns.Start(1, 1);
  int64_t done = 0;
  ParallelTasks(executor, 2, [&](int64_t task, int worker) {
    EXPECT_EQ(worker, 0);
    turns.Wait(task, task);
    done += task + 1;
    turns.Pass(task, task);
  });
  ParallelTasks(executor, 0, [&](int64_t, int) { ++done; });
  const benchmarks::Recording recording = recorder.Finish();
  EXPECT_EQ(done, 3);
  ASSERT_EQ(recording.loops.size(), 2);
  ASSERT_EQ(recording.loops[0].tasks.size(), 2);
  EXPECT_TRUE(recording.loops[1].tasks.empty());
  for (int64_t task = 0; task < 2; ++task) {
    const auto& [seconds, taken] = recording.loops[0].tasks[static_cast<size_t>(task)];
    ASSERT_EQ(taken.size(), 2);
    EXPECT_TRUE(taken[0].waits);
    EXPECT_FALSE(taken[1].waits);
    EXPECT_EQ(taken[0].sum, std::pair(static_cast<const void*>(&turns), task));
    EXPECT_EQ(taken[1].sum, taken[0].sum);
    EXPECT_LE(0, taken[0].at);
    EXPECT_LE(taken[0].at, taken[1].at);
    EXPECT_LE(taken[1].at, seconds);
  }
}

// With the largest query offsets, a causal mask hides no key or all keys, and sums of positions do
// not overflow.
TEST(FarPositionsTest, SeeWhatUnboundedOnesDo) {
  for (const int64_t back : {0, 1, 2, 3, 4, 5, 100}) {
    for (const int64_t sign : {1, -1}) {
      SCOPED_TRACE(sign * back);
      ProblemOptions options = {.shape = {2, 2, 2, 9, 70, 4, 4}};
      options.query_offset = sign * (std::numeric_limits<int64_t>::max() - back);
      const Results<float> unbounded = RandomProblem(FindPairFunction("dot"), options).Run();
      // A causal query far after the keys sees all keys; a query far before them sees none.
      options.right = 0;
      const Results<float> causal = RandomProblem(FindPairFunction("dot"), options).Run();
      if (sign > 0) {
        ExpectSame(causal, unbounded);
      } else {
        for (const float value : causal.at("o")) EXPECT_EQ(value, 0);
      }
      options.query_offsets = {options.query_offset, options.query_offset};
      options.query_offset = 0;
      ExpectSame(RandomProblem(FindPairFunction("dot"), options).Run(), causal);
    }
  }
}

}  // namespace
}  // namespace gnomon::testing
