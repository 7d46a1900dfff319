// Compares the derivatives kernel with the dual-number reference, on every instruction set.
#include "core/derivatives.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/dual_reference.h"
#include "core/dual_tables.h"
#include "core/random_problem.h"
#include "gnomon/table_layout.h"

namespace gnomon::testing {
namespace {

Directed<float> RandomDirected(const ProblemOptions& options,
                               const PairFunction& function = FindPairFunction("dot")) {
  ProblemOptions other = options;
  other.seed = options.seed + 1;
  return {RandomProblem(function, options), RandomProblem(function, other)};
}

Directed<double> InDouble(const Directed<float>& p) {
  return {p.at.InDouble(), p.along.InDouble()};
}

template <class T>
const DualTableOf<T>* TableOf(const Problem<T>& p) {
  return p.function.name == std::string("dot") ? nullptr : FindDualTable<T>(p.function);
}

// Runs the kernel and returns all results, without gaps between rows.
template <class T>
Results<T> RunKernel(const Directed<T>& p, const Executor& executor = SerialExecutor()) {
  const ProblemOptions& options = p.at.options;
  AttentionDerivatives<T> of;
  of.function = TableOf(p.at);
  of.input = p.at.Input();
  of.tangent = p.along.Input();
  of.d_o = p.at.d_o.view();
  of.d_o_tangent = p.along.d_o.view();
  of.d_lse = p.at.d_lse.data();
  of.d_lse_tangent = p.along.d_lse.data();
  std::map<std::string, Array<T>> arrays;
  Results<T> results;
  const auto view = [&](const std::string& name, const Array<T>& like) {
    return (arrays[name] = Array<T>(like.size(), options.padded, static_cast<T>(kNan))).view();
  };
  const auto pointer = [&](const std::string& name, size_t size) {
    return (results[name] = std::vector<T>(size, static_cast<T>(kNan))).data();
  };
  const size_t rows = p.at.d_lse.size();
  of.output = {view("o", p.at.d_o), pointer("lse", rows), pointer("statistics", 3 * rows)};
  of.o_tangent = view("o'", p.at.d_o);
  of.lse_tangent = pointer("lse'", rows);
  const auto set = [&](AttentionGradient<T>& gradient, const std::string& mark) {
    gradient.x = view("d_x" + mark, p.at.x);
    gradient.y = view("d_y" + mark, p.at.y);
    gradient.v = view("d_v" + mark, p.at.v);
    gradient.row_scalars = pointer("d_row" + mark, p.at.row.size());
    gradient.column_scalars = pointer("d_column" + mark, p.at.column.size());
    gradient.head_scalars = pointer("d_head" + mark, p.at.head.size());
    gradient.factor = pointer("d_factor" + mark, p.at.factor.size());
    if (options.bias != ProblemOptions::kNoBias) {
      gradient.bias = {pointer("d_bias" + mark, p.at.bias.size()), p.at.bias_stride(), nullptr};
    }
    if (options.key_bias) {
      gradient.key_bias = pointer("d_key_bias" + mark, p.at.key_bias.size());
    }
    if (of.input.relative.keys != nullptr) {
      gradient.relative_query = view("d_relative_query" + mark, p.at.relative_query);
      gradient.relative_keys = pointer("d_relative_keys" + mark, p.at.relative_keys.size());
    }
    if (of.input.relative.values != nullptr) {
      gradient.relative_values = pointer("d_relative_values" + mark, p.at.relative_values.size());
    }
    if (of.input.relative.queries != nullptr) {
      gradient.relative_key = view("d_relative_key" + mark, p.at.relative_key);
      gradient.relative_queries =
          pointer("d_relative_queries" + mark, p.at.relative_queries.size());
    }
  };
  set(of.gradient, "");
  set(of.gradient_tangent, "'");
  DifferentiateAttention(p.at.function, of, executor);
  for (auto& [name, array] : arrays) results[name] = array.TakeOutput();
  return results;
}

template <class T>
void ExpectNear(const Results<T>& actual, const Results<double>& expected, double tolerance) {
  ASSERT_EQ(actual.size(), expected.size());
  for (const auto& [name, values] : expected) {
    EXPECT_LE(Difference(actual.at(name), values, 1.0), tolerance) << name;
  }
}

std::vector<ProblemOptions> AllOptions() {
  constexpr auto kShared = ProblemOptions::kSharedBias;
  constexpr auto kForEachBatch = ProblemOptions::kBiasForEachBatch;
  return {
      {.shape = {1, 1, 1, 1, 1, 1, 1}},
      {.shape = {1, 1, 1, 0, 3, 2, 2}},
      {.shape = {2, 4, 2, 70, 70, 8, 16}, .right = 0, .bias = kShared},
      {.shape = {1, 2, 1, 130, 300, 16, 32}, .right = 0, .query_offset = 170, .key_bias = true},
      {.shape = {2, 3, 3, 60, 250, 7, 5},
       .left = 20,
       .right = 3,
       .key_starts = {2, 0},
       .key_lengths = {100, 0},
       .query_offsets = {30, -5},
       .bias = kForEachBatch,
       .key_bias = true,
       .padded = true},
      {.shape = {1, 6, 3, 100, 90, 70, 66}, .chunks = {32, 1, 0}},
      {.shape = {1, 2, 2, 50, 130, 9, 16},
       .type = TokenType::kBFloat16,
       .value_type = TokenType::kFloat16},
  };
}

// Relative tables of every kind. The last problem has positions.
std::vector<ProblemOptions> RelativeOptions() {
  static const OffsetLayout clipped(9, 16, OffsetLayout::Far::kClip);
  static const OffsetLayout past(40, 0, OffsetLayout::Far::kZero);
  static const OffsetLayout whole(400, 400, OffsetLayout::Far::kZero);
  std::vector<ProblemOptions> all = {
      {.shape = {2, 4, 2, 70, 130, 8, 6}, .relative = &clipped, .relative_key_dim = 7},
      {.shape = {2, 2, 1, 61, 90, 9, 5},
       .key_starts = {3, 0},
       .key_lengths = {80, 0},
       .query_offsets = {20, -4},
       .key_bias = true,
       .relative = &past,
       .relative_dim = 0,
       .relative_key_dim = 16,
       .relative_heads = true,
       .dropout = 0.3,
       .padded = true},
      {.shape = {1, 2, 1, 130, 300, 16, 8},
       .right = 0,
       .query_offset = 170,
       .relative = &whole,
       .relative_values = false,
       .relative_key_dim = 5},
      {.shape = {2, 2, 2, 30, 40, 6, 3}, .relative = &clipped, .relative_key_dim = 3},
  };
  for (int64_t n = 0; n < 2 * 30; ++n) all.back().query_positions.push_back(n * 7 % 31);
  for (int64_t n = 0; n < 2 * 40; ++n) all.back().key_positions.push_back(n * 3 % 43);
  return all;
}

TEST(DerivativesTest, AreThoseOfTheReferenceInEveryInstructionSet) {
  std::vector<ProblemOptions> all = AllOptions();
  for (const ProblemOptions& options : RelativeOptions()) all.push_back(options);
  for (const ProblemOptions& options : all) {
    SCOPED_TRACE(options);
    const Directed<float> p = RandomDirected(options);
    const Results<double> expected = RunReference(p);
    OnEveryTarget([&] {
      ExpectNear(RunKernel(p), expected, 2e-5);
      if (HasDoubles()) ExpectNear(RunKernel(InDouble(p)), expected, 1e-13);
    });
  }
}

TEST(DerivativesTest, AreThoseOfTheReferenceForEveryPairFunction) {
  const OffsetLayout layout(5, 3, OffsetLayout::Far::kClip);
  const ProblemOptions all[] = {
      {.shape = {1, 4, 2, 60, 150, 20, 8}, .left = 100, .right = 10, .query_offset = 70},
      {.shape = {2, 2, 1, 21, 33, 9, 5},
       .key_lengths = {30, 0},
       .key_bias = true,
       .relative = &layout,
       .relative_key_dim = 4,
       .padded = true},
  };
  for (const PairFunction* function : AllPairFunctions()) {
    ASSERT_NE(FindDualTable<float>(*function), nullptr) << function->name;
    ASSERT_NE(FindDualTable<double>(*function), nullptr) << function->name;
    for (const ProblemOptions& options : all) {
      SCOPED_TRACE(function->name);
      SCOPED_TRACE(options);
      const Directed<float> p = RandomDirected(options, *function);
      const Results<double> expected = RunReference(p);
      OnEveryTarget([&] {
        ExpectNear(RunKernel(p), expected, 1e-4);
        if (HasDoubles()) ExpectNear(RunKernel(InDouble(p)), expected, 1e-12);
      });
    }
  }
}

// Distances and their gradients are computed from differences of tokens.
TEST(DerivativesTest, AreAccurateForNearTokens) {
  const ProblemOptions options = {.shape = {1, 2, 1, 60, 70, 9, 8}};
  const ProblemOptions other = {.shape = options.shape, .seed = 2};
  for (const char* const name : {"gaussian", "laplacian"}) {
    SCOPED_TRACE(name);
    const PairFunction& function = FindPairFunction(name);
    Directed<float> p = {NearTokensProblem(function, options, 64), RandomProblem(function, other)};
    // Scales the tangents to about the size of the differences of tokens.
    for (Array<float>* tokens : {&p.along.x, &p.along.y}) {
      tokens->ForEach([](float& element) { element /= 64; });
    }
    const Results<double> expected = RunReference(p);
    OnEveryTarget([&] {
      ExpectNear(RunKernel(p), expected, 1e-4);
      if (HasDoubles()) ExpectNear(RunKernel(InDouble(p)), expected, 1e-12);
    });
  }
}

TEST(DerivativesTest, DoNotDependOnTheNumberOfWorkers) {
  const OffsetLayout layout(30, 30, OffsetLayout::Far::kClip);
  const ProblemOptions all[] = {
      {.shape = {1, 1, 1, 700, 700, 8, 8}, .right = 0, .bias = ProblemOptions::kSharedBias},
      {.shape = {1, 4, 2, 200, 450, 8, 8}, .key_bias = true},
      {.shape = {3, 8, 4, 60, 40, 6, 8}},
      {.shape = {1, 4, 2, 200, 250, 8, 8}, .relative = &layout, .relative_key_dim = 4},
  };
  for (const ProblemOptions& options : all) {
    SCOPED_TRACE(options);
    const Directed<float> p = RandomDirected(options);
    const Results<float> serial = RunKernel(p);
    for (const int workers : {2, 3, 5}) ExpectSame(RunKernel(p, ThreadExecutor(workers)), serial);
  }
  const Directed<float> p =
      RandomDirected({.shape = {1, 4, 2, 200, 250, 8, 8}}, FindPairFunction("umbral"));
  ExpectSame(RunKernel(p, ThreadExecutor(3)), RunKernel(p));
  const Directed<double> wide = InDouble(p);
  ExpectSame(RunKernel(wide, ThreadExecutor(3)), RunKernel(wide));
}

// A result does not depend on which other results are requested.
TEST(DerivativesTest, AreTheSameOneByOne) {
  const Directed<float> p =
      RandomDirected({.shape = {1, 2, 1, 100, 100, 8, 12}, .right = 0, .key_bias = true});
  const Results<float> all = RunKernel(p);
  AttentionDerivatives<float> of;
  of.input = p.at.Input();
  of.tangent = p.along.Input();
  of.d_o = p.at.d_o.view();
  of.d_o_tangent = p.along.d_o.view();
  of.d_lse = p.at.d_lse.data();
  of.d_lse_tangent = p.along.d_lse.data();
  const auto expect = [&](const std::string& name, const auto& set) {
    std::vector<float> result(all.at(name).size(), kNan);
    AttentionDerivatives<float> alone = of;
    set(alone, result.data());
    DifferentiateAttention(p.at.function, alone, SerialExecutor());
    EXPECT_EQ(result, all.at(name)) << name;
  };
  const auto rows = [](float* data, int64_t heads, int64_t columns) {
    return View<float>{data, {heads * 100 * columns, 100 * columns, columns}};
  };
  expect("o", [&](auto& to, float* data) { to.output.o = rows(data, 2, 12); });
  expect("o'", [&](auto& to, float* data) { to.o_tangent = rows(data, 2, 12); });
  expect("lse'", [&](auto& to, float* data) { to.lse_tangent = data; });
  expect("d_x'", [&](auto& to, float* data) { to.gradient_tangent.x = rows(data, 2, 8); });
  expect("d_y'", [&](auto& to, float* data) { to.gradient_tangent.y = rows(data, 1, 8); });
  expect("d_v'", [&](auto& to, float* data) { to.gradient_tangent.v = rows(data, 1, 12); });
  expect("d_x", [&](auto& to, float* data) { to.gradient.x = rows(data, 2, 8); });
  expect("d_y", [&](auto& to, float* data) { to.gradient.y = rows(data, 1, 8); });
  expect("d_v", [&](auto& to, float* data) { to.gradient.v = rows(data, 1, 12); });
  expect("d_factor'", [&](auto& to, float* data) { to.gradient_tangent.factor = data; });
  expect("d_key_bias'", [&](auto& to, float* data) { to.gradient_tangent.key_bias = data; });
}

// A missing tangent is treated as 0.
TEST(DerivativesTest, TreatAbsentTangentsAsZero) {
  Directed<float> p = RandomDirected({.shape = {1, 2, 1, 60, 70, 8, 12}, .key_bias = true});
  const auto zeros = [](Array<float>& array) { array.ForEach([](float& x) { x = 0; }); };
  zeros(p.along.x);
  zeros(p.along.y);
  zeros(p.along.v);
  zeros(p.along.d_o);
  std::fill(p.along.factor.begin(), p.along.factor.end(), 0.0f);
  const Results<float> expected = RunKernel(p);
  AttentionDerivatives<float> of;
  of.input = p.at.Input();
  of.tangent.key_bias = p.along.key_bias.data();
  of.d_o = std::as_const(p.at.d_o).view();
  of.d_lse = p.at.d_lse.data();
  of.d_lse_tangent = p.along.d_lse.data();
  std::vector<float> o(expected.at("o'").size());
  std::vector<float> d_v(expected.at("d_v'").size());
  std::vector<float> d_y(expected.at("d_y'").size());
  of.o_tangent = {o.data(), {0, 60 * 12, 12}};
  of.gradient_tangent.v = {d_v.data(), {0, 70 * 12, 12}};
  of.gradient_tangent.y = {d_y.data(), {0, 70 * 8, 8}};
  DifferentiateAttention(p.at.function, of, SerialExecutor());
  EXPECT_LE(Difference(o, expected.at("o'")), 1e-6);
  EXPECT_LE(Difference(d_v, expected.at("d_v'")), 1e-6);
  EXPECT_LE(Difference(d_y, expected.at("d_y'")), 1e-6);
}

}  // namespace
}  // namespace gnomon::testing
