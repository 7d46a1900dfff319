// Attention on tensors: first as a replacement for scaled_dot_product_attention, then with a
// learned position.
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <gnomon/torch/attention.h>

#include <cstdio>

namespace {

constexpr int64_t kHeads = 8, kLength = 256, kDim = 64;

bool Agree(const char* name, const at::Tensor& actual, const at::Tensor& expected) {
  const double difference = (actual - expected).abs().max().item<double>();
  std::printf("%s: largest difference %.2g\n", name, difference);
  return difference <= 1e-4 * (1 + expected.abs().max().item<double>());
}

at::Tensor Leaf(double value) { return at::full({kHeads}, value).requires_grad_(); }

// Returns the gradient of sum(o) with respect to a leaf tensor.
at::Tensor GradientOf(const at::Tensor& leaf, const at::Tensor& o) {
  o.sum().backward();
  return leaf.grad();
}

}  // namespace

int main() {
  const at::Tensor q = at::randn({2, kHeads, kLength, kDim});
  const at::Tensor k = at::randn({2, kHeads, kLength, kDim});
  const at::Tensor v = at::randn({2, kHeads, kLength, kDim});

  // Instead of at::scaled_dot_product_attention(q, k, v, {}, 0.0, true):
  const at::Tensor o = gnomon::attention(q, k, v, gnomon::AttentionOptions().causal(true));
  bool same = Agree("causal", o, at::scaled_dot_product_attention(q, k, v, {}, 0.0, true));

  // HyPE, -tau sinh(mu |p_i - p_j|), with learned tau. Neither the bias nor its gradient needs a
  // length x length array.
  const double mu = 1.0 / kLength;
  const at::Tensor tau = Leaf(0.5);
  const at::Tensor biased = gnomon::attention(
      q, k, v, gnomon::AttentionOptions().position({gnomon::position::HyPE(tau, mu)}));
  const at::Tensor d_tau = GradientOf(tau, biased);

  // The same bias as a length x length mask.
  const at::Tensor same_tau = Leaf(0.5);
  const at::Tensor p = at::arange(kLength, at::kFloat);
  const at::Tensor distance = (p.unsqueeze(1) - p).abs();
  const at::Tensor mask = -same_tau.view({kHeads, 1, 1}) * (mu * distance).sinh();
  const at::Tensor expected = at::scaled_dot_product_attention(q, k, v, mask.unsqueeze(0));
  same = Agree("HyPE", biased, expected) && same;
  same = Agree("gradient of tau", d_tau, GradientOf(same_tau, expected)) && same;
  return same ? 0 : 1;
}
