// Tests gnomon::attention from C++. It is the same operator as in Python, where tests check the
// formulas.
#include <gmock/gmock.h>
#include <gnomon/catalogue.h>
#include <gnomon/torch/attention.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ops/grammar/component.h"

namespace gnomon {
namespace {

using ::testing::HasSubstr;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

torch::Tensor Normal(at::IntArrayRef sizes) {
  return torch::randn(sizes, torch::dtype(torch::kDouble).requires_grad(true));
}

torch::Tensor Softmax(const torch::Tensor& scores, const torch::Tensor& v) {
  return torch::matmul(scores.softmax(-1), v);
}

class AttentionTest : public ::testing::Test {
 protected:
  AttentionTest() { torch::manual_seed(0); }

  torch::Tensor q = Normal({2, 4, 9, 6});
  torch::Tensor k = Normal({2, 4, 9, 6});
  torch::Tensor v = Normal({2, 4, 9, 5});
  torch::Tensor gamma = torch::rand({4}, torch::dtype(torch::kDouble).requires_grad(true));
};

void ExpectNear(const torch::Tensor& a, const torch::Tensor& b) {
  EXPECT_EQ(a.sizes(), b.sizes());
  EXPECT_TRUE(torch::allclose(a, b, 1e-9, 1e-9)) << a << b;
}

template <class Exception, class Call>
void ExpectThrow(const Call& call, const std::string& message) {
  try {
    call();
    FAIL() << "nothing was thrown; expected: " << message;
  } catch (const Exception& error) {
    EXPECT_THAT(error.what_without_backtrace(), HasSubstr(message));
  }
}

TEST_F(AttentionTest, DotIsScaledDotProductAttention) {
  ExpectNear(attention(q, k, v, AttentionOptions().causal(true)),
             at::scaled_dot_product_attention(q, k, v, {}, 0, true));
}

TEST_F(AttentionTest, RelativeKeysAndValues) {
  const torch::Tensor table = Normal({7, 6});
  const torch::Tensor values = Normal({7, 5});
  const torch::Tensor p = torch::arange(9);
  const torch::Tensor index = (p.unsqueeze(0) - p.unsqueeze(1)).clamp(-3, 3) + 3;
  const torch::Tensor scores =
      (torch::matmul(q, k.mT()) + torch::einsum("bhid,ijd->bhij", {q, table.index({index})})) /
      std::sqrt(6.0);
  const torch::Tensor weights = scores.softmax(-1);
  const torch::Tensor expected =
      torch::matmul(weights, v) + torch::einsum("bhij,ijd->bhid", {weights, values.index({index})});
  const torch::Tensor o = attention(
      q, k, v, AttentionOptions().position({position::Relative(table, 3, "clip", values)}));
  ExpectNear(o, expected);
  const std::vector<torch::Tensor> inputs = {q, k, v, table, values};
  const auto ours = torch::autograd::grad({o.square().sum()}, inputs);
  const auto theirs = torch::autograd::grad({expected.square().sum()}, inputs);
  for (size_t n = 0; n < inputs.size(); ++n) ExpectNear(ours[n], theirs[n]);
}

TEST_F(AttentionTest, ContentTermsByName) {
  const torch::Tensor keys = Normal({4, 9, 6});
  ExpectNear(attention(q, k, v, AttentionOptions().position({position::AbsoluteKeys(keys)})),
             attention(q, k + keys, v));
  const torch::Tensor u = Normal({4, 6});
  const torch::Tensor r = Normal({4, 9, 6});
  // Without the distance terms, only u remains, which is added to every query.
  ExpectNear(attention(q, k, v,
                       AttentionOptions()
                           .position({position::TransformerXL(u, u, torch::zeros_like(r))})
                           .causal(true)),
             attention(q + u.unsqueeze(1), k, v, AttentionOptions().causal(true)));
  // If all table rows are identical, each pair reads two of them, as if the keys were shifted.
  const torch::Tensor row = Normal({1, 6});
  const auto plane =
      position::Relative2D(row.expand({5, 6}).contiguous(), row.expand({5, 6}).contiguous(), 3, 3);
  ExpectNear(attention(q, k, v, AttentionOptions().position({plane})),
             attention(q, k + 2 * row, v));
}

TEST_F(AttentionTest, ChunksDropoutAndMidpoint) {
  const torch::Tensor p = torch::arange(9).div(3, "floor");
  ExpectNear(
      attention(q, k, v, AttentionOptions().chunks(std::vector<int64_t>{3, 0, 0})),
      attention(
          q, k, v,
          AttentionOptions().query_segments(p.expand({2, 9})).key_segments(p.expand({2, 9}))));
  const torch::Tensor ones = torch::eye(9, torch::kDouble).expand({2, 4, 9, 9});
  const torch::Tensor all = attention(q, k, ones);
  const torch::Tensor some = attention(q, k, ones, AttentionOptions().dropout(0.5).seed(3));
  ExpectNear(some, torch::where(some != 0, 2 * all, 0.0));
  EXPECT_TRUE((some == 0).any().item<bool>());
  EXPECT_TRUE((some != 0).any().item<bool>());
  const torch::Tensor in_ball = v / (1 + v.norm(2, -1, true));
  const torch::Tensor factor = 1 / (1 - in_ball.square().sum(-1)).sqrt();
  const torch::Tensor weights =
      (torch::matmul(q, k.mT()) / std::sqrt(6.0)).exp() * factor.unsqueeze(2);
  ExpectNear(attention(q, k, in_ball, AttentionOptions().aggregation("einstein_midpoint")),
             torch::matmul(weights / weights.sum(-1, true), in_ball));
}

TEST_F(AttentionTest, ASinkIsAScoreWithoutAValue) {
  const torch::Tensor sink = Normal({4});
  const auto [o, lse] = attention_with_lse(q, k, v, AttentionOptions().sink(sink));
  const torch::Tensor scores = torch::cat(
      {torch::matmul(q, k.mT()) / std::sqrt(6.0), sink.reshape({1, 4, 1, 1}).expand({2, 4, 9, 1})},
      3);
  ExpectNear(o, torch::matmul(scores.softmax(3).narrow(3, 0, 9), v));
  ExpectNear(lse, scores.logsumexp(3));
  ExpectThrow<c10::ValueError>(
      [&] { attention(q, k, v, AttentionOptions().sink(sink.narrow(0, 0, 3))); },
      "sink has shape [3]");
}

// Corresponds to test_score_terms.py::test_all_at_once.
TEST_F(AttentionTest, MasksBiasesAndTemperatures) {
  const torch::Tensor pairs = Normal({2, 1, 9, 9});
  const torch::Tensor keys = Normal({1, 4, 9});
  const torch::Tensor log_forget = -Normal({2, 4, 9}).abs();
  const torch::Tensor temperature = Normal({4, 9}).abs();
  const torch::Tensor mask = torch::ones({9, 9}, torch::kBool).tril(2);
  const auto [o, lse] =
      attention_with_lse(q, k, v,
                         AttentionOptions()
                             .position({position::PairBias(pairs), position::KeyBias(keys),
                                        position::Forget(log_forget)})
                             .mask(mask)
                             .temperature(temperature));
  const torch::Tensor scores = (torch::matmul(q, k.mT()) / std::sqrt(6.0) + pairs +
                                keys.unsqueeze(2) - log_forget.cumsum(2).unsqueeze(2)) *
                               temperature.unsqueeze(2);
  const torch::Tensor seen =
      scores.masked_fill(mask.logical_not(), -std::numeric_limits<double>::infinity());
  ExpectNear(o, torch::matmul(seen.softmax(3), v));
  ExpectNear(lse, seen.logsumexp(3));
  ExpectThrow<c10::TypeError>(
      [&] { attention(q, k, v, AttentionOptions().mask(torch::ones({9, 9}))); },
      "mask has dtype Float");
}

TEST_F(AttentionTest, SegmentsAreAttendedToApart) {
  const torch::Tensor segments = torch::tensor({3, 3, 3, 3, 1, 1, 1, 1, 1}).expand({2, 9});
  const torch::Tensor o = attention(
      q, k, v, AttentionOptions().causal(true).query_segments(segments).key_segments(segments));
  for (const auto& [begin, end] : {std::pair(0, 4), std::pair(4, 9)}) {
    const auto part = [begin = begin, end = end](const torch::Tensor& x) {
      return x.slice(2, begin, end);
    };
    ExpectNear(part(o), attention(part(q), part(k), part(v), AttentionOptions().causal(true)));
  }
}

TEST_F(AttentionTest, EachBatchHasItsQueryOffset) {
  const auto position = position::ALiBi(gamma);
  const torch::Tensor o = attention(q, k, v,
                                    AttentionOptions()
                                        .causal(true)
                                        .position({position, position::RoPE()})
                                        .query_offsets(torch::tensor({3, -2})));
  for (const auto& [b, offset] : {std::pair(0, 3), std::pair(1, -2)}) {
    const auto batch = [b = b](const torch::Tensor& x) { return x.slice(0, b, b + 1); };
    ExpectNear(batch(o), attention(batch(q), batch(k), batch(v),
                                   AttentionOptions()
                                       .causal(true)
                                       .position({position, position::RoPE()})
                                       .query_offset(offset)));
  }
}

TEST_F(AttentionTest, LaplacianWithABiasAndItsGradients) {
  const torch::Tensor slopes = gamma.detach().clone().requires_grad_();
  const auto [o, lse] = attention_with_lse(q, k, v,
                                           AttentionOptions()
                                               .similarity(similarity::Laplacian(gamma))
                                               .position({position::ALiBi(slopes)}));
  const torch::Tensor n = torch::arange(9, torch::kDouble);
  const torch::Tensor scores =
      -gamma.view({4, 1, 1}) * (q.unsqueeze(3) - k.unsqueeze(2)).square().sum(-1).sqrt() -
      slopes.view({4, 1, 1}) * (n.unsqueeze(1) - n).abs();
  const torch::Tensor expected = Softmax(scores, v);
  ExpectNear(o, expected);
  ExpectNear(lse, scores.logsumexp(-1));
  const auto gradients = [&](const torch::Tensor& output, const torch::Tensor& log_sum) {
    return torch::autograd::grad({(output.square().sum() + log_sum.sin().sum())},
                                 {q, k, v, gamma, slopes});
  };
  const auto ours = gradients(o, lse);
  const auto theirs = gradients(expected, scores.logsumexp(-1));
  for (size_t i = 0; i < ours.size(); ++i) ExpectNear(ours[i], theirs[i]);
}

TEST_F(AttentionTest, NumbersStandForAllHeads) {
  const auto with = [&](const Similarity& similarity, const Position& position) {
    return attention(q, k, v, AttentionOptions().similarity(similarity).position({position}));
  };
  const auto heads = [](double value) { return torch::full({4}, value, torch::kDouble); };
  for (const auto make :
       {+[](HeadValue value) { return similarity::Umbral(std::move(value)); },
        +[](HeadValue value) { return similarity::Penumbral(std::move(value)); },
        +[](HeadValue value) { return similarity::Gaussian(std::move(value)); }}) {
    ExpectNear(with(make(1.0 / 3), position::HyPE(1e-3, heads(0.7))),
               with(make(heads(1.0 / 3)), position::HyPE(heads(1e-3), 0.7)));
  }
}

TEST_F(AttentionTest, EveryPositionIsReachable) {
  const torch::Tensor plain = attention(q, k, v);
  const torch::Tensor rates = gamma.detach();
  const std::vector<Position> positions = {
      position::RoPE(),
      position::RoPE(100.0, "half", 4),
      position::ALiBi(rates),
      position::HyPE(rates, 0.01, "cosh"),
      position::T5(torch::randn({8, 4}, torch::kDouble), true, 20),
      position::Kerple(rates, rates, "power"),
      position::OffsetBias(torch::randn({4, 17}, torch::kDouble)),
  };
  for (const Position& position : positions) {
    const torch::Tensor o = attention(q, k, v, AttentionOptions().position({position}));
    EXPECT_FALSE(torch::allclose(o, plain)) << position.spec;
  }
}

TEST_F(AttentionTest, TermsSpecificationsAndSumsOfThem) {
  const auto with = [&](const AttentionOptions::Positions& positions) {
    return attention(q, k, v, AttentionOptions().position(positions));
  };
  const torch::Tensor slopes = gamma.detach();
  const torch::Tensor sum =
      with({position::RoPE(), position::ALiBi(slopes), position::HyPE(2, 0.1)});
  ExpectNear(with(position::RoPE() + position::ALiBi(slopes) + "hype:tau=2:mu=0.1"), sum);
  ExpectNear(with("rope" + position::ALiBi(slopes) + position::HyPE(2, 0.1)), sum);
  ExpectNear(with({"rope+hype:tau=2:mu=0.1", position::ALiBi(slopes)}), sum);
  ExpectNear(with("rope+alibi"), with(position::RoPE() + position::ALiBi(alibi_slopes(4))));
  ExpectNear(attention(q, k, v, AttentionOptions().similarity("laplacian:gamma=0.5")),
             attention(q, k, v, AttentionOptions().similarity(similarity::Laplacian(0.5))));
  EXPECT_THROW(with("sinusoidal"), c10::ValueError);
  EXPECT_THROW(with("t5"), c10::ValueError);
  EXPECT_THROW(with("alibi:slopes=learned"), c10::ValueError);
}

TEST_F(AttentionTest, WeightsOfRows) {
  const AttentionOptions options = AttentionOptions()
                                       .similarity(similarity::Penumbral(gamma))
                                       .position(position::ALiBi(0.3))
                                       .causal(true);
  const torch::Tensor weights = attention_weights(q, k, {0, 1, 2, 3, 4, 5, 6, 7, 8}, options);
  ExpectNear(torch::matmul(weights, v), attention(q, k, v, options));
  ExpectNear(attention_weights(q, k, {7, -7}, options),
             weights.index_select(2, torch::tensor({7, 2})));
  ExpectNear(attention_weights(q, k, {-1}, options), weights.narrow(2, 8, 1));
  EXPECT_THROW(attention_weights(q, k, {9}, options), c10::ValueError);
}

// Two prefix tokens, then a grid of 2 x 3 as tokens 2, ..., 7.
class GridTest : public AttentionTest {
 protected:
  static constexpr int64_t kPrefix = 2;
  static constexpr int64_t kWidth = 3;
  static constexpr int64_t kTokens = 8;

