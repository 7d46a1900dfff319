// Loads this folder's terms and uses them by name: in specification strings for attention
// (gnomon/catalogue.h), and in a module. Prints the largest difference from the formulas.
#include <gnomon/catalogue.h>
#include <gnomon/torch/attention.h>
#include <gnomon/torch/nn.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <string>

int main() {
  for (const std::string& name : gnomon::LoadTerms(TERMS_LIBRARY)) {
    std::printf("%s\n", name.c_str());
  }
  torch::manual_seed(0);
  const torch::Tensor q = torch::randn({2, 2, 9, 4}, torch::kDouble);
  const torch::Tensor place = torch::arange(9);
  const torch::Tensor bias = -0.25 * (place.unsqueeze(1) - place).abs().to(torch::kDouble).sqrt();

  const auto difference = [&](const char* similarity, const torch::Tensor& scores) {
    const torch::Tensor o = gnomon::attention(
        q, q, q, gnomon::AttentionOptions().similarity(similarity).position("root:slopes=0.25"));
    const torch::Tensor expected = torch::matmul((scores + bias).softmax(-1), q);
    return (o - expected).abs().max().item<double>();
  };
  const torch::Tensor x = q.slice(3, 0, 3);
  const double worst = std::max(
      difference("student_t:gamma=0.5", -0.5 * torch::cdist(q, q).square().log1p()),
      difference("adaptive:gamma=0.5", -0.5 * q.slice(3, 3).exp() * torch::cdist(x, x).square()));

  gnomon::nn::TokenPosition encoding("bits", /*dim=*/4, /*max_length=*/6);
  const torch::Tensor digits = encoding->forward(torch::zeros({1, 6, 4}))[0][5];
  const bool same = torch::equal(digits, torch::tensor({1.0f, 0.0f, 1.0f, 0.0f}));
  std::printf("largest difference %.1e; the digits of 5 are %s\n", worst, same ? "right" : "wrong");
  return worst < 1e-12 && same ? 0 : 1;
}
