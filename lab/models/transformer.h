// Transformer layers (Vaswani et al. 2017) with pre-norm as in Radford et al. 2019, and any
// similarity and position of the catalogue.
#ifndef GNOMON_MODELS_TRANSFORMER_H_
#define GNOMON_MODELS_TRANSFORMER_H_

#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "gnomon/torch/nn.h"
#include "training/batch_rows.h"
#include "training/options.h"
#include "training/strings.h"

namespace gnomon::lab {

// The options shared by all models with these layers.
#define GNOMON_TRANSFORMER_SIZES(OPTION, dim_default, depth_default, heads_default, mlp_default)   \
  OPTION(int64_t, dim, dim_default, .help = "Model dimension", .lowest = 1)                        \
  OPTION(int64_t, depth, depth_default, .help = "Number of layers", .lowest = 1)                   \
  OPTION(int64_t, heads, heads_default,                                                            \
         .help = "Number of attention heads per layer; must divide --dim", .lowest = 1)            \
  OPTION(int64_t, mlp, mlp_default, .help = "Number of hidden units of each layer's MLP",          \
         .lowest = 1)                                                                              \
  OPTION(double, dropout, 0,                                                                       \
         .help = "Dropout probability on each residual branch during training; below 1",           \
         .highest = 1)                                                                             \
  OPTION(std::string, norm, "layer", .help = "Normalisation before each branch: layer or rms",     \
         .may_lack = true, .choices = {"layer", "rms"})                                            \
  OPTION(std::string, activation, "gelu",                                                          \
         .help = "Activation of the MLP: gelu, relu, swiglu (gated) or geglu (gated)",             \
         .may_lack = true, .choices = {"gelu", "relu", "swiglu", "geglu"})                         \
  OPTION(bool, no_bias, false, .help = "Omit the biases of the attention and MLP projections",     \
         .may_lack = true)                                                                         \
  OPTION(std::optional<int64_t>, kv_heads, std::nullopt,                                           \
         .help =                                                                                   \
             "Number of key/value heads (grouped-query attention); must divide --heads; default: " \
             "--heads",                                                                            \
         .lowest = 1, .shows_default = false, .may_lack = true)                                    \
  OPTION(std::optional<int64_t>, qk_dim, std::nullopt,                                             \
         .help =                                                                                   \
             "Query/key dimension of each head; default: --dim / --heads, or the value that the "  \
             "similarity requires",                                                                \
         .lowest = 1, .shows_default = false, .may_lack = true)

struct TransformerOptions {
  GNOMON_TRANSFORMER_SIZES(GNOMON_OPTION_MEMBER, 128, 4, 4, 512)
  std::string similarity = "dot";
  std::string position = "none";
  // Number of rows in a learned table of absolute positions.
  int64_t max_length = 512;
};

// Copies the options of the list above from one struct to another.
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

// Throws Error if a position, which is defined for at most `most` tokens, is not for `needed`
// tokens. `why` says that so many are needed; `or_else`, what else the user can do.
void CheckReaches(const std::optional<int64_t>& most, int64_t needed, const std::string& why,
                  const std::string& or_else = "");

// The number of tokens of the first call of a model that is trained on rows of `longest` tokens. A
// position on a grid, which has a maximum length, needs tokens for the entire grid.
inline int64_t ProbeLength(const std::optional<int64_t>& most, int64_t longest) {
  return most ? longest : std::min<int64_t>(8, longest);
}

// The flags that determine the number of weights, with their values.
template <class Model>
std::string ModelFlags(const Model& model) {
  const std::string sizes = StrCat("--dim ", model.dim, ", --depth ", model.depth);
  if (!model.qk_dim) return StrCat(sizes, " and --mlp ", model.mlp);
  return StrCat(sizes, ", --mlp ", model.mlp, " and --qk-dim ", *model.qk_dim);
}

// Whether the MLP's hidden units are multiplied by an equal number of gate units.
bool IsGated(const std::string& activation);

// Number of output columns of the MLP's first linear map.
template <class Model>
int64_t HiddenUnits(const Model& model) {
  return IsGated(model.activation) ? 2 * model.mlp : model.mlp;
}

// Total number of value columns over all heads.
template <class Model>
double ValueColumns(const Model& model) {
  const auto dim = static_cast<double>(model.dim);
  return dim * static_cast<double>(model.kv_heads.value_or(model.heads)) /
         static_cast<double>(model.heads);
}

// A lower bound on the number of attention weights. It includes the query and key projections only
// if --qk-dim is given, because some similarities need only one column per head.
template <class Model>
double AttentionWeights(const Model& model) {
  const auto heads = static_cast<double>(model.heads + model.kv_heads.value_or(model.heads));
  return static_cast<double>(model.dim) * (static_cast<double>(model.dim) + ValueColumns(model) +
                                           heads * static_cast<double>(model.qk_dim.value_or(0)));
}

// The number of attention and MLP weights in a layer.
template <class Model>
double LayerWeights(const Model& model) {
  return AttentionWeights(model) +
         static_cast<double>(model.dim) * static_cast<double>(HiddenUnits(model) + model.mlp);
}

// The number of values that a layer stores per token for the backward pass: the inputs of its two
// branches, before and after the norm; the values and the output of attention; and the MLP's hidden
// units before and after the activation.
template <class Model>
double LayerNumbers(const Model& model) {
  return 5 * static_cast<double>(model.dim) + ValueColumns(model) +
         static_cast<double>(HiddenUnits(model) + model.mlp);
}

// Returns the position of each layer. Layers repeat the pattern of a specification such as
// "rope;rope;none". Throws Error if any position after the first adds token encodings, which apply
// to the embeddings and therefore precede all layers.
std::vector<std::string> LayerPositions(const std::string& position, int64_t depth);

// Throws an Error that begins with `where` unless dim is a multiple of heads and dropout is below
// 1.
void CheckTransformer(const std::string& where, int64_t dim, int64_t heads, double dropout);

// Draws weights with variance gain^2 / fan_in, so that inputs of unit variance give outputs of
// variance gain^2; sets biases to 0.
void InitializeLinear(torch::nn::Linear& linear, double gain);

// The gain of the last linear map in each of a model's residual branches, chosen so that the
// variance that all `branches` add to the residual stream does not depend on their number.
double ResidualGain(int64_t branches);

// Applies dropout with random numbers drawn for the whole batch that contains `rows`; by default,
// x is the whole batch.
torch::Tensor DropOut(const torch::Tensor& x, double dropout, const std::optional<BatchRows>& rows);

// Returns the arguments that tell token encodings which rows of the batch they receive.
nn::TokenCall TokenCallOf(const std::optional<BatchRows>& rows);

// Creates an attention module from the options, but with `position` instead of options.position.
nn::MultiheadAttention MakeAttention(const TransformerOptions& options,
                                     const std::string& position);

// LayerNorm or RMSNorm over the last axis. Both have the parameter `weight`; LayerNorm also has
// `bias`.
class NormImpl : public torch::nn::Module {
 public:
  NormImpl(const std::string& kind, int64_t dim);
  torch::Tensor forward(const torch::Tensor& x) const;
  // The device of the weights.
  torch::Device device() const { return weight_.device(); }

