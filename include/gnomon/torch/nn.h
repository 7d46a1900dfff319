// PyTorch modules built on gnomon::attention. Positions and similarities are given as
// specifications in the grammar of gnomon/catalogue.h ("rope+hype:mu=0.001:tau=learned",
// "penumbral:score=height2"), so models need no special cases: they pass a specification to
// TokenPosition, which applies the components that are added to embeddings, and pass its
// attention_position() to MultiheadAttention.
//
// Parameters have the same names in Python (gnomon.nn).
#ifndef GNOMON_TORCH_NN_H_
#define GNOMON_TORCH_NN_H_

#include <gnomon/torch/attention.h>
#include <gnomon/torch/encodings.h>
#include <gnomon/torch/token_encoding.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace gnomon {
class ModuleTerms;
}  // namespace gnomon

namespace gnomon::nn {

// The projected keys and values of the previous tokens, (B, Hkv, L, D) and (B, Hkv, L, Dv), before
// any rotation or map, and the other tensors that a position projects from keys, (B, H, L, ...).
//
// Without gradients, the tensors are views of larger ones, and tokens are appended in place.
// Copies of a cache share its tensors, but can be extended independently.
struct KVCache {
  torch::Tensor k;
  torch::Tensor v;
  std::vector<torch::Tensor> projections;
  // (B, L), (L,) or, with several axes, (1 or B, L, axes): the positions of these tokens, if the
  // calls passed them; otherwise undefined.
  torch::Tensor positions;

  int64_t length() const { return k.defined() ? k.size(2) : 0; }
  // If later tokens have positions, earlier tokens without positions are treated as consecutive.
  void append(const torch::Tensor& new_k, const torch::Tensor& new_v,
              const std::vector<torch::Tensor>& new_projections = {},
              const torch::Tensor& new_positions = {});
  // Returns all keys, rotated. turn(keys, first) rotates the keys of token `first` and of all later
  // tokens, and must rotate them identically in every call. Rotated keys are cached with k. They
  // are recomputed if k or positions were assigned, or if `rotation`, a name chosen by the caller,
  // has changed.
  torch::Tensor turned(
      const std::function<torch::Tensor(const torch::Tensor& keys, int64_t first)>& turn,
      const std::string& rotation = "");
  // Drops all tokens except the last `length`.
  void keep_last(int64_t length);
  void reset();

 private:
  struct Room;
  // Whether turned_ contains rotated keys of the first tokens of k.
  bool HasTurned() const;
  static void Extend(const std::vector<torch::Tensor*>& kept,
                     const std::vector<torch::Tensor>& fresh, std::shared_ptr<Room>* room);

  // Larger tensors with space for later tokens, shared by copies of the cache.
  std::shared_ptr<Room> room_;
  torch::Tensor turned_;
  torch::Tensor turned_of_;  // the k that turned_ was computed from
  torch::Tensor turned_at_;  // the positions at that time
  std::string rotation_;
  std::shared_ptr<Room> turned_room_;
};

// Returns the components of a position that act in attention, or "none" if there are none.
std::string attention_position(const std::string& position);

// Splits a layer pattern such as "rope;rope;none" into its positions. The pattern repeats across
// the model's layers.
std::vector<std::string> layer_positions(const std::string& pattern);

// Returns start * exp(5 theta), the value of a learned per-head scalar with the initial value
// `start`. The parameter theta is initialised to 0. AdamW changes every parameter by about the
// learning rate; the exponential makes the relative change the same for large and small values.
torch::Tensor learned_number(const torch::Tensor& start, const torch::Tensor& theta);

// A learned value of a module as it enters the scores (not the theta that the optimiser updates),
// with its initial value; start is nullopt for tables and for tensors passed in terms.
struct LearnedValue {
  std::string name;  // "gamma", "hype_tau", "t5_table"
  torch::Tensor value;
  std::optional<torch::Tensor> start;
};

struct MultiheadAttentionOptions {
  MultiheadAttentionOptions(int64_t embed_dim, int64_t num_heads)
      : embed_dim_(embed_dim), num_heads_(num_heads) {}

