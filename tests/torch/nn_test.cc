#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <gnomon/torch/nn.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <map>
#include <memory>
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

torch::Tensor Columns(const torch::Tensor& heads) { return heads.transpose(1, 2).flatten(2); }

TEST(LorentzMultiheadAttentionTest, IsItsFormula) {
  for (const bool concat : {true, false}) {
    torch::manual_seed(0);
    LorentzMultiheadAttention module(LorentzMultiheadAttentionOptions(6, 5, 4)
                                         .c(1.7)
                                         .learned_c(true)
                                         .trans_heads_concat(concat)
                                         .normalize(concat));
    module->to(torch::kDouble);
    const torch::Tensor x = torch::randn({2, 7, 24}, torch::kDouble);
    const auto split = [](const torch::Tensor& y) {
      return y.unflatten(2, {4, -1}).transpose(1, 2);
    };
    const torch::Tensor c = module->c;
    torch::Tensor q = split(module->Wq(x));
    torch::Tensor k = split(module->Wk(x));
    if (concat) {
      q = q / q.norm(2, {-1}, true);
      k = k / k.norm(2, {-1}, true);
    }
    const auto time = [&](const torch::Tensor& y) { return (y.square().sum(-1, true) + c).sqrt(); };
    const auto centre = [&](const torch::Tensor& sum) {
      const torch::Tensor square =
          sum.slice(-1, 1).square().sum(-1, true) - sum.slice(-1, 0, 1).square();
      return c.sqrt() * sum / square.abs().sqrt();
    };
    const torch::Tensor inner = torch::matmul(q, k.mT()) - torch::matmul(time(q), time(k).mT());
    const torch::Tensor hidden = torch::ones({7, 7}, torch::kBool).triu(1);
    const torch::Tensor weights =
        ((2 * c + 2 * inner) / module->scale).masked_fill(hidden, -INFINITY).softmax(-1);
    const torch::Tensor space = split(module->Wv(x));
    const torch::Tensor o = centre(torch::matmul(weights, torch::cat({time(space), space}, -1)));
    torch::Tensor expected = centre(o.mean(1));
    if (concat) {
      const torch::Tensor out = module->final_linear(Columns(o));
      expected = torch::cat({time(out), out}, -1);
    }
    const torch::Tensor found = module(x, torch::Tensor(), AttentionCall{.causal = true});
    EXPECT_TRUE(torch::allclose(found, expected, 1e-10, 1e-10));
    const auto gradients = torch::autograd::grad({found.square().sum()}, {c, module->scale});
    const auto exact = torch::autograd::grad({expected.square().sum()}, {c, module->scale});
    for (size_t n = 0; n < gradients.size(); ++n) {
      EXPECT_TRUE(torch::allclose(gradients[n], exact[n], 1e-8, 1e-8));
    }
    KVCache cache;
    std::vector<torch::Tensor> parts;
    for (const torch::Tensor& part : x.split(3, 1)) {
      parts.push_back(
          module(part, torch::Tensor(), AttentionCall{.causal = true, .cache = &cache}));
    }
    EXPECT_TRUE(torch::allclose(torch::cat(parts, 1), expected, 1e-10, 1e-10));
    const auto copy = std::dynamic_pointer_cast<LorentzMultiheadAttentionImpl>(module->clone());
    EXPECT_TRUE(
        torch::equal(copy->forward(x, torch::Tensor(), AttentionCall{.causal = true}), found));
  }
}

