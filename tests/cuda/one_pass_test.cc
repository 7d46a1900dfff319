// Tests the backward pass in one pass (cuda/one_pass.cuh) in the emulator.
#include <algorithm>
#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "cuda_problem.h"
#include "gtest/gtest.h"
#include "launched_kernels.h"

namespace gnomon::testing {
namespace {

// The kinds of backward kernels that a call launched.
std::vector<std::string> BackwardKinds(const EmulatedBackend& backend) {
  std::vector<std::string> kinds;
  for (const cuda::KernelName& name : backend.launched()) {
    if (name.kind.starts_with("backward")) kinds.push_back(name.kind);
  }
  return kinds;
}

const std::vector<std::string> kOnePass = {"backward"};

struct OnePassOptions {
  const char* name;
  const char* function;  // in addition to "dot"
  ProblemOptions options;
};

const OnePassOptions kOnePassOptions[] = {
    {"OneOfEach", "laplacian", {.shape = {1, 1, 1, 1, 1, 1, 1}}},
    // Several blocks of keys, of which all attend to all queries.
    {"Full", "umbral", {.shape = {1, 2, 2, 70, 290, 64, 64}}},
    {"Causal", "penumbral", {.shape = {1, 1, 1, 290, 290, 64, 48}, .right = 0}},
    {"CausalWide", "umbral", {.shape = {1, 2, 1, 150, 150, 128, 128}, .right = 0}},
    // Columns that four warps do not divide evenly, and columns that are not stored.
    {"CausalOddGqa",
     "penumbral",
     {.shape = {2, 4, 2, 67, 145, 75, 17}, .right = 78, .padded = true}},
    // Blocks without queries, and queries without keys, between and beside others.
    {"NegativeOffset",
     "softcap",
     {.shape = {1, 2, 1, 140, 300, 16, 16}, .right = 0, .query_offset = -50}},
    {"Window", "laplacian", {.shape = {1, 2, 1, 260, 270, 32, 40}, .left = 60, .right = 5}},
    {"Chunks",
     "hyperbolic",
     {.shape = {1, 1, 1, 200, 310, 8, 96}, .chunks = {37, 0, 0}, .query_offset = 40}},
    {"LengthsAndStarts",
     "umbral",
     {.shape = {3, 2, 1, 40, 280, 24, 16},
      .key_starts = {0, 150, 30},
      .key_lengths = {280, 260, 90}}},
    {"OffsetsOfBatches",
     "penumbral_log",
     {.shape = {3, 2, 1, 70, 200, 16, 112},
      .left = 60,
      .right = 0,
      .query_offsets = {100, 55, -10}}},
    {"NoKeys", "umbral", {.shape = {2, 2, 1, 5, 0, 8, 8}}},
    {"NoQueries", "umbral", {.shape = {2, 2, 1, 0, 5, 8, 8}}},
    {"NoValueColumns", "gaussian", {.shape = {1, 2, 2, 20, 30, 16, 0}, .right = 0}},
};

struct OnePassCase {
  std::string name;
  ProblemOptions options;
  const char* function;
  Element element = Element::kBFloat16;
  bool factor = false;  // whether the gradients of factors and head scalars are computed
  int near = 0;         // NearTokensProblem(), unless 0
  float offset = 0;     // of all values
  float far = 0;        // the offset of all queries
  bool rising = false;  // whether the values of later keys are larger, up to 2^8 times
};

// Each case with "dot" in bf16, and with another function, for which types and results alternate.
std::vector<OnePassCase> OnePassCases() {
  std::vector<OnePassCase> cases;
  size_t n = 0;
  for (const auto& [name, function, options] : kOnePassOptions) {
    cases.push_back({std::string(name) + "_dot", options, "dot"});
    const Element element = n / 2 % 2 == 0 ? Element::kBFloat16 : Element::kFloat16;
    cases.push_back({std::string(name) + "_" + function, options, function, element, n % 3 == 0});
    ++n;
  }
  const AttentionShape shape = {1, 2, 1, 70, 150, 24, 17};
  cases.push_back({"Near_laplacian", {.shape = shape}, "laplacian", Element::kFloat16, true, 512});
  cases.push_back({"Near_gaussian", {.shape = shape}, "gaussian", Element::kBFloat16, false, 64});
  cases.push_back(
      {"Near_umbral", {.shape = shape, .right = 0}, "umbral", Element::kFloat16, false, 64});
  cases.push_back({"Factor_dot", {.shape = shape, .right = 40}, "dot", Element::kFloat16, true});
  // The weights of warps have different scales.
  cases.back().rising = true;
  // Gradients with respect to weights are large and nearly equal, so that the rounding errors of
  // deltas are, too.
  cases.push_back(
      {"Offset_laplacian", {.shape = shape}, "laplacian", Element::kBFloat16, true, 0, 8});
  // The queries are also far from all keys, so that differences of tokens are nearly equal.
  cases.push_back(
      {"Far_laplacian", {.shape = shape}, "laplacian", Element::kBFloat16, false, 0, 32, 6});
  cases.push_back({"Offset_umbral", {.shape = shape}, "umbral", Element::kFloat16, false, 0, 4});
  return cases;
}

Problem<float> ProblemOfCase(const OnePassCase& test) {
  const PairFunction& function = EmulatedPairFunction(test.function);
  if (test.near == 0) {
    Problem<float> p = ProblemOf(function, test.options, test.element);
    if (test.offset != 0) {
      p.v.ForEach([&](float& v) { v = Rounded(v + test.offset, test.element); });
    }
    if (test.rising) {
      const int64_t keys = p.options.shape.keys;
      for (int64_t j = 0; j < keys; ++j) {
        const float scale = std::exp2f(static_cast<float>(8 * j / keys));
        for (int64_t d = 0; d < p.options.shape.value_dim; ++d) p.v.at(0, 0, j, d) *= scale;
      }
    }
    if (test.far != 0) {
      p.x.ForEach([&](float& x) { x = Rounded(x + test.far, test.element); });
    }
    return p;
  }
  Problem<float> p = NearTokensProblem(function, test.options, test.near);
  for (Array<float>* array : {&p.x, &p.y, &p.v, &p.d_o}) {
    array->ForEach([&](float& x) { x = Rounded(x, test.element); });
  }
  // Some tokens coincide.
  for (int64_t i = 0; i < p.options.shape.queries; i += 3) {
    for (int64_t d = 0; d < p.options.shape.dim; ++d) p.y.at(0, 0, i, d) = p.x.at(0, 1, i, d);
  }
  return p;
}

class OnePassTest : public ::testing::TestWithParam<OnePassCase> {};

// Replaces all numbers of the keys that key_starts and key_lengths hide.
void HideNumbers(Problem<float>& p) {
  const AttentionShape& shape = p.options.shape;
  if (p.options.key_starts.empty()) return;
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t j = 0; j < shape.keys; ++j) {
      const auto batch = static_cast<size_t>(b);
      if (j >= p.options.key_starts[batch] && j < p.options.key_lengths[batch]) continue;
      for (int64_t d = 0; d < shape.dim; ++d) p.y.at(b, 0, j, d) = kNan;
      for (int64_t d = 0; d < shape.value_dim; ++d) p.v.at(b, 0, j, d) = kNan;
      for (int s = 0; s < p.function.column_scalars; ++s) p.column_at(s, b, 0, j) = kNan;
    }
  }
}