  TORCH_ARG(int64_t, embed_dim);
  TORCH_ARG(int64_t, num_heads);
  // Number of key/value heads; must divide num_heads; default num_heads.
  TORCH_ARG(std::optional<int64_t>, kv_heads);
  // Head dimension of q and k; default embed_dim / num_heads.
  TORCH_ARG(std::optional<int64_t>, qk_dim);
  // Specifications, or terms with tensors. The module registers copies of the terms' tensors under
  // the names "<component>_<name>": parameters if they require grad, otherwise buffers.
  TORCH_ARG(Similarity, similarity) = Similarity("dot");
  // Must not contain components that are added to embeddings; see attention_position.
  TORCH_ARG(Position, position) = Position("none");
  // The probability of dropping a weight during training.
  TORCH_ARG(double, dropout) = 0.0;
  TORCH_ARG(bool, bias) = true;
  // Number of rows of a learned position table ("absolute_keys"), unless the component sets its
  // length.
  TORCH_ARG(int64_t, max_length) = 512;
  // Dimensions of key and value; default embed_dim.
  TORCH_ARG(std::optional<int64_t>, kdim);
  TORCH_ARG(std::optional<int64_t>, vdim);
  // Whether q and k of each head are normalised by RMSNorm before all other terms (Henry et al.
  // 2020; Dehghani et al. 2023).
  TORCH_ARG(bool, qk_norm) = false;
  // Whether the output of attention is multiplied by sigmoid(gate_proj(query)) (Qiu et al. 2025).
  TORCH_ARG(bool, gate) = false;
  // Whether each head has a learned sink (AttentionOptions::sink), which is initialised to 0.
  TORCH_ARG(bool, sink) = false;
  // See gnomon::AttentionOptions::tolerance.
  TORCH_ARG(double, tolerance) = kDefaultTolerance;
};

// Computes x / sqrt(mean x^2 + 1e-6) over the last axis, of size `dim`, times a weight initialised
// to 1 (Zhang and Sennrich 2019).
class RMSNormImpl : public torch::nn::Cloneable<RMSNormImpl> {
 public:
  explicit RMSNormImpl(int64_t dim);

  void reset() override;
  torch::Tensor forward(const torch::Tensor& x) const;

  int64_t dim;
  torch::Tensor weight;
};
TORCH_MODULE(RMSNorm);

// The arguments of one call, as in gnomon::AttentionOptions.
struct AttentionCall {
  bool causal = false;
  std::optional<AttentionOptions::Window> window = std::nullopt;
  std::optional<torch::Tensor> key_starts = std::nullopt;
  std::optional<torch::Tensor> key_lengths = std::nullopt;
  std::optional<torch::Tensor> query_segments = std::nullopt;
  std::optional<torch::Tensor> key_segments = std::nullopt;
  std::optional<std::vector<int64_t>> chunks = std::nullopt;
  std::optional<torch::Tensor> mask = std::nullopt;
  // Default: the length of the cache before the call or, without a cache, 0 if Lq = Lk.
  std::optional<int64_t> query_offset = std::nullopt;
  std::optional<torch::Tensor> query_offsets = std::nullopt;
  // Positions of this call's tokens; the cache stores those of the keys.
  std::optional<torch::Tensor> positions = std::nullopt;
  std::optional<torch::Tensor> key_positions = std::nullopt;
  // Receives the projected keys and values of this call; the queries attend to all cached tokens.
  KVCache* cache = nullptr;
};

// Multi-head attention, softmax(similarity + position) v, between input and output projections.
//
// The submodules q_proj, k_proj, v_proj and out_proj have weights initialised from N(0, 1 /
// in_features) and biases initialised to 0, so that inputs of unit variance give q and k of unit
// variance and logits with a standard deviation of 1. The learned per-head values of the similarity
// and the position have the parameters "<component>_<name>_theta" (H,), such as "gamma_theta" or
// "beta_theta", initialised to 0: the value is start * exp(5 theta), because AdamW would barely
// move a large tau itself. Tables of biases, such as "t5_table" (buckets, H) and
// "grid_bias_table" (H, 2 height - 1, 2 width - 1), are initialised to 0. Tables of content terms,
// such as "relative_table" (2 max_offset + 1, D), are initialised from N(0, 1 / D).
// "transformer_xl_u" and "transformer_xl_v" (H, D) are initialised to 0, and "transformer_xl_r" (H,
// D, embed_dim) maps sinusoids to rows. Tensors that are projected from the tokens of each call
// have a weight (H n, embed_dim or kdim) and may have a bias (H n) for n numbers per head:
// "forget_log_forget_weight" and "forget_log_forget_bias", "content_bias_query_weight". The initial
// value of gamma or beta, the buffer "gamma_start" or "beta_start", gives the logits of N(0, 1)
// tokens a standard deviation of 1. The options qk_norm, gate and sink add q_norm, k_norm,
// gate_proj and the parameter "sink" (H,).
class MultiheadAttentionImpl : public torch::nn::Cloneable<MultiheadAttentionImpl> {
 public:
  MultiheadAttentionImpl(int64_t embed_dim, int64_t num_heads)
      : MultiheadAttentionImpl(MultiheadAttentionOptions(embed_dim, num_heads)) {}
  explicit MultiheadAttentionImpl(const MultiheadAttentionOptions& options);

