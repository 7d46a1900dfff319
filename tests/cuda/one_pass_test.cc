// Tests the backward pass in one pass (cuda/one_pass.cuh) in the emulator.
#include <algorithm>
#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "cuda_problem.h"
#include "gtest/gtest.h"

namespace gnomon::testing {
namespace {

struct OnePassCase {
  const char* name;
  ProblemOptions options;
};

const OnePassCase kOnePassCases[] = {
    {"OneOfEach", {.shape = {1, 1, 1, 1, 1, 1, 1}}},
    // Several blocks of keys, of which all attend to all queries.
    {"Full", {.shape = {1, 2, 2, 70, 290, 64, 64}}},
    {"Causal", {.shape = {1, 1, 1, 290, 290, 64, 48}, .right = 0}},
    {"CausalWide", {.shape = {1, 2, 1, 150, 150, 128, 128}, .right = 0}},
    // Columns that four warps do not divide evenly, and columns that are not stored.
    {"CausalOddGqa", {.shape = {2, 4, 2, 67, 145, 75, 17}, .right = 78, .padded = true}},
    // Blocks without queries, and queries without keys, between and beside others.
    {"NegativeOffset", {.shape = {1, 2, 1, 140, 300, 16, 16}, .right = 0, .query_offset = -50}},
    {"Window", {.shape = {1, 2, 1, 260, 270, 32, 40}, .left = 60, .right = 5}},
    {"Chunks", {.shape = {1, 1, 1, 200, 310, 8, 96}, .chunks = {37, 0, 0}, .query_offset = 40}},
    {"LengthsAndStarts",
     {.shape = {3, 2, 1, 40, 280, 24, 16},
      .key_starts = {0, 150, 30},
      .key_lengths = {280, 260, 90}}},
    {"OffsetsOfBatches",
     {.shape = {3, 2, 1, 70, 200, 16, 112},
      .left = 60,
      .right = 0,
      .query_offsets = {100, 55, -10}}},
    {"NoKeys", {.shape = {2, 2, 1, 5, 0, 8, 8}}},
    {"NoQueries", {.shape = {2, 2, 1, 0, 5, 8, 8}}},
    {"NoValueColumns", {.shape = {1, 2, 2, 20, 30, 16, 0}, .right = 0}},
};

CudaOptions OnePassOptions() { return {.element = Element::kBFloat16, .keeps_factor = true}; }

// The kinds of backward kernels that a call launched.
std::vector<std::string> BackwardKinds(const EmulatedBackend& backend) {
  std::vector<std::string> kinds;
  for (const cuda::KernelName& name : backend.launched()) {
    if (name.kind.starts_with("backward")) kinds.push_back(name.kind);
  }
  return kinds;
}

class OnePassTest : public ::testing::TestWithParam<OnePassCase> {};

// Results match the reference. They are bitwise equal for any order of threads and blocks, and any
// number of blocks that run at the same time.
TEST_P(OnePassTest, MatchesTheReferenceInAnyOrder) {
  const ProblemOptions& options = GetParam().options;
  const AttentionShape& shape = options.shape;
  const bool is_empty = shape.queries == 0 || shape.keys == 0 || shape.value_dim == 0;
  Problem<float> p = ProblemOf(EmulatedPairFunction("dot"), options, Element::kBFloat16);
  CudaOptions how = OnePassOptions();
  EmulatedBackend backend;
  const Results<float> first = RunCuda(p, how, &backend);
  if (!is_empty) {
    EXPECT_EQ(BackwardKinds(backend), std::vector<std::string>{"backward"});
  }
  EXPECT_LE(backend.largest_shared(), 99 * 1024);
  ExpectCloseTo(first, p.InDouble().Run(), Element::kBFloat16);
  if (is_empty) return;
  // The parts of sums over keys nearly cancel, so that their order matters after rounding.
  p.y.ForEach([](float& y) { y = Rounded(y + 512, Element::kBFloat16); });
  how.order = {.backwards = true};
  const Results<float> alone = RunCuda(p, how);
  how.order = {.backwards = true, .resident = 9};
  ExpectSame(RunCuda(p, how), alone);
}

INSTANTIATE_TEST_SUITE_P(All, OnePassTest, ::testing::ValuesIn(kOnePassCases),
                         [](const auto& test) { return std::string(test.param.name); });

std::vector<std::string> KindsOf(const ProblemOptions& options, const CudaOptions& how,
                                 const char* function = "dot") {
  EmulatedBackend backend;
  RunCuda(ProblemOf(EmulatedPairFunction(function), options, how.element), how, &backend);
  return BackwardKinds(backend);
}

// Other calls keep two passes, because they need more than the gradients of tokens, or would not be
// faster.
TEST(OnePassPlanTest, OtherCallsTakeTwoPasses) {
  const std::vector<std::string> one = {"backward"};
  const std::vector<std::string> two = {"backward_queries", "backward_keys"};
  const ProblemOptions plain = {.shape = {1, 2, 1, 20, 30, 16, 16}};
  EXPECT_EQ(KindsOf(plain, OnePassOptions()), one);
  CudaOptions how = OnePassOptions();
  how.keeps_factor = false;
  EXPECT_EQ(KindsOf(plain, how), two);
  how = OnePassOptions();
  how.keeps_exact_o = false;
  EXPECT_EQ(KindsOf(plain, how), two);
  for (const Element element : {Element::kFloat32, Element::kFloat16}) {
    how = OnePassOptions();
    how.element = element;
    EXPECT_EQ(KindsOf(plain, how), two);
  }
  EXPECT_EQ(KindsOf(plain, OnePassOptions(), "laplacian"), two);
  EXPECT_EQ(KindsOf(plain, OnePassOptions(), "umbral"), two);
  EXPECT_EQ(KindsOf({.shape = {1, 2, 1, 20, 30, 129, 16}}, OnePassOptions()), two);
  EXPECT_EQ(KindsOf({.shape = {1, 2, 1, 20, 30, 16, 65}}, OnePassOptions(), "softcap"), two);
  EXPECT_EQ(KindsOf({.shape = plain.shape, .bias = ProblemOptions::kSharedBias}, OnePassOptions()),
            two);
  EXPECT_EQ(KindsOf({.shape = plain.shape, .key_bias = true}, OnePassOptions()), two);
  EXPECT_EQ(KindsOf({.shape = plain.shape, .dropout = 0.1}, OnePassOptions()), two);
  const ProblemOptions window = {.shape = {1, 2, 1, 70, 200, 48, 33}, .left = 60, .right = 90};
  EXPECT_EQ(KindsOf(window, OnePassOptions(), "softcap"), one);
  const Problem<float> capped =
      ProblemOf(EmulatedPairFunction("softcap"), window, Element::kBFloat16);
  ExpectCloseTo(RunCuda(capped, OnePassOptions()), capped.InDouble().Run(), Element::kBFloat16);
  // The gradients of keys and values need the same kernel, and are then bitwise the same.
  const Problem<float> p = ProblemOf(EmulatedPairFunction("dot"), plain, Element::kBFloat16);
  const Results<float> all = RunCuda(p, OnePassOptions());
  for (const char* only : {"d_y", "d_v"}) {
    how = OnePassOptions();
    how.only = only;
    EXPECT_EQ(KindsOf(plain, how), one);
    ExpectSame(RunCuda(p, how), all);
  }
  // The gradients of queries alone need only the pass over keys.
  how.only = "d_x";
  EXPECT_EQ(KindsOf(plain, how), std::vector<std::string>{"backward_queries"});
}

}  // namespace
}  // namespace gnomon::testing
