// Layers of Transformers (Vaswani et al. 2017), normed before each branch as in Radford et al.
// 2019, with any similarity and any position of the catalogue.
#ifndef GNOMON_MODELS_TRANSFORMER_H_
#define GNOMON_MODELS_TRANSFORMER_H_

#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "gnomon/torch/nn.h"
#include "training/batch_rows.h"
#include "training/options.h"
#include "training/strings.h"

namespace gnomon::models {

// What all models of such layers may say of them.
#define GNOMON_TRANSFORMER_SIZES(OPTION, dim_default, depth_default, heads_default, mlp_default) \
  OPTION(int64_t, dim, dim_default, .help = "Width of the model", .lowest = 1)                   \
  OPTION(int64_t, depth, depth_default, .help = "Layers", .lowest = 1)                           \
  OPTION(int64_t, heads, heads_default, .help = "Attention heads per layer; must divide --dim",  \
         .lowest = 1)                                                                            \
  OPTION(int64_t, mlp, mlp_default, .help = "Hidden units of each layer's MLP", .lowest = 1)     \
  OPTION(double, dropout, 0,                                                                     \
         .help = "Dropout probability on each residual branch, below 1, while training",         \
         .highest = 1)                                                                           \
  OPTION(std::string, norm, "layer", .help = "Normalisation before each branch: layer or rms",   \
         .may_lack = true, .choices = {"layer", "rms"})                                          \
  OPTION(std::string, activation, "gelu",                                                        \
         .help = "Activation of the MLP: gelu, relu, or the gated swiglu or geglu",              \
         .may_lack = true, .choices = {"gelu", "relu", "swiglu", "geglu"})                       \
  OPTION(bool, no_bias, false, .help = "Omit the biases of the attention and MLP projections",   \
         .may_lack = true)                                                                       \
  OPTION(                                                                                        \
      std::optional<int64_t>, kv_heads, std::nullopt,                                            \
      .help = "Key/value heads (grouped-query attention); must divide --heads; default --heads", \
      .lowest = 1, .shows_default = false, .may_lack = true)                                     \
  OPTION(std::optional<int64_t>, qk_dim, std::nullopt,                                           \
         .help =                                                                                 \
             "Query/key dimension of each head; default --dim / --heads, or the value that the " \
             "similarity needs",                                                                 \
         .lowest = 1, .shows_default = false, .may_lack = true)

struct TransformerOptions {
  GNOMON_TRANSFORMER_SIZES(GNOMON_OPTION_MEMBER, 128, 4, 4, 512)
  std::string similarity = "dot";
  std::string position = "none";
  // Rows of a learned table of absolute positions.
  int64_t max_length = 512;
};

// Copies what the list above says from one struct that has it to another.
template <class From, class To>
void CopySizes(const From& from, To* to) {
#define GNOMON_COPY(Type, name, ...) to->name = from.name;
  GNOMON_TRANSFORMER_SIZES(GNOMON_COPY, , , , )
#undef GNOMON_COPY
}

template <class Model>
TransformerOptions ToTransformer(const Model& model, const std::string& similarity,
                                 const std::string& position, int64_t max_length) {
  TransformerOptions options;
  CopySizes(model, &options);
  options.similarity = similarity;
  options.position = position;
  options.max_length = max_length;
  return options;
}

// The flags that the size of its weights is told by, and their values.
template <class Model>
std::string ModelFlags(const Model& model) {
  const std::string sizes = StrCat("--dim ", model.dim, ", --depth ", model.depth);
  if (!model.qk_dim) return StrCat(sizes, " and --mlp ", model.mlp);
  return StrCat(sizes, ", --mlp ", model.mlp, " and --qk-dim ", *model.qk_dim);
}

// Whether the MLP's hidden units are gated by as many others.
bool IsGated(const std::string& activation);

// What the MLP's first map makes.
template <class Model>
int64_t HiddenUnits(const Model& model) {
  return IsGated(model.activation) ? 2 * model.mlp : model.mlp;
}

// How many columns the values have.
template <class Model>
double ValueColumns(const Model& model) {
  const auto dim = static_cast<double>(model.dim);
  return dim * static_cast<double>(model.kv_heads.value_or(model.heads)) /
         static_cast<double>(model.heads);
}

// At the least: a similarity may have one column of queries and keys, which are left out unless
// their columns are given.
template <class Model>
double AttentionWeights(const Model& model) {
  const auto heads = static_cast<double>(model.heads + model.kv_heads.value_or(model.heads));
  return static_cast<double>(model.dim) * (static_cast<double>(model.dim) + ValueColumns(model) +
                                           heads * static_cast<double>(model.qk_dim.value_or(0)));
}

// Those of attention and of the MLP.
template <class Model>
double LayerWeights(const Model& model) {
  return AttentionWeights(model) +
         static_cast<double>(model.dim) * static_cast<double>(HiddenUnits(model) + model.mlp);
}

// What a layer keeps of a token for its gradients: the stream before its two branches, their normed
// inputs, the values and the output of attention, and the MLP's units before and after their
// activation.
template <class Model>
double LayerNumbers(const Model& model) {
  return 5 * static_cast<double>(model.dim) + ValueColumns(model) +
         static_cast<double>(HiddenUnits(model) + model.mlp);
}

// The positions of the layers: "rope;rope;none" is a pattern that layers repeat, each part the
// position of one. Throws Error where a part after the first is added to embeddings, which come
// before all layers.
std::vector<std::string> LayerPositions(const std::string& position, int64_t depth);

// Throws Error, which begins with `where`, unless heads divide dim and dropout is below 1.
void CheckTransformer(const std::string& where, int64_t dim, int64_t heads, double dropout);

// Weights of variance gain^2 / fan_in keep the variance of unit inputs at gain^2; biases are 0.
void InitializeLinear(torch::nn::Linear& linear, double gain);

// Of the weights that end a residual branch: each of the `branches` of a model adds its share of
// the stream's variance.
double ResidualGain(int64_t branches);

// torch::dropout while training, as it falls on the rows of a batch.
torch::Tensor DropOut(const torch::Tensor& x, double dropout, const std::optional<BatchRows>& rows);

// What the encodings of the tokens of these rows are told.
nn::TokenCall TokenCallOf(const std::optional<BatchRows>& rows);

// Attention of the sizes and the similarity of the options, and of a position.
nn::MultiheadAttention MakeAttention(const TransformerOptions& options,
                                     const std::string& position);

// LayerNorm or RMSNorm over the last axis: parameters weight and, of the former, bias.
class NormImpl : public torch::nn::Module {
 public:
  NormImpl(const std::string& kind, int64_t dim);
  torch::Tensor forward(const torch::Tensor& x) const;
  // Where it is, and the model with it.
  torch::Device device() const { return weight_.device(); }

