// The module of a position that is added to embeddings, and what its calls take.
#ifndef GNOMON_TORCH_TOKEN_ENCODING_H_
#define GNOMON_TORCH_TOKEN_ENCODING_H_

#include <ATen/core/Generator.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace gnomon::nn {

// What token encodings keep of the tokens so far: how many there were, and the embeddings (B, N,
// dim) of those that the next tokens read, as in a convolution.
struct TokenCache {
  torch::Tensor embeddings;
  int64_t tokens = 0;

  int64_t length() const { return tokens; }
  // Keeps the last `history` of all embeddings so far.
  void append(const torch::Tensor& new_embeddings, int64_t history);
  void reset();
};

// The arguments of one call of a token encoding, besides the embeddings.
struct TokenCall {
  // The position of the first token. By default the length of the cache before the call, and 0
  // without one.
  std::optional<int64_t> offset = std::nullopt;
  // (B,) integers, or () for all: the tokens from there on are padding, which no other token sees.
  // Without a cache only.
  std::optional<torch::Tensor> lengths = std::nullopt;
  // The tokens of this call follow those that went through the cache.
  TokenCache* cache = nullptr;
  // The source of what training draws at random; Torch's own by default.
  std::optional<at::Generator> generator = std::nullopt;
  // The sequences are those from first_sequence on of a batch of so many, the others of which are
  // elsewhere; by default they are all of it. Training draws the same random numbers for them as it
  // does for these sequences in a call of the whole batch, from a generator in the same state.
  int64_t first_sequence = 0;
  std::optional<int64_t> batch_size = std::nullopt;
  // (B, L) or (L,) integers: the tokens' positions, instead of consecutive ones from offset on.
  std::optional<torch::Tensor> positions = std::nullopt;
};

struct TokenEncodingOptions {
  TokenEncodingOptions(std::string spec, int64_t dim) : spec_(std::move(spec)), dim_(dim) {}

  // One component of the catalogue, "conv:kernel=64".
  TORCH_ARG(std::string, spec);
  TORCH_ARG(int64_t, dim);
  // No token may see a later one.
  TORCH_ARG(bool, causal) = false;
};

// A component of a position that is added to embeddings. The functions of
// gnomon/torch/encodings.h name the parameters that it learns.
class TokenEncodingImpl : public torch::nn::Cloneable<TokenEncodingImpl> {
 public:
  TokenEncodingImpl(std::string spec, int64_t dim)
      : TokenEncodingImpl(TokenEncodingOptions(std::move(spec), dim)) {}
  explicit TokenEncodingImpl(const TokenEncodingOptions& options);

  void reset() override;

  // embeddings (B, L, dim) and their encoding, their sum; the same shape.
  torch::Tensor forward(const torch::Tensor& embeddings, const TokenCall& call = {});

  // What forward adds; it broadcasts with the embeddings. `before` (B, N, dim) holds the embeddings
  // of the N tokens before the first one, undefined for none.
  torch::Tensor encode(const torch::Tensor& embeddings, int64_t offset, const torch::Tensor& before,
                       const TokenCall& call);

  // The positions at which it is defined; nullopt: all.
  std::optional<int64_t> max_length() const { return max_length_; }
  // How many tokens before the first one it reads.
  int64_t history() const { return history_; }

  TokenEncodingOptions options;

 private:
  std::optional<int64_t> max_length_;
  int64_t history_ = 0;
  std::vector<std::string> tensor_names_;
};
TORCH_MODULE(TokenEncoding);

}  // namespace gnomon::nn

#endif  // GNOMON_TORCH_TOKEN_ENCODING_H_
