// Tests properties of the CUDA kernels other than accuracy, in the emulator.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <exception>
#include <limits>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "cuda_problem.h"
#include "gnomon/table_layout.h"
#include "gtest/gtest.h"
#include "launched_kernels.h"

namespace gnomon::testing {
namespace {

class RulesTest : public ::testing::TestWithParam<const PairFunction*> {
 protected:
  const PairFunction& function() const { return *GetParam(); }
};

INSTANTIATE_TEST_SUITE_P(All, RulesTest, ::testing::ValuesIn(EmulatedPairFunctions()),
                         [](const auto& test) { return std::string(test.param->name); });

// Properties of the engine: one function for each kind of input and scalars.
class EngineRulesTest : public ::testing::TestWithParam<const char*> {
 protected:
  static const PairFunction& function() { return EmulatedPairFunction(GetParam()); }
};

INSTANTIATE_TEST_SUITE_P(Kinds, EngineRulesTest,
                         ::testing::Values("additive", "dot", "every_function", "laplacian",
                                           "umbral"),
                         [](const auto& test) { return std::string(test.param); });

const ProblemOptions kSome = {
    .shape = {2, 4, 2, 37, 70, 17, 16}, .right = 40, .bias = ProblemOptions::kSharedBias};

// Results are bitwise equal for any order of threads, for early or late copies, and for any set of
// requested gradients.
TEST_P(EngineRulesTest, ResultsAreTheSameInAnyOrder) {
  size_t n = 0;
  for (const Element element : kElements) {
    SCOPED_TRACE(NameOf(element));
    ProblemOptions options = kSome;
    if (element != Element::kBFloat16) options.shape.dim = 16;
    options.dropout = element == Element::kFloat16 ? 0.3 : 0;
    const Problem<float> p = ProblemOf(function(), options, element);
    const Results<float> first = RunCuda(p, {.element = element});
    for (const size_t order : {3 + n, size_t{7} - n}) {
      ExpectSame(RunCuda(p, {.element = element, .order = Order(order)}), first);
    }
    ++n;
  }
}

TEST_P(EngineRulesTest, GradientsMayBeLeftOut) {
  const Problem<float> p = ProblemOf(function(), kSome, Element::kBFloat16);
  const CudaOptions how = {.element = Element::kBFloat16};
  const Results<float> all = RunCuda(p, how);
  for (const auto& [name, values] : all) {
    if (!name.starts_with("d_")) continue;
    CudaOptions one = how;
    one.only = name;
    ExpectSame(RunCuda(p, one), all);
  }
}

TEST_P(EngineRulesTest, GradientOfLseIsOptional) {
  Problem<float> p = ProblemOf(function(), kSome, Element::kFloat32);
  std::fill(p.d_lse.begin(), p.d_lse.end(), 0.0f);
  const Results<float> with_zeros = RunCuda(p, {});
  p.pass_d_lse = false;
  ExpectSame(RunCuda(p, {}), with_zeros);
}

TEST_P(EngineRulesTest, RowsWithoutKeysAreZero) {
  // All queries are before the first key, or all keys are outside the windows.
  for (const int64_t offset : {-100, 300}) {
    for (const Element element : kElements) {
      const Problem<float> p = ProblemOf(
          function(),
          {.shape = {1, 2, 2, 20, 30, 17, 17}, .left = 10, .right = 0, .query_offset = offset},
          element);
      for (const auto& [name, values] : RunCuda(p, {.element = element})) {
        const float expected = name == "lse" ? -kInfinity : 0.0f;
        for (const float value : values) ASSERT_EQ(value, expected) << name;
      }
    }
  }
}

TEST_P(EngineRulesTest, InfiniteBiasesMask) {
  Problem<float> p = ProblemOf(
      function(), {.shape = {2, 3, 1, 29, 50, 17, 17}, .bias = ProblemOptions::kBiasForEachBatch},
      Element::kFloat32);
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t entry = 0; entry < 20; ++entry) p.bias_at(b, 0, entry) = -kInfinity;
    p.bias_at(b, 0, 40) = -kInfinity;
    for (int64_t entry = 0; entry < p.bias_size(); ++entry) p.bias_at(b, 1, entry) = -kInfinity;
    for (int64_t entry = 3; entry < p.bias_size(); ++entry) p.bias_at(b, 2, entry) = -kInfinity;
  }
  const Results<float> r = RunCuda(p, {});
  ExpectCloseTo(r, p.InDouble().Run(), Element::kFloat32);
  EXPECT_EQ(r.at("lse")[29], -kInfinity);
  EXPECT_EQ(r.at("lse")[2 * 29], -kInfinity);
  EXPECT_TRUE(std::isfinite(r.at("lse")[2 * 29 + 28]));
  EXPECT_EQ(r.at("d_factor")[1], 0);
}

