#include "models/frechet.h"

#include <limits>
#include <utility>

namespace gnomon::lab {
namespace {

std::pair<torch::Tensor, torch::Tensor> MeanAndCovariance(const torch::Tensor& features) {
  const torch::Tensor rows = features.to(torch::kDouble);
  const torch::Tensor mean = rows.mean(0);
  const torch::Tensor rest = rows - mean;
  return {mean, torch::matmul(rest.t(), rest) / static_cast<double>(rows.size(0) - 1)};
}

// Returns the square roots of the eigenvalues `values` of a positive semidefinite matrix, which may
// be slightly negative due to rounding.
torch::Tensor RootsOfEigenvalues(const torch::Tensor& values) { return values.clamp_min(0).sqrt(); }

}  // namespace

double FrechetDistance(const torch::Tensor& a, const torch::Tensor& b) {
  const auto [mean_a, covariance_a] = MeanAndCovariance(a);
  const auto [mean_b, covariance_b] = MeanAndCovariance(b);
  if (!torch::isfinite(covariance_a).all().item<bool>() ||
      !torch::isfinite(covariance_b).all().item<bool>()) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  // C_a C_b has the same eigenvalues as the symmetric matrix C_a^(1/2) C_b C_a^(1/2).
  const auto [values, vectors] = torch::linalg_eigh(covariance_a);
  const torch::Tensor root = torch::matmul(vectors * RootsOfEigenvalues(values), vectors.t());
  const torch::Tensor product = torch::matmul(torch::matmul(root, covariance_b), root);
  const torch::Tensor trace = RootsOfEigenvalues(torch::linalg_eigvalsh(product)).sum();
  return ((mean_a - mean_b).square().sum() + covariance_a.trace() + covariance_b.trace() -
          2 * trace)
      .item<double>();
}

}  // namespace gnomon::lab
