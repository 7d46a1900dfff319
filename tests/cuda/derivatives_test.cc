// Compares the CUDA kernels of forward-mode and second derivatives, run in the emulator, with the
// dual-number reference.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <exception>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "core/dual_reference.h"
#include "cuda_problem.h"
#include "gnomon/table_layout.h"
#include "gtest/gtest.h"

namespace gnomon::testing::tangents {
namespace {

Directed<float> DirectedOf(const PairFunction& function, const ProblemOptions& options,
                           Element element) {
  ProblemOptions other = options;
  other.seed = options.seed + 1;
  return {ProblemOf(function, options, element), ProblemOf(function, other, element)};
}

struct Wanted {
  std::string only = "";              // the gradient to compute; if empty, all
  std::set<std::string> absent = {};  // tangents that are passed as null pointers
};

// Runs the passes and returns o', lse' and the tangents of the gradients.
Results<float> RunTangents(const Directed<float>& p, const CudaOptions& how,
                           const Wanted& wanted = {}, EmulatedBackend* used = nullptr) {
  EmulatedBackend own(how.order);
  EmulatedBackend& backend = used != nullptr ? *used : own;
  const ProblemOptions& options = p.at.options;
  std::map<std::string, Elements> kept;
  const auto tokens = [&](const std::string& name, const Array<float>& array) {
    return kept.try_emplace(name, array, how.element).first->second.tokens();
  };
  cuda::Input in(p.at.Input());
  in.x = tokens("x", p.at.x);
  in.y = tokens("y", p.at.y);
  in.v = tokens("v", p.at.v);
  in.relative_query = tokens("relative_query", p.at.relative_query);
  in.relative_key = tokens("relative_key", p.at.relative_key);
  in.most_table_numbers = how.table_numbers;
  cuda::Input tangent(p.along.Input());
  const auto is_absent = [&](const char* name) { return wanted.absent.contains(name); };
  const auto tangents = [&](const char* name, const Array<float>& array) {
    return is_absent(name) ? Tokens{} : tokens(name + std::string("'"), array);
  };
  tangent.x = tangents("x", p.along.x);
  tangent.y = tangents("y", p.along.y);
  tangent.v = tangents("v", p.along.v);
  tangent.relative_query = tangents("relative_query", p.along.relative_query);
  tangent.relative_key = tangents("relative_key", p.along.relative_key);
  if (is_absent("numbers")) {
    tangent.row_scalars = tangent.column_scalars = tangent.head_scalars = nullptr;
    tangent.factor = tangent.key_bias = tangent.temperature = nullptr;
    tangent.bias.table = tangent.relative.keys = tangent.relative.values = nullptr;
    tangent.relative.queries = nullptr;
    tangent.pair_bias = {};
  }

  const AttentionShape& n = options.shape;
  const auto rows = p.at.d_lse.size();
  std::vector<float> exact_o(rows * static_cast<size_t>(n.value_dim), kNan);
  std::vector<float> lse(rows, kNan);
  std::vector<float> statistics(3 * rows, kNan);
  Results<float> results;
  Forward(p.at.function, in, {{}, exact_o.data(), lse.data(), statistics.data()}, backend);
  cuda::Saved saved;
  saved.exact_o = exact_o.data();
  saved.statistics = statistics.data();
  saved.d_o = tokens("d_o", p.at.d_o);
  saved.d_lse = p.at.pass_d_lse ? p.at.d_lse.data() : nullptr;
  results["o'"] = std::vector<float>(exact_o.size(), kNan);
  results["lse'"] = std::vector<float>(rows, kNan);
  ForwardTangents(p.at.function, in, tangent, saved, {results["o'"].data(), results["lse'"].data()},
                  backend);

  std::map<std::string, Array<float>> arrays;
  std::map<std::string, Elements> outputs;
  const auto is_wanted = [&](const char* name) {
    return wanted.only.empty() || wanted.only == name;
  };
  const auto tensor = [&](const char* name, const Array<float>& like) {
    if (!is_wanted(name)) return cuda::Tensor{};
    const Array<float>& nan = arrays[name] = Array<float>(like.size(), options.padded, kNan);
    return outputs.try_emplace(name, nan, how.element).first->second.tensor();
  };
  const auto pointer = [&](const char* name, const std::vector<float>& like) -> float* {
    if (!is_wanted(name)) return nullptr;
    return (results[name + std::string("'")] = std::vector<float>(like.size(), kNan)).data();
  };
  cuda::Gradient gradient;
  if (p.at.function.input != PairInput::kNone) {
    gradient.x = tensor("d_x", p.at.x);
    gradient.y = tensor("d_y", p.at.y);
  }
  gradient.v = tensor("d_v", p.at.v);
  gradient.row_scalars = pointer("d_row", p.at.row);
  gradient.column_scalars = pointer("d_column", p.at.column);
  gradient.head_scalars = pointer("d_head", p.at.head);
  gradient.factor = pointer("d_factor", p.at.factor);
  if (options.bias != ProblemOptions::kNoBias) {
    gradient.bias = {pointer("d_bias", p.at.bias), p.at.bias_stride(), options.layout};
  }
  if (options.key_bias) gradient.key_bias = pointer("d_key_bias", p.at.key_bias);
  if (options.temperature) gradient.temperature = pointer("d_temperature", p.at.temperature);
  if (in.relative.keys != nullptr) {
    gradient.relative_query = tensor("d_relative_query", p.at.relative_query);
    gradient.relative_keys = pointer("d_relative_keys", p.at.relative_keys);
  }
  if (in.relative.values != nullptr) {
    gradient.relative_values = pointer("d_relative_values", p.at.relative_values);
  }
  if (in.relative.queries != nullptr) {
    gradient.relative_key = tensor("d_relative_key", p.at.relative_key);
    gradient.relative_queries = pointer("d_relative_queries", p.at.relative_queries);
  }
  if (options.pair_bias.exists && is_wanted("d_pair_bias")) {
    Array<float>& pairs = arrays["d_pair_bias"] =
        Array<float>(p.at.pair_bias.size(), options.padded, kNan);
    gradient.pair_bias = Problem<float>::PairView(pairs.view(), options.pair_bias);
  }
  cuda::CotangentTangents cotangent;
  cotangent.d_o = tangents("d_o", p.along.d_o);
  if (!is_absent("d_lse")) cotangent.d_lse = p.along.d_lse.data();
  BackwardTangents(p.at.function, in, tangent, saved, cotangent, gradient, backend);
  for (auto& [name, array] : arrays) {
    const auto output = outputs.find(name);
    if (output != outputs.end()) output->second.CopyTo(&array);
    results[name + "'"] = array.TakeOutput();
  }
  return results;
}

// Tangents are sums of terms that partly cancel, so errors are relative to at least 1. Weights and
// gradients are rounded to the element type.
void ExpectTangents(const Results<float>& actual, const Results<double>& expected, Element element,
                    double rate = 0, double tolerance = 5e-5) {
  for (const auto& [name, values] : actual) {
    const bool rounded = name == "o'" || name == "d_x'" || name == "d_y'" || name == "d_v'" ||
                         name == "d_relative_query'" || name == "d_relative_key'";
    const double units = rounded ? 8 * Unit(element) / (1 - rate) : 0;
    EXPECT_LE(Difference(values, expected.at(name), 1.0), tolerance + units) << name;
  }
}

struct Case {
  const char* name;
  ProblemOptions options;
};

const OffsetLayout kClipped(7, 3, OffsetLayout::Far::kClip);
const OffsetLayout kShaw(20, 6, OffsetLayout::Far::kClip);
const OffsetLayout kPast(12, 0, OffsetLayout::Far::kZero);
const GridLayout kGrid({3, 9}, 1, GridLayout::Kind::kTable);
const GridLayout kAxes({3, 9}, 1, GridLayout::Kind::kAxes);

// Every term, and the pairs of terms that share code.
std::vector<Case> Cases() {
  constexpr auto kShared = ProblemOptions::kSharedBias;
  constexpr auto kEach = ProblemOptions::kBiasForEachBatch;
  return {
      {"OneOfEach", {.shape = {1, 1, 1, 1, 1, 1, 1}}},
      {"Full", {.shape = {1, 2, 1, 70, 90, 16, 24}}},
      {"CausalBiasGqa",
       {.shape = {2, 4, 2, 35, 35, 17, 3}, .right = 0, .bias = kShared, .padded = true}},
      {"LengthsAndStarts",
       {.shape = {3, 2, 1, 20, 80, 16, 16},
        .key_starts = {0, 60, 30},
        .key_lengths = {80, 55, 70},
        .bias = kEach,
        .temperature = true}},
      {"DocumentsAndDropout",
       {.shape = {2, 2, 1, 70, 70, 8, 16},
        .right = 0,
        .query_segments = Documents(2, 70, 33),
        .key_segments = Documents(2, 70, 33),
        .dropout = 0.25}},
      {"KeyBiasWithBase",
       {.shape = {2, 4, 2, 30, 50, 16, 8}, .right = 40, .key_bias = true, .key_bias_base = true}},
      {"TemperatureOfBiases",
       {.shape = {2, 4, 2, 20, 40, 16, 16},
        .bias = kEach,
        .key_bias = true,
        .temperature = true,
        .pair_bias = {true, false, true},
        .pair_mask = {true, true, false}}},
      {"LayoutAndPairBias",
       {.shape = {2, 2, 1, 30, 46, 8, 8},
        .query_offset = 9,
        .bias = kShared,
        .layout = &kClipped,
        .pair_bias = {true, true, false}}},
      {"Relative",
       {.shape = {1, 4, 2, 18, 40, 16, 24},
        .right = 20,
        .query_offset = 3,
        .bias = kShared,
        .relative = &kShaw}},
      {"RelativeOfHeads",
       {.shape = {2, 2, 1, 33, 50, 8, 17},
        .query_offset = 30,
        .temperature = true,
        .relative = &kPast,
        .relative_dim = 16,
        .relative_heads = true,
        .dropout = 0.25,
        .padded = true,
        .seed = 3}},
      {"Grids",
       {.shape = {1, 2, 1, 28, 28, 8, 8},
        .bias = kEach,
        .layout = &kGrid,
        .key_bias = true,
        .relative = &kAxes}},
      {"EmptyRows",
       {.shape = {3, 2, 1, 25, 60, 8, 8},
        .left = 20,
        .right = 0,
        .chunks = {23, 1, 0},
        .query_offsets = {0, 35, -10},
        .pair_bias = {true, true, true}}},
      {"NoKeys", {.shape = {2, 2, 1, 5, 0, 8, 8}, .bias = kShared, .relative = &kShaw}},
      {"NoQueries", {.shape = {2, 2, 1, 0, 5, 8, 8}, .bias = kShared}},
      {"NoBatch", {.shape = {0, 2, 2, 4, 5, 8, 8}, .bias = kShared}},
      {"SoftcapOfBiases",
       {.shape = {2, 4, 2, 20, 40, 16, 16},
        .right = 20,
        .bias = kEach,
        .temperature = true,
        .softcap = 1.5}},
      {"PositionToContent",
       {.shape = {2, 4, 2, 18, 40, 16, 24},
        .right = 20,
        .query_offset = 3,
        .bias = kShared,
        .relative = &kShaw,
        .relative_key_dim = 7}},
      {"PositionToContentOfHeads",
       {.shape = {2, 4, 2, 33, 50, 8, 17},
        .query_offset = 30,
        .relative = &kPast,
        .relative_dim = 0,
        .relative_values = false,
        .relative_key_dim = 16,
        .relative_heads = true,
        .padded = true}},
  };
}

class EmulatedTangentsTest
    : public ::testing::TestWithParam<std::tuple<const PairFunction*, Element>> {};

TEST_P(EmulatedTangentsTest, MatchTheReference) {
  const auto& [function, element] = GetParam();
  const std::vector<const PairFunction*> functions = EmulatedPairFunctions();
  const bool is_dot = std::string_view(function->name) == "dot";
  // Each type has a different third of the cases of the dot product, and different cases of every
  // other function.
  const size_t step = is_dot ? 3 : 9;
  size_t n = static_cast<size_t>(element);
  if (!is_dot)
    n += 2 * (std::find(functions.begin(), functions.end(), function) - functions.begin());
  for (const Case& c : Cases()) {
    ++n;
    if (!TestsAllForms() && n % step != 0) continue;
    SCOPED_TRACE(c.name);
    const Directed<float> p = DirectedOf(*function, c.options, element);
    CudaOptions how;
    how.element = element;
    how.order = Order(n);
    how.table_numbers = n % 2 == 0 ? 1 : int64_t{1} << 24;
    try {
      ExpectTangents(RunTangents(p, how), RunReference(p), element, c.options.dropout);
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
    if (HasFailure() && GTEST_FLAG_GET(fail_fast)) return;
  }
}

INSTANTIATE_TEST_SUITE_P(All, EmulatedTangentsTest,
                         ::testing::Combine(::testing::ValuesIn(EmulatedPairFunctions()),
                                            ::testing::ValuesIn(kElements)),
                         [](const auto& test) {
                           return std::string(std::get<0>(test.param)->name) +
                                  NameOf(std::get<1>(test.param));
                         });

const ProblemOptions kSome = {
    .shape = {1, 4, 2, 37, 50, 17, 16}, .right = 30, .bias = ProblemOptions::kSharedBias};

TEST(TangentRulesTest, ResultsAreTheSameInAnyOrder) {
  for (const char* name : {"dot", "umbral"}) {
    const Directed<float> p = DirectedOf(EmulatedPairFunction(name), kSome, Element::kBFloat16);
    CudaOptions how = {.element = Element::kBFloat16};
    const Results<float> first = RunTangents(p, how);
    for (const size_t order : {3, 6}) {
      how.order = Order(order);
      ExpectSame(RunTangents(p, how), first);
    }
  }
}

TEST(TangentRulesTest, GradientsMayBeLeftOut) {
  const Directed<float> p =
      DirectedOf(EmulatedPairFunction("every_function"),
                 {.shape = {1, 2, 1, 20, 20, 8, 8}, .key_bias = true}, Element::kFloat32);
  const Results<float> all = RunTangents(p, {});
  for (const auto& [name, values] : all) {
    if (!name.starts_with("d_")) continue;
    const Results<float> one = RunTangents(p, {}, {.only = name.substr(0, name.size() - 1)});
    EXPECT_EQ(one.size(), 3) << name;
    ExpectSame(one, all);
  }
}

// A missing tangent is 0.
TEST(TangentRulesTest, TangentsMayBeAbsent) {
  const ProblemOptions options = {.shape = {1, 2, 1, 20, 35, 8, 8},
                                  .right = 20,
                                  .bias = ProblemOptions::kSharedBias,
                                  .temperature = true,
                                  .relative = &kShaw,
                                  .relative_key_dim = 4};
  const auto clear = [](Array<float>& array) { array.ForEach([](float& x) { x = 0; }); };
  const std::set<std::string> all = {"x",   "y",     "v",      "relative_query", "relative_key",
                                     "d_o", "d_lse", "numbers"};
  for (const char* name : {"dot", "umbral"}) {
    for (const auto& present :
         {std::set<std::string>{"x"}, {"v"}, {"d_o"}, {"numbers"}, {"y"}, {"relative_key"}}) {
      SCOPED_TRACE(name + (" " + *present.begin()));
      Directed<float> p = DirectedOf(EmulatedPairFunction(name), options, Element::kFloat32);
      Wanted wanted;
      std::set_difference(all.begin(), all.end(), present.begin(), present.end(),
                          std::inserter(wanted.absent, wanted.absent.begin()));
      if (!present.contains("x")) clear(p.along.x);
      if (!present.contains("y")) clear(p.along.y);
      if (!present.contains("v")) clear(p.along.v);
      if (!present.contains("d_o")) clear(p.along.d_o);
      clear(p.along.relative_query);
      if (!present.contains("relative_key")) clear(p.along.relative_key);
      std::fill(p.along.d_lse.begin(), p.along.d_lse.end(), 0.0f);
      if (!present.contains("numbers")) {
        for (std::vector<float>* numbers :
             {&p.along.row, &p.along.column, &p.along.head, &p.along.factor, &p.along.bias,
              &p.along.temperature, &p.along.relative_keys, &p.along.relative_values,
              &p.along.relative_queries}) {
          std::fill(numbers->begin(), numbers->end(), 0.0f);
        }
      }
      ExpectTangents(RunTangents(p, {}, wanted), RunReference(p), Element::kFloat32);
    }
  }
}

// Head dimensions of all sizes. No block may request more shared memory than the smallest GPU has.
TEST(WideTangentsTest, MatchTheReference) {
  const std::pair<int64_t, int64_t> dims[] = {{32, 64}, {72, 128}, {128, 40}, {256, 250}};
  size_t n = 0;
  for (const char* name : {"dot", "penumbral"}) {
    for (const auto& [dim, value_dim] : dims) {
      for (const Element element : kElements) {
        if (++n % 2 == 0 && !TestsAllForms() && dim < 256) continue;
        SCOPED_TRACE(name + std::string(" ") + std::to_string(dim) + " " + NameOf(element));
        const Directed<float> p = DirectedOf(EmulatedPairFunction(name),
                                             {.shape = {1, 1, 1, 19, 34, dim, value_dim},
                                              .right = 20,
                                              .bias = ProblemOptions::kSharedBias},
                                             element);
        EmulatedBackend backend(Order(n));
        try {
          ExpectTangents(RunTangents(p, {.element = element}, {}, &backend), RunReference(p),
                         element);
        } catch (const std::exception& error) {
          ADD_FAILURE() << error.what();
        }
        EXPECT_LE(backend.largest_shared(), 99 * 1024);
      }
    }
  }
}

// Distances, their tangents and their gradients are computed from differences of tokens.
TEST(NearTangentsTest, HaveTheDigitsOfTheirDifferences) {
  for (const char* name : {"laplacian", "gaussian"}) {
    for (const int fraction : {64, 4096}) {
      SCOPED_TRACE(name + std::string(" spread 1/") + std::to_string(fraction));
      const PairFunction& function = EmulatedPairFunction(name);
      const ProblemOptions options = {.shape = {1, 2, 1, 30, 40, 9, 8}, .seed = 2};
      Directed<float> p = {NearTokensProblem(function, options, fraction),
                           RandomProblem(function, options)};
      // Scales the tangents to about the size of the differences of tokens.
      for (Array<float>* tokens : {&p.along.x, &p.along.y}) {
        tokens->ForEach([&](float& element) { element /= static_cast<float>(fraction); });
      }
      ExpectTangents(RunTangents(p, {}), RunReference(p), Element::kFloat32, 0, 1e-4);
    }
  }
}

// A large common part of the scores' tangents, and large scores, do not reduce the accuracy.
TEST(TangentRulesTest, TangentsOfFactorsMayBeLarge) {
  for (const Element element : kElements) {
    SCOPED_TRACE(NameOf(element));
    Directed<float> p =
        DirectedOf(EmulatedPairFunction("laplacian"), {.shape = {1, 2, 1, 30, 50, 16, 8}}, element);
    for (float& number : p.along.factor) number = 64;
    for (Array<float>* tokens : {&p.at.x, &p.at.y}) {
      tokens->ForEach([&](float& x) { x *= 4; });
    }
    const Results<double> expected = RunReference(p);
    Results<float> actual = RunTangents(p, {.element = element});
    ExpectTangents(actual, expected, element, 0, 2e-4);
  }
}

// Hidden keys may hold any values.
TEST(TangentRulesTest, NanInHiddenKeysStaysHidden) {
  for (const bool by_mask : {false, true}) {
    SCOPED_TRACE(by_mask);
    ProblemOptions options = {.shape = {1, 2, 1, 20, 40, 16, 16},
                              .pair_mask = {by_mask, true, true}};
    if (!by_mask) options.right = 10;
    Directed<float> clean = DirectedOf(EmulatedPairFunction("dot"), options, Element::kBFloat16);
    // Some queries attend to this key.
    constexpr int64_t kKey = 15;
    for (int64_t i = 0; by_mask && i < 20; ++i) {
      for (int64_t j = 0; j < 40; ++j) {
        clean.at.pair_mask.at(0, 0, i, j) = j != kKey || i % 3 == 0 ? 1 : 0;
      }
    }
    Directed<float> p = clean;
    p.at.v.at(0, 0, kKey, 3) = kNan;
    p.along.v.at(0, 0, kKey, 5) = kInfinity;
    p.along.y.at(0, 0, kKey, 5) = kNan;
    const CudaOptions how = {.element = Element::kBFloat16};
    const Results<float> expected = RunTangents(clean, how, {.only = "none"});
    const Results<float> actual = RunTangents(p, how, {.only = "none"});
    int64_t hidden = 0;
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t i = 0; i < 20; ++i) {
        const auto row = static_cast<size_t>(h * 20 + i);
        const float* const o = actual.at("o'").data() + row * 16;
        if (Sees(options, 0, i, kKey) && p.at.SeesPair(0, h, i, kKey)) {
          EXPECT_FALSE(std::isfinite(o[3]));
          EXPECT_FALSE(std::isfinite(o[5]));
          continue;
        }
        ++hidden;
        EXPECT_EQ(actual.at("lse'")[row], expected.at("lse'")[row]);
        for (size_t d = 0; d < 16; ++d) EXPECT_EQ(o[d], expected.at("o'")[row * 16 + d]);
      }
    }
    EXPECT_GT(hidden, 0);
    EXPECT_LT(hidden, 40);
  }
}

}  // namespace
}  // namespace gnomon::testing::tangents