// Equivalent ways of hiding pairs give the same result: causal order, a mask, positions, or the
// positions of a cache.
TEST(LorentzMultiheadAttentionTest, TakesMasksAndPositions) {
  torch::manual_seed(0);
  LorentzMultiheadAttention module(LorentzMultiheadAttentionOptions(6, 5, 4).position("rope"));
  const torch::Tensor x = torch::randn({2, 7, 24});
  const torch::Tensor none;
  const auto expected = module(x, none, AttentionCall{.causal = true});
  const torch::Tensor seen = torch::ones({7, 7}, torch::kBool).tril();
  EXPECT_TRUE(torch::allclose(module(x, none, AttentionCall{.mask = seen}), expected));
  const torch::Tensor order = torch::tensor({3, 0, 6, 1, 5, 2, 4});
  const torch::Tensor mixed = module(x.index({torch::indexing::Slice(), order}), none,
                                     AttentionCall{.causal = true, .positions = order});
  EXPECT_TRUE(
      torch::allclose(mixed, expected.index({torch::indexing::Slice(), order}), 1e-4, 1e-6));
  KVCache cache;
  std::vector<torch::Tensor> parts;
  for (const int64_t first : {0, 4}) {
    const int64_t count = std::min<int64_t>(4, 7 - first);
    parts.push_back(module(
        x.narrow(1, first, count), none,
        AttentionCall{
            .causal = true, .positions = torch::arange(first, first + count), .cache = &cache}));
  }
  EXPECT_TRUE(torch::allclose(torch::cat(parts, 1), expected, 1e-4, 1e-6));
  EXPECT_TRUE(torch::equal(cache.positions, torch::arange(7)));
  EXPECT_THROW(module(x.narrow(1, 0, 2), x, AttentionCall{.positions = torch::arange(2)}),
               c10::Error);
}

TEST(LorentzMultiheadAttentionTest, NamesItsParameters) {
  const LorentzMultiheadAttention module(
      LorentzMultiheadAttentionOptions(6, 6, 2).use_weight(false));
  EXPECT_THAT(Names(module->named_parameters()),
              ElementsAre("scale", "bias", "Wk.weight", "Wk.bias", "Wq.weight", "Wq.bias"));
  EXPECT_THROW(
      LorentzMultiheadAttention(LorentzMultiheadAttentionOptions(6, 5, 2).use_weight(false)),
      c10::ValueError);
  EXPECT_THROW(LorentzMultiheadAttention(LorentzMultiheadAttentionOptions(6, 5, 2).c(0)),
               c10::ValueError);
}

// The rotated keys in a cache must match the module's rotation and the positions of the call.
TEST(KVCacheTest, RotatesKeysAgainForAnotherRotationOrPositions) {
  torch::manual_seed(0);
  const torch::NoGradGuard no_grad;
  MultiheadAttention module(MultiheadAttentionOptions(16, 2).position("rope"));
  MultiheadAttention other(MultiheadAttentionOptions(16, 2).position("rope:base=50"));
  for (size_t n = 0; n < module->parameters().size(); ++n) {
    other->parameters()[n].copy_(module->parameters()[n]);
  }
  const torch::Tensor x = torch::randn({1, 7, 16});
  const torch::Tensor none;
  KVCache cache;
  module(x.narrow(1, 0, 4), none, none, AttentionCall{.causal = true, .cache = &cache});
  int64_t n = 4;
  for (MultiheadAttention& one : std::vector<MultiheadAttention>{module, other, module}) {
    const torch::Tensor o =
        one(x.narrow(1, n, 1), none, none, AttentionCall{.causal = true, .cache = &cache});
    const torch::Tensor whole = one(x, none, none, AttentionCall{.causal = true});
    EXPECT_TRUE(torch::allclose(o, whole.narrow(1, n++, 1), 1e-5, 1e-6));
  }
  const torch::Tensor places = torch::arange(7);
  KVCache moved;
  module(x.narrow(1, 0, 6), none, none,
         AttentionCall{.causal = true, .positions = places.narrow(0, 0, 6), .cache = &moved});
  moved.positions = moved.positions * 3;
  const torch::Tensor o =
      module(x.narrow(1, 6, 1), none, none,
             AttentionCall{.causal = true, .positions = torch::full({1}, 18), .cache = &moved});
  const torch::Tensor whole =
      module(x, none, none, AttentionCall{.causal = true, .positions = places * 3});
  EXPECT_TRUE(torch::allclose(o, whole.narrow(1, 6, 1), 1e-5, 1e-6));
}

