// Attention with the similarity defined in matern-inl.h, which is not part of the library. On every
// available instruction set, checks the output and the gradients with respect to keys and inverse
// length scales against plain loops.
#include <gnomon/attention.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

namespace gnomon {
const PairFunction& PairFunctionOfMatern();
}

namespace {

constexpr int64_t kHeads = 2, kLength = 100, kDim = 5;
constexpr int64_t kSize = kHeads * kLength * kDim;
using Array = std::vector<float>;

// Arbitrary numbers between -1 and 1.
Array Tokens(double frequency) {
  Array tokens(kSize);
  for (int64_t n = 0; n < kSize; ++n) {
    tokens[n] = static_cast<float>(std::sin(frequency * static_cast<double>(n + 1)));
  }
  return tokens;
}

// The sum of o * d_o over all elements, computed from the formula.
double Objective(const Array& q, const Array& k, const Array& v, const Array& inverse_length,
                 const Array& d_o) {
  double total = 0;
  for (int64_t h = 0; h < kHeads; ++h) {
    for (int64_t i = 0; i < kLength; ++i) {
      double sum = 0, weighted = 0;
      for (int64_t j = 0; j < kLength; ++j) {
        double square = 0, value = 0;
        for (int64_t d = 0; d < kDim; ++d) {
          const int64_t key = (h * kLength + j) * kDim + d;
          const int64_t query = (h * kLength + i) * kDim + d;
          square += std::pow(static_cast<double>(q[query]) - k[key], 2);
          value += static_cast<double>(d_o[query]) * v[key];
        }
        const double u = inverse_length[h] * std::sqrt(3 * square);
        const double weight = (1 + u) * std::exp(-u);
        sum += weight;
        weighted += weight * value;
      }
      total += weighted / sum;
    }
  }
  return total;
}

// The derivative of the objective with respect to `entry`, an element of one of its arguments.
template <class Function>
double Derivative(float& entry, const Function& objective) {
  constexpr float kStep = 1.0f / 1024;
  const float at = entry;
  entry = at + kStep;
  const double above = objective();
  entry = at - kStep;
  const double below = objective();
  entry = at;
  return (above - below) / (2 * kStep);
}

bool Agree(const std::string& name, double actual, double expected) {
  std::printf("%s: %.5f, expected %.5f\n", name.c_str(), actual, expected);
  return std::abs(actual - expected) <= 1e-5 + 1e-3 * std::abs(expected);
}

}  // namespace

int main() {
  const gnomon::PairFunction& matern = gnomon::PairFunctionOfMatern();
  const std::array<int64_t, 3> stride = {kSize, kLength * kDim, kDim};
  const gnomon::ThreadExecutor threads(2);
  const Array q = Tokens(0.7), v = Tokens(1.7), d_o = Tokens(2.3), factor(kHeads, -1.0f);
  Array k = Tokens(1.1), inverse_length = {0.8f, 2.5f};

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
  input.head_scalars = inverse_length.data();
  input.factor = factor.data();

  constexpr int64_t kEntry = 640;  // an entry of k
  const auto objective = [&] { return Objective(q, k, v, inverse_length, d_o); };
  const double expected = objective();
  const double expected_key = Derivative(k[kEntry], objective);
  const double expected_length = Derivative(inverse_length[1], objective);
  bool same = true;
  for (const std::string& target : gnomon::Targets()) {
    gnomon::SetTarget(target);
    Array o(kSize), lse(kHeads * kLength), statistics(3 * kHeads * kLength);
    Array d_k(kSize), d_inverse_length(kHeads);
    gnomon::AttentionForward(
        matern, input,
        {.o = {o.data(), stride}, .lse = lse.data(), .statistics = statistics.data()}, threads);
    gnomon::AttentionGradient<float> gradient;
    gradient.y = {d_k.data(), stride};
    gradient.head_scalars = d_inverse_length.data();
    gnomon::AttentionBackward(matern, input,
                              {.o = {o.data(), stride},
                               .lse = lse.data(),
                               .d_o = {d_o.data(), stride},
                               .statistics = statistics.data()},
                              gradient, threads);
    double total = 0;
    for (int64_t n = 0; n < kSize; ++n) total += static_cast<double>(o[n]) * d_o[n];
    same = Agree(target + " o", total, expected) && same;
    same = Agree(target + " d_k", d_k[kEntry], expected_key) && same;
    same = Agree(target + " d_t", d_inverse_length[1], expected_length) && same;
  }
  return same ? 0 : 1;
}
