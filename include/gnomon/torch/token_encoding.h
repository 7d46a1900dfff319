// The module for position encodings that are added to embeddings, and its call arguments.
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

// The state of token encodings between calls: the number of tokens so far, and the embeddings (B,
// N, dim) of the last N tokens, which a convolution needs in order to encode the next tokens.
struct TokenCache {
  torch::Tensor embeddings;
  int64_t tokens = 0;

  int64_t length() const { return tokens; }
  // Counts the new tokens, and stores the last `history` embeddings.
  void append(const torch::Tensor& new_embeddings, int64_t history);
  void reset();
};

// The arguments of one call of a token encoding, in addition to the embeddings.
struct TokenCall {
  // The position of the first token. Default: the length of the cache before the call, or 0 without
  // a cache.
  std::optional<int64_t> offset = std::nullopt;
  // The lengths of the sequences, (B,) integers, or () if shared across the batch: later tokens are
  // padding, which no other token reads. Not supported with a cache.
  std::optional<torch::Tensor> lengths = std::nullopt;
  // The tokens of this call follow those in the cache.
  TokenCache* cache = nullptr;
  // The random generator for training; default: PyTorch's default generator.
  std::optional<at::Generator> generator = std::nullopt;
  // This call processes part of a batch of batch_size sequences, starting with sequence
  // first_sequence; other calls process the rest. Default: the whole batch. With a generator in the
  // same state, training draws the same random numbers for these sequences as in a call with the
  // whole batch.
  int64_t first_sequence = 0;
  std::optional<int64_t> batch_size = std::nullopt;
  // (B, L) or (L,) integers: the positions of the tokens, instead of consecutive positions starting
  // at offset.
  std::optional<torch::Tensor> positions = std::nullopt;
};

struct TokenEncodingOptions {
  TokenEncodingOptions(std::string spec, int64_t dim) : spec_(std::move(spec)), dim_(dim) {}

  // One component from the catalogue, such as "conv:kernel=64".
  TORCH_ARG(std::string, spec);
  TORCH_ARG(int64_t, dim);
  // Whether encodings must not depend on later tokens.
  TORCH_ARG(bool, causal) = false;
};

// A position component that is added to embeddings. The functions in gnomon/torch/encodings.h
// describe its learned parameters.
class TokenEncodingImpl : public torch::nn::Cloneable<TokenEncodingImpl> {
 public:
  TokenEncodingImpl(std::string spec, int64_t dim)
      : TokenEncodingImpl(TokenEncodingOptions(std::move(spec), dim)) {}
  explicit TokenEncodingImpl(const TokenEncodingOptions& options);

  void reset() override;

  // Returns the sum of embeddings (B, L, dim) and their encoding, with the same shape.
  torch::Tensor forward(const torch::Tensor& embeddings, const TokenCall& call = {});

  // Returns the encoding that forward adds, which broadcasts with the embeddings. `before` (B, N,
  // dim) contains the embeddings of the N preceding tokens; it is undefined if there are none.
  torch::Tensor encode(const torch::Tensor& embeddings, int64_t offset, const torch::Tensor& before,
                       const TokenCall& call);

  // Returns the number of positions for which the encoding is defined; nullopt if unlimited.
  std::optional<int64_t> max_length() const { return max_length_; }
  // Returns the number of preceding tokens that the encoding reads.
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