TEST(KVCacheTest, CopiesGoOnByThemselves) {
  const torch::NoGradGuard no_grad;
  const auto draw = [](int64_t tokens) { return torch::randn({2, 3, tokens, 4}); };
  KVCache cache;
  std::vector<torch::Tensor> keys;
  std::vector<torch::Tensor> values;
  const auto append = [&](KVCache* to, int64_t tokens) {
    keys.push_back(draw(tokens));
    values.push_back(draw(tokens));
    to->append(keys.back(), values.back(), {values.back().sum(3)});
  };
  const auto check = [&](const KVCache& of, const std::vector<size_t>& parts, int64_t last) {
    std::vector<torch::Tensor> k;
    std::vector<torch::Tensor> v;
    for (const size_t part : parts) {
      k.push_back(keys[part]);
      v.push_back(values[part]);
    }
    const int64_t total = torch::cat(k, 2).size(2);
    EXPECT_EQ(of.length(), last);
    EXPECT_TRUE(torch::equal(of.k, torch::cat(k, 2).narrow(2, total - last, last)));
    EXPECT_TRUE(torch::equal(of.v, torch::cat(v, 2).narrow(2, total - last, last)));
    EXPECT_TRUE(torch::equal(of.projections[0], of.v.sum(3)));
  };
  for (const int64_t tokens : {5, 7, 1}) append(&cache, tokens);  // parts 0 to 2
  const void* const there = cache.k.const_data_ptr();
  append(&cache, 2);
  EXPECT_EQ(cache.k.const_data_ptr(), there);  // in place
  KVCache copy = cache;
  append(&copy, 1);   // part 4
  append(&cache, 1);  // part 5
  check(copy, {0, 1, 2, 3, 4}, 16);
  check(cache, {0, 1, 2, 3, 5}, 16);
  // The slots of dropped tokens are eventually freed.
  cache.keep_last(3);
  for (int n = 0; n < 40; ++n) {
    append(&cache, 1);
    cache.keep_last(3);
  }
  const size_t last = keys.size() - 1;
  check(cache, {last - 2, last - 1, last}, 3);
  EXPECT_LT(cache.k.storage().nbytes(), 20 * 2 * 3 * 4 * sizeof(float));
  check(copy, {0, 1, 2, 3, 4}, 16);
  // A cache with a selection of batch rows can also be extended.
  KVCache selected = copy;
  for (torch::Tensor* tensor : {&selected.k, &selected.v, &selected.projections[0]}) {
    *tensor = tensor->index_select(0, torch::tensor({1, 0}));
  }
  append(&selected, 1);
  append(&copy, 1);
  EXPECT_TRUE(torch::equal(selected.k.narrow(2, 0, 16), copy.k.narrow(2, 0, 16).flip(0)));
  EXPECT_TRUE(torch::equal(selected.k.narrow(2, 16, 1), keys[keys.size() - 2]));
}

TEST(KVCacheTest, WhatABackwardPassReadsStays) {
  KVCache cache;
  const auto k = [](bool learned) { return torch::randn({1, 1, 2, 4}).requires_grad_(learned); };
  {
    const torch::NoGradGuard no_grad;
    for (int n = 0; n < 3; ++n) cache.append(k(false), k(false));
  }
  cache.append(k(true), k(true));
  const torch::Tensor sum = (cache.k * cache.k).sum() + (cache.v * cache.v).sum();
  {
    const torch::NoGradGuard no_grad;
    for (int n = 0; n < 3; ++n) cache.append(k(false), k(false));
  }
  EXPECT_NO_THROW(sum.backward());
}

// Uses the module, weights and expected numbers of tests/python/test_nn.py.
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

TEST(MultiheadAttentionTest, TakesAMaskOfPairs) {
  torch::manual_seed(0);
  MultiheadAttention module(MultiheadAttentionOptions(16, 4).kv_heads(2).position("alibi"));
  const torch::NoGradGuard no_grad;
  const torch::Tensor x = torch::randn({2, 9, 16});
  const torch::Tensor past = torch::ones({9, 9}, torch::kBool).tril();
  EXPECT_TRUE(torch::allclose(module->forward(x, {}, {}, AttentionCall{.mask = past}),
                              module->forward(x, {}, {}, AttentionCall{.causal = true})));
  const torch::Tensor first = torch::arange(9) < 1;
  EXPECT_TRUE(torch::equal(
      module->attention_weights(x, {}, {0, 5}, AttentionCall{.mask = first}).select(3, 0),
      torch::ones({2, 4, 2})));
  EXPECT_THROW(module->forward(x, {}, {}, AttentionCall{.mask = torch::ones({9, 9})}),
               c10::TypeError);
}