  void reset() override;

  // query (B, Lq, embed_dim), key (B, Lk, kdim), value (B, Lk, vdim); key defaults to query, and
  // value defaults to key. Returns (B, Lq, embed_dim).
  torch::Tensor forward(const torch::Tensor& query, const torch::Tensor& key = {},
                        const torch::Tensor& value = {}, const AttentionCall& call = {});

  // Returns the weights (B, H, n, Lk) of n rows of query (-1 is the last), like
  // gnomon::attention_weights, with this module's projections, similarity and position, and without
  // dropout. Throws if the call has a cache. `key` defaults to query.
  torch::Tensor attention_weights(const torch::Tensor& query, const torch::Tensor& key,
                                  const std::vector<int64_t>& rows, const AttentionCall& call = {});

  // Returns the learned values of the similarity and the position, without gradients.
  std::vector<LearnedValue> learned_values() const;

  MultiheadAttentionOptions options;
  torch::nn::Linear q_proj{nullptr};
  torch::nn::Linear k_proj{nullptr};
  torch::nn::Linear v_proj{nullptr};
  torch::nn::Linear out_proj{nullptr};
  torch::nn::Linear gate_proj{nullptr};
  RMSNorm q_norm{nullptr};
  RMSNorm k_norm{nullptr};
  torch::Tensor sink;

 private:
  // Returns the tensors of the similarity and the position, in the order of term_names_.
  std::vector<torch::Tensor> TermTensors() const;
  // Returns q and k (B, H, L, D) for checked embeddings.
  std::pair<torch::Tensor, torch::Tensor> QueriesAndKeys(const torch::Tensor& query,
                                                         const torch::Tensor& key);

  // The similarity and the position, resolved.
  std::shared_ptr<const ModuleTerms> terms_;
  // The names of their tensors, which are parameters and buffers of this module.
  std::vector<std::string> term_names_;
  bool has_projections_ = false;
  int64_t key_heads_ = 0;
};
TORCH_MODULE(MultiheadAttention);

struct LorentzMultiheadAttentionOptions {
  LorentzMultiheadAttentionOptions(int64_t in_channels, int64_t out_channels, int64_t num_heads)
      : in_channels_(in_channels), out_channels_(out_channels), num_heads_(num_heads) {}

