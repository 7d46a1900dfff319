// An encoder-decoder Transformer (Vaswani et al. 2017) with pre-norm as in Radford et al. 2019.
// The encoder, the decoder and the output layer share one embedding table (Press and Wolf 2017).
// The model supports any similarity, and separate positions for self-attention and cross-attention.
#ifndef GNOMON_MODELS_SEQ2SEQ_H_
#define GNOMON_MODELS_SEQ2SEQ_H_

#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "gnomon/torch/nn.h"
#include "models/transformer.h"
#include "training/options.h"
#include "training/terms.h"

namespace gnomon::lab {

// The value of cross_position that selects the position of self-attention.
inline constexpr const char* kSamePosition = "same";

#define GNOMON_SEQ2SEQ_OPTIONS(OPTION)                                                           \
  OPTION(int64_t, vocabulary, 256, .lowest = 1, .has_flag = false)                               \
  GNOMON_TRANSFORMER_SIZES(OPTION, 256, 3, 4, 512)                                               \
  GNOMON_TERM_OPTIONS(OPTION)                                                                    \
  OPTION(std::string, cross_position, "none",                                                    \
         .help =                                                                                 \
             "Position specification for cross-attention, where each token's position is its "   \
             "index in its own sentence; 'same' means the value of --position")                  \
  OPTION(int64_t, max_length, 256,                                                               \
         .help =                                                                                 \
             "Maximum number of tokens per sentence, including the end token. Longer sentences " \
             "are skipped in training; a learned position table has this many rows",             \
         .lowest = 2, .highest = 1e6)

// The encoder and the decoder have `depth` layers each.
struct Seq2SeqOptions {
  GNOMON_OPTIONS(GNOMON_SEQ2SEQ_OPTIONS)
};

// Rows of different lengths, padded to the longest.
struct PaddedTokens {
  torch::Tensor tokens;   // (B, L), int64
  torch::Tensor lengths;  // (B,), int64; later tokens are padding
};

PaddedTokens PadTokens(const std::vector<std::vector<int32_t>>& rows, int64_t padding);

// The decoder's state: the tokens decoded so far, and the keys and values of the source.
struct Seq2SeqCache {
  explicit Seq2SeqCache(int64_t depth) : self(depth), cross(depth) {}

  // Selects rows (int64) of the batch. `is_same_source` means that the source stays the same in
  // every row, so that its keys and values need not be copied.
  void Select(const torch::Tensor& rows, bool is_same_source);

  nn::TokenCache tokens;
  std::vector<nn::KVCache> self;
  std::vector<nn::KVCache> cross;
};

// One decoder layer: x + attention(norm(x)) with causal attention, followed by
// x + cross_attention(norm(x), encoded), followed by x + mlp(norm(x)).
class TransformerDecoderBlockImpl : public torch::nn::Module {
 public:
  // `position` applies to self-attention and `cross_position` to cross-attention; options.position
  // is ignored.
  TransformerDecoderBlockImpl(const TransformerOptions& options, const std::string& position,
                              const std::string& cross_position);
  // The positions of x (B, Lt, dim) start at `offset`. `encoded` (B, Ls, dim) has `lengths` tokens
  // per row, or is empty if the cache already contains the source.
  torch::Tensor forward(torch::Tensor x, const torch::Tensor& encoded, const torch::Tensor& lengths,
                        int64_t offset, nn::KVCache* self, nn::KVCache* cross,
                        const std::optional<BatchRows>& rows);

 private:
  double dropout_;
  Norm attention_norm_{nullptr};
  nn::MultiheadAttention attention_{nullptr};
  Norm cross_norm_{nullptr};
  nn::MultiheadAttention cross_attention_{nullptr};
  Norm mlp_norm_{nullptr};
  FeedForward mlp_;
};
TORCH_MODULE(TransformerDecoderBlock);

// Weights are drawn from PyTorch's default generator; those of the encodings are drawn last, as in
// the language model. Dropout applies to each residual branch and to the embeddings. Its random
// numbers are drawn for the whole batch that contains `rows`; by default, the tokens are the whole
// batch. Tokens and lengths are moved to the model's device. Throws gnomon::Error or c10::Error if
// an option or a specification is invalid.
class Seq2SeqImpl : public torch::nn::Module {
 public:
  explicit Seq2SeqImpl(Seq2SeqOptions options);

  // Returns the encoder's output for B source sentences: (B, Ls, dim).
  torch::Tensor encode(const PaddedTokens& source,
                       const std::optional<BatchRows>& rows = std::nullopt);

  // Returns the logits (B, Lt, vocabulary) of the token after each token of `target` (B, Lt),
  // int64. With a cache, `target` continues the cached tokens, and the source must be the same.
  torch::Tensor decode(const torch::Tensor& target, const torch::Tensor& encoded,
                       const torch::Tensor& lengths, Seq2SeqCache* cache = nullptr,
                       const std::optional<BatchRows>& rows = std::nullopt);

  torch::Tensor forward(const PaddedTokens& source, const torch::Tensor& target,
                        const std::optional<BatchRows>& rows = std::nullopt);

  const Seq2SeqOptions& options() const { return options_; }
  // The maximum length for which all positions are defined; none if unlimited.
  std::optional<int64_t> max_length() const;

 private:
  torch::Tensor Embed(const torch::Tensor& tokens, const std::optional<BatchRows>& rows);

  Seq2SeqOptions options_;
  torch::nn::Embedding embedding_{nullptr};
  torch::nn::ModuleList decoder_blocks_{nullptr};
  Norm decoder_norm_{nullptr};
  Encoder encoder_{nullptr};
  nn::TokenPosition decoder_position_{nullptr};
  std::optional<int64_t> cross_length_;  // maximum length of the cross-attention position
};
TORCH_MODULE(Seq2Seq);

}  // namespace gnomon::lab

#endif  // GNOMON_MODELS_SEQ2SEQ_H_
