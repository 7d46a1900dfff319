// The Frechet distance between two sets of features (Heusel et al. 2017).
#ifndef GNOMON_MODELS_FRECHET_H_
#define GNOMON_MODELS_FRECHET_H_

#include <torch/torch.h>

namespace gnomon::lab {

// Returns |m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2)), where m and C are the means and
// covariances of `a` (N, D) and `b` (M, D). This is the squared 2-Wasserstein distance between the
// normal distributions with these means and covariances. Each set needs at least two rows. Returns
// NaN if a feature is not finite.
double FrechetDistance(const torch::Tensor& a, const torch::Tensor& b);

}  // namespace gnomon::lab

#endif  // GNOMON_MODELS_FRECHET_H_