  // Channels per head: tokens have num_heads * in_channels channels, and the points of each head
  // have out_channels coordinates, including the time.
  TORCH_ARG(int64_t, in_channels);
  TORCH_ARG(int64_t, out_channels);
  TORCH_ARG(int64_t, num_heads);
  // The hyperboloid is (x.x)_L = -c. If c is learned, this is the initial value of the parameter
  // "c".
  TORCH_ARG(double, c) = 1.0;
  TORCH_ARG(bool, learned_c) = false;
  // Whether tokens are projected; otherwise, the tokens are the points of all heads.
  TORCH_ARG(bool, use_weight) = true;
  // Whether final_linear maps the points of all heads to one point; otherwise, the output is their
  // centroid.
  TORCH_ARG(bool, trans_heads_concat) = false;
  // Whether the spatial coordinates of q and k are divided by their norm.
  TORCH_ARG(bool, normalize) = false;
  // A specification, or a term without tensors.
  TORCH_ARG(Position, position) = Position("none");
  // The probability of dropping a weight during training.
  TORCH_ARG(double, dropout) = 0.0;
};

// Multi-head attention on one hyperboloid, with the weights softmax(2 c + 2 (q.k)_L) and centroids
// of the values: the attention layer of HyperCore (He et al. 2025; Chen et al. 2022; Yang et al.
// 2024, Hypformer). The submodules Wq, Wk and Wv compute the spatial coordinates of each head, and
// final_linear computes those of the output; the time coordinates follow from these. Parameters:
// scale (1,), initialised to sqrt(num_heads * out_channels), which divides the scores, and bias (),
// which is added to all scores and has no effect on the softmax.
class LorentzMultiheadAttentionImpl : public torch::nn::Cloneable<LorentzMultiheadAttentionImpl> {
 public:
  LorentzMultiheadAttentionImpl(int64_t in_channels, int64_t out_channels, int64_t num_heads)
      : LorentzMultiheadAttentionImpl(
            LorentzMultiheadAttentionOptions(in_channels, out_channels, num_heads)) {}
  explicit LorentzMultiheadAttentionImpl(const LorentzMultiheadAttentionOptions& options);

  void reset() override;

  // query (B, Lq, num_heads * in_channels), source (B, Lk, ...), which defaults to query. Returns
  // points, time first: (B, Lq, num_heads * out_channels) with trans_heads_concat, otherwise (B,
  // Lq, out_channels).
  torch::Tensor forward(const torch::Tensor& query, const torch::Tensor& source = {},
                        const AttentionCall& call = {});

  LorentzMultiheadAttentionOptions options;
  torch::nn::Linear Wq{nullptr};
  torch::nn::Linear Wk{nullptr};
  torch::nn::Linear Wv{nullptr};
  torch::nn::Linear final_linear{nullptr};
  torch::Tensor scale;
  torch::Tensor bias;
  torch::Tensor c;  // defined if it is learned
};
TORCH_MODULE(LorentzMultiheadAttention);

struct TokenPositionOptions {
  TokenPositionOptions(std::string position, int64_t dim, int64_t max_length)
      : position_(std::move(position)), dim_(dim), max_length_(max_length) {}

  TORCH_ARG(std::string, position);
  TORCH_ARG(int64_t, dim);
  // Number of rows of a learned table; "learned:length=N" in the specification overrides it.
  TORCH_ARG(int64_t, max_length);
  // Whether encodings must not depend on later tokens.
  TORCH_ARG(bool, causal) = false;
};

// Adds the token encodings of a position, such as "sinusoidal" or "learned", to embeddings, and
// ignores components that act in attention. Each encoding reads the original embeddings, so their
// order does not matter.
class TokenPositionImpl : public torch::nn::Cloneable<TokenPositionImpl> {
 public:
  TokenPositionImpl(std::string position, int64_t dim, int64_t max_length)
      : TokenPositionImpl(TokenPositionOptions(std::move(position), dim, max_length)) {}
  explicit TokenPositionImpl(const TokenPositionOptions& options);

  void reset() override;

  // Returns the sum of embeddings (B, L, dim) and their encodings, with the same shape.
  torch::Tensor forward(const torch::Tensor& embeddings, const TokenCall& call = {});

  // The maximum length at which the position is defined; nullopt if it is unlimited.
  std::optional<int64_t> max_length() const { return max_length_; }

  TokenPositionOptions options;

 private:
  std::optional<int64_t> max_length_;
  std::vector<TokenEncoding> encodings_;  // submodules "<name><n>", numbered per name
};
TORCH_MODULE(TokenPosition);

// Returns a position's first encoding that reads preceding tokens, such as "conv:kernel=64",
// without creating the module; nullopt if there is none.
std::optional<std::string> encoding_with_history(const TokenPositionOptions& options);

}  // namespace gnomon::nn

#endif  // GNOMON_TORCH_NN_H_
