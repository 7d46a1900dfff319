// Tests biases of a token grid, which have one entry per difference of grid cells.
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/random_problem.h"
#include "gnomon/attention.h"
#include "gnomon/table_layout.h"
#include "gtest/gtest.h"

namespace gnomon::testing {
namespace {

// Loops over all pairs of grid cells, as in the definition of the layout, without index arithmetic.
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

// The factors are 0, so the logits are the biases. The weights must be the softmax of the biases,
// and the gradient of the biases must be that of the softmax, summed over all pairs with the same
// (dy, dx).
TEST(GridBiasTest, IsATableOfDifferencesOfCells) {
  constexpr int64_t kHeight = 3;
  constexpr int64_t kWidth = 5;
  constexpr int64_t kCells = kHeight * kWidth;
  const GridLayout layout({kHeight, kWidth}, 0, GridLayout::Kind::kTable);
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
  const GridLayout small({3, 5}, 0, GridLayout::Kind::kTable);
  const GridLayout large({9, 13}, 1, GridLayout::Kind::kTable);
  for (const GridLayout* layout : {&small, &large}) {
    for (const auto kind : {ProblemOptions::kSharedBias, ProblemOptions::kBiasForEachBatch}) {
      const int64_t tokens = layout->tokens();
      ProblemOptions options = {
          .shape = {2, 4, 2, tokens, tokens, 8, 17}, .bias = kind, .layout = layout};
      ExpectKernelsMatchReference(RandomProblem(FindPairFunction("umbral"), options));
      options.left = 20;
      options.key_starts = {0, 1};
      options.key_lengths = {tokens, 12};
      Problem<float> p = RandomProblem(FindPairFunction("dot"), options);
      p.bias_at(0, 1, layout->size() / 2 - 1) = -kInfinity;
      ExpectKernelsMatchReference(p);
    }
  }
}

}  // namespace
}  // namespace gnomon::testing
