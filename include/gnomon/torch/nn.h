// Torch modules on gnomon::attention. Positions and similarities are named by specifications in the
// grammar of gnomon/catalogue.h ("rope+hype:mu=0.001:tau=learned", "penumbral:score=height2"), so
// that a model has no special case for any of them: it hands the same specification to
// TokenPosition and to MultiheadAttention, and each takes the components that act in it.
//
// Parameters have the same names in Python (gnomon.nn).
#ifndef GNOMON_TORCH_NN_H_
#define GNOMON_TORCH_NN_H_

#include <gnomon/torch/attention.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace gnomon::nn {

// Projected keys and values of the tokens so far, (B, Hkv, L, D) and (B, Hkv, L, Dv), before any
// rotation or map.
struct KVCache {
  torch::Tensor k;
  torch::Tensor v;

  int64_t length() const { return k.defined() ? k.size(2) : 0; }
  void append(const torch::Tensor& new_k, const torch::Tensor& new_v);
  void reset();
};

struct MultiheadAttentionOptions {
  MultiheadAttentionOptions(int64_t embed_dim, int64_t num_heads)
      : embed_dim_(embed_dim), num_heads_(num_heads) {}

  TORCH_ARG(int64_t, embed_dim);
  TORCH_ARG(int64_t, num_heads);
  // Heads of keys and values; a divisor of num_heads, and num_heads by default.
  TORCH_ARG(std::optional<int64_t>, kv_heads);
  // Columns of one head of q and k; embed_dim / num_heads by default.
  TORCH_ARG(std::optional<int64_t>, qk_dim);
  TORCH_ARG(std::string, similarity) = "dot";
  TORCH_ARG(std::string, position) = "none";
  // Of the attention weights; only 0 in this version.
  TORCH_ARG(double, dropout) = 0.0;
  TORCH_ARG(bool, bias) = true;
};

// The arguments of one call, as in gnomon::AttentionOptions.
struct AttentionCall {
  bool causal = false;
  std::optional<AttentionOptions::Window> window = std::nullopt;
  std::optional<torch::Tensor> key_lengths = std::nullopt;
  // By default the length of the cache before the call; without a cache 0 where Lq = Lk.
  std::optional<int64_t> query_offset = std::nullopt;
  // The projected keys and values of this call are appended, and the queries see all of the cache.
  KVCache* cache = nullptr;
};

// softmax(similarity + position) over heads, between projections.
//
// Submodules q_proj, k_proj, v_proj, out_proj: weights N(0, 1 / in_features), biases 0, so that
// inputs of unit variance give q and k of unit variance and logits of spread 1. Parameters of the
// similarity and of the position are (H,) tensors "<component>_<name>_theta" that start at 0, with
// value = start * exp(5 theta) (AdamW barely moves a large tau itself), "gamma_theta" or
// "beta_theta" among them, and "t5_table" (buckets, H), which starts at 0. The start of gamma or
// beta, the buffer "gamma_start" or "beta_start", makes the spread of the logits of N(0, 1) tokens
// 1.
class MultiheadAttentionImpl : public torch::nn::Cloneable<MultiheadAttentionImpl> {
 public:
  MultiheadAttentionImpl(int64_t embed_dim, int64_t num_heads)
      : MultiheadAttentionImpl(MultiheadAttentionOptions(embed_dim, num_heads)) {}
  explicit MultiheadAttentionImpl(const MultiheadAttentionOptions& options);

  void reset() override;

  // query (B, Lq, embed_dim), key (B, Lk, embed_dim), value likewise; key is query by default,
  // value is key. Returns (B, Lq, embed_dim).
  torch::Tensor forward(const torch::Tensor& query, const torch::Tensor& key = {},
                        const torch::Tensor& value = {}, const AttentionCall& call = {});

  MultiheadAttentionOptions options;
  torch::nn::Linear q_proj{nullptr};
  torch::nn::Linear k_proj{nullptr};
  torch::nn::Linear v_proj{nullptr};
  torch::nn::Linear out_proj{nullptr};

 private:
  // Tensors of the similarity and of the position by name: parameters and buffers of this module.
  std::vector<std::string> term_names_;
};
TORCH_MODULE(MultiheadAttention);

// Sinusoids of the positions, added to embeddings; see gnomon::sinusoid.
class SinusoidalImpl : public torch::nn::Cloneable<SinusoidalImpl> {
 public:
  explicit SinusoidalImpl(int64_t dim, std::string layout = "interleaved");
  void reset() override;
  // embeddings (B, L, dim), the first of them at position `offset`; the same shape.
  torch::Tensor forward(const torch::Tensor& embeddings, int64_t offset = 0);

 private:
  int64_t dim_;
  std::string layout_;
};
TORCH_MODULE(Sinusoidal);

// A learned table of positions, added to embeddings: parameter `table` (max_length, dim), which
// starts as N(0, 0.02^2) (Radford et al. 2019).
class LearnedAbsoluteImpl : public torch::nn::Cloneable<LearnedAbsoluteImpl> {
 public:
  LearnedAbsoluteImpl(int64_t max_length, int64_t dim);
  void reset() override;
  // embeddings (B, L, dim), the first of them at position `offset`; offset + L <= max_length.
  torch::Tensor forward(const torch::Tensor& embeddings, int64_t offset = 0);

  torch::Tensor table;

 private:
  int64_t max_length_;
  int64_t dim_;
};
TORCH_MODULE(LearnedAbsolute);

struct TokenPositionOptions {
  TokenPositionOptions(std::string position, int64_t dim, int64_t max_length)
      : position_(std::move(position)), dim_(dim), max_length_(max_length) {}

  TORCH_ARG(std::string, position);
  TORCH_ARG(int64_t, dim);
  // Rows of a learned table; "learned:length=N" in the specification overrides it.
  TORCH_ARG(int64_t, max_length);
};

// Adds the token encodings of a position ("sinusoidal", "learned") to embeddings; nothing for the
// components that act in attention.
class TokenPositionImpl : public torch::nn::Cloneable<TokenPositionImpl> {
 public:
  TokenPositionImpl(std::string position, int64_t dim, int64_t max_length)
      : TokenPositionImpl(TokenPositionOptions(std::move(position), dim, max_length)) {}
  explicit TokenPositionImpl(const TokenPositionOptions& options);

  void reset() override;

  // embeddings (B, L, dim), the first of them at position `offset`; the same shape.
  torch::Tensor forward(const torch::Tensor& embeddings, int64_t offset = 0);

  // The longest length at which the whole position is defined; nullopt: any.
  std::optional<int64_t> max_length() const { return max_length_; }

  TokenPositionOptions options;

 private:
  std::optional<int64_t> max_length_;
  std::vector<Sinusoidal> sinusoidal_;
  std::vector<LearnedAbsolute> learned_;
};
TORCH_MODULE(TokenPosition);

}  // namespace gnomon::nn

#endif  // GNOMON_TORCH_NN_H_
