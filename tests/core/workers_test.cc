// Tests that results do not depend on which of several concurrent workers is late.
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/random_problem.h"
#include "gnomon/attention.h"
#include "gnomon/table_layout.h"
#include "gtest/gtest.h"

namespace gnomon::testing {
namespace {

extern "C" void Stall(int) {
  const timespec time = {0, 500'000};
  nanosleep(&time, nullptr);
}

// Delays its threads at arbitrary points of their work, one after the other.
class StallingExecutor final : public Executor {
 public:
  int max_workers() const override { return 4; }
  void Run(int workers, const std::function<void(int)>& body) const override {
    struct sigaction action = {};
    struct sigaction before = {};
    action.sa_handler = Stall;
    action.sa_flags = SA_RESTART;
    sigaction(SIGUSR1, &action, &before);
    std::atomic<int> running{workers};
    std::vector<std::thread> threads;
    for (int worker = 0; worker < workers; ++worker) {
      threads.emplace_back([&, worker] {
        body(worker);
        running.fetch_sub(1);
      });
    }
    std::mt19937 engine(1);
    while (running.load() > 0) {
      pthread_kill(threads[engine() % threads.size()].native_handle(), SIGUSR1);
      std::this_thread::sleep_for(std::chrono::microseconds(100));
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