// Corresponds to test_nn.py::test_norms_gates_and_sinks, with the same names.
TEST(MultiheadAttentionTest, NormsGatesAndSinks) {
  torch::manual_seed(0);
  MultiheadAttention module(
      MultiheadAttentionOptions(16, 4).kv_heads(2).position("rope").qk_norm(true).gate(true).sink(
          true));
  EXPECT_THAT(Names(module->named_parameters()),
              ElementsAre("sink", "q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias",
                          "v_proj.weight", "v_proj.bias", "out_proj.weight", "out_proj.bias",
                          "gate_proj.weight", "gate_proj.bias", "q_norm.weight", "k_norm.weight"));
  module->to(torch::kDouble);
  {
    const torch::NoGradGuard no_grad;
    for (torch::Tensor& parameter : module->parameters()) parameter.normal_();
  }
  const torch::Tensor x = torch::randn({2, 9, 16}, torch::kDouble);
  const auto heads = [&](torch::nn::Linear& projection, int64_t count) {
    return projection(x).unflatten(2, {count, -1}).transpose(1, 2);
  };
  const auto normed = [](const torch::Tensor& tokens, const RMSNorm& norm) {
    return tokens * (tokens.square().mean(3, true) + 1e-6).rsqrt() * norm->weight;
  };
  const torch::Tensor o =
      attention(normed(heads(module->q_proj, 4), module->q_norm),
                normed(heads(module->k_proj, 2), module->k_norm), heads(module->v_proj, 2),
                AttentionOptions().position("rope").causal(true).sink(module->sink));
  const torch::Tensor gate = module->gate_proj(x).sigmoid();
  const torch::Tensor expected = module->out_proj(o.transpose(1, 2).flatten(2) * gate);
  const torch::Tensor out =
      module(x, torch::Tensor(), torch::Tensor(), AttentionCall{.causal = true});
  EXPECT_TRUE(torch::allclose(out, expected, 1e-9, 1e-9));
  const auto copy = std::dynamic_pointer_cast<MultiheadAttentionImpl>(module->clone());
  EXPECT_TRUE(torch::equal(copy->forward(x, {}, {}, AttentionCall{.causal = true}), out));
  EXPECT_NE(copy->sink.data_ptr(), module->sink.data_ptr());
}

