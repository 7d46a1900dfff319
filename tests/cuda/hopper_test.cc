// Tests the forward pass for compute capability 9.0 (cuda/hopper.cuh) in the emulator.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "cuda_problem.h"
#include "gtest/gtest.h"

namespace gnomon::testing {
namespace {

struct HopperCase {
  const char* name;
  const char* function;
  ProblemOptions options;
};

const HopperCase kHopperCases[] = {
    // The second group of the last block has no queries.
    {"Full", "dot", {.shape = {1, 1, 1, 540, 140, 64, 64}}},
    {"OneTile", "dot", {.shape = {2, 2, 2, 100, 60, 64, 64}}},
    {"Causal", "dot", {.shape = {1, 2, 2, 370, 370, 64, 64}, .right = 0}},
    {"CausalWide", "dot", {.shape = {1, 2, 1, 250, 250, 128, 128}, .right = 0}},
    // Columns that the tiles pad, and mixed widths.
    {"CausalOddGqa", "dot", {.shape = {2, 4, 2, 120, 290, 72, 40}, .right = 160}},
    {"Window", "dot", {.shape = {1, 2, 1, 250, 420, 40, 120}, .left = 60, .right = 130}},
    // Rows, groups and blocks without keys, and tiles that all rows of some groups see.
    {"NegativeOffset",
     "dot",
     {.shape = {1, 2, 1, 370, 300, 64, 64}, .right = 0, .query_offset = -150}},
    {"Chunks",
     "dot",
     {.shape = {1, 1, 1, 380, 600, 64, 96}, .chunks = {150, 1, 0}, .query_offset = 40}},
    {"LengthsAndStarts",
     "dot",
     {.shape = {3, 2, 1, 120, 460, 48, 64},
      .key_starts = {0, 150, 130},
      .key_lengths = {460, 260, 90}}},
    {"OffsetsOfBatches",
     "dot",
     {.shape = {3, 2, 1, 70, 400, 64, 112},
      .left = 160,
      .right = 0,
      .query_offsets = {300, 55, -10}}},
    {"NoKeys", "dot", {.shape = {2, 2, 1, 120, 0, 64, 64}}},
    {"HeadScalars", "softcap", {.shape = {1, 2, 1, 250, 270, 64, 64}, .right = 20}},
    {"Distances", "laplacian", {.shape = {1, 2, 1, 250, 270, 64, 64}, .right = 20}},
    {"DistancesWide",
     "gaussian",
     {.shape = {1, 2, 2, 120, 150, 128, 104}, .left = 90, .right = 10}},
    {"Heights", "umbral", {.shape = {1, 2, 1, 120, 190, 64, 128}, .right = 70}},
    {"HeightsWide", "penumbral", {.shape = {1, 2, 2, 120, 150, 128, 128}, .right = 30}},
};

CudaOptions HopperOptions(Element element) {
  return {.element = element, .fills = true, .is_hopper = true};
}

// The kinds of kernels with a pair function that a call launched.
std::vector<std::string> PairKinds(const EmulatedBackend& backend) {
  std::vector<std::string> kinds;
  for (const cuda::KernelName& name : backend.launched()) {
    if (!name.definition.empty() && std::ranges::find(kinds, name.kind) == kinds.end()) {
      kinds.push_back(name.kind);
    }
  }
  return kinds;
}

class HopperTest : public ::testing::TestWithParam<HopperCase> {};

// Results match the reference, with the gradients that the backward pass computes from them. They
// are bitwise equal for any order of threads, copies and blocks.
TEST_P(HopperTest, MatchesTheReferenceInAnyOrder) {
  const auto& [name, function, options] = GetParam();
  // Every second case runs first in fp16, so that both types meet all kinds of masks.
  const size_t n = std::string_view(name).size() % 2;
  for (const Element element : {n == 0 ? Element::kBFloat16 : Element::kFloat16,
                                n == 0 ? Element::kFloat16 : Element::kBFloat16}) {
    SCOPED_TRACE(NameOf(element));
    const Problem<float> p = ProblemOf(EmulatedPairFunction(function), options, element);
    CudaOptions how = HopperOptions(element);
    EmulatedBackend backend({}, 1, true);
    const Results<float> first = RunCuda(p, how, &backend);
    EXPECT_EQ(PairKinds(backend)[0], "forward_hopper");
    EXPECT_LE(backend.largest_shared(), 227 * 1024);
    ExpectCloseTo(first, p.InDouble().Run(), element);
    how.forward_only = true;
    for (const size_t order : {3 + n, size_t{7} - n}) {
      how.order = Order(order);
      const Results<float> other = RunCuda(p, how);
      EXPECT_EQ(other.at("o"), first.at("o"));
      EXPECT_EQ(other.at("lse"), first.at("lse"));
    }
    if (!TestsAllForms()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(All, HopperTest, ::testing::ValuesIn(kHopperCases), [](const auto& test) {
  return std::string(test.param.function) + test.param.name;
});

// Shifts may be below the largest score, but not if one key outweighs all others.
TEST(HopperShiftTest, IsTheScoreOfAKeyThatOutweighsAllOthers) {
  Problem<float> p = ProblemOf(
      EmulatedPairFunction("dot"),
      {.shape = {1, 2, 1, 250, 700, 40, 40}, .left = 400, .query_offset = 400}, Element::kBFloat16);
  p.factor = {1, 64};
  std::vector<float> statistics;
  CudaOptions how = HopperOptions(Element::kBFloat16);
  how.forward_only = true;
  how.statistics = &statistics;
  RunCuda(p, how);
  const size_t rows = p.d_lse.size();
  const Problem<double> q = p.InDouble();
  std::vector<double> expected(3 * rows);
  Array<double> o(q.d_o.size(), false, 0.0);
  std::vector<double> lse(rows);
  AttentionForward(p.function, q.Input(), {o.view(), lse.data(), expected.data()});
  int64_t single = 0;
  for (size_t row = 0; row < rows; ++row) {
    const double tolerance = 2e-6 * std::abs(expected[row]) + 2e-6;
    EXPECT_NEAR(statistics[row] + std::log2(statistics[rows + row]),
                expected[row] + std::log2(expected[rows + row]), 2 * tolerance);
    EXPECT_GE(statistics[row], expected[row] - 8 - tolerance);
    if (expected[rows + row] > 1.9) continue;
    ++single;
    EXPECT_NEAR(statistics[row], expected[row], tolerance);
    EXPECT_EQ(statistics[2 * rows + row], expected[2 * rows + row]) << row;
  }
  EXPECT_GT(single, 50);
}

class HopperRulesTest : public ::testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(All, HopperRulesTest, ::testing::Values("dot", "gaussian", "laplacian"),
                         [](const auto& test) { return std::string(test.param); });

// Distances of equal tokens are exactly 0, and those of similar ones keep their digits.
TEST_P(HopperRulesTest, NearDistancesHaveTheDigitsOfTheirDifferences) {
  const PairFunction& function = EmulatedPairFunction(GetParam());
  if (function.input != PairInput::kSquaredDistance) GTEST_SKIP() << "has no distances";
  for (const int fraction : {8, 64, 512}) {
    SCOPED_TRACE(fraction);
    Problem<float> p =
        NearTokensProblem(function, {.shape = {1, 2, 1, 70, 140, 40, 48}, .right = 80}, fraction);
    for (Array<float>* array : {&p.x, &p.y, &p.v, &p.d_o}) {
      array->ForEach([](float& x) { x = Rounded(x, Element::kFloat16); });
    }
    CudaOptions how = HopperOptions(Element::kFloat16);
    how.forward_only = true;
    const Results<float> actual = RunCuda(p, how);
    EXPECT_LE(Difference(actual.at("lse"), p.InDouble().Run().at("lse")), 3e-5);
  }
}

// A non-finite value affects only the rows that see it; all others are bitwise unchanged.
TEST_P(HopperRulesTest, PoisonReachesOnlyTheRowsThatSeeIt) {
  const ProblemOptions all[] = {
      {.shape = {2, 2, 2, 370, 370, 64, 40}, .right = 0},
      {.shape = {2, 2, 1, 120, 300, 40, 128}, .left = 50, .right = 110},
  };
  constexpr int64_t kPoisoned = 100;
  for (const ProblemOptions& options : all) {
    const AttentionShape& shape = options.shape;
    const Problem<float> clean =
        ProblemOf(EmulatedPairFunction(GetParam()), options, Element::kBFloat16);
    CudaOptions how = HopperOptions(Element::kBFloat16);
    how.forward_only = true;
    const std::vector<float> expected = RunCuda(clean, how).at("o");
    for (const float poison : {kNan, kInfinity}) {
      Problem<float> p = clean;
      p.v.at(1, 0, kPoisoned, shape.value_dim - 1) = poison;
      how.order = Order(5);
      EmulatedBackend backend(how.order, 1, true);
      const std::vector<float> actual = RunCuda(p, how, &backend).at("o");
      EXPECT_EQ(PairKinds(backend)[0], "forward_hopper");
      for (size_t n = 0; n < actual.size(); ++n) {
        const auto at = static_cast<int64_t>(n);
        const int64_t i = at / shape.value_dim % shape.queries;
        const int64_t head = at / shape.value_dim / shape.queries;
        const bool sees =
            head / shape.heads == 1 && head % shape.heads < shape.heads / shape.key_heads &&
            at % shape.value_dim == shape.value_dim - 1 && Sees(options, 1, i, kPoisoned);
        if (sees) {
          ASSERT_FALSE(std::isfinite(actual[n])) << "query " << i << " of head " << head;
        } else {
          ASSERT_EQ(actual[n], expected[n]) << "query " << i << " of head " << head;
        }
      }
    }
  }
}

// Other calls use the kernels that run on all GPUs.
TEST(HopperPlanTest, OtherCallsUseTheOtherKernels) {
  const ProblemOptions plain = {.shape = {1, 2, 1, 128, 30, 64, 64}};
  const auto kind_of = [](const ProblemOptions& options, Element element,
                          const char* function = "dot", int64_t fills = 1, bool is_hopper = true) {
    EmulatedBackend backend({}, fills, is_hopper);
    CudaOptions how = HopperOptions(element);
    how.forward_only = true;
    RunCuda(ProblemOf(EmulatedPairFunction(function), options, element), how, &backend);
    return PairKinds(backend)[0];
  };
  const std::string hopper = "forward_hopper";
  const std::string other = "forward";
  EXPECT_EQ(kind_of(plain, Element::kBFloat16), hopper);
  EXPECT_EQ(kind_of(plain, Element::kBFloat16, "dot", 1, /*is_hopper=*/false), other);
  EXPECT_EQ(kind_of(plain, Element::kBFloat16, "dot", 4), hopper);
  EXPECT_EQ(kind_of(plain, Element::kBFloat16, "dot", 5), other);
  EXPECT_EQ(kind_of(plain, Element::kFloat32), other);
  EXPECT_EQ(kind_of(plain, Element::kBFloat16, "additive"), other);
  EXPECT_EQ(
      kind_of({.shape = plain.shape, .bias = ProblemOptions::kSharedBias}, Element::kBFloat16),
      other);
  EXPECT_EQ(kind_of({.shape = plain.shape, .dropout = 0.1}, Element::kBFloat16), other);
  EXPECT_EQ(kind_of({.shape = plain.shape, .key_bias = true}, Element::kBFloat16), other);
  // Rows that are not aligned, wide and narrow heads, and few queries.
  for (const AttentionShape& shape :
       {AttentionShape{1, 2, 1, 128, 30, 60, 64}, AttentionShape{1, 2, 1, 128, 30, 136, 64},
        AttentionShape{1, 2, 1, 128, 30, 64, 32}, AttentionShape{1, 2, 1, 64, 30, 64, 64},
        AttentionShape{1, 2, 1, 290, 30, 64, 64}}) {
    EXPECT_EQ(kind_of({.shape = shape}, Element::kBFloat16), other);
  }
}

}  // namespace
}  // namespace gnomon::testing