// With logits of several hundred, the largest weight is nearly 1.
TEST_P(RulesTest, LogitsMayBeLarge) {
  Problem<float> p = ProblemOf(function(), {.shape = {1, 2, 2, 29, 70, 17, 16}}, Element::kFloat32);
  for (float& factor : p.factor) factor *= 512;
  ExpectCloseTo(RunCuda(p, {}), p.InDouble().Run(), Element::kFloat32, 0, 2e-3);
}

// Row statistics are inputs of the backward pass, and of the kernel that merges results for parts
// of the keys.
TEST_P(RulesTest, StatisticsAreThoseOfTheReference) {
  int64_t single = 0;
  for (const int64_t queries : {1, 30}) {
    Problem<float> p = ProblemOf(
        function(), {.shape = {1, 2, 1, queries, 700, 8, 8}, .left = 400, .query_offset = 400},
        Element::kFloat32);
    for (float& factor : p.factor) factor *= 512;
    std::vector<float> statistics;
    const Results<float> forward = RunCuda(p, {.forward_only = true, .statistics = &statistics});
    const size_t rows = p.d_lse.size();
    const Problem<double> q = p.InDouble();
    std::vector<double> expected(3 * rows);
    Array<double> o(q.d_o.size(), false, 0.0);
    std::vector<double> lse(rows);
    AttentionForward(function(), q.Input(), {o.view(), lse.data(), expected.data()});
    for (size_t row = 0; row < rows; ++row) {
      EXPECT_NEAR(statistics[row], expected[row], 2e-6 * std::abs(expected[row]) + 2e-6);
      EXPECT_NEAR(statistics[rows + row], expected[rows + row], 2e-3 * expected[rows + row]);
      // If two scores are nearly equal, the key of either may be stored.
      if (expected[rows + row] > 1.9) continue;
      EXPECT_EQ(statistics[2 * rows + row], expected[2 * rows + row]) << row;
      single += expected[2 * rows + row] >= 0 ? 1 : 0;
    }
  }
  if (function().input != PairInput::kNone) {
    EXPECT_GT(single, 0);
  }
}

// With 32 rows per warp, a row's shift may be below its largest score, unless one key outweighs all
// others: its score must then be the shift, because the backward pass depends on it.
TEST(ShiftTest, IsTheScoreOfAKeyThatOutweighsAllOthers) {
  Problem<float> p = ProblemOf(
      EmulatedPairFunction("dot"),
      {.shape = {1, 2, 1, 230, 700, 8, 8}, .left = 400, .query_offset = 400}, Element::kBFloat16);
  p.factor = {1, 64};
  std::vector<float> statistics;
  RunCuda(p, {.element = Element::kBFloat16,
              .fills = true,
              .forward_only = true,
              .statistics = &statistics});
  const size_t rows = p.d_lse.size();
  const Problem<double> q = p.InDouble();
  std::vector<double> expected(3 * rows);
  Array<double> o(q.d_o.size(), false, 0.0);
  std::vector<double> lse(rows);
  AttentionForward(p.function, q.Input(), {o.view(), lse.data(), expected.data()});
  int64_t single = 0;
  int64_t lower = 0;
  for (size_t row = 0; row < rows; ++row) {
    const double shift = statistics[row];
    const double tolerance = 2e-6 * std::abs(expected[row]) + 2e-6;
    EXPECT_NEAR(shift + std::log2(statistics[rows + row]),
                expected[row] + std::log2(expected[rows + row]), 2 * tolerance);
    EXPECT_LE(shift, expected[row] + tolerance);
    EXPECT_GE(shift, expected[row] - 8 - tolerance);
    lower += shift < expected[row] - 0.01 ? 1 : 0;
    if (expected[rows + row] > 1.9) continue;
    ++single;
    EXPECT_NEAR(shift, expected[row], tolerance);
    EXPECT_EQ(statistics[2 * rows + row], expected[2 * rows + row]) << row;
  }
  EXPECT_GT(single, 50);
  EXPECT_GT(lower, 20);
}

