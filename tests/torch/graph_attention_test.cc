#include <gnomon/torch/graph_attention.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <vector>

namespace gnomon {
namespace {

TEST(GraphAttention, IsDenseAttentionOverTheEdgesOfEachNode) {
  torch::manual_seed(0);
  const auto options = torch::dtype(torch::kDouble);
  const std::vector<std::vector<int64_t>> rows = {{1, 3}, {}, {0, 1, 2, 3}, {2}};
  std::vector<int64_t> indptr = {0};
  std::vector<int64_t> indices;
  for (const auto& row : rows) {
    indices.insert(indices.end(), row.begin(), row.end());
    indptr.push_back(static_cast<int64_t>(indices.size()));
  }
  const torch::Tensor q = torch::randn({4, 6, 5}, options);
  const torch::Tensor k = torch::randn({4, 2, 5}, options);
  const torch::Tensor v = torch::randn({4, 2, 3}, options);
  const torch::Tensor gamma = torch::rand({6}, options);
  const auto batch = [](const torch::Tensor& nodes) { return nodes.transpose(0, 1).unsqueeze(0); };
  for (const Similarity& similarity : {similarity::Dot(), similarity::Umbral(gamma)}) {
    const auto [o, lse] =
        graph_attention_with_lse(q, k, v, torch::tensor(indptr), torch::tensor(indices),
                                 GraphAttentionOptions().similarity(similarity));
    ASSERT_EQ(o.sizes(), (std::vector<int64_t>{4, 6, 3}));
    for (int64_t i = 0; i < 4; ++i) {
      const std::vector<int64_t>& row = rows[static_cast<size_t>(i)];
      if (row.empty()) {
        EXPECT_TRUE(torch::equal(o[i], torch::zeros({6, 3}, options)));
        EXPECT_TRUE(torch::equal(
            lse[i], torch::full({6}, -std::numeric_limits<double>::infinity(), options)));
        continue;
      }
      const torch::Tensor keys = torch::tensor(row);
      const auto [dense, dense_lse] = attention_with_lse(
          batch(q.slice(0, i, i + 1)), batch(k.index_select(0, keys)),
          batch(v.index_select(0, keys)), AttentionOptions().similarity(similarity));
      EXPECT_TRUE(torch::allclose(o[i], dense[0].squeeze(1)));
      EXPECT_TRUE(torch::allclose(lse[i], dense_lse[0].squeeze(1)));
    }
  }
}

TEST(GraphAttention, HasBiasesOfEdgesAndDropout) {
  torch::manual_seed(0);
  const torch::Tensor x = torch::randn({3, 2, 4});
  const torch::Tensor indptr = torch::tensor({0, 3, 3, 5});
  const torch::Tensor indices = torch::tensor({0, 2, 1, 0, 1});
  const torch::Tensor bias = torch::randn({5, 2}).set_requires_grad(true);
  const auto options = GraphAttentionOptions().edge_bias(bias).dropout(0.5).seed(3);
  const torch::Tensor o = graph_attention(x, x, x, indptr, indices, options);
  EXPECT_TRUE(torch::equal(o, graph_attention(x, x, x, indptr, indices, options)));
  // Compares with attention over one node's keys as a sequence, with edge biases as key biases.
  const auto batch = [](const torch::Tensor& nodes) { return nodes.transpose(0, 1).unsqueeze(0); };
  const torch::Tensor keys = batch(x.index_select(0, indices.slice(0, 0, 3)));
  const torch::Tensor dense =
      attention(batch(x.slice(0, 0, 1)), keys, keys,
                AttentionOptions()
                    .position(position::KeyBias(bias.slice(0, 0, 3).t().unsqueeze(0)))
                    .dropout(0.5)
                    .seed(3));
  EXPECT_TRUE(torch::allclose(o[0], dense[0].squeeze(1)));
  o.sum().backward();
  EXPECT_GT(bias.grad().abs().max().item<float>(), 0.0f);
  EXPECT_THROW(graph_attention(x, x, x, indptr, indices,
                               GraphAttentionOptions().edge_bias(torch::zeros({4}))),
               c10::ValueError);
}

TEST(GraphAttention, HasGradientsAndAScale) {
  const torch::Tensor x = torch::randn({3, 1, 2}).set_requires_grad(true);
  const torch::Tensor indptr = torch::tensor({0, 2, 2, 3});
  const torch::Tensor indices = torch::tensor({0, 2, 1});
  const torch::Tensor o =
      graph_attention(x, x, x, indptr, indices, GraphAttentionOptions().scale(0.0));
  EXPECT_TRUE(torch::allclose(o[0], (x[0] + x[2]) / 2));
  o.sum().backward();
  EXPECT_TRUE(torch::allclose(x.grad().flatten(),
                              torch::tensor({0.5, 0.5, 1.0, 1.0, 0.5, 0.5}).to(torch::kFloat)));
}

TEST(GraphAttention, NamesWhatIsWrong) {
  const torch::Tensor x = torch::randn({3, 1, 2});
  const torch::Tensor indptr = torch::tensor({0, 2, 2, 3});
  EXPECT_THROW(graph_attention(x, x, x, indptr, torch::tensor({0, 2, 3})), c10::ValueError);
  EXPECT_THROW(graph_attention(x, x, x, indptr, torch::rand({3})), c10::TypeError);
}

}  // namespace
}  // namespace gnomon
