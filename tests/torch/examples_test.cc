// The examples of CONTRIBUTING.md, as they stand there.
#include <ATen/ATen.h>
#include <gnomon/torch/attention.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <vector>

#include "ops/offset_bias.h"
#include "ops/token_map.h"

namespace gnomon {
namespace {

#include "root_bias.h"
#include "student_t_map.h"

TEST(ContributingTest, ThePositionIsItsFormula) {
  torch::manual_seed(0);
  const torch::Tensor q = torch::randn({1, 2, 5, 4}, torch::kDouble);
  const torch::Tensor k = torch::randn({1, 2, 7, 4}, torch::kDouble);
  const torch::Tensor slopes = torch::tensor({0.5, 0.2}, torch::kDouble).requires_grad_(true);
  const torch::Tensor table = RootBias(Component::Parse("root"), {slopes}, {5, 7, 2, 2, {}});
  const torch::Tensor o = attention(
      q, k, k, AttentionOptions().position({position::OffsetBias(table)}).query_offset(2));
  const torch::Tensor distance =
      (torch::arange(5).unsqueeze(1) + 2 - torch::arange(7)).abs().to(torch::kDouble);
  const torch::Tensor scores =
      torch::matmul(q, k.mT()) / 2 - slopes.view({2, 1, 1}) * distance.sqrt();
  const torch::Tensor expected = torch::matmul(scores.softmax(-1), k);
  EXPECT_TRUE(torch::allclose(o, expected));
  const auto gradient = [&](const torch::Tensor& of) {
    return torch::autograd::grad({of.square().sum()}, {slopes})[0];
  };
  EXPECT_TRUE(torch::allclose(gradient(o), gradient(expected)));
}

TEST(ContributingTest, TheMapNamesThePairFunction) {
  const torch::Tensor q = torch::randn({1, 2, 5, 4});
  const MappedTokens tokens = MapStudentT(Component::Parse("student_t"), q, q, torch::ones({2}));
  EXPECT_EQ(tokens.function, "student_t");
  EXPECT_TRUE(torch::equal(tokens.x, q));
  EXPECT_TRUE(torch::equal(tokens.factor, -torch::ones({2})));
}

}  // namespace
}  // namespace gnomon
