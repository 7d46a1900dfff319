// Tests the terms in examples/terms, which CONTRIBUTING.md quotes. They register themselves when
// linked in; no code calls them directly.
#include <gmock/gmock.h>
#include <gnomon/catalogue.h>
#include <gnomon/torch/attention.h>
#include <gnomon/torch/nn.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <string>
#include <vector>

namespace gnomon {
namespace {

using ::testing::Contains;

std::vector<std::string> Names(const std::vector<CatalogueEntry>& entries) {
  std::vector<std::string> names;
  for (const CatalogueEntry& entry : entries) names.push_back(entry.name);
  return names;
}

torch::Tensor GradientOf(const torch::Tensor& of, const torch::Tensor& leaf) {
  return torch::autograd::grad({of.square().sum()}, {leaf})[0];
}

TEST(ContributingTest, AFileIsAPosition) {
  EXPECT_THAT(Names(PositionCatalogue()), Contains("root"));
  torch::manual_seed(0);
  const torch::Tensor q = torch::randn({1, 2, 5, 4}, torch::kDouble);
  const torch::Tensor k = torch::randn({1, 2, 7, 4}, torch::kDouble);
  const torch::Tensor slopes = torch::tensor({0.5, 0.2}, torch::kDouble).requires_grad_(true);
  const Position root{Term{"root:slopes=tensor", {slopes}}};
  const torch::Tensor o = attention(q, k, k, AttentionOptions().position({root}).query_offset(2));
  const torch::Tensor distance =
      (torch::arange(5).unsqueeze(1) + 2 - torch::arange(7)).abs().to(torch::kDouble);
  const torch::Tensor scores =
      torch::matmul(q, k.mT()) / 2 - slopes.view({2, 1, 1}) * distance.sqrt();
  const torch::Tensor expected = torch::matmul(scores.softmax(-1), k);
  EXPECT_TRUE(torch::allclose(o, expected));
  EXPECT_TRUE(torch::allclose(GradientOf(o, slopes), GradientOf(expected, slopes)));
  // The term is used in a specification, in a sum, and along the axes of a grid.
  const torch::Tensor tokens = torch::randn({1, 2, 6, 4});
  for (const char* spec : {"root", "rope+root:slopes=0.3", "root:shape=2x3"}) {
    EXPECT_TRUE(attention(tokens, tokens, tokens, AttentionOptions().position(spec))
                    .isfinite()
                    .all()
                    .item<bool>())
        << spec;
  }
}

TEST(ContributingTest, ADefinitionIsASimilarity) {
  EXPECT_THAT(Names(SimilarityCatalogue()), Contains("student_t"));
  torch::manual_seed(0);
  const torch::Tensor q = torch::randn({1, 2, 5, 4}, torch::kDouble);
  const torch::Tensor gamma = torch::tensor({0.5, 1.5}, torch::kDouble).requires_grad_(true);
  const Similarity student{Term{"student_t:gamma=tensor", {gamma}}};
  const torch::Tensor o = attention(q, q, q, AttentionOptions().similarity(student));
  const torch::Tensor scores = -gamma.view({2, 1, 1}) * torch::cdist(q, q).square().log1p();
  const torch::Tensor expected = torch::matmul(scores.softmax(-1), q);
  EXPECT_TRUE(torch::allclose(o, expected));
  EXPECT_TRUE(torch::allclose(GradientOf(o, gamma), GradientOf(expected, gamma)));
  // In float32, calls use the kernels for this machine.
  const torch::Tensor single =
      attention(q.to(torch::kFloat), q.to(torch::kFloat), q.to(torch::kFloat),
                AttentionOptions().similarity("student_t:gamma=0.5"));
  EXPECT_TRUE(torch::allclose(single.select(1, 0).to(torch::kDouble), o.select(1, 0), 1e-5, 1e-5));
}

TEST(ContributingTest, TwoFilesAreASimilarityWithAMap) {
  EXPECT_THAT(Names(SimilarityCatalogue()), Contains("adaptive"));
  torch::manual_seed(0);
  const torch::Tensor q = torch::randn({1, 2, 5, 4}, torch::kDouble).requires_grad_(true);
  const torch::Tensor gamma = torch::tensor({0.5, 1.5}, torch::kDouble).requires_grad_(true);
  const Similarity adaptive{Term{"adaptive:gamma=tensor:limit=1", {gamma}}};
  const torch::Tensor o = attention(q, q, q, AttentionOptions().similarity(adaptive));
  const torch::Tensor x = q.slice(3, 0, 3);
  const torch::Tensor square = (x.unsqueeze(3) - x.unsqueeze(2)).square().sum(4);
  const torch::Tensor scores = -gamma.view({2, 1, 1}) * q.slice(3, 3).clamp(-1, 1).exp() * square;
  const torch::Tensor expected = torch::matmul(scores.softmax(-1), q);
  EXPECT_TRUE(torch::allclose(o, expected));
  const auto ours = torch::autograd::grad({o.square().sum()}, {q, gamma});
  const auto theirs = torch::autograd::grad({expected.square().sum()}, {q, gamma});
  EXPECT_TRUE(torch::allclose(ours[0], theirs[0]));
  EXPECT_TRUE(torch::allclose(ours[1], theirs[1]));
}

TEST(ContributingTest, BothAreThereInModules) {
  nn::MultiheadAttention module(
      nn::MultiheadAttentionOptions(8, 2).similarity("student_t").position("root:slopes=learned"));
  const auto names = module->named_parameters().keys();
  EXPECT_THAT(names, Contains("gamma_theta"));
  EXPECT_THAT(names, Contains("root_slopes_theta"));
  EXPECT_TRUE(module->forward(torch::randn({1, 8, 8})).isfinite().all().item<bool>());
}

}  // namespace
}  // namespace gnomon