// Results match the reference. They are bitwise equal for any order of threads and blocks, and any
// number of blocks that run at the same time.
TEST_P(OnePassTest, MatchesTheReferenceInAnyOrder) {
  const OnePassCase& test = GetParam();
  const AttentionShape& shape = test.options.shape;
  const bool is_empty = shape.queries == 0 || shape.keys == 0 || shape.value_dim == 0;
  Problem<float> p = ProblemOfCase(test);
  CudaOptions how = {.element = test.element, .keeps_factor = !test.factor};
  EmulatedBackend backend;
  const Results<float> first = RunCuda(p, how, &backend);
  if (!is_empty) {
    EXPECT_EQ(BackwardKinds(backend), kOnePass);
  }
  EXPECT_LE(backend.largest_shared(), 99 * 1024);
  ExpectCloseTo(first, p.InDouble().Run(), test.element);
  if (is_empty) return;
  HideNumbers(p);
  how.order = {.far_ahead = true, .early_copies = true};
  ExpectSame(RunCuda(p, how), first);
  // The parts of sums over keys nearly cancel, so that their order matters after rounding.
  if (p.function.input == PairInput::kInnerProduct) {
    p.y.ForEach([&](float& y) { y = Rounded(y + 512, test.element); });
  }
  how.order = {.backwards = true};
  const Results<float> alone = RunCuda(p, how);
  how.order = {.backwards = true, .resident = 9};
  ExpectSame(RunCuda(p, how), alone);
}

