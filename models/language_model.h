// A decoder-only Transformer over tokens (Vaswani et al. 2017, pre-norm as in Radford et al. 2019):
// tied embeddings, which may be adaptive, GELU, any similarity and any position of the catalogue.
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

namespace gnomon::models {

#define GNOMON_LANGUAGE_MODEL_OPTIONS(OPTION)                                                      \
  OPTION(int64_t, vocabulary, kByteVocabulary, .lowest = 1, .has_flag = false)                     \
  GNOMON_TRANSFORMER_SIZES(OPTION, 128, 4, 4, 512)                                                 \
  GNOMON_TERM_OPTIONS(OPTION)                                                                      \
  OPTION(std::vector<int64_t>, adaptive, {},                                                       \
         .help =                                                                                   \
             "Adaptive embeddings and softmax: first tokens of the rarer bands, joined by commas " \
             "(2000,10000); each band has a quarter of the previous band's columns",               \
         .lowest = 1, .may_lack = true)                                                            \
  /* Rows of a learned table of absolute positions. */                                             \
  OPTION(int64_t, max_length, 512, .lowest = 1, .has_flag = false)

struct LanguageModelOptions {
  GNOMON_OPTIONS(GNOMON_LANGUAGE_MODEL_OPTIONS)
};

// What a model remembers of the tokens so far.
struct LanguageModelCache {
  explicit LanguageModelCache(int64_t depth, std::optional<int64_t> most = std::nullopt)
      : max_length(most), layers(depth) {}

  // Tokens whose keys and values are kept from one call to the next: those before them are
  // forgotten, as in a memory of that length. None: all.
  std::optional<int64_t> max_length;
  nn::TokenCache tokens;
  std::vector<nn::KVCache> layers;
};

// The memory of Transformer-XL (Dai et al. 2019, section 3.2): what each layer read for the last
// tokens of the segments before this one. No gradient flows into it, but into the weights that make
// keys and values of it in each call. Where weights do not change, a cache of that max_length is
// the same for less work.
struct LanguageModelMemory {
  int64_t max_length = 0;  // tokens to keep
  // (B, length, dim), one a layer; none before the first segment.
  std::vector<torch::Tensor> layers;
  nn::TokenCache tokens;

  int64_t length() const { return layers.empty() ? 0 : layers[0].size(1); }
  void reset();
};

// Weights come from Torch's default generator, those of the encodings last: two models built from
// one seed begin with the same weights wherever they have the same ones. Tokens, targets and
// positions are taken to where the model is. Throws gnomon::Error or c10::Error where an option or
// a spec is wrong.
class LanguageModelImpl : public torch::nn::Module {
 public:
  explicit LanguageModelImpl(LanguageModelOptions options);

  // Logits (B, L, vocabulary) of the token after each of `tokens` (B, L), int64; with adaptive
  // embeddings they are logarithms of probabilities. With a cache, the
  // tokens follow those already in it; with a memory, they are the segment after those that it
  // holds, and it then holds theirs. Token encodings see true positions, counted from the first
  // segment on. Training draws as for the batch that `rows` are of, by default these. Throws Error
  // where both a cache and a memory are given, or the memory is of another batch.
  torch::Tensor forward(const torch::Tensor& tokens, LanguageModelCache* cache = nullptr,
                        LanguageModelMemory* memory = nullptr,
                        const std::optional<BatchRows>& rows = std::nullopt);

  // The same of tokens that stand at `positions` (B, L), each below max_length of the options where
  // a table has so many rows; a token sees those up to its position. Throws Error where the
  // position has more to it than CheckPlacedAnywhere() allows.
  torch::Tensor forward_at(const torch::Tensor& tokens, const torch::Tensor& positions,
                           const std::optional<BatchRows>& rows = std::nullopt);

  // Losses (B, T) in nats of the `targets` (B, T) after each of the last T tokens, as forward()
  // would tell them, without the work that only other logits need.
  torch::Tensor losses(const torch::Tensor& tokens, const torch::Tensor& targets,
                       LanguageModelCache* cache = nullptr, LanguageModelMemory* memory = nullptr,
                       const std::optional<BatchRows>& rows = std::nullopt);

  const LanguageModelOptions& options() const { return options_; }
  // The longest text at which the encodings are defined; none if any length will do.
  std::optional<int64_t> max_length() const;

 private:
  // What the layer at hand reads of the segments before, while `x`, what it reads of this one, goes
  // into the memory. Undefined where there is none.
  torch::Tensor TakeBefore(int64_t layer, const torch::Tensor& x, LanguageModelMemory* memory);
  // Embeddings of variance 1.
  torch::Tensor Rows(const torch::Tensor& tokens);
  // What the first layer reads.
  torch::Tensor Embed(const torch::Tensor& tokens, LanguageModelCache* cache,
                      LanguageModelMemory* memory, const std::optional<BatchRows>& rows,
                      const std::optional<torch::Tensor>& positions = std::nullopt);
  // All layers, from what the first one reads to the norm of what the last one leaves, of the
  // `last` tokens or of all.
  torch::Tensor Layers(torch::Tensor x, LanguageModelCache* cache, LanguageModelMemory* memory,
                       const std::optional<BatchRows>& rows,
                       const std::optional<torch::Tensor>& positions = std::nullopt,
                       const std::optional<int64_t>& last = std::nullopt);
  torch::Tensor Logits(const torch::Tensor& x);

  LanguageModelOptions options_;
  // One of the two, called "embedding".
  torch::nn::Embedding embedding_{nullptr};
  AdaptiveEmbedding adaptive_{nullptr};
  torch::nn::ModuleList blocks_{nullptr};
  Norm norm_{nullptr};
  nn::TokenPosition token_position_{nullptr};
};
TORCH_MODULE(LanguageModel);

// Throws Error unless tokens may stand at any positions: an encoding that reads the tokens beside
// each other, such as a convolution, does not know where they are.
void CheckPlacedAnywhere(const LanguageModelOptions& options);

// Throws Error where the position of the model ends at a length: a memory carries it beyond any.
void CheckMemory(const LanguageModel& model, int64_t memory);

struct GenerationOptions {
  int64_t tokens = 256;
  double temperature = 1;  // 0: the likeliest token each time
  int64_t top_k = 0;       // 0: all of them
  uint64_t seed = 0;
  bool use_cache = true;
};

// Continues `prompt` (at least one token) and returns the new tokens. `emit` is called with each
// token as it comes; generation ends early when it returns false.
std::vector<int64_t> Generate(LanguageModel& model, const TokenText& prompt,
                              const GenerationOptions& options,
                              const std::function<bool(int64_t)>& emit = nullptr);

}  // namespace gnomon::models

#endif  // GNOMON_MODELS_LANGUAGE_MODEL_H_