// Tests with NaN and infinities.

std::vector<std::vector<float>> Rows(const Problem<float>& p, Element element, size_t order) {
  const Results<float> r =
      RunCuda(p, {.element = element, .order = Order(order), .forward_only = true});
  const int64_t columns = p.options.shape.value_dim;
  std::vector<std::vector<float>> rows;
  for (auto o = r.at("o").begin(); o != r.at("o").end(); o += columns) {
    rows.emplace_back(o, o + columns);
  }
  return rows;
}

// A non-finite token affects only the rows that see it; all other rows are bitwise unchanged.
template <class Spoil>
void ExpectOnlySeeingRowsChange(const PairFunction& function, const Spoil& spoil) {
  const AttentionShape shape = {2, 4, 2, 70, 70, 17, 17};
  const ProblemOptions all[] = {
      {.shape = shape, .right = 0},
      {.shape = shape, .left = 20, .right = 10, .padded = true},
      {.shape = shape, .chunks = {40, 1, 0}},
      {.shape = shape, .bias = ProblemOptions::kSharedBias},
      {.shape = shape, .key_bias = true},
      {.shape = shape, .pair_mask = {true, false, false}},
      {.shape = shape, .pair_bias = {true, false, false}},
      {.shape = shape,
       .query_segments = Documents(2, 70, 30),
       .key_segments = Documents(2, 70, 30)},
      {.shape = shape},
  };
  constexpr int64_t kPoisoned = 50;
  size_t n = 0;
  for (const ProblemOptions& options : all) {
    ++n;
    if (!TestsAllForms() && !RunsWith(function, n)) continue;
    SCOPED_TRACE(::testing::PrintToString(n));
    const Element element = kElements[n / 3 % 3];
    Problem<float> p = ProblemOf(function, options, element);
    // The offset bias hides keys 1, 2 and 3 positions after the query, and the poisoned key from
    // row 0. The key bias hides the poisoned key from head 0. The pair bias hides it from every
    // third row of head 1.
    const int64_t zero = shape.queries - 1;
    if (!p.bias.empty()) {
      for (const int64_t offset : {int64_t{-1}, int64_t{-2}, int64_t{-3}, kPoisoned}) {
        for (int64_t h = 0; h < shape.heads; ++h) p.bias_at(0, h, zero + offset) = -kInfinity;
      }
    }
    if (options.key_bias) {
      p.key_bias[static_cast<size_t>(shape.heads * shape.keys + kPoisoned)] = -kInfinity;
    }
    const auto pair_hides = [&](int64_t h, int64_t i) {
      return options.pair_bias.exists && h == 1 && i % 3 == 0;
    };
    for (int64_t i = 0; i < shape.queries; ++i) {
      if (pair_hides(1, i)) p.pair_bias.at(1, 1, i, kPoisoned) = -kInfinity;
    }
    const auto sees = [&](int64_t b, int64_t h, int64_t i) {
      return b == 1 && h < 2 && Sees(options, b, i, kPoisoned) && p.SeesPair(b, h, i, kPoisoned) &&
             !pair_hides(h, i) &&
             (p.bias.empty() || p.bias_at(b, h, zero + kPoisoned - i) != -kInfinity) &&
             (!options.key_bias || h != 0);
    };
    const auto clean = Rows(p, element, n);
    Problem<float> spoiled = p;
    spoil(spoiled, kPoisoned);
    const auto rows = Rows(spoiled, element, n);
    for (int64_t b = 0; b < shape.batch; ++b) {
      for (int64_t h = 0; h < shape.heads; ++h) {
        for (int64_t i = 0; i < shape.queries; ++i) {
          const auto row = static_cast<size_t>((b * shape.heads + h) * shape.queries + i);
          if (sees(b, h, i)) {
            ASSERT_FALSE(std::all_of(rows[row].begin(), rows[row].end(),
                                     [](float x) { return std::isfinite(x); }))
                << "query " << i << " of head " << h;
          } else {
            ASSERT_EQ(rows[row], clean[row]) << "query " << i << " of head " << h;
          }
        }
      }
    }
  }
}

