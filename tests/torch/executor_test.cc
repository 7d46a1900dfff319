// Tests the executor that runs work on PyTorch's threads.
#include "ops/operators/executor.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

namespace gnomon {
namespace {

class ExecutorTest : public testing::Test {
 protected:
  ~ExecutorTest() override { at::set_num_threads(before_); }

 private:
  int before_ = at::get_num_threads();
};

TEST_F(ExecutorTest, CoversTheRangeOnce) {
  for (const int threads : {1, 2, 4}) {
    at::set_num_threads(threads);
    for (const int64_t count : {0, 1, 7, 1000}) {
      std::vector<std::atomic<int>> visits(static_cast<size_t>(count));
      ParallelFor(count, /*grain=*/3, [&](int64_t first, int64_t last) {
        for (int64_t n = first; n < last; ++n) ++visits[static_cast<size_t>(n)];
      });
      for (const std::atomic<int>& visit : visits) EXPECT_EQ(visit, 1);
    }
  }
}

TEST_F(ExecutorTest, UsesTheThreads) {
  at::set_num_threads(2);
  ASSERT_EQ(TorchExecutor().max_workers(), 2);
  std::mutex mutex;
  std::set<std::thread::id> threads;
  TorchExecutor().Run(2, [&](int) {
    EXPECT_EQ(TorchExecutor().max_workers(), 1);  // in a parallel region
    const std::lock_guard<std::mutex> lock(mutex);
    threads.insert(std::this_thread::get_id());
  });
  EXPECT_EQ(threads.size(), 2);
}

TEST_F(ExecutorTest, ThrowsWhatTheWorkThrows) {
  for (const int threads : {1, 2}) {
    at::set_num_threads(threads);
    EXPECT_THROW(ParallelFor(8, 1,
                             [](int64_t first, int64_t) {
                               if (first < 4) throw std::range_error("of the work");
                             }),
                 std::range_error);
  }
}

}  // namespace
}  // namespace gnomon
