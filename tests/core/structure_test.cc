// What the operator's structure promises beyond the library's own pair functions: an inner product
// that goes with scalars, and biases that are not by offset.
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "core/grid_layout.h"
#include "core/random_problem.h"
#include "gnomon/attention.h"
#include "gtest/gtest.h"

namespace gnomon::testing {
namespace {

class DefinitionKernelTest : public ::testing::TestWithParam<const PairFunction*> {};

TEST_P(DefinitionKernelTest, MatchesReference) {
  const ProblemOptions problems[] = {
      {.shape = {2, 3, 3, 47, 49, 9, 17}, .padded = true},
      // Query heads of a group have factors and head scalars of their own.
      {.shape = {2, 6, 2, 49, 130, 16, 16}, .right = 0, .query_offset = 81},
      {.shape = {3, 2, 1, 60, 200, 40, 3},
       .left = 100,
       .right = 20,
       .key_starts = {0, 20, 60},
       .key_lengths = {200, 199, 20},
       .bias = ProblemOptions::kSharedBias},
      {.shape = {2, 2, 1, 0, 49, 9, 9}},
  };
  for (const ProblemOptions& options : problems) {
    SCOPED_TRACE(::testing::PrintToString(options));
    ExpectKernelsMatchReference(RandomProblem(*GetParam(), options));
  }
}

TEST_P(DefinitionKernelTest, IsTheSameForAnyNumberOfWorkers) {
  const Problem<float> p = RandomProblem(
      *GetParam(),
      {.shape = {2, 4, 2, 100, 700, 16, 16}, .left = 300, .bias = ProblemOptions::kSharedBias});
  const Results<float> serial = p.Run();
  ExpectSame(p.Run(ThreadExecutor(3)), serial);
}

INSTANTIATE_TEST_SUITE_P(All, DefinitionKernelTest, ::testing::ValuesIn(TestPairFunctions()),
                         [](const auto& test) { return std::string(test.param->name); });

// What the definitions are there to show.
TEST(DefinitionKernelTest, CoverAnInnerProductWithScalars) {
  const auto goes_with_scalars = [](const PairFunction* f) {
    return f->input == PairInput::kInnerProduct && f->row_scalars == 2 && f->column_scalars == 1;
  };
  const auto all = TestPairFunctions();
  EXPECT_TRUE(std::any_of(all.begin(), all.end(), goes_with_scalars));
}

// Entries that neither follow each other nor are each others' differences; some pairs have none.
class ScatteredLayout : public BiasLayout {
 public:
  int64_t table_size() const override { return 11; }
  int64_t Entry(int64_t query, int64_t key) const override {
    return (query + key) % 7 == 0 ? -1 : (7 * query * query + 3 * key) % 11;
  }
};

// By loops over the cells: what the layout says, without its arithmetic.
template <class Body>
void ForEachPairOfCells(int64_t height, int64_t width, const Body& body) {
  for (int64_t yi = 0; yi < height; ++yi) {
    for (int64_t xi = 0; xi < width; ++xi) {
      for (int64_t yj = 0; yj < height; ++yj) {
        for (int64_t xj = 0; xj < width; ++xj) {
          body(yi * width + xi, yj * width + xj, yj - yi, xj - xi);
        }
      }
    }
  }
}

// A head's logits are its biases alone: the weights must be their softmax, and the gradient of the
// biases that of the softmax, summed over the pairs of each (dy, dx).
TEST(GridBiasTest, IsATableOfDifferencesOfCells) {
  constexpr int64_t kHeight = 3;
  constexpr int64_t kWidth = 5;
  constexpr int64_t kCells = kHeight * kWidth;
  const GridLayout layout({0, kHeight, kWidth}, kCells, kCells);
  Problem<float> p =
      RandomProblem(FindPairFunction("dot"), {.shape = {2, 4, 2, kCells, kCells, 8, 3},
                                              .bias = ProblemOptions::kSharedBias,
                                              .layout = &layout});
  std::fill(p.factor.begin(), p.factor.end(), 0.0f);
  const auto entry = [](int64_t dy, int64_t dx) {
    return (dy + kHeight - 1) * (2 * kWidth - 1) + dx + kWidth - 1;
  };
  OnEveryTarget([&] {
    const Results<float> r = p.Run();
    std::vector<double> d_bias(p.bias.size());
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t h = 0; h < 4; ++h) {
        std::vector<double> sum(kCells);
        ForEachPairOfCells(kHeight, kWidth, [&](int64_t i, int64_t, int64_t dy, int64_t dx) {
          sum[static_cast<size_t>(i)] += std::exp(p.bias_at(b, h, entry(dy, dx)));
        });
        std::vector<std::vector<double>> o(kCells, std::vector<double>(3));
        ForEachPairOfCells(kHeight, kWidth, [&](int64_t i, int64_t j, int64_t dy, int64_t dx) {
          const double weight =
              std::exp(p.bias_at(b, h, entry(dy, dx))) / sum[static_cast<size_t>(i)];
          for (int64_t d = 0; d < 3; ++d) {
            o[static_cast<size_t>(i)][static_cast<size_t>(d)] += weight * p.v.at(b, h / 2, j, d);
          }
        });
        ForEachPairOfCells(kHeight, kWidth, [&](int64_t i, int64_t j, int64_t dy, int64_t dx) {
          const auto row = static_cast<size_t>(i);
          double slope = p.d_lse[static_cast<size_t>((b * 4 + h) * kCells + i)];
          for (int64_t d = 0; d < 3; ++d) {
            slope +=
                p.d_o.at(b, h, i, d) * (p.v.at(b, h / 2, j, d) - o[row][static_cast<size_t>(d)]);
          }
          const double weight = std::exp(p.bias_at(b, h, entry(dy, dx))) / sum[row];
          d_bias[static_cast<size_t>(h * p.bias_size() + entry(dy, dx))] += weight * slope;
        });
        for (int64_t i = 0; i < kCells; ++i) {
          const auto row = static_cast<size_t>((b * 4 + h) * kCells + i);
          EXPECT_NEAR(r.at("lse")[row], std::log(sum[static_cast<size_t>(i)]), 1e-5);
          for (size_t d = 0; d < 3; ++d) {
            EXPECT_NEAR(r.at("o")[row * 3 + d], o[static_cast<size_t>(i)][d], 1e-5);
          }
        }
      }
    }
    EXPECT_LE(Difference(r.at("d_bias"), d_bias), 1e-5);
  });
}

