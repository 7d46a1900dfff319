// Tests certified skipping: the skipped weights of every row sum to less than the tolerance, and
// results are otherwise unchanged.
#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "base/pair_count.h"
#include "core/random_problem.h"
#include "gnomon/attention.h"
#include "gnomon/table_layout.h"
#include "gtest/gtest.h"

namespace gnomon::testing {
namespace {

// Counts visible and computed pairs during its lifetime.
class ScopedCount {
 public:
  ScopedCount() { CountPairs(&count_); }
  ~ScopedCount() { CountPairs(nullptr); }
  ScopedCount(const ScopedCount&) = delete;
  ScopedCount& operator=(const ScopedCount&) = delete;

  double share() const {
    return static_cast<double>(count_.computed.load()) / static_cast<double>(count_.seen.load());
  }

 private:
  PairCount count_;
};

double ShareOf(const std::function<void()>& run) {
  const ScopedCount count;
  run();
  return count.share();
}

class BoundedFunctionTest : public ::testing::TestWithParam<const PairFunction*> {
 protected:
  const PairFunction& function() const { return *GetParam(); }
};

// The pair functions with bounds.
std::vector<const PairFunction*> BoundedFunctions() {
  std::vector<const PairFunction*> bounded;
  for (const PairFunction* function : PairFunctions()) {
    if (function->bounds != nullptr) bounded.push_back(function);
  }
  return bounded;
}

INSTANTIATE_TEST_SUITE_P(All, BoundedFunctionTest, ::testing::ValuesIn(BoundedFunctions()),
                         [](const auto& test) { return std::string(test.param->name); });

// Random scalars as token maps compute them, so that all scalars of a point are consistent.
struct Scalars {
  double values[3] = {0, 0, 0};
};
Scalars RandomScalars(std::string_view name, bool of_query, double height, double any) {
  if (name.starts_with("penumbral")) {
    return {{1 - std::sqrt(1 - height * height), height * height}};
  }
  if (name == "hyperbolic") return {{any, 0.1 + height, 2 * height}};
  if (name == "entailment" && of_query) return {{height * height, 1.5 * height}};
  if (name == "entailment") return {{height * height}};
  if (name == "additive") return {{any}};
  if (name == "lorentz") {
    return {{std::exp(4 * height) - 1, std::exp(-4 * height), std::sinh(4 * height)}};
  }
  return {{height}};
}

TEST_P(BoundedFunctionTest, ValuesLieWithinTheBounds) {
  const PairFunction& f = function();
  ASSERT_NE(f.bounds, nullptr);
  std::mt19937 engine(1);
  std::uniform_real_distribution<double> uniform(0, 1);
  std::normal_distribution<double> normal(0, 2);
  int tight = 0;
  for (int repeat = 0; repeat < 4000; ++repeat) {
    const double spread = std::exp2(-10 * uniform(engine));
    const auto near = [&](double x) {
      return std::clamp(x + spread * (uniform(engine) - 0.5), 1e-9, 1.0);
    };
    const Scalars a = RandomScalars(f.name, true, uniform(engine), normal(engine));
    const double t[3] = {normal(engine), normal(engine), normal(engine)};
    // Draws several keys, and computes the ranges of their g and scalars.
    constexpr int kKeys = 5;
    const double middle = uniform(engine);
    const double any = normal(engine);
    const double g_middle = f.input == PairInput::kSquaredDistance
                                ? std::pow(normal(engine), 2) * uniform(engine)
                                : 3 * normal(engine);
    double gs[kKeys];
    Scalars bs[kKeys];
    double g[2] = {kInfinity, -kInfinity};
    double b[6] = {kInfinity, -kInfinity, kInfinity, -kInfinity, kInfinity, -kInfinity};
    for (int k = 0; k < kKeys; ++k) {
      gs[k] = g_middle + spread * normal(engine);
      if (f.input == PairInput::kSquaredDistance) gs[k] = std::fabs(gs[k]);
      if (f.input == PairInput::kNone) gs[k] = 0;
      bs[k] = RandomScalars(f.name, false, near(middle), any + spread * normal(engine));
      g[0] = std::min(g[0], gs[k]);
      g[1] = std::max(g[1], gs[k]);
      for (int s = 0; s < f.column_scalars; ++s) {
        b[2 * s] = std::min(b[2 * s], bs[k].values[s]);
        b[2 * s + 1] = std::max(b[2 * s + 1], bs[k].values[s]);
      }
    }
    double bounds[2] = {kNan, kNan};
    f.bounds(g, a.values, b, t, bounds);
    for (int k = 0; k < kKeys; ++k) {
      for (int l = 0; l < kKeys; ++l) {
        const double value = f.value(gs[k], a.values, bs[l].values, t);
        const double rounding = 1e-9 * (1 + std::fabs(value));
        ASSERT_GE(value, bounds[0] - rounding) << repeat;
        ASSERT_LE(value, bounds[1] + rounding) << repeat;
      }
    }
    if (bounds[1] - bounds[0] < 8) ++tight;
  }
  // Bounds must sometimes be tight, because loose bounds would never allow skipping.
  EXPECT_GT(tight, 400);
}

// Sets offset biases that decrease linearly with distance or, if `odd`, increase with the offset.
// The slope depends on the head.
void SetSlopes(Problem<float>& p, float slope, bool odd = false) {
  const AttentionShape& n = p.options.shape;
  const int64_t tables = p.bias_stride() == 0 ? 1 : n.batch;
  for (int64_t b = 0; b < tables; ++b) {
    for (int64_t h = 0; h < n.heads; ++h) {
      for (int64_t e = 0; e < p.bias_size(); ++e) {
        const auto offset = static_cast<float>(e - (n.queries - 1) - p.options.query_offset);
        p.bias_at(b, h, e) =
            slope / static_cast<float>(h + 1) * (odd ? offset : -std::fabs(offset));
      }
    }
  }
}

// Returns the score of a pair in double precision: (factor * f + biases) * temperature.
double ScoreOf(const Problem<double>& p, int64_t b, int64_t h, int64_t i, int64_t j) {
  const AttentionShape& n = p.options.shape;
  const PairFunction& f = p.function;
  const int64_t group = n.heads / n.key_heads;
  double g = 0;
  for (int64_t d = 0; d < n.dim; ++d) {
    const double x = p.x.at(b, h, i, d);
    const double y = p.y.at(b, h / group, j, d);
    g += f.input == PairInput::kInnerProduct ? x * y : (x - y) * (x - y);
  }
  const auto entry = [](const std::vector<double>& v, int64_t at) {
    return v[static_cast<size_t>(at)];
  };
  double scalars_a[3] = {};
  double scalars_b[3] = {};
  double scalars_t[3] = {};
  for (int s = 0; s < f.row_scalars; ++s) {
    scalars_a[s] = entry(p.row, ((s * n.batch + b) * n.heads + h) * n.queries + i);
  }
  for (int s = 0; s < f.column_scalars; ++s) {
    scalars_b[s] = entry(p.column, ((s * n.batch + b) * n.key_heads + h / group) * n.keys + j);
  }
  for (int s = 0; s < f.head_scalars; ++s) scalars_t[s] = entry(p.head, s * n.heads + h);
  double score = entry(p.factor, h) * f.value(g, scalars_a, scalars_b, scalars_t);
  if (!p.bias.empty()) {
    score += entry(p.bias, b * p.bias_stride() + h * p.bias_size() + n.queries - 1 + j - i);
  }
  const int64_t head = b * n.heads + h;
  if (!p.key_bias.empty()) score += entry(p.key_bias, head * n.keys + j);
  if (!p.key_bias_low.empty()) {
    score +=
        entry(p.key_bias_low, head * n.keys + j) - entry(p.key_bias_base, head * n.queries + i);
  }
  if (!p.temperature.empty()) score *= entry(p.temperature, head * n.queries + i);
  return score;
}

// Returns the weights, in double precision, of all pairs. They add up to 1 in each row that sees
// keys.
std::vector<double> WeightsOf(const Problem<float>& problem) {
  const Problem<double> p = problem.InDouble();
  const AttentionShape& n = p.options.shape;
  std::vector<double> weights(static_cast<size_t>(n.batch * n.heads * n.queries * n.keys));
  auto row = weights.begin();
  for (int64_t b = 0; b < n.batch; ++b) {
    for (int64_t h = 0; h < n.heads; ++h) {
      for (int64_t i = 0; i < n.queries; ++i, row += n.keys) {
        for (int64_t j = 0; j < n.keys; ++j) {
          row[j] = Sees(p.options, b, i, j) ? ScoreOf(p, b, h, i, j) : -kInfinity;
        }
        const double top = n.keys > 0 ? *std::max_element(row, row + n.keys) : -kInfinity;
        double all = 0;
        for (int64_t j = 0; j < n.keys; ++j) {
          row[j] = top == -kInfinity ? 0.0 : std::exp(row[j] - top);
          all += row[j];
        }
        for (int64_t j = 0; j < n.keys && all > 0; ++j) row[j] /= all;
      }
    }
  }
  return weights;
}

// Returns the largest sum in a row of the weights of the pairs for which left_out(b, h, i, j) is
// true.
template <class LeftOut>
double LargestLeftOut(const std::vector<double>& weights, const AttentionShape& n,
                      const LeftOut& left_out) {
  double largest = 0;
  auto weight = weights.begin();
  for (int64_t b = 0; b < n.batch; ++b) {
    for (int64_t h = 0; h < n.heads; ++h) {
      for (int64_t i = 0; i < n.queries; ++i) {
        double left = 0;
        for (int64_t j = 0; j < n.keys; ++j, ++weight) {
          if (left_out(b, h, i, j)) left += *weight;
        }
        largest = std::max(largest, left);
      }
    }
  }
  return largest;
}

// v_j and dO_i are unit vectors, so o_ij and the gradient of v_j in column i both equal p_ij. They
// are 0 if a pair was skipped or has negligible weight.
void SetUnitVectors(Problem<float>& p) {
  const AttentionShape& n = p.options.shape;
  for (int64_t b = 0; b < n.batch; ++b) {
    for (int64_t e = 0; e < n.value_dim; ++e) {
      for (int64_t h = 0; h < n.heads; ++h) {
        for (int64_t i = 0; i < n.queries; ++i) p.d_o.at(b, h, i, e) = e == i ? 1.0f : 0.0f;
      }
      for (int64_t h = 0; h < n.key_heads; ++h) {
        for (int64_t j = 0; j < n.keys; ++j) p.v.at(b, h, j, e) = e == j ? 1.0f : 0.0f;
      }
    }
  }
}

struct SkippingCase {
  const char* name;
  ProblemOptions options;
  float slope = 0.4f;
  bool odd = false;
  float factor = 1;    // multiplies the factors of the problem
  float norm = 1;      // multiplies the tokens
  double most = 0.97;  // maximum fraction of pairs to compute
};

std::vector<SkippingCase> SkippingCases() {
  constexpr auto kShared = ProblemOptions::kSharedBias;
  constexpr auto kEach = ProblemOptions::kBiasForEachBatch;
  const AttentionShape square = {1, 2, 2, 560, 560, 8, 560};
  return {
      {"Causal", {.shape = square, .right = 0, .bias = kShared}},
      {"Full", {.shape = square, .bias = kShared}},
      {"GrowingFull", {.shape = square, .bias = kShared}, 0.4f, true},
      {"NegativeFactor", {.shape = square, .right = 0, .bias = kShared}, 0.4f, false, -1.0f},
      {"LargeNorms", {.shape = square, .right = 0, .bias = kShared}, 0.8f, false, 1.0f, 3.0f, 0.99},
      {"Coarse", {.shape = square, .right = 0, .bias = kShared, .tolerance = 1e-2}, 0.05f},
      {"Gqa", {.shape = {2, 4, 2, 520, 520, 8, 520}, .right = 0, .bias = kEach, .padded = true}},
      {"KeyBias", {.shape = square, .right = 0, .key_bias = true, .key_bias_base = true}},
      {"BiasAndKeyBias", {.shape = square, .bias = kShared, .key_bias = true}},
      {"Temperature", {.shape = square, .right = 0, .bias = kShared, .temperature = true}},
      {"FewQueries",
       {.shape = {1, 2, 1, 9, 2100, 8, 2100}, .right = 0, .query_offset = 2091, .bias = kShared},
       0.2f},
  };
}

Problem<float> SkippingProblem(const PairFunction& f, const SkippingCase& c) {
  Problem<float> p = RandomProblem(f, c.options);
  if (c.options.bias != ProblemOptions::kNoBias) SetSlopes(p, c.slope, c.odd);
  for (float& factor : p.factor) factor *= c.factor;
  for (Array<float>* tokens : {&p.x, &p.y}) {
    tokens->ForEach([&](float& element) { element *= c.norm; });
  }
  if (c.options.key_bias) {
    // The key bias is a running sum, like that of a forget gate.
    const AttentionShape& n = p.options.shape;
    for (int64_t row = 0; row < n.batch * n.heads; ++row) {
      for (int64_t j = 0; j < n.keys; ++j) {
        p.key_bias[static_cast<size_t>(row * n.keys + j)] =
            c.slope * static_cast<float>(j) - 100.0f;
      }
      for (int64_t i = 0; !p.key_bias_base.empty() && i < n.queries; ++i) {
        p.key_bias_base[static_cast<size_t>(row * n.queries + i)] = c.slope * static_cast<float>(i);
      }
    }
  }
  return p;
}

TEST_P(BoundedFunctionTest, WhatIsLeftOutIsLessThanTheTolerance) {
  size_t count = 0;
  for (const SkippingCase& c : SkippingCases()) {
    if (!RunsWith(function(), count++)) continue;
    SCOPED_TRACE(c.name);
    Problem<float> p = SkippingProblem(function(), c);
    SetUnitVectors(p);
    const AttentionShape& n = p.options.shape;
    const bool few = n.queries < n.keys;
    Results<float> results;
    const double share =
        ShareOf([&] { results = few ? p.Forward() : p.Run(SerialExecutor(), "d_v"); });
    // With a negated factor, large distances raise scores, which may outweigh the biases.
    if (c.factor > 0) {
      EXPECT_LT(share, c.most);
    }
    const std::vector<float>& o = results.at("o");
    const std::vector<double> weights = WeightsOf(p);
    EXPECT_LT(LargestLeftOut(weights, n,
                             [&](int64_t b, int64_t h, int64_t i, int64_t j) {
                               const int64_t row = (b * n.heads + h) * n.queries + i;
                               return o[static_cast<size_t>(row * n.value_dim + j)] == 0.0f;
                             }),
              p.options.tolerance);
    if (few) continue;
    // If heads share keys, d_v is a sum over these heads and does not show single weights.
    if (n.heads > n.key_heads) continue;
    const std::vector<float>& d_v = results.at("d_v");
    EXPECT_LT(LargestLeftOut(weights, n,
                             [&](int64_t b, int64_t h, int64_t i, int64_t j) {
                               const int64_t key = (b * n.key_heads + h) * n.keys + j;
                               return d_v[static_cast<size_t>(key * n.value_dim + i)] == 0.0f;
                             }),
              p.options.tolerance);
  }
}

// All outputs and gradients must equal those of a call without skipping, and those of the
// reference.
TEST_P(BoundedFunctionTest, ResultsAreTheSame) {
  static const OffsetLayout layout(9, 9, OffsetLayout::Far::kClip);
  constexpr auto kShared = ProblemOptions::kSharedBias;
  const AttentionShape square = {1, 2, 1, 700, 700, 17, 9};
  const ProblemOptions all[] = {
      {.shape = square, .right = 0, .bias = kShared, .dropout = 0.3},
      {.shape = square, .left = 400, .right = 300, .bias = kShared, .padded = true},
      {.shape = square,
       .right = 0,
       .query_segments = Documents(1, 700, 330),
       .key_segments = Documents(1, 700, 330),
       .bias = kShared},
      {.shape = {2, 2, 1, 600, 800, 17, 9},
       .key_starts = {70, 0},
       .key_lengths = {800, 500},
       .query_offset = 100,
       .bias = kShared,
       .temperature = true},
      {.shape = square,
       .right = 0,
       .bias = kShared,
       .pair_mask = {true, true, true},
       .relative = &layout,
       .relative_heads = true},
      {.shape = square, .chunks = {200, 1, 1}, .bias = kShared, .key_bias = true},
      // There are rows before all keys, rows that see few keys, and rows after all keys.
      {.shape = {1, 2, 1, 900, 500, 17, 9},
       .left = 600,
       .right = 0,
       .query_offset = -100,
       .bias = kShared},
      // There are many heads with few queries.
      {.shape = {1, 32, 1, 20, 1500, 17, 9}, .right = 0, .query_offset = 1480, .bias = kShared},
      {.shape = {2, 2, 1, 9, 5000, 17, 9},
       .key_starts = {0, 1111},
       .key_lengths = {5000, 4000},
       .query_offset = 4000,
       .bias = kShared},
  };
  size_t count = 0;
  for (const ProblemOptions& options : all) {
    if (!RunsWith(function(), count++)) continue;
    SCOPED_TRACE(::testing::PrintToString(options));
    Problem<float> p = SkippingProblem(function(), {"", options, 0.5f});
    Results<float> results;
    const double share = ShareOf([&] { results = p.Run(); });
    if (!options.pair_mask.exists) {
      EXPECT_LT(share, 0.97);
    }
    const Results<double> expected = p.InDouble().Run();
    ExpectClose(results, expected, 5e-5);
    p.options.tolerance = 0;
    EXPECT_EQ(ShareOf([&] { ExpectClose(p.Run(), expected, 5e-5); }), 1);
  }
}

// For packed documents, the forward pass computes only the pairs within documents. The backward
// pass also computes at most part of a tile at both ends of each document.
TEST(SegmentsTest, TilesBetweenThemAreSkipped) {
  const int64_t lengths[] = {300, 37, 1, 520, 142};
  for (const int64_t group : {1, 4}) {
    std::vector<int32_t> segments;
    int64_t pairs = 0;
    int64_t whole_tiles = 0;
    for (const int64_t length : lengths) {
      segments.insert(segments.end(), static_cast<size_t>(length),
                      static_cast<int32_t>(segments.size()) * (length % 2 == 0 ? 1 : -1));
      pairs += 4 * length * length;
      // Blocks have 48 rows and at most 192 keys.
      whole_tiles += 4 * (length + 2 * 48) * (length + 2 * 192);
    }
    Problem<float> p =
        RandomProblem(FindPairFunction("dot"), {.shape = {1, 4, 4 / group, 1000, 1000, 8, 8},
                                                .query_segments = segments,
                                                .key_segments = segments});
    PairCount forward;
    CountPairs(&forward);
    p.Forward();
    PairCount both;
    CountPairs(&both);
    p.Run();
    CountPairs(nullptr);
    EXPECT_EQ(forward.computed.load(), pairs);
    EXPECT_LE(both.computed.load() - pairs, whole_tiles);
  }
}

// A row's result is bitwise independent of hidden tokens, although rows share blocks and tiles of
// keys.
TEST_P(BoundedFunctionTest, WhatRowsDoNotSeeChangesNoBit) {
  constexpr auto kShared = ProblemOptions::kSharedBias;
  Problem<float> p = SkippingProblem(
      function(), {"", {.shape = {1, 2, 2, 900, 900, 8, 8}, .right = 0, .bias = kShared}, 0.3f});
  for (const int64_t changed : {1, 200, 600, 611, 767, 768, 830}) {
    SCOPED_TRACE(changed);
    Problem<float> q = p;
    const AttentionShape& n = q.options.shape;
    for (int64_t h = 0; h < n.heads; ++h) {
      for (int64_t t = changed; t < n.keys; ++t) {
        for (int64_t e = 0; e < q.options.shape.dim; ++e) {
          q.x.at(0, h, t, e) *= 7;
          q.y.at(0, h, t, e) *= -5;
        }
        for (int64_t e = 0; e < n.value_dim; ++e) q.v.at(0, h, t, e) = t % 2 == 0 ? kNan : 1e6f;
      }
    }
    double share = 0;
    Results<float> before;
    Results<float> after;
    share = ShareOf([&] { before = p.Forward(); });
    after = q.Forward();
    EXPECT_LT(share, 0.9);
    for (int64_t h = 0; h < n.heads; ++h) {
      for (int64_t i = 0; i < changed; ++i) {
        const auto row = static_cast<size_t>(h * n.queries + i);
        ASSERT_EQ(before.at("lse")[row], after.at("lse")[row]) << h << ' ' << i;
        for (size_t e = 0; e < 8; ++e) {
          ASSERT_EQ(before.at("o")[row * 8 + e], after.at("o")[row * 8 + e]) << h << ' ' << i;
        }
      }
    }
  }
}

// Tests the same for windows, whose tiles start with keys that are hidden from some rows. The
// tolerance is large, so that a difference in skipping would show.
TEST_P(BoundedFunctionTest, WhatIsOutsideTheWindowChangesNoBit) {
  constexpr int64_t kLeft = 280;
  const Problem<float> p = SkippingProblem(function(), {"",
                                                        {.shape = {1, 1, 1, 900, 900, 8, 8},
                                                         .left = kLeft,
                                                         .right = 0,
                                                         .bias = ProblemOptions::kSharedBias,
                                                         .tolerance = 1e-2},
                                                        0.05f});
  const AttentionShape& n = p.options.shape;
  const Results<float> before = p.Forward();
  for (const int64_t row : {300, 430, 530, 650, 700, 880}) {
    SCOPED_TRACE(row);
    Problem<float> q = p;
    for (int64_t t = 0; t < n.keys; ++t) {
      if (t >= row - kLeft && t <= row) continue;
      for (int64_t e = 0; e < n.dim; ++e) q.y.at(0, 0, t, e) *= 50;
      for (int64_t e = 0; e < n.value_dim; ++e) q.v.at(0, 0, t, e) = kNan;
    }
    const Results<float> after = q.Forward();
    for (int64_t e = 0; e < n.value_dim; ++e) {
      const auto at = static_cast<size_t>(row * n.value_dim + e);
      ASSERT_EQ(before.at("o")[at], after.at("o")[at]);
    }
  }
}

TEST_P(BoundedFunctionTest, IsTheSameForAnyNumberOfWorkers) {
  constexpr auto kShared = ProblemOptions::kSharedBias;
  for (const AttentionShape shape :
       {AttentionShape{2, 4, 2, 700, 700, 16, 16}, AttentionShape{1, 4, 2, 9, 9000, 16, 16}}) {
    const Problem<float> p = SkippingProblem(
        function(),
        {"",
         {.shape = shape, .right = 0, .query_offset = shape.keys - shape.queries, .bias = kShared},
         0.3f});
    Results<float> serial;
    EXPECT_LT(ShareOf([&] { serial = p.Run(); }), 0.9);
    ExpectSame(p.Run(ThreadExecutor(3)), serial);
  }
}

// Results must be non-finite in the same places with and without skipping.
void ExpectSameNonFinite(const Results<float>& actual, const Results<float>& expected) {
  for (const auto& [name, values] : expected) {
    const std::vector<float>& others = actual.at(name);
    size_t different = 0;
    for (size_t n = 0; n < values.size(); ++n) {
      different += std::isfinite(values[n]) != std::isfinite(others[n]) ? 1 : 0;
    }
    EXPECT_EQ(different, 0u) << name;
  }
}

TEST_P(BoundedFunctionTest, WhatIsNotFiniteReachesWhatItReachesWithout) {
  constexpr auto kShared = ProblemOptions::kSharedBias;
  const AttentionShape few = {1, 2, 2, 16, 4000, 8, 8};
  const Problem<float> square = SkippingProblem(
      function(),
      {"",
       {.shape = {1, 2, 2, 700, 700, 8, 8}, .right = 0, .bias = kShared, .key_bias = true},
       0.5f});
  const Problem<float> decoding = SkippingProblem(
      function(), {"", {.shape = few, .right = 0, .query_offset = 3984, .bias = kShared}, 0.5f});
  for (const Problem<float>* problem : {&square, &decoding}) {
    const AttentionShape& n = problem->options.shape;
    const int64_t key = n.keys / 7;
    for (const float poison : {kNan, kInfinity, -kInfinity}) {
      SCOPED_TRACE(poison);
      const auto expect = [&](const char* what, const std::function<void(Problem<float>&)>& set) {
        SCOPED_TRACE(what);
        Problem<float> p = *problem;
        set(p);
        const Results<float> results = p.Run();
        p.options.tolerance = 0;
        ExpectSameNonFinite(results, p.Run());
      };
      expect("value", [&](Problem<float>& p) { p.v.at(0, 1, key, 3) = poison; });
      if (n.dim > 0) {
        expect("key", [&](Problem<float>& p) { p.y.at(0, 1, key, 3) = poison; });
        expect("query", [&](Problem<float>& p) { p.x.at(0, 1, n.queries - 1, 3) = poison; });
      }
      expect("gradient", [&](Problem<float>& p) { p.d_o.at(0, 1, n.queries - 1, 3) = poison; });
      expect("bias", [&](Problem<float>& p) { p.bias_at(0, 1, 20) = poison; });
      expect("factor", [&](Problem<float>& p) { p.factor[1] = poison; });
      if (!problem->key_bias.empty()) {
        expect("key bias",
               [&](Problem<float>& p) { p.key_bias[static_cast<size_t>(n.keys + key)] = poison; });
      }
      for (int s = 0; s < function().column_scalars; ++s) {
        expect("scalar", [&](Problem<float>& p) { p.column_at(s, 0, 1, key) = poison; });
      }
    }
  }
}

// In these cases, no tile is provably negligible.
TEST(SkippingTest, LeavesNothingOut) {
  constexpr auto kShared = ProblemOptions::kSharedBias;
  const PairFunction& dot = FindPairFunction("dot");
  const AttentionShape square = {1, 2, 2, 700, 700, 8, 8};
  const auto share = [](const Problem<float>& p) { return ShareOf([&] { p.Run(); }); };
  // The biases do not outweigh such large scores.
  EXPECT_EQ(
      share(SkippingProblem(dot, {"", {.shape = square, .bias = kShared}, 0.4f, false, 1e4f})), 1);
  EXPECT_EQ(
      share(SkippingProblem(dot, {"", {.shape = square, .bias = kShared}, 0.4f, false, 1, 1e10f})),
      1);
  EXPECT_EQ(share(SkippingProblem(dot, {"", {.shape = square, .right = 0}})), 1);
  EXPECT_EQ(share(SkippingProblem(
                dot, {"", {.shape = square, .bias = kShared, .pair_bias = {true, true, true}}})),
            1);
  EXPECT_EQ(share(SkippingProblem(dot, {"", {.shape = square, .bias = kShared, .tolerance = 0}})),
            1);
  static const OffsetLayout near(4, 4, OffsetLayout::Far::kClip);
  EXPECT_EQ(share(SkippingProblem(dot, {"",
                                        {.shape = square,
                                         .bias = kShared,
                                         .relative = &near,
                                         .relative_dim = 0,
                                         .relative_values = false,
                                         .relative_key_dim = 8}})),
            1);
  // With few rows, the forward pass does not check for skipping.
  const Problem<float> few = SkippingProblem(
      dot,
      {"", {.shape = {1, 2, 2, 3, 4000, 8, 8}, .right = 0, .query_offset = 3997, .bias = kShared}});
  EXPECT_EQ(ShareOf([&] { few.Forward(); }), 1);
  Problem<float> negative =
      SkippingProblem(dot, {"", {.shape = square, .bias = kShared, .temperature = true}});
  for (float& temperature : negative.temperature) temperature *= -1;
  EXPECT_EQ(share(negative), 1);
  // A soft cap raises low scores, so biases cannot prove that they are negligible.
  EXPECT_EQ(share(SkippingProblem(dot, {"", {.shape = square, .bias = kShared, .softcap = 20}})),
            1);
  for (const PairFunction* f : TestPairFunctions()) {
    EXPECT_EQ(f->bounds, nullptr);
    EXPECT_EQ(
        share(SkippingProblem(*f, {"", {.shape = {1, 2, 2, 700, 700, 9, 8}, .bias = kShared}})), 1)
        << f->name;
  }
}

// The tile of a distant key with a large norm is computed, but it does not cause other tiles to be
// computed.
TEST(SkippingTest, ComputesAKeyOfALargeNorm) {
  Problem<float> p = SkippingProblem(
      FindPairFunction("dot"),
      {"",
       {.shape = {1, 1, 1, 4000, 4000, 8, 8}, .right = 0, .bias = ProblemOptions::kSharedBias},
       0.2f});
  const double before = ShareOf([&] { p.Run(); });
  for (int64_t e = 0; e < 8; ++e) p.y.at(0, 0, 5, e) = 800;
  const double after = ShareOf([&] { p.Run(); });
  EXPECT_LT(before, 0.25);
  EXPECT_GT(after, before);
  EXPECT_LT(after, 0.45);
  ExpectClose(p.Run(), p.InDouble().Run(), 5e-5);
}

// The weight of each tile is below the tolerance, but the weights of several tiles together exceed
// it.
TEST(SkippingTest, TilesTogetherStayBelowTheTolerance) {
  constexpr int64_t kLength = 1100;
  constexpr int64_t kNear = 64;
  // The weight of a tile relative to the tolerance, per head.
  constexpr double kShares[] = {0.9, 0.45, 0.1};
  constexpr int64_t kHeads = std::size(kShares);
  Problem<float> p = SkippingProblem(FindPairFunction("dot"),
                                     {"",
                                      {.shape = {1, kHeads, kHeads, kLength, kLength, 8, kLength},
                                       .right = 0,
                                       .bias = ProblemOptions::kSharedBias,
                                       .tolerance = 1e-2}});
  SetUnitVectors(p);
  for (Array<float>* tokens : {&p.x, &p.y}) tokens->ForEach([](float& element) { element = 0; });
  for (int64_t h = 0; h < kHeads; ++h) {
    const double far = std::log(kShares[h] * p.options.tolerance * kNear / 256);
    for (int64_t e = 0; e < p.bias_size(); ++e) {
      p.bias_at(0, h, e) = kLength - 1 - e < kNear ? 0.0f : static_cast<float>(far);
    }
  }
  const std::vector<double> weights = WeightsOf(p);
  OnEveryTarget([&] {
    Results<float> results;
    EXPECT_LT(ShareOf([&] { results = p.Run(SerialExecutor(), "d_v"); }), 0.97);
    const auto is_zero = [&](const char* name, int64_t h, int64_t row, int64_t column) {
      const int64_t at = (h * kLength + row) * kLength + column;
      return results.at(name)[static_cast<size_t>(at)] == 0.0f;
    };
    EXPECT_LT(LargestLeftOut(
                  weights, p.options.shape,
                  [&](int64_t, int64_t h, int64_t i, int64_t j) { return is_zero("o", h, i, j); }),
              p.options.tolerance);
    EXPECT_LT(LargestLeftOut(weights, p.options.shape,
                             [&](int64_t, int64_t h, int64_t i, int64_t j) {
                               return is_zero("d_v", h, j, i);
                             }),
              p.options.tolerance);
  });
}

TEST(SkippingTest, EveryInstructionSet) {
  constexpr auto kShared = ProblemOptions::kSharedBias;
  for (const char* name : {"dot", "penumbral", "laplacian"}) {
    const Problem<float> p = SkippingProblem(
        FindPairFunction(name),
        {"", {.shape = {1, 2, 1, 600, 600, 17, 9}, .right = 0, .bias = kShared}, 0.5f});
    const Problem<float> few = SkippingProblem(
        FindPairFunction(name),
        {"",
         {.shape = {1, 4, 1, 4, 3000, 17, 9}, .right = 0, .query_offset = 2996, .bias = kShared},
         0.5f});
    const Results<double> expected = p.InDouble().Run();
    const Results<double> expected_few = few.InDouble().Run();
    OnEveryTarget([&] {
      EXPECT_LT(ShareOf([&] { ExpectClose(p.Run(), expected, 5e-5); }), 0.9);
      EXPECT_LT(ShareOf([&] { ExpectClose(few.Run(), expected_few, 5e-5); }), 0.9);
    });
  }
}

TEST(SkippingTest, RefusesAToleranceThatIsNone) {
  for (const double tolerance : {-1e-9, 1.0, std::nan("")}) {
    const Problem<float> p = RandomProblem(
        FindPairFunction("dot"), {.shape = {1, 1, 1, 2, 2, 2, 2}, .tolerance = tolerance});
    EXPECT_THROW(p.Forward(), Error);
    EXPECT_THROW(p.InDouble().Forward(), Error);
  }
}

}  // namespace
}  // namespace gnomon::testing
