// Layers of Transformers (Vaswani et al. 2017), normed before each branch as in Radford et al.
// 2019, with any similarity and any position of the catalogue.
#ifndef GNOMON_MODELS_TRANSFORMER_H_
#define GNOMON_MODELS_TRANSFORMER_H_

#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <string>

#include "gnomon/torch/nn.h"
#include "training/options.h"

namespace gnomon::models {

struct TransformerOptions {
  int64_t dim = 128;
  int64_t depth = 4;
  int64_t heads = 4;  // divides dim
  int64_t mlp = 512;  // hidden units of each layer's MLP
  std::string similarity = "dot";
  std::string position = "none";
  double dropout = 0;  // on each residual branch, while training
  // Rows of a learned table of absolute positions.
  int64_t max_length = 512;
};

#define GNOMON_TRANSFORMER_SIZES(OPTION, dim_default, depth_default, heads_default, mlp_default) \
  OPTION(int64_t, dim, dim_default, .help = "Width of the model", .lowest = 1)                   \
  OPTION(int64_t, depth, depth_default, .help = "Layers", .lowest = 1)                           \
  OPTION(int64_t, heads, heads_default, .help = "Attention heads per layer; divides --dim",      \
         .lowest = 1)                                                                            \
  OPTION(int64_t, mlp, mlp_default, .help = "Hidden units of each layer's MLP", .lowest = 1)     \
  OPTION(double, dropout, 0,                                                                     \
         .help = "Dropout probability on each residual branch, while training", .highest = 1)

// Throws Error, which begins with `where`, unless heads divide dim and dropout is below 1.
void CheckTransformer(const std::string& where, int64_t dim, int64_t heads, double dropout);

// Weights of variance gain^2 / fan_in keep the variance of unit inputs at gain^2; no bias.
void InitializeLinear(torch::nn::Linear& linear, double gain);

// Of the weights that end a residual branch: each of the `branches` of a model adds its share of
// the stream's variance.
double ResidualGain(int64_t branches);

// torch::dropout while training, as it falls on the rows of a batch.
torch::Tensor DropOut(const torch::Tensor& x, double dropout, const std::optional<BatchRows>& rows);

// One layer: x + attention(norm(x)), then x + mlp(norm(x)).
class TransformerBlockImpl : public torch::nn::Module {
 public:
  explicit TransformerBlockImpl(const TransformerOptions& options);
  // Keys and values are those of `memory` (B, M, dim), if it is defined, and of x (B, L, dim); the
  // queries then follow the memory. Dropout draws as for the batch that `rows` are of.
  torch::Tensor forward(torch::Tensor x, nn::AttentionCall call = {},
                        const torch::Tensor& memory = {},
                        const std::optional<BatchRows>& rows = std::nullopt);

 private:
  double dropout_;
  torch::nn::LayerNorm attention_norm_{nullptr};
  nn::MultiheadAttention attention_{nullptr};
  torch::nn::LayerNorm mlp_norm_{nullptr};
  torch::nn::Linear mlp_in_{nullptr};
  torch::nn::Linear mlp_out_{nullptr};
};
TORCH_MODULE(TransformerBlock);

// Embeddings and their positions through all layers, and a norm.
class EncoderImpl : public torch::nn::Module {
 public:
  explicit EncoderImpl(const TransformerOptions& options);
  // x (B, L, dim), of unit variance; the same shape. Tokens from `lengths` (B,) on are padding,
  // which no other token sees.
  torch::Tensor forward(torch::Tensor x, const std::optional<torch::Tensor>& lengths = std::nullopt,
                        const std::optional<BatchRows>& rows = std::nullopt);
  // The most tokens that the position is defined for; none if any number will do.
  std::optional<int64_t> max_length() const { return token_position_->max_length(); }

 private:
  torch::nn::ModuleList blocks_{nullptr};
  torch::nn::LayerNorm norm_{nullptr};
  nn::TokenPosition token_position_{nullptr};
};
TORCH_MODULE(Encoder);

}  // namespace gnomon::models

#endif  // GNOMON_MODELS_TRANSFORMER_H_
