// Tests per-head and per-batch arguments that are given as a number or a zero-dimensional tensor.
#include <gnomon/torch/attention.h>
#include <gnomon/torch/graph_attention.h>
#include <gnomon/torch/linear_attention.h>
#include <gnomon/torch/nn.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace gnomon {
namespace {

const torch::TensorOptions kFloat64 = torch::dtype(torch::kDouble);

class ArgumentsTest : public ::testing::Test {
 protected:
  ArgumentsTest() { torch::manual_seed(0); }

  torch::Tensor q = torch::randn({2, 4, 6, 3}, kFloat64);
  torch::Tensor k = torch::randn({2, 2, 6, 3}, kFloat64);
  torch::Tensor v = torch::randn({2, 2, 6, 5}, kFloat64);
};

TEST_F(ArgumentsTest, OneValueIsThatOfAllHeads) {
  const auto of = [](const Similarity& similarity) {
    return AttentionOptions().similarity(similarity);
  };
  const auto at = [](const Position& position) { return AttentionOptions().position({position}); };
  const std::vector<std::function<AttentionOptions(const HeadValue&)>> calls = {
      [&](const HeadValue& x) { return of(similarity::Laplacian(x)); },
      [&](const HeadValue& x) { return of(similarity::Umbral(x)); },
      [&](const HeadValue& x) { return of(similarity::Hyperbolic(x)); },
      [&](const HeadValue& x) { return of(similarity::Entailment(x)); },
      [&](const HeadValue& x) { return at(position::ALiBi(x)); },
      [&](const HeadValue& x) { return at(position::HyPE(x, 0.1)); },
      [&](const HeadValue& x) { return at(position::HyPE(0.1, x)); },
      [&](const HeadValue& x) { return at(position::Kerple(x, 0.7)); },
      [&](const HeadValue& x) { return at(position::Kerple(0.7, x)); },
      [&](const HeadValue& x) {
        return at(position::Grid({2, 3}, {position::ALiBi(x), position::ALiBi(0.3)}));
      },
  };
  for (const auto& call : calls) {
    const torch::Tensor one = torch::tensor(0.5, kFloat64).requires_grad_();
    const torch::Tensor each = torch::full({4}, 0.5, kFloat64).requires_grad_();
    const torch::Tensor o = attention(q, k, v, call(one));
    const torch::Tensor expected = attention(q, k, v, call(each));
    EXPECT_TRUE(torch::equal(o, expected));
    EXPECT_TRUE(torch::equal(o, attention(q, k, v, call(0.5))));
    o.square().sum().backward();
    expected.square().sum().backward();
    EXPECT_EQ(one.grad().dim(), 0);
    EXPECT_TRUE(torch::allclose(one.grad(), each.grad().sum()));
  }
}

TEST_F(ArgumentsTest, OneIntegerIsThatOfAllBatches) {
  const torch::Tensor four = torch::tensor(4);
  const torch::Tensor fours = torch::tensor({4, 4});
  const auto expect_same = [&](const AttentionOptions& ours, const AttentionOptions& expected) {
    EXPECT_TRUE(torch::equal(attention(q, k, v, ours), attention(q, k, v, expected)));
  };
  expect_same(AttentionOptions().key_lengths(four), AttentionOptions().key_lengths(fours));
  expect_same(AttentionOptions().key_starts(four), AttentionOptions().key_starts(fours));
  expect_same(AttentionOptions().query_offsets(four).causal(true),
              AttentionOptions().query_offsets(fours).causal(true));
  const torch::Tensor segments = torch::tensor({0, 0, 1, 1, 2, 2});
  const torch::Tensor repeated = segments.expand({2, 6});
  expect_same(AttentionOptions().query_segments(segments).key_segments(segments),
              AttentionOptions().query_segments(repeated).key_segments(repeated));
  EXPECT_TRUE(torch::equal(linear_attention(q, k, v, LinearAttentionOptions().key_lengths(four)),
                           linear_attention(q, k, v, LinearAttentionOptions().key_lengths(fours))));
  const torch::Tensor embeddings = torch::randn({2, 6, 8});
  for (const char* spec : {"conv:kernel=5:groups=2", "cape:normalize"}) {
    nn::TokenEncoding encoding(spec, 8);
    encoding->eval();
    EXPECT_TRUE(torch::equal(encoding(embeddings, nn::TokenCall{.lengths = four}),
                             encoding(embeddings, nn::TokenCall{.lengths = fours})));
  }
}

TEST_F(ArgumentsTest, OneNumberIsBothSidesOfAWindow) {
  const torch::Tensor o = attention(q, k, v, AttentionOptions().window(2));
  EXPECT_TRUE(torch::equal(o, attention(q, k, v, AttentionOptions().window({{2, 2}}))));
  EXPECT_FALSE(torch::equal(o, attention(q, k, v, AttentionOptions().window({{2, std::nullopt}}))));
  const std::pair<std::optional<int64_t>, std::optional<int64_t>> sides = {2, 2};
  EXPECT_TRUE(torch::equal(o, attention(q, k, v, AttentionOptions().window(sides))));
  EXPECT_FALSE(torch::equal(o, attention(q, k, v, AttentionOptions().window({{{}, 2}}))));
  nn::MultiheadAttention module(8, 2);
  const torch::Tensor x = torch::randn({2, 6, 8});
  EXPECT_TRUE(torch::equal(
      module(x, torch::Tensor(), torch::Tensor(), nn::AttentionCall{.window = 2}),
      module(x, torch::Tensor(), torch::Tensor(), nn::AttentionCall{.window = {{2, 2}}})));
}

TEST_F(ArgumentsTest, ThirdDerivativesAreRefusedByName) {
  q.requires_grad_();
  const torch::Tensor loss = attention(q, k, v).square().sum();
  const torch::Tensor gradient =
      torch::autograd::grad({loss}, {q}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
  const torch::Tensor second =
      torch::autograd::grad({gradient.square().sum()}, {q}, {}, /*retain_graph=*/true,
                            /*create_graph=*/true)[0];
  EXPECT_GT(second.abs().sum().item<double>(), 0);
  try {
    second.sum().backward();
    FAIL();
  } catch (const c10::NotImplementedError& error) {
    EXPECT_NE(error.msg().find("gnomon.attention: third derivatives"), std::string::npos);
  }
}

}  // namespace
}  // namespace gnomon
