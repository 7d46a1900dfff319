#include <gnomon/torch/linear_attention.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace gnomon {
namespace {

TEST(LinearAttention, IsTheQuotientOfItsSums) {
  torch::manual_seed(0);
  const auto options = torch::dtype(torch::kDouble);
  const torch::Tensor q = torch::randn({1, 2, 90, 4}, options);
  const torch::Tensor k = torch::randn({1, 2, 90, 4}, options);
  const torch::Tensor v = torch::randn({1, 2, 90, 3}, options);
  const auto phi = [](const torch::Tensor& x) { return torch::elu(x) + 1; };
  const torch::Tensor weights = phi(q).matmul(phi(k).mT());
  for (const bool causal : {false, true}) {
    const torch::Tensor seen = causal ? weights.tril() : weights;
    const torch::Tensor expected = seen.matmul(v) / seen.sum(-1, true);
    EXPECT_TRUE(torch::allclose(linear_attention(q, k, v, LinearAttentionOptions().causal(causal)),
                                expected));
  }
  // If a query and a key are rotated by the same angle, their product is unchanged.
  const auto last = [](const torch::Tensor& x) { return x.slice(2, 89, 90); };
  const LinearAttentionOptions rotated =
      LinearAttentionOptions().rope(position::RoPE()).query_offset(0);
  EXPECT_TRUE(torch::allclose(linear_attention(last(q), last(k), last(v), rotated), last(v)));
}

TEST(LinearAttention, FavorTakesItsProjectionOrDrawsIt) {
  const torch::Tensor q = torch::randn({1, 2, 9, 4});
  const torch::Tensor drawn =
      linear_attention(q, q, q, LinearAttentionOptions().feature("favor").num_features(12).seed(7));
  const torch::Tensor given = linear_attention(q, q, q,
                                               LinearAttentionOptions().feature("favor").projection(
                                                   favor_projection(12, 4, 7).to(torch::kFloat)));
  EXPECT_TRUE(torch::allclose(drawn, given));
}

TEST(LinearAttention, NamesWhatIsWrong) {
  const torch::Tensor q = torch::randn({1, 2, 9, 4});
  EXPECT_THROW(linear_attention(q, q, q, LinearAttentionOptions().feature("softmax")),
               c10::ValueError);
  EXPECT_THROW(
      linear_attention(q, q, q, LinearAttentionOptions().rope(position::ALiBi(torch::rand({2})))),
      c10::ValueError);
}

}  // namespace
}  // namespace gnomon
