// A decoder-only Transformer over bytes (Vaswani et al. 2017, pre-norm as in Radford et al. 2019):
// tied embeddings, GELU, any similarity and any position of the catalogue.
#ifndef GNOMON_MODELS_LANGUAGE_MODEL_H_
#define GNOMON_MODELS_LANGUAGE_MODEL_H_

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "gnomon/torch/nn.h"

namespace gnomon::models {

inline constexpr int64_t kByteVocabulary = 256;

struct LanguageModelOptions {
  int64_t dim = 128;
  int64_t depth = 4;
  int64_t heads = 4;
  int64_t mlp = 512;
  std::string similarity = "dot";
  std::string position = "none";
  double dropout = 0;        // of each residual branch, while training
  int64_t max_length = 512;  // rows of a learned table of absolute positions
};

// What a model remembers of the tokens so far.
struct LanguageModelCache {
  explicit LanguageModelCache(int64_t depth) : layers(depth) {}

  nn::TokenCache tokens;
  std::vector<nn::KVCache> layers;
};

// One layer: x + attention(norm(x)), then x + mlp(norm(x)).
class TransformerBlockImpl : public torch::nn::Module {
 public:
  explicit TransformerBlockImpl(const LanguageModelOptions& options);
  torch::Tensor forward(torch::Tensor x, nn::KVCache* cache);

 private:
  double dropout_;
  torch::nn::LayerNorm attention_norm_{nullptr};
  nn::MultiheadAttention attention_{nullptr};
  torch::nn::LayerNorm mlp_norm_{nullptr};
  torch::nn::Linear mlp_in_{nullptr};
  torch::nn::Linear mlp_out_{nullptr};
};
TORCH_MODULE(TransformerBlock);

// Weights come from Torch's default generator, those of the encodings last: two models built from
// one seed begin with the same weights wherever they have the same ones. Throws gnomon::Error or
// c10::Error where an option or a spec is wrong.
class LanguageModelImpl : public torch::nn::Module {
 public:
  explicit LanguageModelImpl(LanguageModelOptions options);

  // Logits (B, L, 256) of the byte after each of `tokens` (B, L), int64. With a cache, the tokens
  // follow those already in it.
  torch::Tensor forward(const torch::Tensor& tokens, LanguageModelCache* cache = nullptr);

  const LanguageModelOptions& options() const { return options_; }
  // The longest text at which the encodings are defined; none if any length will do.
  std::optional<int64_t> max_length() const;
  int64_t CountParameters() const;

 private:
  LanguageModelOptions options_;
  torch::nn::Embedding embedding_{nullptr};
  torch::nn::ModuleList blocks_{nullptr};
  torch::nn::LayerNorm norm_{nullptr};
  nn::TokenPosition token_position_{nullptr};
};
TORCH_MODULE(LanguageModel);

struct GenerationOptions {
  int64_t tokens = 256;
  double temperature = 1;  // 0: the likeliest token each time
  int64_t top_k = 0;       // 0: all of them
  uint64_t seed = 0;
  bool use_cache = true;
};

// Continues `prompt` (at least one byte) and returns the new bytes. `emit` is called with each byte
// as it comes; generation ends early when it returns false.
std::string Generate(LanguageModel& model, std::string_view prompt,
                     const GenerationOptions& options,
                     const std::function<bool(char)>& emit = nullptr);

}  // namespace gnomon::models

#endif  // GNOMON_MODELS_LANGUAGE_MODEL_H_