TEST_P(EngineRulesTest, PoisonInAValueReachesTheRowsThatSeeIt) {
  for (const float poison : {kNan, kInfinity, -kInfinity}) {
    // How an infinite value spreads does not depend on the pair function, so it is tested only with
    // "dot".
    if (!std::isnan(poison) && std::string_view(function().name) != "dot") continue;
    ExpectOnlySeeingRowsChange(function(), [&](Problem<float>& p, int64_t key) {
      p.v.at(1, 0, key, p.options.shape.value_dim - 1) = poison;
    });
  }
}

TEST_P(RulesTest, PoisonInAKeyReachesTheRowsThatSeeIt) {
  ExpectOnlySeeingRowsChange(function(), [&](Problem<float>& p, int64_t key) {
    if (p.function.input == PairInput::kNone) {
      p.column_at(0, 1, 0, key) = kNan;
    } else {
      p.y.at(1, 0, key, 3) = kNan;
    }
  });
}

// Keys outside key_starts and key_lengths are never read.
TEST_P(EngineRulesTest, HiddenColumnsMayHoldAnything) {
  for (const int64_t columns : {17, 16}) {
    const AttentionShape shape = {3, 2, 1, 30, 90, columns, columns};
    const Problem<float> clean = ProblemOf(function(),
                                           {.shape = shape,
                                            .right = 70,
                                            .key_starts = {0, 5, 50},
                                            .key_lengths = {90, 70, 40},
                                            .bias = ProblemOptions::kSharedBias},
                                           Element::kBFloat16);
    Problem<float> p = clean;
    for (int64_t b = 0; b < shape.batch; ++b) {
      for (int64_t j = 0; j < shape.keys; ++j) {
        const auto batch = static_cast<size_t>(b);
        if (j >= p.options.key_starts[batch] && j < p.options.key_lengths[batch]) continue;
        for (int64_t d = 0; d < p.y.size()[3]; ++d) p.y.at(b, 0, j, d) = kNan;
        for (int64_t d = 0; d < columns; ++d) p.v.at(b, 0, j, d) = kNan;
        for (int s = 0; s < function().column_scalars; ++s) p.column_at(s, b, 0, j) = kNan;
      }
    }
    const CudaOptions how = {.element = Element::kBFloat16};
    ExpectSame(RunCuda(p, how), RunCuda(clean, how));
  }
}

// Distances are on both sides of the threshold for near tokens, and far below it.
TEST(NearTokensTest, HaveTheDigitsOfTheirDifferences) {
  for (const char* name : {"laplacian", "gaussian"}) {
    for (int fraction = 1; fraction <= 4096; fraction *= 8) {
      SCOPED_TRACE(name + std::string(" spread 1/") + std::to_string(fraction));
      const Problem<float> p = NearTokensProblem(EmulatedPairFunction(name),
                                                 {.shape = {1, 2, 1, 64, 70, 24, 17}}, fraction);
      const Results<double> expected = p.InDouble().Run();
      const Results<float> actual = RunCuda(p, {});
      for (const char* result : {"o", "lse"}) {
        EXPECT_LE(Difference(actual.at(result), expected.at(result)), 3e-5) << result;
      }
      ExpectCloseTo(actual, expected, Element::kFloat32, 0, 3e-5);
    }
  }
}

// Key biases and row bases may be large, because they are sums over many tokens. The base must be
// subtracted before anything else is added.
TEST(KeyBiasTest, BasesAreTakenOffFirst) {
  Problem<float> p =
      ProblemOf(EmulatedPairFunction("dot"),
                {.shape = {1, 2, 1, 30, 70, 16, 16}, .key_bias = true, .key_bias_base = true},
                Element::kFloat32);
  for (float& bias : p.key_bias) bias += 65536;
  for (float& base : p.key_bias_base) base += 65536;
  ExpectCloseTo(RunCuda(p, {}), p.InDouble().Run(), Element::kFloat32);
}