INSTANTIATE_TEST_SUITE_P(All, OnePassTest, ::testing::ValuesIn(OnePassCases()),
                         [](const auto& test) { return test.param.name; });

std::vector<std::string> KindsOf(const ProblemOptions& options, const CudaOptions& how,
                                 const char* function = "dot") {
  EmulatedBackend backend;
  RunCuda(ProblemOf(EmulatedPairFunction(function), options, how.element), how, &backend);
  return BackwardKinds(backend);
}

// Other calls keep two passes, because they need more registers or numbers per pair.
TEST(OnePassPlanTest, OtherCallsTakeTwoPasses) {
  const std::vector<std::string> two = {"backward_queries", "backward_keys"};
  const ProblemOptions plain = {.shape = {1, 2, 1, 20, 30, 16, 16}};
  const CudaOptions usual = {.element = Element::kBFloat16};
  EXPECT_EQ(KindsOf(plain, usual), kOnePass);
  CudaOptions how = usual;
  how.keeps_exact_o = false;
  EXPECT_EQ(KindsOf(plain, how), two);
  how = usual;
  how.element = Element::kFloat32;
  EXPECT_EQ(KindsOf(plain, how), two);
  how = usual;
  how.precise = false;
  EXPECT_EQ(KindsOf(plain, how, "umbral"), two);
  EXPECT_EQ(KindsOf(plain, how, "laplacian"), kOnePass);
  EXPECT_EQ(KindsOf(plain, usual, "additive"), two);
  EXPECT_EQ(KindsOf({.shape = {1, 2, 1, 20, 30, 129, 16}}, usual, "umbral"), two);
  EXPECT_EQ(KindsOf({.shape = {1, 2, 1, 20, 30, 16, 65}}, usual, "softcap"), two);
  EXPECT_EQ(KindsOf({.shape = plain.shape, .bias = ProblemOptions::kSharedBias}, usual), two);
  EXPECT_EQ(KindsOf({.shape = plain.shape, .key_bias = true}, usual), two);
  EXPECT_EQ(KindsOf({.shape = plain.shape, .dropout = 0.1}, usual), two);
  // Any gradient that belongs to keys needs the same kernel, and is then bitwise the same.
  const Problem<float> p = ProblemOf(EmulatedPairFunction("umbral"), plain, usual.element);
  const Results<float> all = RunCuda(p, usual);
  for (const char* only : {"d_y", "d_v", "d_column"}) {
    how = usual;
    how.only = only;
    EXPECT_EQ(KindsOf(plain, how, "umbral"), kOnePass);
    ExpectSame(RunCuda(p, how), all);
  }
  // The gradients of queries alone need only the pass over keys.
  how.only = "d_x";
  EXPECT_EQ(KindsOf(plain, how), std::vector<std::string>{"backward_queries"});
}

// Inference does not take the time of precise outputs, which only one pass needs.
TEST(OnePassPlanTest, SplitsWeightsOnlyForOnePass) {
  struct Case {
    const char* function;
    bool precise;
    Element element;
    bool splits;
  };
  for (const bool is_hopper : {false, true}) {
    for (const Case& c : {Case{"umbral", true, Element::kBFloat16, true},
                          Case{"umbral", false, Element::kBFloat16, false},
                          Case{"umbral", true, Element::kFloat32, false},
                          Case{"laplacian", true, Element::kBFloat16, false}}) {
      EmulatedBackend backend({}, 1, is_hopper);
      const Problem<float> p = ProblemOf(EmulatedPairFunction(c.function),
                                         {.shape = {1, 2, 1, 256, 64, 48, 64}}, c.element);
      RunCuda(p, {.element = c.element, .precise = c.precise, .forward_only = true}, &backend);
      int64_t splits = 0;
      for (const cuda::KernelName& name : backend.launched()) {
        if (name.kind.starts_with("forward")) splits += ConstantOf(name, "kSplit");
      }
      EXPECT_EQ(splits, c.splits ? 1 : 0) << c.function;
    }
  }
}

}  // namespace
}  // namespace gnomon::testing
