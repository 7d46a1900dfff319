// Compares causal sums with their formula, on every instruction set.
#include "core/causal_sums.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

namespace gnomon {
namespace {

std::vector<float> Random(int64_t count, std::mt19937& generator) {
  std::normal_distribution<float> normal;
  std::vector<float> numbers(static_cast<size_t>(count));
  for (float& number : numbers) number = normal(generator);
  return numbers;
}

double Map(Feature feature, double a) {
  if (feature == Feature::kElu) return a > 0 ? a + 1 : std::exp(a);
  return feature == Feature::kRelu ? std::max(a, 0.0) : a;
}

struct Case {
  int64_t rows;
  int64_t dim;
  int64_t value_dim;
  Feature feature;
  bool reverse;
  bool divided;
};

void CheckCase(const Case& c) {
  std::mt19937 generator(7);
  CausalSums n;
  n.heads = 2;
  n.batch = n.key_heads = 1;
  n.rows = c.rows;
  n.dim = c.dim;
  n.value_dim = c.value_dim;
  n.feature = c.feature;
  n.reverse = c.reverse;
  const std::vector<float> x = Random(2 * c.rows * c.dim, generator);
  const std::vector<float> y = Random(c.rows * c.dim, generator);
  const std::vector<float> z = Random(c.rows * c.value_dim, generator);
  std::vector<float> out(static_cast<size_t>(2 * c.rows * c.value_dim));
  std::vector<float> denominator(static_cast<size_t>(2 * c.rows));
  n.x = {x.data(), {0, c.rows * c.dim, c.dim}};
  n.y = {y.data(), {0, 0, c.dim}};
  n.z = {z.data(), {0, 0, c.value_dim}};
  n.out = {out.data(), {0, c.rows * c.value_dim, c.value_dim}};
  if (c.divided) n.denominator = denominator.data();
  SumCausally(n, ThreadExecutor(2));

  for (int64_t row = 0; row < 2 * c.rows; ++row) {
    const int64_t i = row % c.rows;
    std::vector<double> sums(static_cast<size_t>(c.value_dim));
    double total = 0;
    double size = 0;
    for (int64_t j = c.reverse ? i : 0; j < (c.reverse ? c.rows : i + 1); ++j) {
      double product = 0;
      for (int64_t e = 0; e < c.dim; ++e) {
        product += Map(c.feature, x[row * c.dim + e]) * Map(c.feature, y[j * c.dim + e]);
      }
      total += product;
      size += std::abs(product);
      for (int64_t e = 0; e < c.value_dim; ++e) sums[e] += product * z[j * c.value_dim + e];
    }
    if (c.divided) {
      EXPECT_NEAR(denominator[row], total, 1e-5 * size);
    }
    for (int64_t e = 0; e < c.value_dim; ++e) {
      const double expected = !c.divided ? sums[e] : total == 0 ? 0.0 : sums[e] / total;
      const double tolerance = 1e-5 * (!c.divided ? size + 1 : 1.0);
      EXPECT_NEAR(out[row * c.value_dim + e], expected, tolerance) << "row " << row;
    }
  }
}

TEST(CausalSumsTest, IsTheFormulaInEveryInstructionSet) {
  const std::string before = CurrentTarget();
  for (const std::string& target : Targets()) {
    SCOPED_TRACE(target);
    SetTarget(target);
    for (const int64_t rows : {1, 63, 64, 130, 1100}) {
      for (const bool reverse : {false, true}) {
        CheckCase({rows, 5, 19, Feature::kNone, reverse, false});
        CheckCase({rows, 16, 16, Feature::kNone, reverse, false});
      }
      CheckCase({rows, 7, 3, Feature::kElu, false, true});
      CheckCase({rows, 16, 64, Feature::kRelu, false, true});
    }
  }
  SetTarget(before);
}

TEST(CausalSumsTest, DoesNotDependOnTheNumberOfWorkers) {
  std::mt19937 generator(3);
  constexpr int64_t kRows = 1500;
  constexpr int64_t kDim = 8;
  const std::vector<float> x = Random(kRows * kDim, generator);
  std::vector<float> one(x.size());
  std::vector<float> three(x.size());
  CausalSums n;
  n.batch = n.heads = n.key_heads = 1;
  n.rows = kRows;
  n.dim = n.value_dim = kDim;
  n.x = n.y = n.z = {x.data(), {0, 0, kDim}};
  n.out = {one.data(), {0, 0, kDim}};
  SumCausally(n, SerialExecutor());
  n.out.data = three.data();
  SumCausally(n, ThreadExecutor(3));
  EXPECT_EQ(one, three);
}

}  // namespace
}  // namespace gnomon
