// Causal attention with eight heads, forward and backward, on plain arrays with two threads.
// Compares one value of each result with a plain loop.
#include <gnomon/attention.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

namespace {

constexpr int64_t kHeads = 8, kLength = 256, kDim = 64;
constexpr int64_t kSize = kHeads * kLength * kDim;

// Arbitrary numbers between -1 and 1.
std::vector<float> Tokens(double frequency) {
  std::vector<float> tokens(kSize);
  for (int64_t n = 0; n < kSize; ++n) {
    tokens[n] = static_cast<float>(std::sin(frequency * static_cast<double>(n + 1)));
  }
  return tokens;
}

// The weights of query `row` in head `head`, computed from the formula.
std::vector<double> Weights(const std::vector<float>& q, const std::vector<float>& k, int64_t head,
                            int64_t row) {
  std::vector<double> weights(kLength);
  double sum = 0;
  for (int64_t j = 0; j <= row; ++j) {
    double score = 0;
    for (int64_t d = 0; d < kDim; ++d) {
      score += q[(head * kLength + row) * kDim + d] * k[(head * kLength + j) * kDim + d];
    }
    sum += weights[j] = std::exp(score / std::sqrt(kDim));
  }
  for (double& weight : weights) weight /= sum;
  return weights;
}

bool Agree(const char* name, double actual, double expected) {
  std::printf("%s: %.6f, expected %.6f\n", name, actual, expected);
  return std::abs(actual - expected) <= 1e-5 * (1 + std::abs(expected));
}

}  // namespace

int main() {
  const std::vector<float> q = Tokens(0.7), k = Tokens(1.1), v = Tokens(1.7);
  const std::vector<float> factor(kHeads, 0.125f);  // 1 / sqrt(kDim)
  const std::array<int64_t, 3> stride = {kSize, kLength * kDim, kDim};
  const gnomon::ThreadExecutor threads(2);
  const gnomon::PairFunction& dot = gnomon::FindPairFunction("dot");

  gnomon::AttentionInput<float> input;
  input.shape = {.batch = 1,
                 .heads = kHeads,
                 .key_heads = kHeads,
                 .queries = kLength,
                 .keys = kLength,
                 .dim = kDim,
                 .value_dim = kDim};
  input.x = {q.data(), stride};
  input.y = {k.data(), stride};
  input.v = {v.data(), stride};
  input.factor = factor.data();
  input.mask.right = 0;  // causal
  std::vector<float> o(kSize), lse(kHeads * kLength), statistics(3 * kHeads * kLength);
  gnomon::AttentionForward(
      dot, input, {.o = {o.data(), stride}, .lse = lse.data(), .statistics = statistics.data()},
      threads);

  // The gradients of sum(o).
  const std::vector<float> ones(kSize, 1.0f);
  std::vector<float> d_q(kSize), d_k(kSize), d_v(kSize);
  gnomon::AttentionGradient<float> gradient;
  gradient.x = {d_q.data(), stride};
  gradient.y = {d_k.data(), stride};
  gradient.v = {d_v.data(), stride};
  gnomon::AttentionBackward(dot, input,
                            {.o = {o.data(), stride},
                             .lse = lse.data(),
                             .d_o = {ones.data(), stride},
                             .statistics = statistics.data()},
                            gradient, threads);

  constexpr int64_t kHead = 3, kToken = 100;
  double expected_o = 0, expected_d_v = 0;
  const std::vector<double> weights = Weights(q, k, kHead, kToken);
  for (int64_t j = 0; j < kLength; ++j) {
    expected_o += weights[j] * v[(kHead * kLength + j) * kDim];
  }
  for (int64_t i = 0; i < kLength; ++i) expected_d_v += Weights(q, k, kHead, i)[kToken];
  const int64_t place = (kHead * kLength + kToken) * kDim;
  const bool same = Agree("o", o[place], expected_o) && Agree("d_v", d_v[place], expected_d_v);
  return same ? 0 : 1;
}