  // Returns the bias (4, L, L); `value` maps the grid offsets of a pair to a bias (4).
  template <class Value>
  static torch::Tensor Loop(const Value& value) {
    std::vector<torch::Tensor> entries;
    for (int64_t i = 0; i < kTokens; ++i) {
      for (int64_t j = 0; j < kTokens; ++j) {
        const int64_t from = i - kPrefix;
        const int64_t to = j - kPrefix;
        entries.push_back(from < 0 || to < 0
                              ? torch::zeros({4}, torch::kDouble)
                              : value(to / kWidth - from / kWidth, to % kWidth - from % kWidth));
      }
    }
    return torch::stack(entries, 1).view({4, kTokens, kTokens});
  }

  torch::Tensor Dense(const torch::Tensor& bias) const {
    return Softmax(torch::matmul(x, y.transpose(2, 3)) / std::sqrt(6.0) + bias, values);
  }

  torch::Tensor x = q.slice(2, 0, kTokens);
  torch::Tensor y = k.slice(2, 0, kTokens);
  torch::Tensor values = v.slice(2, 0, kTokens);
};

TEST_F(GridTest, OneBiasForEachAxisAndATable) {
  const torch::Tensor columns = Normal({4, 5});
  const torch::Tensor table = Normal({4, 3, 5});
  const Position grid =
      position::Grid({2, kWidth}, {position::ALiBi(gamma), position::OffsetBias(columns)}, kPrefix);
  const auto options = AttentionOptions().position({grid, position::GridBias(table, kPrefix)});
  const torch::Tensor bias = Loop([&](int64_t dy, int64_t dx) {
    return -gamma * std::abs(dy) + columns.select(1, dx + 2) +
           table.select(1, dy + 1).select(1, dx + 2);
  });
  const torch::Tensor ours = attention(x, y, values, options);
  const torch::Tensor expected = Dense(bias);
  ExpectNear(ours, expected);
  const torch::Tensor direction = torch::randn_like(ours);
  const std::vector<torch::Tensor> leaves = {q, k, v, gamma, columns, table};
  const auto got = torch::autograd::grad({ours}, leaves, {direction});
  const auto want = torch::autograd::grad({expected}, leaves, {direction});
  for (size_t n = 0; n < leaves.size(); ++n) ExpectNear(got[n], want[n]);
}

TEST_F(GridTest, AugmentedTokensCarryTheSumOverAxes) {
  const auto cells = [](const torch::Tensor& tokens) { return tokens.slice(2, 0, 6); };
  const auto [augmented_q, augmented_k] = hype_augment(cells(q), cells(k), 2.0, 0.1, 1, {2, 3});
  EXPECT_EQ(augmented_q.size(3), 6 + 4);
  const Position hype = position::HyPE(2.0, 0.1, "odd");
  ExpectNear(at::scaled_dot_product_attention(augmented_q, augmented_k, cells(v), {}, 0, false,
                                              1 / std::sqrt(6.0)),
             attention(cells(q), cells(k), cells(v),
                       AttentionOptions().position({position::Grid({2, 3}, {hype, hype})})));
}

TEST_F(GridTest, EachAxisTurnsItsPart) {
  // An axis with a single cell rotates nothing; the other axis is RoPE in a sequence.
  const auto rotated = [&](const std::vector<int64_t>& shape) {
    return attention(x, y, values,
                     AttentionOptions().position(
                         {position::RoPE(10.0, "half", std::nullopt, shape, /*prefix=*/0)}));
  };
  const auto first_part = position::RoPE(10.0, "half", 2);
  ExpectNear(rotated({8, 1, 1}),
             attention(x, y, values, AttentionOptions().position({first_part})));
  EXPECT_FALSE(torch::allclose(rotated({8, 1, 1}), rotated({1, 8, 1})));
}

TEST_F(GridTest, ErrorsNameTheGrid) {
  const Position alibi = position::ALiBi(gamma);
  ExpectThrow<c10::ValueError>([&] { position::Grid({2, 3}, {alibi}); },
                               "shape has 2 axes and axes has 1 biases");
  ExpectThrow<c10::ValueError>([&] { position::Grid({2, 3}, {alibi, position::RoPE()}); },
                               "axes contains rope");
  ExpectThrow<c10::ValueError>(
      [&] { position::Grid({2, 3}, {alibi, position::Grid({3}, {alibi})}); },
      "expected offset biases");
  ExpectThrow<c10::ValueError>(
      [&] {
        attention(x, y, values,
                  AttentionOptions().position({position::Grid({2, 3}, {alibi, alibi})}));
      },
      "alibi on the grid 2x3, but Lq is 8 and Lk is 8; expected 6 tokens");
  ExpectThrow<c10::ValueError>([&] { grid_sinusoid({int64_t{1} << 31, 4}, 4); },
                               "expected at most 2^32 tokens");
  ExpectThrow<c10::ValueError>([&] { grid_sinusoid({}, 4); }, "expected positive sizes");
}

TEST_F(AttentionTest, MasksAndEmptyRows) {
  const torch::Tensor lengths = torch::tensor({9, 0});
  const auto [o, lse] = attention_with_lse(
      q, k, v, AttentionOptions().key_lengths(lengths).window({{3, std::nullopt}}).query_offset(2));
  EXPECT_EQ(o[1].abs().max().item<double>(), 0);
  EXPECT_EQ(lse[1].max().item<double>(), -kInfinity);
  const torch::Tensor n = torch::arange(9);
  const torch::Tensor hidden = n.unsqueeze(0) < (n.unsqueeze(1) + 2 - 3);
  const torch::Tensor scores =
      (torch::matmul(q, k.transpose(2, 3)) / std::sqrt(6.0)).masked_fill(hidden, -kInfinity);
  ExpectNear(o[0], Softmax(scores, v)[0]);
}

TEST_F(AttentionTest, AugmentedTokensCarryTheBias) {
  const torch::Tensor mu = gamma.detach() * 0.1;
  const auto [augmented_q, augmented_k] = hype_augment(q, k, 2.0, mu, 2);
  ExpectNear(attention(q, k, v, AttentionOptions().position({position::HyPE(2.0, mu, "odd")})),
             at::scaled_dot_product_attention(augmented_q, augmented_k, v, {}, 0, false,
                                              1 / std::sqrt(6.0)));
}

// Tests each model's own map, and the exponential map, which all models share.
TEST_F(AttentionTest, HyperbolicDistanceIsThatOfItsModel) {
  const auto lse = [&](const Similarity& similarity) {
    return std::get<1>(attention_with_lse(q, k, v, AttentionOptions().similarity(similarity)));
  };
  const auto split = [](const torch::Tensor& x) {
    return std::pair(x.narrow(3, 0, 5), x.select(3, 5));
  };
  const auto [x, z] = split(q);
  const auto [y, w] = split(k);
  const auto unit = [](const torch::Tensor& t) { return t / t.norm(2, {3}, /*keepdim=*/true); };
  const torch::Tensor minkowski = z.cosh().unsqueeze(3) * w.cosh().unsqueeze(2) -
                                  torch::matmul(unit(x) * z.sinh().unsqueeze(3),
                                                (unit(y) * w.sinh().unsqueeze(3)).transpose(2, 3));
  ExpectNear(lse(similarity::Hyperbolic(gamma)),
             (-gamma.view({4, 1, 1}) * minkowski.acosh()).logsumexp(-1));
  const torch::Tensor u = z.exp();
  const torch::Tensor t = w.exp();
  const torch::Tensor places =
      ((x * u.unsqueeze(3)).unsqueeze(3) - (y * t.unsqueeze(3)).unsqueeze(2)).square().sum(-1);
  const torch::Tensor rise = (u.unsqueeze(3) - t.unsqueeze(2)).square();
  const torch::Tensor cosh = 1 + (places + rise) / (2 * u.unsqueeze(3) * t.unsqueeze(2));
  ExpectNear(lse(similarity::Hyperbolic(0.7, "half_space")), (-0.7 * cosh.acosh()).logsumexp(-1));
  const torch::Tensor expected = lse(similarity::Hyperbolic(gamma, "ball"));
  for (const char* model : {"hyperboloid", "half_space", "klein"}) {
    ExpectNear(lse(similarity::Hyperbolic(gamma, model, "exp")), expected);
  }
}

TEST_F(AttentionTest, AdditiveScoresHaveOneColumn) {
  const torch::Tensor a = q.narrow(3, 0, 1);
  const torch::Tensor b = k.narrow(3, 0, 1);
  const auto options = AttentionOptions().similarity(similarity::Additive(0.3));
  ExpectNear(attention(a, b, v, options), Softmax(at::leaky_relu(a + b.transpose(2, 3), 0.3), v));
}

TEST_F(AttentionTest, AWideConeEntailsEverything) {
  const torch::Tensor points = q * 0.01;
  const auto options = AttentionOptions().similarity(similarity::Entailment(gamma, 0.1, "none"));
  const torch::Tensor keys = points * 1.5;
  // Near the origin, cones are half-spaces; keys on the axis have no energy.
  const auto [o, lse] =
      attention_with_lse(points.narrow(2, 0, 1), keys.narrow(2, 0, 1), v.narrow(2, 0, 1), options);
  ExpectNear(lse, torch::zeros_like(lse));
}

TEST(ConesTest, OrderPoints) {
  const auto point = [](double x, double height) {
    return torch::tensor({x, height}, torch::kDouble);
  };
  EXPECT_TRUE(cones::ancestor(point(0, 0.9), point(0, 0.1)).item<bool>());
  EXPECT_FALSE(cones::ancestor(point(0, 0.1), point(0, 0.9)).item<bool>());
  EXPECT_TRUE(cones::ancestor(point(0, 2), point(0.1, 0.5), "umbral").item<bool>());
  EXPECT_FALSE(cones::ancestor(point(0, 2), point(0.1, 0.5), "umbral", 0.01).item<bool>());
  // By symmetry, the common ancestor is midway between points of equal height.
  const torch::Tensor lca =
      cones::lowest_common_ancestor(point(-0.2, 0.5), point(0.4, 0.5), "umbral", 0.5);
  ExpectNear(lca, point(0.1, 0.5 + 0.3 / std::sinh(0.5)));
}

TEST_F(AttentionTest, ErrorsNameTheArgument) {
  ExpectThrow<c10::ValueError>([&] { attention(q, k.narrow(3, 0, 5), v); },
                               "k has shape [2, 4, 9, 5]");
  ExpectThrow<c10::TypeError>([&] { attention(q, k, v.to(torch::kFloat)); }, "v has dtype Float");
  ExpectThrow<c10::ValueError>(
      [&] {
        attention(q, k, v, AttentionOptions().similarity(similarity::Umbral(1.0, 0.1, "xi")));
      },
      "umbral:map=xi is invalid; expected one of psi, exp, none");
  ExpectThrow<c10::ValueError>(
      [&] { attention(q.narrow(2, 0, 3), k, v, AttentionOptions().causal(true)); },
      "causal requires query_offset");
  ExpectThrow<c10::ValueError>([&] { position::RoPE(1.0, "half:dims=2"); }, "layout");
}

TEST(CatalogueTest, EveryEntrySaysWhatItIs) {
  for (const auto& catalogue : {SimilarityCatalogue(), PositionCatalogue()}) {
    EXPECT_GE(catalogue.size(), 5u);
    for (const CatalogueEntry& entry : catalogue) {
      EXPECT_FALSE(entry.formula.empty() || entry.title.empty()) << entry.name;
      EXPECT_THAT(entry.source, HasSubstr(" 20")) << entry.name;
      EXPECT_THAT(entry.cost, HasSubstr(" + ")) << entry.name;
      EXPECT_FALSE(entry.use().empty()) << entry.name;
      const bool is_similarity = entry.role == CatalogueEntry::Role::kSimilarity;
      EXPECT_EQ(entry.tokens().empty(), is_similarity) << entry.name;
      for (const CatalogueParameter& parameter : entry.parameters) {
        EXPECT_FALSE(parameter.values().empty()) << entry.name;
        const bool says_nothing = parameter.default_value.empty() && parameter.otherwise.empty();
        EXPECT_EQ(says_nothing, parameter.kind == CatalogueParameter::Kind::kTable &&
                                    parameter.argument == CatalogueParameter::Argument::kRequired)
            << entry.name << ":" << parameter.name;
        // A specification must accept the default.
        if (parameter.default_value.empty()) continue;
        std::string text = entry.name + ":" + parameter.name + "=" + parameter.default_value;
        if (!parameter.read_by.empty()) {
          text += ":" + parameter.detail_of + "=" + parameter.read_by.front();
        }
        Component::Parse(text).Check();
      }
    }
  }
  EXPECT_EQ(SimilarityCatalogue().front().name, "dot");
  EXPECT_EQ(PositionCatalogue().front().name, "none");
}

// The numbers were counted by hand: a squared distance takes 5 simple operations.
TEST(CatalogueTest, CostsAreCounted) {
  std::map<std::string, std::string> told;
  for (const CatalogueEntry& entry : SimilarityCatalogue()) told[entry.name] = entry.cost;
  EXPECT_EQ(told["dot"], "0 + 0; softcap: 1 + 1");
  EXPECT_EQ(told["laplacian"], "5 + 1");  // a square root
  EXPECT_EQ(told["gaussian"], "5 + 0");
  EXPECT_EQ(told["additive"], "4 + 0, without the inner product");
  EXPECT_EQ(told["student_t"], "5 + 1");  // from examples/terms: a logarithm
  // u - v, its square, the maximum, the difference; a square root. With the logarithm: u + v + M
  // and the minimum.
  EXPECT_EQ(told["umbral"], "height: 9 + 1; log: 11 + 2");
}

TEST(CatalogueTest, TitlesAreAsAPersonSaysThem) {
  EXPECT_EQ(PositionTitle("rope+hype:tau=learned"), "RoPE + learned HyPE");
  EXPECT_EQ(PositionTitle("none"), "no position");
  EXPECT_EQ(PositionTitle("t5:buckets=8:bidirectional"), "T5 (buckets 8, bidirectional)");
  EXPECT_EQ(SimilarityTitle("penumbral:gamma=fixed:score=log"),
            "fixed penumbral cones (score log)");
  EXPECT_THROW(PositionTitle("hpye"), c10::ValueError);
  EXPECT_THROW(SimilarityTitle("rope"), c10::ValueError);
}

}  // namespace
}  // namespace gnomon
