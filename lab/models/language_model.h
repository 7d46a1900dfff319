// A decoder-only Transformer (Vaswani et al. 2017, with pre-norm as in Radford et al. 2019) with
// tied embeddings (optionally adaptive), and any similarity and position in the catalogue.
#ifndef GNOMON_MODELS_LANGUAGE_MODEL_H_
#define GNOMON_MODELS_LANGUAGE_MODEL_H_

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "gnomon/torch/nn.h"
#include "models/adaptive_embedding.h"
#include "models/transformer.h"
#include "text/tokens.h"
#include "training/options.h"
#include "training/terms.h"

namespace gnomon::lab {

#define GNOMON_LANGUAGE_MODEL_OPTIONS(OPTION)                                                \
  OPTION(int64_t, vocabulary, kByteVocabulary, .lowest = 1, .has_flag = false)               \
  GNOMON_TRANSFORMER_SIZES(OPTION, 128, 4, 4, 512)                                           \
  GNOMON_TERM_OPTIONS(OPTION)                                                                \
  OPTION(std::vector<int64_t>, adaptive, {},                                                 \
         .help =                                                                             \
             "Adaptive embeddings and softmax: index of the first token in each band after " \
             "the first, comma-separated (2000,10000). Each band has a quarter of the "      \
             "previous band's dimension",                                                    \
         .lowest = 1, .may_lack = true)                                                      \
  /* The number of rows in a table of learned absolute positions. */                         \
  OPTION(int64_t, max_length, 512, .lowest = 1, .has_flag = false)

struct LanguageModelOptions {
  GNOMON_OPTIONS(GNOMON_LANGUAGE_MODEL_OPTIONS)
};

// The state of a model after the tokens processed so far.
struct LanguageModelCache {
  explicit LanguageModelCache(int64_t depth, std::optional<int64_t> most = std::nullopt)
      : max_length(most), layers(depth) {}

  // Maximum number of tokens whose keys and values are kept between calls; earlier ones are
  // discarded, as in a LanguageModelMemory of that length. If absent, there is no maximum.
  std::optional<int64_t> max_length;
  nn::TokenCache tokens;
  std::vector<nn::KVCache> layers;
};

// The memory of Transformer-XL (Dai et al. 2019, section 3.2): the input of each layer for the last
// tokens of the previous segments. The memory receives no gradient, but the weights that map it to
// keys and values do. If the weights do not change, a cache with the same max_length gives the same
// result with less computation.
struct LanguageModelMemory {
  int64_t max_length = 0;  // tokens to keep
  // (B, length, dim) per layer; empty before the first segment.
  std::vector<torch::Tensor> layers;
  nn::TokenCache tokens;

  int64_t length() const { return layers.empty() ? 0 : layers[0].size(1); }
  void reset();
};

// Weights are drawn from PyTorch's default generator. The weights of the encodings are drawn last,
// so that models with the same seed but different encodings have the same initial values of all
// other weights. Tokens, targets and positions are moved to the model's device. Throws
// gnomon::Error or c10::Error if an option or a specification is invalid.
class LanguageModelImpl : public torch::nn::Module {
 public:
  explicit LanguageModelImpl(LanguageModelOptions options);

  // Returns the logits (B, L, vocabulary) of the token after each of `tokens` (B, L), int64; with
  // adaptive embeddings, returns log-probabilities. With a cache, the tokens continue the cached
  // ones. With a memory, they are the next segment, which is then added to the memory; token
  // encodings count positions from the start of the first segment. In training, random numbers are
  // drawn for the whole batch that `rows` is a part of; by default, the tokens are the whole batch.
  // Throws Error if both a cache and a memory are given, or if the memory has a different batch
  // size.
  torch::Tensor forward(const torch::Tensor& tokens, LanguageModelCache* cache = nullptr,
                        LanguageModelMemory* memory = nullptr,
                        const std::optional<BatchRows>& rows = std::nullopt);

  // Like forward(), for tokens at `positions` (B, L). A token attends to all tokens up to its own
  // position. If the model has a learned position table, positions must be below
  // options.max_length. Throws Error if CheckPlacedAnywhere() rejects the model's position.
  torch::Tensor forward_at(const torch::Tensor& tokens, const torch::Tensor& positions,
                           const std::optional<BatchRows>& rows = std::nullopt);

  // Returns the losses (B, T), in nats, of the `targets` (B, T) that follow the last T tokens. They
  // equal the losses from forward(), but logits are computed only for these tokens.
  torch::Tensor losses(const torch::Tensor& tokens, const torch::Tensor& targets,
                       LanguageModelCache* cache = nullptr, LanguageModelMemory* memory = nullptr,
                       const std::optional<BatchRows>& rows = std::nullopt);

  const LanguageModelOptions& options() const { return options_; }
  // The maximum length for which the encodings are defined; none if unlimited.
  std::optional<int64_t> max_length() const;

 private:
  // Returns the layer's inputs from previous segments, and adds `x`, its input from this segment,
  // to the memory. Without a memory, returns an undefined tensor.
  torch::Tensor TakeBefore(int64_t layer, const torch::Tensor& x, LanguageModelMemory* memory);
  // Returns embeddings with variance 1.
  torch::Tensor Rows(const torch::Tensor& tokens);
  // The input of the first layer.
  torch::Tensor Embed(const torch::Tensor& tokens, LanguageModelCache* cache,
                      LanguageModelMemory* memory, const std::optional<BatchRows>& rows,
                      const std::optional<torch::Tensor>& positions = std::nullopt);
  // Applies all layers and the final norm. Returns the results for the last `last` tokens, or for
  // all.
  torch::Tensor Layers(torch::Tensor x, LanguageModelCache* cache, LanguageModelMemory* memory,
                       const std::optional<BatchRows>& rows,
                       const std::optional<torch::Tensor>& positions = std::nullopt,
                       const std::optional<int64_t>& last = std::nullopt);
  torch::Tensor Logits(const torch::Tensor& x);

  LanguageModelOptions options_;
  // One of these two is registered as "embedding".
  torch::nn::Embedding embedding_{nullptr};
  AdaptiveEmbedding adaptive_{nullptr};
  torch::nn::ModuleList blocks_{nullptr};
  Norm norm_{nullptr};
  nn::TokenPosition token_position_{nullptr};
};
TORCH_MODULE(LanguageModel);

// Throws Error unless tokens may have arbitrary positions: an encoding that uses adjacent tokens,
// such as a convolution, does not support arbitrary positions.
void CheckPlacedAnywhere(const LanguageModelOptions& options);

// Throws Error if `memory` is not 0 and the model's position has a maximum length: with a memory,
// positions continue through the whole text and would exceed it.
void CheckMemory(const LanguageModel& model, int64_t memory);

struct GenerationOptions {
  int64_t tokens = 256;
  double temperature = 1;  // 0 always picks the most likely token
  int64_t top_k = 0;       // 0 samples from all tokens
  uint64_t seed = 0;
  bool use_cache = true;
};

// Continues `prompt` (at least one token) and returns the new tokens. `emit` is called with each
// new token; generation stops when it returns false.
std::vector<int64_t> Generate(LanguageModel& model, const TokenText& prompt,
                              const GenerationOptions& options,
                              const std::function<bool(int64_t)>& emit = nullptr);

}  // namespace gnomon::lab

#endif  // GNOMON_MODELS_LANGUAGE_MODEL_H_
