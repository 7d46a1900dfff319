// Tests pair arrays that the user supplies: pair biases and pair masks.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <ctime>
#include <limits>
#include <string>
#include <vector>

#include "core/random_problem.h"
#include "gnomon/attention.h"
#include "gtest/gtest.h"

namespace gnomon::testing {
namespace {

void FillMask(Problem<float>& p, auto sees) {
  const auto [batch, heads, queries, keys] = p.pair_mask.size();
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t i = 0; i < queries; ++i) {
        for (int64_t j = 0; j < keys; ++j) p.pair_mask.at(b, h, i, j) = sees(i, j) ? 1 : 0;
      }
    }
  }
}

TEST(PairBiasTest, IsTheSameForAnyNumberOfWorkers) {
  for (const bool batch : {false, true}) {
    for (const bool heads : {false, true}) {
      // Tests grouped heads, one key head per head, and few heads with many keys.
      for (const AttentionShape& shape :
           {AttentionShape{3, 6, 2, 100, 500, 16, 16}, AttentionShape{2, 4, 4, 100, 200, 16, 16},
            AttentionShape{1, 2, 1, 60, 1500, 16, 16}}) {
        ExpectSameForAnyNumberOfWorkers(
            RandomProblem(FindPairFunction("dot"), {.shape = shape,
                                                    .pair_bias = {true, batch, heads},
                                                    .pair_mask = {true, heads, batch}}));
      }
    }
  }
}

// An offset bias expanded to pairs gives the same results, and its gradient summed along diagonals
// equals that of the offset bias.
TEST(PairBiasTest, IsABiasByOffsetWrittenOut) {
  const AttentionShape shape = {2, 4, 2, 70, 300, 16, 16};
  Problem<float> by_offset = RandomProblem(
      FindPairFunction("gaussian"),
      {.shape = shape, .right = 0, .query_offset = 230, .bias = ProblemOptions::kBiasForEachBatch});
  for (int64_t entry = 100; entry < 120; ++entry) by_offset.bias_at(1, 2, entry) = -kInfinity;
  Problem<float> p = by_offset;
  p.options.bias = ProblemOptions::kNoBias;
  p.options.pair_bias.exists = true;
  p.pair_bias = Array<float>({2, 4, 70, 300}, true, 0.0f);
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t h = 0; h < 4; ++h) {
      for (int64_t i = 0; i < 70; ++i) {
        for (int64_t j = 0; j < 300; ++j) {
          p.pair_bias.at(b, h, i, j) = by_offset.bias_at(b, h, 69 + j - i);
        }
      }
    }
  }
  OnEveryTarget([&] {
    Results<float> expected = by_offset.Run();
    Results<float> actual = p.Run();
    Problem<double> sums = by_offset.InDouble();
    std::fill(sums.bias.begin(), sums.bias.end(), 0.0);
    const std::vector<float>& d_pairs = actual.at("d_pair_bias");
    for (size_t n = 0; n < d_pairs.size(); ++n) {
      const auto pair = static_cast<int64_t>(n);
      const int64_t head = pair / 300 / 70;
      sums.bias_at(head / 4, head % 4, 69 + pair % 300 - pair / 300 % 70) += d_pairs[n];
    }
    EXPECT_LE(Difference(expected.at("d_bias"), sums.bias), 1e-5);
    expected.erase("d_bias");
    for (const auto& [name, values] : expected) {
      EXPECT_LE(Difference(actual.at(name), values), 1e-5) << name;
    }
  });
}

// If all keys have the lowest (or largest) finite bias, no key is hidden: keys have equal weights,
// because the bias absorbs the scores. Tests offset, key and pair biases, with windows of different
// lengths.
TEST(PairBiasTest, OfTheLeastNumberWeighsAllKeysAlike) {
  const AttentionShape shape = {2, 2, 2, 70, 300, 16, 16};
  for (const float number :
       {std::numeric_limits<float>::lowest(), std::numeric_limits<float>::max()}) {
    for (int kind = 0; kind < 3; ++kind) {
      ProblemOptions options = {.shape = shape, .left = 40, .right = 3, .query_offset = 230};
      if (kind == 0) options.bias = ProblemOptions::kBiasForEachBatch;
      if (kind == 1) options.key_bias = true;
      if (kind == 2) options.pair_bias = {true, false, false};
      Problem<float> p = RandomProblem(FindPairFunction("dot"), options);
      std::fill(p.bias.begin(), p.bias.end(), number);
      std::fill(p.key_bias.begin(), p.key_bias.end(), number);
      if (kind == 2) p.pair_bias = Array<float>({2, 2, 70, 300}, false, number);
      OnEveryTarget([&] {
        const std::vector<float> o = p.Run().at("o");
        for (int64_t n = 0; n < 2 * 2 * 70; ++n) {
          const int64_t first = 230 + n % 70 - 40;
          const int64_t end = std::min<int64_t>(300, 230 + n % 70 + 4);
          for (int64_t d = 0; d < 16; ++d) {
            double mean = 0;
            for (int64_t j = first; j < end; ++j) mean += p.v.at(n / 140, n / 70 % 2, j, d);
            ASSERT_NEAR(o[static_cast<size_t>(n * 16 + d)], mean / static_cast<double>(end - first),
                        1e-5)
                << kind << " " << number;
          }
        }
      });
    }
  }
}