// Offset biases that fall by `slopes[h]` per token leave out most keys.
Problem<float> FallingProblem(const PairFunction& function, Element element, double tolerance) {
  Problem<float> p = ProblemOf(function,
                               {.shape = {2, 3, 1, 40, 700, 16, 8},
                                .right = 3,
                                .key_starts = {0, 90},
                                .query_offset = 500,
                                .bias = ProblemOptions::kBiasForEachBatch,
                                .tolerance = tolerance},
                               element);
  constexpr float kSlopes[] = {0.04f, 0.1f, 0.4f};
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t h = 0; h < 3; ++h) {
      for (int64_t entry = 0; entry < p.bias_size(); ++entry) {
        const auto offset = static_cast<float>(entry - (p.options.shape.queries - 1) - 500);
        p.bias_at(b, h, entry) = -kSlopes[h] * std::abs(offset);
      }
    }
  }
  return p;
}

TEST_P(RulesTest, TheToleranceBoundsTheWeightOfSkippedKeys) {
  // These definitions have no bounds.
  const std::string_view name = function().name;
  const bool skips = name != "adaptive" && name != "cosine_entailment" &&
                     name != "every_function" && name != "student_t";
  for (const Element element : kElements) {
    SCOPED_TRACE(NameOf(element));
    const Problem<float> p = FallingProblem(function(), element, kDefaultTolerance);
    const Results<double> exact = p.InDouble().Run();
    CudaOptions how = {.element = element, .skipping_keys = 1};
    ExpectCloseTo(RunCuda(p, how), exact, element);
    // With a large tolerance, skipped weights are larger than rounding errors.
    constexpr double kTolerance = 0.5;
    how.forward_only = true;
    const Results<float> some = RunCuda(FallingProblem(function(), element, kTolerance), how);
    double least = 1;
    for (size_t n = 0; n < exact.at("lse").size(); ++n) {
      const double share = std::exp(some.at("lse")[n] - exact.at("lse")[n]);
      least = std::min(least, share);
      ASSERT_LE(share, 1 + 1e-4);
      ASSERT_GE(share, 1 - kTolerance - 1e-4);
    }
    EXPECT_EQ(least < 1 - 5e-5, skips) << least;
  }
}

// In decoding, the rows of a tile are the query heads that share its keys.
TEST(PackingTest, GroupsOfHeadsShareTiles) {
  ProblemOptions options = {.shape = {2, 6, 2, 1, 300, 16, 16}, .right = 0, .query_offset = 290};
  for (const bool shares : {true, false}) {
    if (!shares) options.shape.key_heads = 6;
    EmulatedBackend backend;
    RunCuda(ProblemOf(EmulatedPairFunction("umbral"), options, Element::kFloat32),
            {.forward_only = true}, &backend);
    int64_t packed = 0;
    for (const cuda::KernelName& name : backend.launched()) {
      if (name.kind == "forward") packed += ConstantOf(name, "kPacked");
    }
    EXPECT_EQ(packed, shares ? 1 : 0);
  }
}

// Pages change only where keys and values lie.
TEST_P(EngineRulesTest, PagesDoNotChangeResults) {
  constexpr auto kShared = ProblemOptions::kSharedBias;
  const ProblemOptions forms[] = {
      {.shape = {3, 4, 2, 37, 128, 17, 24},
       .right = 0,
       .key_starts = {0, 7, 64},
       .key_lengths = {128, 77, 97},
       .query_offsets = {91, 40, 60},
       .bias = kShared,
       .padded = true},
      // Decoding: packed query heads, and keys in parts.
      {.shape = {2, 4, 2, 1, 576, 16, 16}, .key_lengths = {570, 33}},
      {.shape = {2, 2, 2, 1, 576, 64, 16}, .query_offset = 575, .bias = kShared, .key_bias = true},
      // Whole tiles, rows of 32 bytes or more, and two rows of tiles per warp.
      {.shape = {2, 2, 1, 130, 192, 32, 64}, .right = 0, .query_offset = 62},
      // The kernel of compute capability 9.0.
      {.shape = {2, 2, 1, 120, 192, 64, 48}, .right = 0, .key_starts = {0, 30}, .query_offset = 72},
      {.shape = {1, 2, 2, 20, 64, 8, 8}, .key_bias = true, .pair_mask = {true, true, true}}};
  // Each function has other sizes and types.
  size_t n = std::string_view(GetParam()).size();
  for (const ProblemOptions& options : forms) {
    const Element element = kElements[n % 3];
    const int64_t size = std::to_array<int64_t>({1, 4, 16, 64})[n % 4];
    SCOPED_TRACE(std::string(NameOf(element)) + ", pages of " + std::to_string(size));
    Problem<float> p = ProblemOf(function(), options, element);
    // A query equals a key, and some queries see a value that is not finite.
    for (int64_t d = 0; d < p.options.shape.dim; ++d) p.x.at(0, 0, 0, d) = p.y.at(0, 0, 20, d);
    if (options.right == 0) p.v.at(0, 0, options.shape.keys - 9, 5) = kNan;
    CudaOptions how = {.element = element,
                       .fills = n % 2 == 0 || options.shape.value_dim == 48,
                       .is_hopper = options.shape.value_dim == 48,
                       .forward_only = true};
    const Results<float> expected = RunCuda(p, how);
    how.page_size = size;
    ExpectSame(RunCuda(p, how), expected);
    ++n;
  }
}