 private:
  int64_t dim_;
  torch::Tensor weight_;
  torch::Tensor bias_;  // undefined of RMSNorm
};
TORCH_MODULE(Norm);

// mlp_out(activation(mlp_in(x))), as modules of another, whose names these are.
struct FeedForward {
  FeedForward(torch::nn::Module* owner, const TransformerOptions& options);
  torch::Tensor forward(const torch::Tensor& x);

  std::string activation;
  torch::nn::Linear in{nullptr};
  torch::nn::Linear out{nullptr};
};

// One layer: x + attention(norm(x)), then x + mlp(norm(x)).
class TransformerBlockImpl : public torch::nn::Module {
 public:
  // `position` is that of this layer; the options' is not read.
  TransformerBlockImpl(const TransformerOptions& options, const std::string& position);
  // Keys and values are those of `memory` (B, M, dim), if it is defined, and of x (B, L, dim); the
  // queries then follow the memory. Dropout draws as for the batch that `rows` are of. With `last`
  // only that many tokens at the end come out, which may be 0: a cache of the call then takes all.
  torch::Tensor forward(torch::Tensor x, nn::AttentionCall call = {},
                        const torch::Tensor& memory = {},
                        const std::optional<BatchRows>& rows = std::nullopt,
                        const std::optional<int64_t>& last = std::nullopt);
  // The weights (B, H, n, L) with which rows of x attend to x.
  torch::Tensor attention_weights(const torch::Tensor& x, const std::vector<int64_t>& rows);

 private:
  double dropout_;
  Norm attention_norm_{nullptr};
  nn::MultiheadAttention attention_{nullptr};
  Norm mlp_norm_{nullptr};
  FeedForward mlp_;
};
TORCH_MODULE(TransformerBlock);

// A block for each layer, of its position, registered as "blocks".
torch::nn::ModuleList MakeBlocks(torch::nn::Module* owner, const TransformerOptions& options);

// What a position of layers adds to embeddings, and how far all of it reaches.
nn::TokenPosition MakeTokenPosition(const TransformerOptions& options, bool causal);

// Embeddings and their positions through all layers, and a norm.
class EncoderImpl : public torch::nn::Module {
 public:
  explicit EncoderImpl(const TransformerOptions& options);
  // x (B, L, dim), of unit variance; the same shape. Tokens from `lengths` (B,) on are padding,
  // which no other token sees.
  torch::Tensor forward(torch::Tensor x, const std::optional<torch::Tensor>& lengths = std::nullopt,
                        const std::optional<BatchRows>& rows = std::nullopt);
  // The weights (B, H, n, L) with which rows of the tokens attend to all in the last layer.
  torch::Tensor last_attention_weights(torch::Tensor x, const std::vector<int64_t>& rows);
  // The most tokens that the position is defined for; none if any number will do.
  std::optional<int64_t> max_length() const { return token_position_->max_length(); }

 private:
  torch::nn::ModuleList blocks_{nullptr};
  Norm norm_{nullptr};
  nn::TokenPosition token_position_{nullptr};
};
TORCH_MODULE(Encoder);

}  // namespace gnomon::models

#endif  // GNOMON_MODELS_TRANSFORMER_H_