// The gradient of a bias that heads or batch elements share is the sum of their separate gradients.
TEST(PairBiasTest, GradientIsSummedOverWhatSharesIt) {
  const AttentionShape shape = {3, 4, 2, 60, 250, 16, 16};
  for (const bool batch : {false, true}) {
    for (const bool heads : {false, true}) {
      const Problem<float> shared =
          RandomProblem(FindPairFunction("laplacian"),
                        {.shape = shape, .left = 100, .pair_bias = {true, batch, heads}});
      Problem<float> p = shared;
      p.options.pair_bias = {true, false, false};
      p.pair_bias = Array<float>({3, 4, 60, 250}, false, 0.0f);
      const auto of = [&](int64_t b, int64_t h) { return std::pair{batch ? 0 : b, heads ? 0 : h}; };
      for (int64_t n = 0; n < 12; ++n) {
        const auto [b, h] = of(n / 4, n % 4);
        for (int64_t i = 0; i < 60; ++i) {
          for (int64_t j = 0; j < 250; ++j) {
            p.pair_bias.at(n / 4, n % 4, i, j) = shared.pair_bias.at(b, h, i, j);
          }
        }
      }
      OnEveryTarget([&] {
        const std::vector<float> each = p.Run().at("d_pair_bias");
        const std::vector<float> sum = shared.Run().at("d_pair_bias");
        std::vector<double> expected(sum.size());
        for (size_t n = 0; n < each.size(); ++n) {
          const auto head = static_cast<int64_t>(n) / (60 * 250);
          const auto [b, h] = of(head / 4, head % 4);
          const int64_t to = b * (heads ? 1 : 4) + h;
          expected[static_cast<size_t>(to) * 60 * 250 + n % (60 * 250)] += each[n];
        }
        EXPECT_LE(Difference(sum, expected), 1e-6);
      });
    }
  }
}

TEST(PairMaskTest, OfThePastIsCausal) {
  for (const PairFunction* function : AllPairFunctions()) {
    SCOPED_TRACE(function->name);
    // Tests a call with many blocks of queries, and one with few queries.
    for (const int64_t queries : {300, 3}) {
      const Problem<float> causal = RandomProblem(
          *function,
          {.shape = {1, 2, 1, queries, 500, 16, 16}, .right = 0, .query_offset = 500 - queries});
      Problem<float> p = causal;
      p.options.right = kUnbounded;
      p.options.pair_mask = {true, true, true};
      p.pair_mask = Array<uint8_t>({1, 1, queries, 500}, false, 0);
      FillMask(p, [&](int64_t i, int64_t j) { return j <= i + 500 - queries; });
      OnEveryTarget([&] {
        const Results<float> expected = causal.Run();
        for (const auto& [name, values] : p.Run()) {
          EXPECT_LE(Difference(values, expected.at(name)), 1e-5) << name;
        }
      });
    }
  }
}

TEST(PairMaskTest, RowsThatSeeNothingAreZero) {
  for (const int64_t queries : {130, 2}) {
    Problem<float> p =
        RandomProblem(FindPairFunction("umbral"), {.shape = {2, 4, 2, queries, 300, 17, 17},
                                                   .pair_bias = {true, true, false},
                                                   .pair_mask = {true, true, true}});
    FillMask(p, [](int64_t i, int64_t j) { return i != 0 && i != 60 && i < 90 && (i + j) % 3; });
    OnEveryTarget([&] {
      const Results<float> r = p.Run();
      for (int64_t row = 0; row < 8 * queries; ++row) {
        const int64_t i = row % queries;
        const bool empty = i == 0 || i == 60 || i >= 90;
        EXPECT_EQ(std::isinf(r.at("lse")[static_cast<size_t>(row)]), empty);
        for (const char* name : {"o", "d_x"}) {
          const auto first = r.at(name).begin() + row * 17;
          EXPECT_EQ(std::all_of(first, first + 17, [](float x) { return x == 0; }), empty) << name;
        }
      }
      for (int64_t n = 0; n < 4 * queries * 300; ++n) {
        const int64_t i = n / 300 % queries;
        const int64_t j = n % 300;
        const bool sees = p.SeesPair(0, 0, i, j);
        if (!sees) {
          ASSERT_EQ(r.at("d_pair_bias")[static_cast<size_t>(n)], 0) << i << " " << j;
        }
      }
    });
  }
}

// Each block of tokens attends only to itself, so most tiles must be skipped. Processor time is
// measured, because other programs may be running.
TEST(PairMaskTest, TilesOfWhichNothingIsSeenAreSkipped) {
  constexpr int64_t kLength = 2304;
  const auto problem = [](auto sees) {
    Problem<float> p = RandomProblem(
        FindPairFunction("dot"),
        {.shape = {1, 1, 1, kLength, kLength, 64, 64}, .pair_mask = {true, true, true}});
    FillMask(p, sees);
    return p;
  };
  Problem<float> blocks = problem([](int64_t i, int64_t j) { return i / 192 == j / 192; });
  Problem<float> all = problem([](int64_t, int64_t) { return true; });
  const auto clocks = [](Problem<float>& p) {
    const std::clock_t start = std::clock();
    p.Run();
    return std::clock() - start;
  };
  std::clock_t of_blocks = std::numeric_limits<std::clock_t>::max();
  std::clock_t of_all = of_blocks;
  for (int repeat = 0; repeat < 8; ++repeat) {
    of_blocks = std::min(of_blocks, clocks(blocks));
    of_all = std::min(of_all, clocks(all));
  }
  // Only one pair in twelve is visible, but reading the inputs also takes time, so the test expects
  // only a speedup of 1.5x.
  EXPECT_LE(of_blocks, of_all / 1.5);
}

}  // namespace
}  // namespace gnomon::testing
