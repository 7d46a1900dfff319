// With large scores, the weights of the backward pass must be bitwise equal to those of the forward
// pass, and gradients that are mathematically 0 must be exactly 0.
#include <cmath>
#include <sstream>
#include <string>
#include <vector>

#include "core/random_problem.h"
#include "gnomon/attention.h"
#include "gnomon/table_layout.h"
#include "gtest/gtest.h"

namespace gnomon::testing {
namespace {

class LargeScoreTest : public ::testing::TestWithParam<const PairFunction*> {
 protected:
  const PairFunction& function() const { return *GetParam(); }
};

INSTANTIATE_TEST_SUITE_P(All, LargeScoreTest, ::testing::ValuesIn(PairFunctions()),
                         [](const auto& test) { return std::string(test.param->name); });

// v_j and dO_i are unit vectors, so that o_ij and the gradient of v_j in column i both equal p_ij.
Problem<float> WeightsProblem(const PairFunction& f, ProblemOptions options, float scale) {
  Problem<float> p = RandomProblem(f, options);
  const AttentionShape& n = p.options.shape;
  p.pass_d_lse = false;
  for (float& factor : p.factor) factor *= scale;
  for (int64_t b = 0; b < n.batch; ++b) {
    for (int64_t h = 0; h < n.heads; ++h) {
      for (int64_t i = 0; i < n.queries; ++i) {
        for (int64_t e = 0; e < n.value_dim; ++e) p.d_o.at(b, h, i, e) = e == i ? 1.0f : 0.0f;
      }
    }
    for (int64_t h = 0; h < n.key_heads; ++h) {
      for (int64_t j = 0; j < n.keys; ++j) {
        for (int64_t e = 0; e < n.value_dim; ++e) p.v.at(b, h, j, e) = e == j ? 1.0f : 0.0f;
      }
    }
  }
  return p;
}

// All keys fit into one tile. With more keys, the forward pass would rescale earlier sums, which
// changes the rounding.
TEST_P(LargeScoreTest, WeightsAreTheSameInBothDirections) {
  static const OffsetLayout layout(9, 9, OffsetLayout::Far::kClip);
  const AttentionShape shape = {1, 2, 2, 60, 60, 17, 60};
  const ProblemOptions all[] = {
      {.shape = shape},
      {.shape = shape, .right = 0},
      {.shape = shape, .right = 0, .bias = ProblemOptions::kSharedBias},
      {.shape = shape, .left = 20, .key_bias = true, .padded = true},
      {.shape = shape, .relative = &layout, .relative_values = false},
      {.shape = shape,
       .bias = ProblemOptions::kSharedBias,
       .key_bias = true,
       .relative = &layout,
       .relative_values = false},
      // Row counts around the limit up to which keys are not packed.
      {.shape = {1, 2, 2, 1, 60, 64, 60}},
      {.shape = {1, 2, 2, 4, 60, 33, 60},
       .type = TokenType::kBFloat16,
       .value_type = TokenType::kBFloat16},
      {.shape = {1, 2, 2, 8, 60, 33, 60}, .type = TokenType::kFloat16},
      {.shape = {1, 2, 2, 8, 60, 17, 60},
       .right = 0,
       .query_offset = 30,
       .bias = ProblemOptions::kSharedBias,
       .key_bias = true,
       .relative = &layout,
       .relative_dim = 19,
       .relative_values = false},
      {.shape = {1, 2, 2, 9, 60, 17, 60}, .relative = &layout, .relative_values = false},
  };
  for (const ProblemOptions& options : all) {
    const AttentionShape& n = options.shape;
    for (const float scale : {1.0f, 1e2f, 1e4f, 1e6f}) {
      std::ostringstream description;
      description << options << " factor " << scale;
      SCOPED_TRACE(description.str());
      const Problem<float> p = WeightsProblem(function(), options, scale);
      OnEveryTarget([&] {
        const Results<float> r = p.Run();
        for (int64_t h = 0; h < n.heads; ++h) {
          for (int64_t i = 0; i < n.queries; ++i) {
            for (int64_t j = 0; j < n.keys; ++j) {
              const float forward =
                  r.at("o")[static_cast<size_t>((h * n.queries + i) * n.value_dim + j)];
              const float backward =
                  r.at("d_v")[static_cast<size_t>((h * n.keys + j) * n.value_dim + i)];
              ASSERT_EQ(backward, forward) << "head " << h << " query " << i << " key " << j;
              ASSERT_LE(backward, 1.0f);
            }
          }
        }
      });
    }
  }
}

// Weights must sum to 1, also with many tiles, keys split into parts, shared key heads and
// bfloat16.
TEST_P(LargeScoreTest, WeightsAddUpToOne) {
  const ProblemOptions all[] = {
      {.shape = {1, 1, 1, 8, 400, 9, 400}},
      {.shape = {1, 6, 2, 3, 400, 16, 400}, .query_offset = 399},
      {.shape = {1, 2, 1, 300, 300, 24, 300}, .right = 0},
      {.shape = {1, 2, 1, 300, 300, 24, 300},
       .right = 0,
       .type = TokenType::kBFloat16,
       .value_type = TokenType::kBFloat16},
      {.shape = {1, 2, 1, 5, 400, 33, 400},
       .type = TokenType::kBFloat16,
       .value_type = TokenType::kBFloat16},
  };
  size_t count = 0;
  for (const ProblemOptions& options : all) {
    for (const float scale : {1.0f, 1e6f}) {
      if (!RunsWith(function(), count++)) continue;
      std::ostringstream description;
      description << options << " factor " << scale;
      SCOPED_TRACE(description.str());
      const Problem<float> p = WeightsProblem(function(), options, scale);
      const AttentionShape& n = options.shape;
      OnEveryTarget([&] {
        const Results<float> r = p.Run(SerialExecutor(), "d_v");
        // d_v sums the weights of all heads that share the keys.
        for (int64_t h = 0; h < n.key_heads; ++h) {
          for (int64_t i = 0; i < n.queries; ++i) {
            double sum = 0;
            for (int64_t j = 0; j < n.keys; ++j) {
              sum += r.at("d_v")[static_cast<size_t>((h * n.keys + j) * n.value_dim + i)];
            }
            const auto heads = static_cast<double>(n.heads / n.key_heads);
            ASSERT_NEAR(sum, heads, 1e-5 * heads) << "key head " << h << " query " << i;
          }
        }
      });
    }
  }
}

// The only key of a row has weight 1, regardless of its score, so the score has no gradient.
TEST_P(LargeScoreTest, OnlyKeysHaveNoGradient) {
  static const OffsetLayout layout(9, 9, OffsetLayout::Far::kClip);
  static const GridLayout grid({5, 10}, 3, GridLayout::Kind::kAxes);
  const ProblemOptions all[] = {
      {.shape = {2, 4, 2, 53, 53, 17, 19}, .left = 0, .right = 0},
      {.shape = {1, 2, 2, 300, 300, 64, 64}, .left = 0, .right = 0},
      {.shape = {2, 4, 2, 3, 900, 16, 16}, .left = 0, .right = 0, .query_offset = 700},
      {.shape = {1, 2, 2, 53, 53, 17, 19},
       .left = 0,
       .right = 0,
       .bias = ProblemOptions::kSharedBias,
       .key_bias = true},
      {.shape = {1, 2, 2, 53, 53, 17, 19}, .left = 0, .right = 0, .relative = &layout},
      {.shape = {1, 2, 1, 53, 53, 17, 19},
       .left = 0,
       .right = 0,
       .relative = &grid,
       .relative_heads = true,
       .dropout = 0.5},
      {.shape = {1, 2, 2, 53, 53, 17, 19}, .left = 0, .right = 0, .dropout = 0.3},
      {.shape = {1, 2, 2, 53, 53, 33, 19},
       .left = 0,
       .right = 0,
       .type = TokenType::kBFloat16,
       .value_type = TokenType::kBFloat16},
      {.shape = {3, 2, 2, 53, 53, 17, 19}, .key_starts = {0, 7, 52}, .key_lengths = {1, 8, 53}},
      {.shape = {1, 2, 2, 53, 53, 17, 19}, .left = 0, .right = 0, .keeps_statistics = false},
  };
  for (const ProblemOptions& options : all) {
    for (const float scale : {1.0f, 1e6f}) {
      std::ostringstream description;
      description << options << " factor " << scale;
      SCOPED_TRACE(description.str());
      Problem<float> p = RandomProblem(function(), options);
      p.pass_d_lse = false;
      for (float& factor : p.factor) factor *= scale;
      const auto expect_none = [&](const auto& results) {
        for (const auto& [name, values] : results) {
          if (name == "o" || name == "lse" || name == "d_v" || name == "d_relative_values")
            continue;
          for (const auto value : values) ASSERT_EQ(value, 0) << name;
        }
      };
      OnEveryTarget([&] { expect_none(p.Run()); });
      expect_none(p.InDouble().Run());
    }
  }
}

// The gradient of a factor is the sum of ds * f. The part of f that all pairs of a row have in
// common must cancel, even if it is large, and regardless of the rounding of dP and delta.
TEST(FactorTest, ItsGradientHangsOnTheSpreadOfScoresAlone) {
  for (const bool pass_d_lse : {false, true}) {
    Problem<float> p = RandomProblem(FindPairFunction("dot"), {.shape = {2, 2, 1, 60, 250, 8, 16}});
    p.pass_d_lse = pass_d_lse;
    const auto set_first = [](Array<float>& tokens, float value) {
      const auto [batch, heads, rows, columns] = tokens.size();
      for (int64_t row = 0; row < batch * heads * rows; ++row) {
        tokens.at(row / rows / heads, row / rows % heads, row % rows, 0) = value;
      }
    };
    set_first(p.x, 16);
    set_first(p.y, 16);
    p.v.ForEach([](float& element) { element += 100; });
    const std::vector<double> expected = p.InDouble().Run().at("d_factor");
    OnEveryTarget([&] {
      const std::vector<float> actual = p.Run().at("d_factor");
      for (size_t h = 0; h < 2; ++h) {
        EXPECT_NEAR(actual[h], expected[h], 3e-3 + 3e-6 * std::fabs(expected[h]))
            << "d_lse " << pass_d_lse << " head " << h;
      }
    });
  }
}

// The part of the slopes that all pairs of a row have in common must cancel in the gradients of the
// row's query and scalars.
class SlopesTest : public ::testing::TestWithParam<const char*> {};

TEST_P(SlopesTest, WhatTheyShareIsNotInTheGradientOfTheQuery) {
  constexpr float kFar = 1000;  // puts all keys on one side of all queries
  const PairFunction& f = FindPairFunction(GetParam());
  // The magnitude of each pair's slope.
  const double slope = f.input == PairInput::kInnerProduct ? kFar : 1;
  for (const int64_t left : {int64_t{1}, int64_t{40}, kUnbounded}) {
    SCOPED_TRACE(left);
    Problem<float> p = RandomProblem(
        f, {.shape = {1, 2, 1, 60, 250, 9, 300}, .left = left, .right = 0, .query_offset = 100});
    p.pass_d_lse = false;
    for (int64_t i = 0; f.input != PairInput::kNone && i < 60; ++i) {
      for (int64_t h = 0; h < 2; ++h) p.x.at(0, h, i, 0) = 0;
    }
    for (int64_t j = 0; f.input != PairInput::kNone && j < 250; ++j) p.y.at(0, 0, j, 0) = kFar;
    for (float& scalar : p.row) scalar += kFar;
    p.v.ForEach([](float& element) { element += 100; });
    const Results<double> expected = p.InDouble().Run();
    OnEveryTarget([&] {
      const Results<float> actual = p.Run();
      for (const char* name : {"d_x", "d_row"}) {
        EXPECT_LE(Difference(actual.at(name), expected.at(name), slope), 5e-5) << name;
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Functions, SlopesTest, ::testing::Values("dot", "laplacian", "additive"),
                         [](const auto& test) { return std::string(test.param); });

// If all slopes of a row are equal, they cancel and leave exactly the gradient of lse.
class EqualSlopesTest : public ::testing::TestWithParam<const char*> {};

TEST_P(EqualSlopesTest, LeaveTheGradientOfLse) {
  constexpr float kFar = 1000;
  const PairFunction& f = FindPairFunction(GetParam());
  // For "additive", all sums of scalars are positive; for "umbral", all keys are far above the
  // query.
  const bool is_cone = f.input == PairInput::kSquaredDistance;
  for (const bool pass_d_lse : {false, true}) {
    SCOPED_TRACE(pass_d_lse);
    Problem<float> p = RandomProblem(f, {.shape = {1, 2, 1, 60, 250, 9, 300}, .left = 40});
    p.pass_d_lse = pass_d_lse;
    for (float& scalar : p.row) scalar += is_cone ? -kFar : kFar;
    const Results<double> expected = p.InDouble().Run();
    OnEveryTarget([&] {
      const std::vector<float> actual = p.Run().at("d_row");
      for (size_t n = 0; n < actual.size(); ++n) {
        const double limit = pass_d_lse ? 3e-7 * std::fabs(expected.at("d_row")[n]) : 0;
        ASSERT_NEAR(actual[n], pass_d_lse ? expected.at("d_row")[n] : 0, limit) << n;
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Functions, EqualSlopesTest, ::testing::Values("additive", "umbral"),
                         [](const auto& test) { return std::string(test.param); });

// If the caller has not saved the row statistics, the backward pass recomputes them.
TEST_P(LargeScoreTest, StatisticsThatAreNotKeptChangeNothing) {
  ProblemOptions options = {.shape = {2, 4, 2, 53, 70, 17, 19}, .right = 20, .dropout = 0.2};
  const Problem<float> kept = RandomProblem(function(), options);
  options.keeps_statistics = false;
  const Problem<float> not_kept = RandomProblem(function(), options);
  OnEveryTarget([&] { ExpectSame(not_kept.Run(), kept.Run()); });
  EXPECT_EQ(not_kept.InDouble().Run(), kept.InDouble().Run());
}

// Tests the statistics of rows with no key, one dominant key and many keys, in calls with few rows
// (for which keys are split into parts) and with many rows.
class StatisticsTest : public ::testing::TestWithParam<int64_t> {};

TEST_P(StatisticsTest, AreTheLargestScoreTheSumAndTheKey) {
  constexpr int64_t kKeys = 600;
  const int64_t queries = GetParam();
  const auto rows = static_cast<size_t>(queries);
  Problem<float> p = RandomProblem(FindPairFunction("dot"),
                                   {.shape = {1, 1, 1, queries, kKeys, 1, 1}, .key_bias = true});
  p.factor = {1.0f};
  for (int64_t j = 0; j < kKeys; ++j) {
    p.y.at(0, 0, j, 0) = j == 421 ? 40.0f : 0.0f;
    p.key_bias[static_cast<size_t>(j)] = 0;
  }
  // Rows alternate: key 421 dominates, all keys have equal scores, or all keys except 421 dominate.
  for (int64_t i = 0; i < queries; ++i) p.x.at(0, 0, i, 0) = static_cast<float>(1 - i % 3);
  const auto statistics_of = [&](const auto& problem) {
    auto statistics = problem.key_bias;
    statistics.assign(3 * rows, 7);
    auto o = statistics;
    auto lse = statistics;
    AttentionForward(problem.function, problem.Input(),
                     {{o.data(), {queries, queries, 1}}, lse.data(), statistics.data()});
    return statistics;
  };
  const auto expect = [&](const auto& statistics, double tolerance) {
    for (size_t i = 0; i < rows; i += 3) {
      EXPECT_NEAR(statistics[i], 40 / std::log(2.0), tolerance);
      EXPECT_NEAR(statistics[i + 1], 0, tolerance);
      EXPECT_NEAR(statistics[i + 2], 0, tolerance);
      EXPECT_NEAR(statistics[rows + i], 1, 1e-12);
      EXPECT_EQ(statistics[rows + i + 1], kKeys);
      EXPECT_NEAR(statistics[rows + i + 2], kKeys - 1, 1e-12);
      EXPECT_EQ(statistics[2 * rows + i], 421);
      // If several keys have the largest score, any of them may be stored.
      for (const size_t row : {i + 1, i + 2}) {
        EXPECT_GE(statistics[2 * rows + row], 0);
        EXPECT_LT(statistics[2 * rows + row], kKeys);
      }
      EXPECT_NE(statistics[2 * rows + i + 2], 421);
    }
  };
  OnEveryTarget([&] { expect(statistics_of(p), 1e-5); });
  expect(statistics_of(p.InDouble()), 1e-12);
  p.options.key_lengths = {0};
  const std::vector<float> statistics = statistics_of(p);
  for (size_t i = 0; i < rows; ++i) {
    EXPECT_EQ(statistics[i], -kInfinity);
    EXPECT_EQ(statistics[rows + i], 0);
    EXPECT_EQ(statistics[2 * rows + i], -1);
  }
}

INSTANTIATE_TEST_SUITE_P(Queries, StatisticsTest, ::testing::Values(3, 300));

}  // namespace
}  // namespace gnomon::testing
