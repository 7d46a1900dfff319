// Helpers for the parameters of modules in tests.
#ifndef GNOMON_TESTS_LAB_VALUES_H_
#define GNOMON_TESTS_LAB_VALUES_H_

#include <torch/torch.h>

#include <algorithm>
#include <vector>

namespace gnomon::lab {

// Returns copies of the parameters.
inline std::vector<torch::Tensor> Values(const torch::nn::Module& module) {
  std::vector<torch::Tensor> values;
  for (const torch::Tensor& parameter : module.parameters()) {
    values.push_back(parameter.detach().clone());
  }
  return values;
}

inline bool Equal(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const auto& x, const auto& y) { return torch::equal(x, y); });
}

}  // namespace gnomon::lab

#endif  // GNOMON_TESTS_LAB_VALUES_H_
