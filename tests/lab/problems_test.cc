#include "models/problems.h"

#include <gtest/gtest.h>

namespace gnomon::lab {
namespace {

// tests/python/test_task_generated.py tests the examples themselves.

TEST(ProblemsTest, StreamsAreTheSameAgainAndNoneIsAnother) {
  const Problem& problem = FindProblem("copy");
  const auto tokens = [&](uint32_t purpose, int64_t seed, int64_t step) {
    Draws draws(purpose, seed, step);
    return MakeRows(problem, 9, 20, 3, &draws).tokens;
  };
  const torch::Tensor rows = tokens(0, 1, 2);
  EXPECT_TRUE(torch::equal(rows, tokens(0, 1, 2)));
  EXPECT_FALSE(torch::equal(rows, tokens(1, 1, 2)));
  EXPECT_FALSE(torch::equal(rows, tokens(0, 2, 1)));
  EXPECT_FALSE(torch::equal(rows, tokens(0, 1 + (int64_t{1} << 32), 2)));
  EXPECT_FALSE(torch::equal(rows, tokens(0, 1, 3)));
}

TEST(ProblemsTest, SubsetsAreSortedAndReachEverywhere) {
  Draws draws(0, 0, 0);
  const torch::Tensor subsets = RandomSubsets(50, 20, 400, &draws);
  EXPECT_TRUE(subsets.diff().gt(0).all().item<bool>());
  EXPECT_EQ(subsets.min().item<int64_t>(), 0);
  EXPECT_EQ(subsets.max().item<int64_t>(), 49);
  // Each number occurs in 160 subsets on average, with a standard deviation of 9.8.
  const torch::Tensor counts = subsets.flatten().bincount({}, 50);
  EXPECT_GT(counts.min().item<int64_t>(), 110);
  EXPECT_LT(counts.max().item<int64_t>(), 210);
  EXPECT_TRUE(torch::equal(RandomSubsets(4, 4, 1, &draws)[0], torch::arange(4)));
}

}  // namespace
}  // namespace gnomon::lab