TEST(GridBiasTest, MatchesReference) {
  const GridLayout small({0, 3, 5}, 15, 15);
  const GridLayout large({1, 9, 13}, 118, 118);
  const GridLayout deep({2, 3, 4, 5}, 62, 62);
  const ScatteredLayout scattered;
  const std::pair<const BiasLayout*, int64_t> layouts[] = {
      {&small, 15}, {&large, 118}, {&deep, 62}, {&scattered, 50}};
  for (const auto& [layout, tokens] : layouts) {
    for (const auto kind : {ProblemOptions::kSharedBias, ProblemOptions::kBiasForEachBatch}) {
      ProblemOptions options = {
          .shape = {2, 4, 2, tokens, tokens, 8, 17}, .bias = kind, .layout = layout};
      ExpectKernelsMatchReference(RandomProblem(FindPairFunction("umbral"), options));
      options.left = 20;
      options.key_starts = {0, 1};
      options.key_lengths = {tokens, 12};
      Problem<float> p = RandomProblem(FindPairFunction("dot"), options);
      p.bias_at(0, 1, layout->Entry(tokens - 1, tokens - 2)) = -kInfinity;
      ExpectKernelsMatchReference(p);
    }
  }
}

TEST(GridLayoutTest, ReadsATableOfDifferencesInThreeDimensions) {
  constexpr int64_t kPrefix = 2;
  constexpr int64_t kTokens = kPrefix + 2 * 3 * 4;
  const GridLayout layout({kPrefix, 2, 3, 4}, kTokens, kTokens);
  EXPECT_EQ(layout.table_size(), 3 * 5 * 7);
  // The coordinates of each token, counted up like an odometer.
  std::vector<std::vector<int64_t>> places;
  for (int64_t z = 0; z < 2; ++z) {
    for (int64_t y = 0; y < 3; ++y) {
      for (int64_t x = 0; x < 4; ++x) places.push_back({z, y, x});
    }
  }
  for (int64_t i = 0; i < kTokens; ++i) {
    for (int64_t j = 0; j < kTokens; ++j) {
      int64_t expected = -1;
      if (i >= kPrefix && j >= kPrefix) {
        const std::vector<int64_t>& from = places[static_cast<size_t>(i - kPrefix)];
        const std::vector<int64_t>& to = places[static_cast<size_t>(j - kPrefix)];
        expected = ((to[0] - from[0] + 1) * 5 + to[1] - from[1] + 2) * 7 + to[2] - from[2] + 3;
      }
      EXPECT_EQ(layout.Entry(i, j), expected) << i << " " << j;
    }
  }
}

TEST(GridLayoutTest, RunsFollowEachOther) {
  const GridLayout layouts[] = {GridLayout({3, 4, 5}, 23, 23), GridLayout({0, 6}, 6, 6),
                                GridLayout({1, 3, 1}, 4, 4)};
  const int64_t lengths[] = {23, 6, 4};
  for (size_t n = 0; n < 3; ++n) {
    for (int64_t i = 0; i < lengths[n]; ++i) {
      for (int64_t j = 0; j < lengths[n]; ++j) {
        const int64_t run = layouts[n].RunLength(i, j);
        ASSERT_GE(run, 1);
        const int64_t first = layouts[n].Entry(i, j);
        for (int64_t m = 0; m < std::min(run, lengths[n] - j); ++m) {
          EXPECT_EQ(layouts[n].Entry(i, j + m), first < 0 ? -1 : first + m) << i << " " << j;
        }
      }
    }
  }
  EXPECT_EQ(layouts[0].RunLength(3, 3), 5);  // a whole row of the grid at once
}

TEST(GridLayoutTest, NumbersThatAreNoGridAreErrors) {
  EXPECT_NO_THROW(GridLayout({1, 2, 3}, 7, 7));
  const std::vector<int64_t> grids[] = {
      {},         {7},         {0, 2, 3},
      {-1, 2, 4}, {1, -2, -3}, {1, 0, 3},
      {7, 0},     {8, 1},      {1, int64_t{1} << 32, int64_t{1} << 32, 6}};
  for (const std::vector<int64_t>& grid : grids) EXPECT_THROW(GridLayout(grid, 7, 7), Error);
  EXPECT_THROW(GridLayout({1, 2, 3}, 7, 8), Error);
  EXPECT_THROW(GridLayout({0, 2, 3}, 7, 6), Error);
  EXPECT_THROW(GridLayout({0, 1}, 0, 0), Error);
}

}  // namespace
}  // namespace gnomon::testing