TEST(MultiheadAttentionTest, WeightsAreThoseOfTheForwardPass) {
  torch::manual_seed(0);
  const torch::NoGradGuard no_grad;
  for (const char* position : {"rope+hype:tau=learned", "forget", "relative+sink"}) {
    SCOPED_TRACE(position);
    MultiheadAttention module(MultiheadAttentionOptions(16, 4)
                                  .kv_heads(2)
                                  .similarity("umbral")
                                  .position(position)
                                  .qk_norm(true));
    module->to(torch::kDouble);
    const torch::Tensor x = torch::randn({2, 9, 16}, torch::kDouble);
    const AttentionCall call{.causal = true, .key_starts = torch::tensor({0, 2})};
    const torch::Tensor weights =
        module->attention_weights(x, {}, {0, 1, 2, 3, 4, 5, 6, 7, -1}, call);
    EXPECT_EQ(weights.sizes(), (std::vector<int64_t>{2, 4, 9, 9}));
    const torch::Tensor v =
        module->v_proj(x).unflatten(2, {2, -1}).transpose(1, 2).repeat_interleave(2, 1);
    const torch::Tensor o = torch::matmul(weights, v).transpose(1, 2).flatten(2);
    EXPECT_TRUE(torch::allclose(module->out_proj(o), module->forward(x, {}, {}, call), 1e-9, 1e-9));
    EXPECT_TRUE(torch::equal(module->attention_weights(x, x, {3}, call), weights.narrow(2, 3, 1)));
    KVCache cache;
    EXPECT_THROW(module->attention_weights(x, {}, {0}, AttentionCall{.cache = &cache}),
                 c10::ValueError);
  }
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

TEST(MultiheadAttentionTest, ACacheTakesPaddingLongerThanItsKeys) {
  torch::manual_seed(0);
  torch::NoGradGuard no_grad;
  MultiheadAttention module(MultiheadAttentionOptions(16, 2).position("rope+alibi"));
  const torch::Tensor x = torch::randn({3, 6, 16});
  const auto run = [&](const torch::Tensor& tokens, const torch::Tensor& starts, KVCache* used) {
    return module(tokens, torch::Tensor(), torch::Tensor(),
                  AttentionCall{.causal = true, .key_starts = starts, .cache = used});
  };
  const torch::Tensor starts = torch::tensor({4, 0, 1});
  KVCache cache;
  std::vector<torch::Tensor> parts;
  for (const torch::Tensor& token : x.split(1, 1)) parts.push_back(run(token, starts, &cache));
  EXPECT_TRUE(torch::allclose(torch::cat(parts, 1), run(x, starts, nullptr), 1e-5, 1e-5));
  EXPECT_THROW(run(x, torch::tensor({9, -1, 0}), &cache), c10::ValueError);
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

TEST(MultiheadAttentionTest, TakesTerms) {
  torch::manual_seed(0);
  const torch::Tensor slopes = torch::rand({2}).requires_grad_();
  const torch::Tensor table = torch::randn({2, 19});
  MultiheadAttention module(
      MultiheadAttentionOptions(16, 2)
          .similarity(similarity::Laplacian(0.5))
          .position("rope" + position::ALiBi(slopes) + position::OffsetBias(table)));
  EXPECT_THAT(Names(module->named_parameters(/*recurse=*/false)), ElementsAre("alibi_slopes"));
  EXPECT_THAT(Names(module->named_buffers()), ElementsAre("offset_bias_table"));
  const torch::Tensor x = torch::randn({1, 7, 16});
  const auto heads = [](const torch::Tensor& tokens) {
    return tokens.unflatten(2, {2, -1}).transpose(1, 2);
  };
  const torch::Tensor o =
      attention(heads(module->q_proj(x)), heads(module->k_proj(x)), heads(module->v_proj(x)),
                AttentionOptions()
                    .similarity("laplacian:gamma=0.5")
                    .position({"rope", position::ALiBi(slopes),
                               position::OffsetBias(table.narrow(1, 3, 13))}));
  EXPECT_TRUE(
      torch::allclose(module(x), module->out_proj(o.transpose(1, 2).flatten(2)), 1e-5, 1e-5));
  const auto twin = std::dynamic_pointer_cast<MultiheadAttentionImpl>(module->clone());
  EXPECT_TRUE(torch::equal(twin->forward(x), module(x)));
  torch::NoGradGuard no_grad;
  twin->named_parameters()["alibi_slopes"].zero_();
  EXPECT_FALSE(torch::equal(twin->forward(x), module(x)));
}

TEST(MultiheadAttentionTest, LearnedValuesAct) {
  MultiheadAttention module(MultiheadAttentionOptions(16, 2)
                                .similarity("gaussian")
                                .position("alibi:slopes=learned+t5+hype"));
  torch::NoGradGuard no_grad;
  module->named_parameters()["alibi_slopes_theta"].fill_(0.2);
  const std::vector<LearnedValue> values = module->learned_values();
  ASSERT_EQ(values.size(), 3);
  EXPECT_EQ(values[0].name, "gamma");
  EXPECT_TRUE(torch::allclose(values[0].value, *values[0].start));
  EXPECT_EQ(values[1].name, "alibi_slopes");
  EXPECT_TRUE(torch::allclose(*values[1].start, alibi_slopes(2).to(torch::kFloat)));
  EXPECT_TRUE(torch::allclose(values[1].value, *values[1].start * std::exp(1.0)));
  EXPECT_EQ(values[2].name, "t5_table");
  EXPECT_FALSE(values[2].start.has_value());
}

TEST(MultiheadAttentionTest, KeysAndValuesOfOtherWidths) {
  MultiheadAttention module(MultiheadAttentionOptions(16, 2).kdim(5).vdim(7));
  const torch::Tensor query = torch::randn({1, 3, 16});
  EXPECT_EQ(module(query, torch::randn({1, 4, 5}), torch::randn({1, 4, 7})).sizes(), query.sizes());
  EXPECT_THROW(module(query), c10::ValueError);
}

TEST(MultiheadAttentionTest, RefusesWhatItCannotBe) {
  const auto make = [](const MultiheadAttentionOptions& options) { MultiheadAttention{options}; };
  EXPECT_THROW(make(MultiheadAttentionOptions(10, 4)), c10::ValueError);
  EXPECT_THROW(make(MultiheadAttentionOptions(8, 4).kv_heads(3)), c10::ValueError);
  EXPECT_THROW(make(MultiheadAttentionOptions(8, 4).qk_dim(0)), c10::ValueError);
  EXPECT_THROW(make(MultiheadAttentionOptions(8, 4).dropout(1.5)), c10::ValueError);
  EXPECT_THROW(make(MultiheadAttentionOptions(8, 4).position("absolute_keys:length=0")),
               c10::ValueError);
  EXPECT_THROW(make(MultiheadAttentionOptions(8, 4).position("rop")), c10::ValueError);
  EXPECT_THROW(make(MultiheadAttentionOptions(8, 4).similarity("dot:gamma=1")), c10::ValueError);
  EXPECT_THROW(make(MultiheadAttentionOptions(8, 4).position("rope+sinusoidal")), c10::ValueError);
  EXPECT_EQ(attention_position("rope+sinusoidal"), "rope");
  EXPECT_EQ(attention_position("sinusoidal"), "none");
  EXPECT_THROW(make(MultiheadAttentionOptions(8, 4).kdim(0)), c10::ValueError);
}

TEST(TokenPositionTest, AddsWhatBelongsToTokens) {
  torch::manual_seed(0);
  TokenPosition module("sinusoidal:layout=split+rope+learned:length=9", 8, 32);
  EXPECT_EQ(module->max_length(), 9);
  EXPECT_THAT(Names(module->named_parameters()), ElementsAre("learned0.table"));
  const torch::Tensor x = torch::randn({2, 4, 8});
  const torch::Tensor expected = x + sinusoid(torch::arange(3, 7), 8, "split") +
                                 module->named_parameters()["learned0.table"].narrow(0, 3, 4);
  EXPECT_TRUE(torch::allclose(module(x, TokenCall{.offset = 3}), expected));
  EXPECT_THROW(module(x, TokenCall{.offset = 6}), c10::ValueError);
  EXPECT_THROW(module(x.narrow(2, 0, 7)), c10::ValueError);
}

TEST(TokenPositionTest, AnAttentionPositionChangesNothing) {
  TokenPosition module("rope+hype:tau=learned", 8, 32);
  EXPECT_EQ(module->max_length(), std::nullopt);
  const torch::Tensor x = torch::randn({1, 50, 8});
  EXPECT_TRUE(torch::equal(module(x), x));
}

TEST(TokenPositionTest, ACacheGivesTheSameAsTheWhole) {
  torch::manual_seed(0);
  const torch::NoGradGuard no_grad;
  TokenPosition module(
      TokenPositionOptions("conv:kernel=5:groups=2+cape+learned", 8, 12).causal(true));
  module->eval();
  const torch::Tensor x = torch::randn({2, 12, 8});
  TokenCache cache;
  std::vector<torch::Tensor> parts;
  for (const auto& [begin, length] : {std::pair(0, 2), {2, 1}, {3, 8}, {11, 1}}) {
    EXPECT_EQ(cache.length(), begin);
    parts.push_back(module(x.narrow(1, begin, length), TokenCall{.cache = &cache}));
  }
  EXPECT_EQ(cache.embeddings.size(1), 4);
  EXPECT_TRUE(torch::allclose(torch::cat(parts, 1), module(x), 1e-5, 1e-5));
  EXPECT_THROW(module(x.narrow(1, 0, 4), TokenCall{.offset = 3}), c10::ValueError);
  cache.reset();
  EXPECT_EQ(cache.length(), 0);
}

// Uses the module, weights and expected numbers of tests/python/test_token_encodings.py.
TEST(TokenEncodingTest, Golden) {
  TokenEncoding module = Convolutional(4, 3, 2);
  module->to(torch::kDouble);
  const torch::NoGradGuard no_grad;
  EXPECT_THAT(Names(module->named_parameters()), ElementsAre("weight_g", "weight_v", "bias"));
  int64_t n = 0;
  for (const auto& parameter : module->named_parameters()) {
    const torch::Tensor index = torch::arange(parameter.value().numel(), torch::kDouble);
    parameter.value().copy_((index * 0.7 + n).sin().view(parameter.value().sizes()));
    ++n;
  }
  const torch::Tensor x = (torch::arange(20, torch::kDouble) * 0.37).cos().view({1, 5, 4});
  const torch::Tensor out = module(x)[0][2];
  const torch::Tensor expected = torch::tensor(
      {-0.487749022173, -0.844797908636, -0.902171932861, -0.741380287787}, torch::kDouble);
  EXPECT_TRUE(torch::allclose(out, expected, 0, 1e-9)) << out;
}

TEST(TokenEncodingTest, ClonesAreApart) {
  TokenPosition module("conv:kernel=3:groups=2+learned", 8, 16);
  const auto twin = std::dynamic_pointer_cast<TokenPositionImpl>(module->clone());
  const torch::Tensor x = torch::randn({1, 5, 8});
  EXPECT_TRUE(torch::equal(twin->forward(x), module(x)));
  const torch::NoGradGuard no_grad;
  twin->named_parameters()["conv0.weight_v"].normal_();
  EXPECT_FALSE(torch::equal(twin->forward(x), module(x)));
}

TEST(TokenEncodingTest, FunctionsAreTheirSpecifications) {
  const torch::Tensor x = torch::randn({2, 7, 8});
  EXPECT_TRUE(
      torch::equal(Sinusoidal(8, "split", {2, 3}, 1)(x), x + grid_sinusoid({2, 3}, 8, "split", 1)));
  EXPECT_EQ(LearnedAbsolute(9, 8)->max_length(), 9);
  EXPECT_EQ(Convolutional(8, 5, 2, /*causal=*/true)->history(), 4);
  // The defaults of the class equal those of the specification.
  EXPECT_TRUE(torch::equal(Sinusoidal(8)(x), TokenEncoding("sinusoidal", 8)(x)));
  const auto sizes = [](const TokenEncoding& module) {
    std::map<std::string, std::vector<int64_t>> of_module;
    for (const auto& [name, tensor] : module->named_parameters().pairs()) {
      of_module[name] = tensor.sizes().vec();
    }
    return of_module;
  };
  EXPECT_EQ(sizes(Convolutional(32)), sizes(TokenEncoding("conv", 32)));
  TokenEncoding cape = CAPE(8, CAPEOptions().global_shift(1.5).global_scale(1.25).normalize(true));
  EXPECT_EQ(cape->options.spec(),
            "cape:global_shift=1.5:global_scale=1.25:normalize=true:prefix=0");
  const auto drawn = [&](uint64_t seed) {
    const auto generator = torch::make_generator<at::CPUGeneratorImpl>(seed);
    return cape(x, TokenCall{.generator = generator});
  };
  EXPECT_TRUE(torch::equal(drawn(1), drawn(1)));
  EXPECT_FALSE(torch::equal(drawn(1), drawn(2)));
  cape->eval();
  EXPECT_TRUE(torch::allclose(cape(x), x + sinusoid(torch::arange(7) - 3.0, 8)));
}

}  // namespace
}  // namespace gnomon::nn
