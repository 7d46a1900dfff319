#include <gmock/gmock.h>
#include <gnomon/torch/nn.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <string>
#include <vector>

namespace gnomon::nn {
namespace {

using ::testing::ElementsAre;

std::vector<std::string> Names(const torch::OrderedDict<std::string, torch::Tensor>& tensors) {
  return tensors.keys();
}

TEST(MultiheadAttentionTest, NamesItsParameters) {
  const MultiheadAttention module(MultiheadAttentionOptions(32, 4)
                                      .kv_heads(2)
                                      .similarity("umbral")
                                      .position("rope+t5+hype:tau=learned")
                                      .bias(false));
  EXPECT_THAT(Names(module->named_parameters()),
              ElementsAre("gamma_theta", "t5_table", "hype_tau_theta", "q_proj.weight",
                          "k_proj.weight", "v_proj.weight", "out_proj.weight"));
  EXPECT_THAT(Names(module->named_buffers()), ElementsAre("gamma_start"));
  EXPECT_EQ(module->k_proj->weight.sizes(), (std::vector<int64_t>{16, 32}));
}

// The same module, weights and numbers as in tests/python/test_nn.py: both languages agree.
TEST(MultiheadAttentionTest, Golden) {
  MultiheadAttention module(MultiheadAttentionOptions(8, 2)
                                .kv_heads(1)
                                .similarity("penumbral")
                                .position("rope+t5+hype:mu=0.01:tau=learned"));
  module->to(torch::kDouble);
  torch::NoGradGuard no_grad;
  std::map<std::string, torch::Tensor> sorted;
  for (const auto& parameter : module->named_parameters()) {
    sorted[parameter.key()] = parameter.value();
  }
  int64_t n = 0;
  for (auto& [name, parameter] : sorted) {
    const torch::Tensor index = torch::arange(parameter.numel(), torch::kDouble);
    parameter.copy_((index * 0.7 + n).sin().mul(0.3).view(parameter.sizes()));
    ++n;
  }
  module->named_buffers()["gamma_start"].fill_(1.25);
  const torch::Tensor x = (torch::arange(48, torch::kDouble) * 0.37).cos().view({1, 6, 8});
  const torch::Tensor out =
      module(x, torch::Tensor(), torch::Tensor(),
             AttentionCall{.causal = true, .window = {{3, std::nullopt}}})[0][5];
  const torch::Tensor expected =
      torch::tensor({-0.312258745162, -0.388714625559, -0.284255134003, -0.047230407236,
                     0.212166622111, 0.373149561168, 0.360602219062, 0.180139130061},
                    torch::kDouble);
  EXPECT_TRUE(torch::allclose(out, expected, 0, 1e-9)) << out;
}

TEST(MultiheadAttentionTest, TrainsItsTerms) {
  torch::manual_seed(0);
  MultiheadAttention module(MultiheadAttentionOptions(16, 2)
                                .similarity("penumbral:score=height2")
                                .position("kerple+alibi:slopes=learned"));
  torch::optim::SGD optimizer(module->parameters(), 0.1);
  const torch::Tensor x = torch::randn({2, 10, 16});
  const torch::Tensor target = torch::randn({2, 10, 16});
  std::vector<double> losses;
  for (int step = 0; step < 3; ++step) {
    const torch::Tensor loss =
        (module(x, torch::Tensor(), torch::Tensor(), AttentionCall{.causal = true}) - target)
            .square()
            .mean();
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  EXPECT_LT(losses.back(), losses.front());
  for (const char* name :
       {"gamma_theta", "kerple_r1_theta", "kerple_r2_theta", "alibi_slopes_theta"}) {
    EXPECT_GT(module->named_parameters()[name].abs().max().item<double>(), 0) << name;
  }
}

TEST(MultiheadAttentionTest, ACacheGivesTheSameAsTheWhole) {
  torch::manual_seed(0);
  torch::NoGradGuard no_grad;
  MultiheadAttention module(
      MultiheadAttentionOptions(16, 2).qk_dim(6).position("rope+hype").similarity("umbral"));
  const torch::Tensor x = torch::randn({2, 7, 16});
  KVCache cache;
  const auto run = [&](const torch::Tensor& tokens, KVCache* used) {
    return module(tokens, torch::Tensor(), torch::Tensor(),
                  AttentionCall{.causal = true, .cache = used});
  };
  const torch::Tensor first = run(x.narrow(1, 0, 4), &cache);
  EXPECT_EQ(cache.length(), 4);
  const torch::Tensor rest = run(x.narrow(1, 4, 3), &cache);
  EXPECT_TRUE(torch::allclose(torch::cat({first, rest}, 1), run(x, nullptr), 1e-5, 1e-5));
  cache.reset();
  EXPECT_EQ(cache.length(), 0);
}

TEST(MultiheadAttentionTest, ClonesAreApart) {
  MultiheadAttention module(MultiheadAttentionOptions(16, 2).similarity("gaussian").position("t5"));
  const auto twin = std::dynamic_pointer_cast<MultiheadAttentionImpl>(module->clone());
  const torch::Tensor x = torch::randn({1, 5, 16});
  EXPECT_TRUE(torch::equal(twin->forward(x), module(x)));
  torch::NoGradGuard no_grad;
  twin->named_parameters()["t5_table"].normal_();
  EXPECT_FALSE(torch::equal(twin->forward(x), module(x)));
}

TEST(MultiheadAttentionTest, RefusesWhatItCannotBe) {
  const auto make = [](const MultiheadAttentionOptions& options) { MultiheadAttention{options}; };
  EXPECT_THROW(make(MultiheadAttentionOptions(10, 4)), c10::ValueError);
  EXPECT_THROW(make(MultiheadAttentionOptions(8, 4).kv_heads(3)), c10::ValueError);
  EXPECT_THROW(make(MultiheadAttentionOptions(8, 4).qk_dim(0)), c10::ValueError);
  EXPECT_THROW(make(MultiheadAttentionOptions(8, 4).dropout(0.5)), c10::NotImplementedError);
  EXPECT_THROW(make(MultiheadAttentionOptions(8, 4).position("rop")), c10::ValueError);
  EXPECT_THROW(make(MultiheadAttentionOptions(8, 4).similarity("dot:gamma=1")), c10::ValueError);
}

TEST(TokenPositionTest, AddsWhatBelongsToTokens) {
  torch::manual_seed(0);
  TokenPosition module("sinusoidal:layout=split+rope+learned:length=9", 8, 32);
  EXPECT_EQ(module->max_length(), 9);
  EXPECT_THAT(Names(module->named_parameters()), ElementsAre("learned0.table"));
  const torch::Tensor x = torch::randn({2, 4, 8});
  const torch::Tensor expected = x + sinusoid(torch::arange(3, 7), 8, "split") +
                                 module->named_parameters()["learned0.table"].narrow(0, 3, 4);
  EXPECT_TRUE(torch::allclose(module(x, 3), expected));
  EXPECT_THROW(module(x, 6), c10::ValueError);
  EXPECT_THROW(module(x.narrow(2, 0, 7)), c10::ValueError);
}

TEST(TokenPositionTest, AnAttentionPositionChangesNothing) {
  TokenPosition module("rope+hype:tau=learned", 8, 32);
  EXPECT_EQ(module->max_length(), std::nullopt);
  const torch::Tensor x = torch::randn({1, 50, 8});
  EXPECT_TRUE(torch::equal(module(x), x));
}

}  // namespace
}  // namespace gnomon::nn