 private:
  int64_t dim_;
  torch::Tensor weight_;
  torch::Tensor bias_;  // undefined for RMSNorm
};
TORCH_MODULE(Norm);

// Computes mlp_out(activation(mlp_in(x))). Both maps are submodules of `owner` with these names.
struct FeedForward {
  FeedForward(torch::nn::Module* owner, const TransformerOptions& options);
  torch::Tensor forward(const torch::Tensor& x);

  std::string activation;
  torch::nn::Linear in{nullptr};
  torch::nn::Linear out{nullptr};
};

// One layer: x + attention(norm(x)), followed by x + mlp(norm(x)).
class TransformerBlockImpl : public torch::nn::Module {
 public:
  // `position` is the position of this layer; options.position is ignored.
  TransformerBlockImpl(const TransformerOptions& options, const std::string& position);
  // Keys and values come from `memory` (B, M, dim), if defined, followed by x (B, L, dim); queries
  // come from x. Random numbers for dropout are drawn for the whole batch that contains `rows`.
  // With `last`, only that many final tokens are returned (possibly none), but a cache still
  // receives all tokens.
  torch::Tensor forward(torch::Tensor x, nn::AttentionCall call = {},
                        const torch::Tensor& memory = {},
                        const std::optional<BatchRows>& rows = std::nullopt,
                        const std::optional<int64_t>& last = std::nullopt);
  // Returns the attention weights (B, H, n, L) of the n tokens `rows` over all tokens.
  torch::Tensor attention_weights(const torch::Tensor& x, const std::vector<int64_t>& rows);

 private:
  double dropout_;
  Norm attention_norm_{nullptr};
  nn::MultiheadAttention attention_{nullptr};
  Norm mlp_norm_{nullptr};
  FeedForward mlp_;
};
TORCH_MODULE(TransformerBlock);

// Creates one block per layer, with the position of that layer, and registers them as "blocks".
torch::nn::ModuleList MakeBlocks(torch::nn::Module* owner, const TransformerOptions& options);

// Creates the module that adds token encodings to embeddings. Its maximum length accounts for the
// positions of all layers.
nn::TokenPosition MakeTokenPosition(const TransformerOptions& options, bool causal);

// Applies token encodings, all layers and a final norm to embeddings.
class EncoderImpl : public torch::nn::Module {
 public:
  explicit EncoderImpl(const TransformerOptions& options);
  // x (B, L, dim) has unit variance; the result has the same shape. In each row, tokens at index
  // `lengths` (B,) and above are padding, which is masked.
  torch::Tensor forward(torch::Tensor x, const std::optional<torch::Tensor>& lengths = std::nullopt,
                        const std::optional<BatchRows>& rows = std::nullopt);
  // Returns the last layer's attention weights (B, H, n, L) of the n tokens `rows` over all tokens.
  torch::Tensor last_attention_weights(torch::Tensor x, const std::vector<int64_t>& rows);
  // The maximum number of tokens for which the position is defined; none if unlimited.
  std::optional<int64_t> max_length() const { return token_position_->max_length(); }

 private:
  torch::nn::ModuleList blocks_{nullptr};
  Norm norm_{nullptr};
  nn::TokenPosition token_position_{nullptr};
};
TORCH_MODULE(Encoder);

}  // namespace gnomon::lab

#endif  // GNOMON_MODELS_TRANSFORMER_H_
