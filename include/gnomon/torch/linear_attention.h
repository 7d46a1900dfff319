// Linear attention on PyTorch tensors: time and memory linear in the lengths, with autograd.
#ifndef GNOMON_TORCH_LINEAR_ATTENTION_H_
#define GNOMON_TORCH_LINEAR_ATTENTION_H_

#include <gnomon/torch/attention.h>
#include <torch/arg.h>
#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <string>

namespace gnomon {

struct LinearAttentionOptions {
  // The feature map phi. "elu", elu(x) + 1 (Katharopoulos et al. 2020), and "relu" have D features.
  // "favor" has one feature per row w of the projection, exp(w.x - |x|^2 / 2) with x divided by
  // D^(1/4): the positive random features of the softmax with scale 1/sqrt(D) (Choromanski et al.
  // 2021).
  TORCH_ARG(std::string, feature) = "elu";
  // A position::RoPE that rotates the features, but only in the numerator (Su et al. 2021, eq. 19).
  TORCH_ARG(std::optional<Position>, rope);
  // Whether query i attends only to keys j <= i; requires Lq = Lk.
  TORCH_ARG(bool, causal) = false;
  // (B,) integers, or () if shared across the batch: keys from key_lengths[b] on are ignored and
  // may contain NaN.
  TORCH_ARG(std::optional<torch::Tensor>, key_lengths);
  // The position of the first query, for rope. nullopt means 0 if Lq = Lk; if the lengths differ,
  // rope requires a value.
  TORCH_ARG(std::optional<int64_t>, query_offset);
  // Only for "favor": the number of rows of the projection (default: D ln D rounded up to an even
  // number, at least 2) and the seed of the random projection (default 0); or the projection
  // itself, (features, D).
  TORCH_ARG(std::optional<int64_t>, num_features);
  TORCH_ARG(std::optional<int64_t>, seed);
  TORCH_ARG(std::optional<torch::Tensor>, projection);
};

// o_i = phi(q_i).(sum_j phi(k_j) v_j^T) / (phi(q_i).sum_j phi(k_j)). q (B, H, Lq, D), k (B, Hkv,
// Lk, D), v (B, Hkv, Lk, Dv) as in attention(); returns o (B, H, Lq, Dv) in the dtype of q, which
// is 0 where the denominator is 0. Invalid arguments throw the same exceptions as in attention().
torch::Tensor linear_attention(const torch::Tensor& q, const torch::Tensor& k,
                               const torch::Tensor& v, const LinearAttentionOptions& options = {});

// Returns the projection that linear_attention draws: (num_features, head_dim), float64. The rows
// within a block of head_dim rows are orthogonal; each row is distributed like a vector of N(0, 1)
// numbers (Choromanski et al. 2021, section 2.4).
torch::Tensor favor_projection(int64_t num_features, int64_t head_dim, int64_t seed = 0);

}  // namespace gnomon

#endif  // GNOMON_TORCH_LINEAR_ATTENTION_H_