// Skipping may not hide errors in the input.
TEST_P(EngineRulesTest, NonFiniteKeysAreNotSkipped) {
  for (const char* where : {"key", "value"}) {
    Problem<float> p = FallingProblem(function(), Element::kFloat32, kDefaultTolerance);
    if (function().input == PairInput::kNone && std::string_view(where) == "key") continue;
    (std::string_view(where) == "key" ? p.y : p.v).at(0, 0, 7, 0) = kNan;
    const CudaOptions how = {.forward_only = true, .skipping_keys = 1};
    const Results<float> r = RunCuda(p, how);
    p.options.tolerance = 0;
    const Results<float> without = RunCuda(p, how);
    for (const auto& [name, values] : without) {
      for (size_t n = 0; n < values.size(); ++n) {
        ASSERT_EQ(std::isnan(values[n]), std::isnan(r.at(name)[n])) << where << " " << name;
      }
    }
  }
}

// With bf16, gradients that are sums over a row are as accurate as with fp32, although weights are
// rounded. In this test, f is large compared with its differences.
TEST(BalanceTest, SumsOverRowsKeepTheirDigits) {
  Problem<float> p = ProblemOf(EmulatedPairFunction("laplacian"),
                               {.shape = {1, 2, 1, 66, 130, 64, 32},
                                .bias = ProblemOptions::kSharedBias,
                                .temperature = true},
                               Element::kBFloat16);
  for (Array<float>* tokens : {&p.x, &p.y}) {
    tokens->ForEach([](float& x) { x = Rounded(8 * x, Element::kBFloat16); });
  }
  for (const bool keeps : {false, true}) {
    const Results<float> actual =
        RunCuda(p, {.element = Element::kBFloat16, .keeps_exact_o = keeps});
    ExpectCloseTo(actual, p.InDouble().Run(), Element::kBFloat16);
  }
}

// The rounding error in the sum of a row's ds must not be multiplied by the slope that all pairs of
// the row share.
class EqualSlopesTest : public ::testing::TestWithParam<const char*> {
 protected:
  static constexpr float kFar = 1000;
  static Problem<float> ProblemOfName(Element element) {
    return ProblemOf(EmulatedPairFunction(GetParam()),
                     {.shape = {1, 2, 1, 60, 90, 9, 40}, .left = 40}, element);
  }
};

