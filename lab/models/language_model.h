// A decoder-only Transformer over tokens (Vaswani et al. 2017, pre-norm as in Radford et al. 2019):
// tied embeddings (optionally adaptive), GELU, and any similarity and position of the catalogue.
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

#define GNOMON_LANGUAGE_MODEL_OPTIONS(OPTION)                                                     \
  OPTION(int64_t, vocabulary, kByteVocabulary, .lowest = 1, .has_flag = false)                    \
  GNOMON_TRANSFORMER_SIZES(OPTION, 128, 4, 4, 512)                                                \
  GNOMON_TERM_OPTIONS(OPTION)                                                                     \
  OPTION(std::vector<int64_t>, adaptive, {},                                                      \
         .help =                                                                                  \
             "Adaptive embeddings and softmax: first tokens of the rarer bands, comma-separated " \
             "(2000,10000); each band has a quarter of the previous band's dimension",            \
         .lowest = 1, .may_lack = true)                                                           \
  /* Rows of a learned table of absolute positions. */                                            \
  OPTION(int64_t, max_length, 512, .lowest = 1, .has_flag = false)

struct LanguageModelOptions {
  GNOMON_OPTIONS(GNOMON_LANGUAGE_MODEL_OPTIONS)
};

// The state of a model after the tokens so far.
struct LanguageModelCache {
  explicit LanguageModelCache(int64_t depth, std::optional<int64_t> most = std::nullopt)
      : max_length(most), layers(depth) {}

  // Number of tokens whose keys and values are kept between calls. Earlier ones are discarded, as
  // in a memory of that length. None: all are kept.
  std::optional<int64_t> max_length;
  nn::TokenCache tokens;
  std::vector<nn::KVCache> layers;
};

// The memory of Transformer-XL (Dai et al. 2019, section 3.2): the input of each layer for the last
// tokens of the previous segments. Gradients do not flow into it, but into the weights that map it
// to keys and values in each call. If weights do not change, a cache of that max_length gives the
// same result with less work.
struct LanguageModelMemory {
  int64_t max_length = 0;  // tokens to keep
  // (B, length, dim) per layer; empty before the first segment.
  std::vector<torch::Tensor> layers;
  nn::TokenCache tokens;

  int64_t length() const { return layers.empty() ? 0 : layers[0].size(1); }
  void reset();
};

// Weights are drawn from Torch's default generator, those of the encodings last, so that two models
// with the same seed share the initial values of the weights that both have. Tokens, targets and
// positions are moved to the model's device. Throws gnomon::Error or c10::Error if an option or a
// specification is invalid.
class LanguageModelImpl : public torch::nn::Module {
 public:
  explicit LanguageModelImpl(LanguageModelOptions options);

  // Logits (B, L, vocabulary) of the token after each of `tokens` (B, L), int64; log-probabilities
  // with adaptive embeddings. With a cache, the tokens follow those in it. With a memory, they are
  // the segment after it, and are then added to it. Token encodings use positions counted from the
  // first segment. In training, random numbers are drawn as for the batch that contains `rows`, by
  // default this one. Throws Error if both a cache and a memory are given, or if the memory belongs
  // to another batch.
  torch::Tensor forward(const torch::Tensor& tokens, LanguageModelCache* cache = nullptr,
                        LanguageModelMemory* memory = nullptr,
                        const std::optional<BatchRows>& rows = std::nullopt);

  // The same for tokens at `positions` (B, L), each below options.max_length if a table has that
  // many rows. A token attends to those up to its position. Throws Error if CheckPlacedAnywhere()
  // does not allow the model's position.
  torch::Tensor forward_at(const torch::Tensor& tokens, const torch::Tensor& positions,
                           const std::optional<BatchRows>& rows = std::nullopt);

  // Losses (B, T) in nats of the `targets` (B, T) after each of the last T tokens, equal to those
  // of forward(), without computing other logits.
  torch::Tensor losses(const torch::Tensor& tokens, const torch::Tensor& targets,
                       LanguageModelCache* cache = nullptr, LanguageModelMemory* memory = nullptr,
                       const std::optional<BatchRows>& rows = std::nullopt);

  const LanguageModelOptions& options() const { return options_; }
  // The maximum length for which the encodings are defined; none if unlimited.
  std::optional<int64_t> max_length() const;

 private:
  // The current layer's input from previous segments; `x`, its input from this segment, is added to
  // the memory. Undefined without a memory.
  torch::Tensor TakeBefore(int64_t layer, const torch::Tensor& x, LanguageModelMemory* memory);
  // Embeddings with variance 1.
  torch::Tensor Rows(const torch::Tensor& tokens);
  // The input of the first layer.
  torch::Tensor Embed(const torch::Tensor& tokens, LanguageModelCache* cache,
                      LanguageModelMemory* memory, const std::optional<BatchRows>& rows,
                      const std::optional<torch::Tensor>& positions = std::nullopt);
  // All layers and the final norm, for the `last` tokens or all.
  torch::Tensor Layers(torch::Tensor x, LanguageModelCache* cache, LanguageModelMemory* memory,
                       const std::optional<BatchRows>& rows,
                       const std::optional<torch::Tensor>& positions = std::nullopt,
                       const std::optional<int64_t>& last = std::nullopt);
  torch::Tensor Logits(const torch::Tensor& x);

  LanguageModelOptions options_;
  // One of the two is registered as "embedding".
  torch::nn::Embedding embedding_{nullptr};
  AdaptiveEmbedding adaptive_{nullptr};
  torch::nn::ModuleList blocks_{nullptr};
  Norm norm_{nullptr};
  nn::TokenPosition token_position_{nullptr};
};
TORCH_MODULE(LanguageModel);

// Throws Error unless tokens may have arbitrary positions: an encoding that uses adjacent tokens,
// such as a convolution, does not support them.
void CheckPlacedAnywhere(const LanguageModelOptions& options);

// Throws Error if the model's position has a maximum length, which a memory would exceed.
void CheckMemory(const LanguageModel& model, int64_t memory);

struct GenerationOptions {
  int64_t tokens = 256;
  double temperature = 1;  // 0: the likeliest token each time
  int64_t top_k = 0;       // 0: all of them
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
