// Compares kernels with the reference for relative keys and values, key biases and dropout.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "core/random_problem.h"
#include "gnomon/attention.h"
#include "gnomon/table_layout.h"
#include "gtest/gtest.h"

namespace gnomon::testing {
namespace {

class RelativeTest : public ::testing::TestWithParam<const PairFunction*> {};

TEST_P(RelativeTest, MatchesReference) {
  const OffsetLayout shaw(16, 16, OffsetLayout::Far::kClip);
  const OffsetLayout whole(700, 700, OffsetLayout::Far::kZero);
  const OffsetLayout past(90, 0, OffsetLayout::Far::kZero);
  const KeyLayout keys(300);
  const GridLayout plane({9, 14}, 1, GridLayout::Kind::kAxes);
  const GridLayout table({9, 14}, 1, GridLayout::Kind::kTable);
  std::vector<ProblemOptions> problems = {
      {.shape = {2, 4, 2, 100, 300, 17, 19}, .relative = &shaw},
      {.shape = {1, 2, 1, 130, 270, 16, 33},
       .right = 0,
       .query_offset = 140,
       .relative = &whole,
       .relative_dim = 16,
       .relative_heads = true},
      {.shape = {2, 2, 2, 200, 200, 8, 8}, .right = 0, .relative = &past, .relative_values = false},
      {.shape = {2, 2, 1, 61, 300, 8, 24},
       .relative = &keys,
       .relative_dim = 33,
       .relative_heads = true},
      {.shape = {2, 2, 1, plane.tokens(), plane.tokens(), 8, 16},
       .relative = &plane,
       .relative_dim = 64},
      {.shape = {1, 2, 1, table.tokens(), table.tokens(), 8, 16},
       .relative = &table,
       .relative_dim = 0,
       .relative_heads = true},
      {.shape = {2, 4, 2, 100, 300, 17, 19}, .key_bias = true},
      {.shape = {2, 4, 2, 100, 300, 17, 19},
       .right = 3,
       .query_offset = 170,
       .key_bias = true,
       .relative = &shaw,
       .dropout = 0.3},
      {.shape = {2, 4, 1, 50, 70, 17, 19}, .dropout = 0.5}};
  for (ProblemOptions& options : problems) {
    for (const auto bias : {ProblemOptions::kNoBias, ProblemOptions::kBiasForEachBatch}) {
      options.bias = bias;
      SCOPED_TRACE(::testing::PrintToString(options));
      ExpectKernelsMatchReference(RandomProblem(*GetParam(), options), 5e-5);
    }
  }
}

// Fills freed memory, which may be reused as scratch, with NaN.
void PoisonFreedMemory() {
  std::vector<std::vector<float>> blocks;
  for (size_t size = 1 << 10; size < size_t{1} << 19; size += size / 4) {
    for (int n = 0; n < 4; ++n) blocks.emplace_back(size, kNan);
  }
}

// If windows or key_starts begin inside a vector, kernels must not read unwritten memory.
TEST_P(RelativeTest, ReadsNothingThatItHasNotWritten) {
  const OffsetLayout layout(127, 127, OffsetLayout::Far::kClip);
  for (const int64_t left : {2, 20, 33}) {
    ProblemOptions options = {.shape = {1, 2, 1, 97, 97, 16, 16},
                              .left = left,
                              .right = 0,
                              .bias = ProblemOptions::kSharedBias,
                              .key_bias = true,
                              .relative = &layout,
                              .relative_key_dim = 5};
    if (left == 33) options.key_starts = {13};
    const Problem<float> p = RandomProblem(*GetParam(), options);
    const Results<double> expected = p.InDouble().Run();
    OnEveryTarget([&] {
      for (int repeat = 0; repeat < 3; ++repeat) {
        PoisonFreedMemory();
        ExpectClose(p.Run(), expected, 5e-5);
      }
    });
  }
}

// Tests position-to-content terms (relative queries), alone and combined with all other terms.
TEST_P(RelativeTest, KeysMeetRowsOfTheirQueriesPlaces) {
  const OffsetLayout shaw(16, 16, OffsetLayout::Far::kClip);
  const OffsetLayout uneven(5, 30, OffsetLayout::Far::kZero);
  const OffsetLayout whole(700, 700, OffsetLayout::Far::kZero);
  const OffsetLayout past(90, 0, OffsetLayout::Far::kClip);
  const OffsetLayout one(0, 0, OffsetLayout::Far::kClip);
  std::vector<ProblemOptions> problems = {
      {.shape = {2, 4, 2, 100, 300, 17, 19}, .relative = &shaw, .relative_key_dim = 17},
      // This problem has no other term, and its tables are per head.
      {.shape = {1, 2, 1, 130, 270, 16, 33},
       .right = 0,
       .query_offset = 140,
       .relative = &whole,
       .relative_dim = 0,
       .relative_values = false,
       .relative_key_dim = 16,
       .relative_heads = true},
      {.shape = {2, 2, 2, 200, 200, 8, 8},
       .right = 0,
       .relative = &past,
       .relative_values = false,
       .relative_key_dim = 3},
      {.shape = {2, 4, 2, 97, 401, 8, 8},
       .left = 70,
       .right = 9,
       .key_starts = {13, 0},
       .key_lengths = {401, 111},
       .query_offsets = {300, 7},
       .key_bias = true,
       .temperature = true,
       .pair_bias = {.exists = true, .shares_batch = true},
       .pair_mask = {.exists = true, .shares_heads = true},
       .relative = &uneven,
       .relative_key_dim = 40,
       .relative_heads = true,
       .dropout = 0.3},
      // With few rows, keys are split into parts, a block contains several heads, or keys are read
      // in place.
      {.shape = {2, 4, 1, 21, 700, 8, 8}, .relative = &shaw, .relative_key_dim = 8},
      {.shape = {1, 4, 2, 3, 130, 8, 8},
       .query_offset = 100,
       .relative = &shaw,
       .relative_key_dim = 8},
      {.shape = {1, 1, 1, 1, 1, 4, 4}, .relative = &one, .relative_key_dim = 4},
      {.shape = {1, 2, 2, 1, 65, 4, 4}, .relative = &one, .relative_key_dim = 4},
      // Some rows see no key.
      {.shape = {2, 2, 1, 60, 60, 8, 8},
       .right = -20,
       .key_lengths = {0, 60},
       .relative = &shaw,
       .relative_key_dim = 8}};
  for (ProblemOptions& options : problems) {
    options.padded = !options.padded && options.shape.batch == 2;
    SCOPED_TRACE(::testing::PrintToString(options));
    ExpectKernelsMatchReference(RandomProblem(*GetParam(), options), 5e-5);
  }
}

// Tests explicit positions. Positions of hidden keys do not matter.
TEST_P(RelativeTest, KeysMeetRowsOfTheirQueriesPositions) {
  const OffsetLayout clip(40, 40, OffsetLayout::Far::kClip);
  const OffsetLayout zero(30, 4, OffsetLayout::Far::kZero);
  for (const OffsetLayout* layout : {&clip, &zero}) {
    ProblemOptions options = {.shape = {2, 4, 2, 90, 230, 8, 8},
                              .right = 60,
                              .key_starts = {3, 0},
                              .key_lengths = {200, 230},
                              .relative = layout,
                              .relative_key_dim = 8};
    std::mt19937 engine(7);
    for (int64_t n = 0; n < 2 * 90; ++n) {
      options.query_positions.push_back(n < 90 ? n + 40 : static_cast<int64_t>(engine() % 300));
    }
    for (int64_t n = 0; n < 2 * 230; ++n) {
      // Batch element 0 has two documents, and batch element 1 has random positions.
      options.key_positions.push_back(n < 230 ? n % 120 : static_cast<int64_t>(engine() % 300));
    }
    const Results<double> expected = RandomProblem(*GetParam(), options).InDouble().Run();
    for (const int64_t hidden : {int64_t{0}, int64_t{1} << 62, -(int64_t{1} << 62)}) {
      for (int64_t j = 200; j < 230; ++j) options.key_positions[static_cast<size_t>(j)] = hidden;
      const Problem<float> p = RandomProblem(*GetParam(), options);
      OnEveryTarget([&] { ExpectClose(p.Run(), expected, 5e-5); });
    }
  }
}

// A gradient requested alone equals the same gradient requested with all others. Gradients are
// bitwise equal for any number of workers.
TEST_P(RelativeTest, GradientsDoNotDependOnCompanyOrWorkers) {
  const OffsetLayout layout(20, 20, OffsetLayout::Far::kClip);
  const Problem<float> p = RandomProblem(*GetParam(), {.shape = {2, 4, 2, 100, 400, 17, 19},
                                                       .bias = ProblemOptions::kSharedBias,
                                                       .key_bias = true,
                                                       .relative = &layout,
                                                       .relative_key_dim = 5,
                                                       .dropout = 0.2});
  const Results<float> all = p.Run();
  ExpectSame(p.Run(ThreadExecutor(3)), all);
  for (const char* name : {"d_x", "d_bias", "d_key_bias", "d_relative_query", "d_relative_keys",
                           "d_relative_key", "d_relative_queries", "d_relative_values"}) {
    SCOPED_TRACE(name);
    ExpectSame(p.Run(SerialExecutor(), name), all);
  }
}

INSTANTIATE_TEST_SUITE_P(Functions, RelativeTest,
                         ::testing::Values(&FindPairFunction("dot"), &FindPairFunction("umbral"),
                                           &FindPairFunction("penumbral")),
                         [](const auto& test) { return std::string(test.param->name); });

TEST(KeyBiasTest, MasksByMinusInfinity) {
  Problem<float> p =
      RandomProblem(FindPairFunction("dot"), {.shape = {2, 2, 1, 49, 130, 8, 8}, .key_bias = true});
  for (int64_t j = 0; j < 130; ++j) {
    if (j % 3 == 0) p.key_bias[static_cast<size_t>(j)] = -kInfinity;
    p.key_bias[static_cast<size_t>(130 + j)] = -kInfinity;
  }
  // In the first batch element, every third key is hidden from head 0, and all keys from head 1.
  ExpectKernelsMatchReference(p);
  OnEveryTarget([&] {
    const Results<float> r = p.Run();
    EXPECT_EQ(r.at("lse")[49], -kInfinity);
    EXPECT_EQ(r.at("d_key_bias")[3], 0);
  });
}

TEST(KeyBiasTest, HidesValuesThatAreNotFinite) {
  Problem<float> p =
      RandomProblem(FindPairFunction("dot"), {.shape = {1, 1, 1, 49, 130, 8, 8}, .key_bias = true});
  p.key_bias[70] = -kInfinity;
  p.v.at(0, 0, 70, 3) = kNan;
  OnEveryTarget([&] {
    const Results<float> r = p.Forward();
    for (const float o : r.at("o")) EXPECT_TRUE(std::isfinite(o));
  });
}

// Values are unit vectors, so o contains the weights after dropout.
TEST(DropoutTest, KeepsWeightsWithTheGivenChanceAndScale) {
  constexpr int64_t kTokens = 96;
  for (const double rate : {0.1, 0.5, 0.9, 1.0}) {
    Problem<float> p =
        RandomProblem(FindPairFunction("dot"), {.shape = {2, 4, 2, kTokens, kTokens, 4, kTokens}});
    int64_t n = 0;
    p.v.ForEach([&](float& element) {
      element = n / kTokens % kTokens == n % kTokens ? 1.0f : 0.0f;
      ++n;
    });
    const std::vector<float> all = p.Forward().at("o");
    const std::vector<float> lse = p.Forward().at("lse");
    p.options.dropout = rate;
    OnEveryTarget([&] {
      const Results<float> r = p.Forward();
      EXPECT_LE(Difference(r.at("lse"), lse), 1e-6);
      const std::vector<float>& some = r.at("o");
      const double count = static_cast<double>(all.size());
      double dropped = 0;
      double together = 0;  // neighbours that are both dropped
      for (size_t e = 0; e < all.size(); ++e) {
        if (some[e] == 0) {
          ++dropped;
          // The neighbours are the same column of the next row, and the next column of the same
          // row.
          if (e + kTokens < all.size() && some[e + kTokens] == 0) ++together;
          if (e + 1 < all.size() && some[e + 1] == 0) ++together;
        } else {
          EXPECT_NEAR(some[e] * (1 - rate), all[e], 1e-5 * all[e]);
        }
      }
      // The tolerance is five standard deviations; it is larger for neighbours, because pairs of
      // neighbours overlap.
      EXPECT_NEAR(dropped / count, rate, 5 * std::sqrt(rate * (1 - rate) / count));
      EXPECT_NEAR(together / (2 * count), rate * rate,
                  10 * rate * std::sqrt((1 - rate) / count) + 2e-3);
    });
  }
}

TEST(DropoutTest, SeedsGiveMasksOfTheirOwn) {
  ProblemOptions options = {.shape = {1, 2, 2, 20, 30, 4, 4}, .dropout = 0.5, .seed = 1};
  Problem<float> p = RandomProblem(FindPairFunction("dot"), options);
  const Results<float> first = p.Forward();
  ExpectSame(p.Forward(), first);
  p.options.seed = 2;
  EXPECT_GT(Difference(p.Forward().at("o"), first.at("o")), 0.1);
}

}  // namespace
}  // namespace gnomon::testing