// If all slopes of a row are equal, the gradients of its scalars are exactly the gradient of lse.
TEST_P(EqualSlopesTest, LeaveTheGradientOfLse) {
  for (const bool pass_d_lse : {false, true}) {
    SCOPED_TRACE(pass_d_lse);
    Problem<float> p = ProblemOfName(Element::kBFloat16);
    p.pass_d_lse = pass_d_lse;
    // For "additive", all sums of scalars are positive; for "umbral", all keys are far above the
    // query.
    const bool is_cone = p.function.input == PairInput::kSquaredDistance;
    for (float& scalar : p.row) scalar += is_cone ? -kFar : kFar;
    const std::vector<double> expected = p.InDouble().Run().at("d_row");
    const std::vector<float> actual =
        RunCuda(p, {.element = Element::kBFloat16, .only = "d_row"}).at("d_row");
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t n = 0; n < actual.size(); ++n) {
      const double limit = pass_d_lse ? 3e-7 * std::abs(expected[n]) : 0;
      ASSERT_NEAR(actual[n], pass_d_lse ? expected[n] : 0, limit) << n;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Functions, EqualSlopesTest, ::testing::Values("additive", "umbral"),
                         [](const auto& test) { return std::string(test.param); });

// The gradient of a query is a sum of differences: all keys except the first are far away, in
// almost the same direction.
class FarKeysTest : public EqualSlopesTest {};

TEST_P(FarKeysTest, LeaveDifferencesInTheGradientOfTheQuery) {
  Problem<float> p = ProblemOfName(Element::kFloat32);
  p.pass_d_lse = false;
  for (int64_t j = 0; j < 90; ++j) p.y.at(0, 0, j, 0) += j == 0 ? -kFar : kFar;
  p.v.ForEach([](float& element) { element += 100; });
  const std::vector<double> expected = p.InDouble().Run().at("d_x");
  EXPECT_LE(Difference(RunCuda(p, {.only = "d_x"}).at("d_x"), expected, 1), 5e-5);
}

INSTANTIATE_TEST_SUITE_P(Functions, FarKeysTest, ::testing::Values("laplacian"),
                         [](const auto& test) { return std::string(test.param); });

std::string ErrorOf(const Problem<float>& p) {
  try {
    RunCuda(p, {});
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// If the tables of all heads do not fit into memory together, heads are computed in several
// launches, with bitwise the same results.
TEST(RelativeTest, HeadsMayBeTakenOneAfterTheOther) {
  const OffsetLayout layout(9, 5, OffsetLayout::Far::kClip);
  for (const PairOptions pairs : {PairOptions{true, true, false}, PairOptions{true, false, true}}) {
    const Problem<float> p = ProblemOf(EmulatedPairFunction("dot"),
                                       {.shape = {3, 4, 2, 20, 40, 8, 8},
                                        .query_offset = 9,
                                        .bias = ProblemOptions::kSharedBias,
                                        .pair_bias = pairs,
                                        .relative = &layout,
                                        .relative_key_dim = 5},
                                       Element::kFloat32);
    EmulatedBackend whole;
    const Results<float> expected = RunCuda(p, {}, &whole);
    const int64_t of_head = 40 * layout.size();
    for (const int64_t numbers : {int64_t{1}, 5 * of_head}) {
      EmulatedBackend sliced;
      ExpectSame(RunCuda(p, {.table_numbers = numbers}, &sliced), expected);
      EXPECT_GT(sliced.launched().size(), whole.launched().size());
    }
  }
}

class UnknownLayout final : public TableLayout {
 public:
  int64_t size() const override { return 3; }
  void AddRuns(int64_t, int64_t, int64_t, std::vector<TableRun>*) const override {}
};

TEST(RefusalTest, NamesTheArgument) {
  const PairFunction& dot = EmulatedPairFunction("dot");
  EXPECT_EQ(ErrorOf(RandomProblem(dot, {.shape = {1, 1, 1, 2, 3, 257, 8}})),
            "attention on CUDA: head_dim is 257; expected at most 256");
  EXPECT_EQ(ErrorOf(RandomProblem(dot, {.shape = {1, 1, 1, 2, 3, 8, 300}})),
            "attention on CUDA: head_dim of v is 300; expected at most 256");
  cuda::Input long_one;
  long_one.shape = {1, 1, 1, 1, (int64_t{1} << 24) + 1, 8, 8};
  EXPECT_EQ(cuda::Unsupported(dot, long_one), "k has 16777217 keys; expected at most 16777216");
  const UnknownLayout layout;
  EXPECT_EQ(ErrorOf(RandomProblem(dot, {.shape = {1, 1, 1, 2, 3, 8, 8},
                                        .bias = ProblemOptions::kSharedBias,
                                        .layout = &layout})),
            "attention on CUDA: bias has a layout that is not supported on a GPU");
  EXPECT_EQ(ErrorOf(RandomProblem(dot, {.shape = {1, 1, 1, 2, 3, 8, 8}, .relative = &layout})),
            "attention on CUDA: relative has a layout that is not supported on a GPU");
}

}  // namespace
}  // namespace gnomon::testing
