#include "models/transformer.h"

#include <cmath>
#include <utility>
#include <vector>

#include "gnomon/attention.h"
#include "training/strings.h"

namespace gnomon::lab {
namespace {

// The epsilon of nn::RMSNorm.
constexpr double kRMSNormEpsilon = 1e-6;

// Splits a layer pattern such as "rope;rope;none" into its positions.
std::vector<std::string> PatternOf(const std::string& position) {
  std::vector<std::string> parts = nn::layer_positions(position);
  for (size_t n = 1; n < parts.size(); ++n) {
    if (nn::attention_position(parts[n]) == parts[n] || parts[n] == "none") continue;
    throw Error(StrCat("the layer position '", parts[n],
                       "' is added to the embeddings before all layers; put it only in the first "
                       "item of the list"));
  }
  return parts;
}

}  // namespace

void CheckTransformer(const std::string& where, int64_t dim, int64_t heads, double dropout) {
  if (dim % heads != 0) {
    throw Error(StrCat(where, ": dim is ", dim, "; expected a multiple of heads, ", heads));
  }
  if (dropout == 1) throw Error(StrCat(where, ": dropout is 1; expected a probability below 1"));
}

void CheckReaches(const std::optional<int64_t>& most, int64_t needed, const std::string& why,
                  const std::string& or_else) {
  if (!most || *most >= needed) return;
  throw Error(StrCat("the position is defined only up to length ", *most, ", but ", why,
                     "; choose a position without a maximum length", or_else));
}

bool IsGated(const std::string& activation) {
  return activation == "swiglu" || activation == "geglu";
}

std::vector<std::string> LayerPositions(const std::string& position, int64_t depth) {
  const std::vector<std::string> parts = PatternOf(position);
  std::vector<std::string> layers;
  for (int64_t layer = 0; layer < depth; ++layer) {
    layers.push_back(nn::attention_position(parts[layer % parts.size()]));
  }
  return layers;
}

void InitializeLinear(torch::nn::Linear& linear, double gain) {
  const double deviation = gain / std::sqrt(static_cast<double>(linear->options.in_features()));
  torch::nn::init::normal_(linear->weight, 0, deviation);
  if (linear->options.bias()) torch::nn::init::zeros_(linear->bias);
}

double ResidualGain(int64_t branches) { return 1 / std::sqrt(static_cast<double>(branches)); }

torch::Tensor DropOut(const torch::Tensor& x, double dropout,
                      const std::optional<BatchRows>& rows) {
  if (!rows || dropout == 0) return torch::dropout(x, dropout, /*train=*/true);
  std::vector<int64_t> shape = x.sizes().vec();
  shape[0] = rows->total;
  const torch::Tensor kept = torch::empty(shape, x.options()).bernoulli_(1 - dropout);
  // Select the rows before dividing, so that only they are stored for the backward pass.
  return x * kept.narrow(0, rows->first, x.size(0)).div(1 - dropout);
}

nn::TokenCall TokenCallOf(const std::optional<BatchRows>& rows) {
  nn::TokenCall call;
  if (rows) {
    call.first_sequence = rows->first;
    call.batch_size = rows->total;
  }
  return call;
}

NormImpl::NormImpl(const std::string& kind, int64_t dim) : dim_(dim) {
  if (kind != "layer" && kind != "rms") {
    throw Error(StrCat("norm is '", kind, "'; expected layer or rms"));
  }
  weight_ = register_parameter("weight", torch::ones({dim}));
  if (kind == "layer") bias_ = register_parameter("bias", torch::zeros({dim}));
}

torch::Tensor NormImpl::forward(const torch::Tensor& x) const {
  if (!bias_.defined()) return torch::rms_norm(x, {dim_}, weight_, kRMSNormEpsilon);
  return torch::layer_norm(x, {dim_}, weight_, bias_, 1e-5);
}

FeedForward::FeedForward(torch::nn::Module* owner, const TransformerOptions& options)
    : activation(options.activation) {
  if (activation != "gelu" && activation != "relu" && !IsGated(activation)) {
    throw Error(StrCat("activation is '", activation, "'; expected gelu, relu, swiglu or geglu"));
  }
  const int64_t hidden = IsGated(activation) ? 2 * options.mlp : options.mlp;
  const auto linear = [&](int64_t from, int64_t to) {
    return torch::nn::Linear(torch::nn::LinearOptions(from, to).bias(!options.no_bias));
  };
  in = owner->register_module("mlp_in", linear(options.dim, hidden));
  out = owner->register_module("mlp_out", linear(options.mlp, options.dim));
}

torch::Tensor FeedForward::forward(const torch::Tensor& x) {
  torch::Tensor hidden = in->forward(x);
  if (IsGated(activation)) {
    const std::vector<torch::Tensor> halves = hidden.chunk(2, -1);
    const torch::Tensor& gate = halves[0];
    hidden = (activation == "swiglu" ? torch::silu(gate) : torch::gelu(gate)) * halves[1];
  } else {
    hidden = activation == "relu" ? torch::relu(hidden) : torch::gelu(hidden);
  }
  return out->forward(hidden);
}

nn::MultiheadAttention MakeAttention(const TransformerOptions& options,
                                     const std::string& position) {
  return nn::MultiheadAttention(nn::MultiheadAttentionOptions(options.dim, options.heads)
                                    .similarity(options.similarity)
                                    .kv_heads(options.kv_heads)
                                    .qk_dim(options.qk_dim)
                                    .position(position)
                                    .bias(!options.no_bias)
                                    .max_length(options.max_length));
}

TransformerBlockImpl::TransformerBlockImpl(const TransformerOptions& options,
                                           const std::string& position)
    : dropout_(options.dropout),
      attention_norm_(register_module("attention_norm", Norm(options.norm, options.dim))),
      attention_(register_module("attention", MakeAttention(options, position))),
      mlp_norm_(register_module("mlp_norm", Norm(options.norm, options.dim))),
      mlp_(this, options) {
  const double residual_gain = ResidualGain(2 * options.depth);
  InitializeLinear(attention_->out_proj, residual_gain);
  InitializeLinear(mlp_.in, 1);
  InitializeLinear(mlp_.out, residual_gain);
}

torch::Tensor TransformerBlockImpl::forward(torch::Tensor x, nn::AttentionCall call,
                                            const torch::Tensor& memory,
                                            const std::optional<BatchRows>& rows,
                                            const std::optional<int64_t>& last) {
  const auto drop_out = [&](const torch::Tensor& branch) {
    return is_training() ? DropOut(branch, dropout_, rows) : branch;
  };
  torch::Tensor queries = attention_norm_->forward(x);
  torch::Tensor keys;
  if (memory.defined()) {
    keys = torch::cat({attention_norm_->forward(memory), queries}, 1);
    call.query_offset = memory.size(1);
  }
  if (const int64_t others = x.size(1) - last.value_or(x.size(1)); others > 0) {
    if (!keys.defined()) keys = queries;
    const int64_t before = call.cache == nullptr ? 0 : call.cache->length();
    call.query_offset = call.query_offset.value_or(before) + others;
    queries = queries.narrow(1, others, *last);
    x = x.narrow(1, others, *last);
  }
  const torch::Tensor attended = attention_->forward(queries, keys, {}, call);
  x = x + drop_out(attended);
  return x + drop_out(mlp_.forward(mlp_norm_->forward(x)));
}

torch::Tensor TransformerBlockImpl::attention_weights(const torch::Tensor& x,
                                                      const std::vector<int64_t>& rows) {
  return attention_->attention_weights(attention_norm_->forward(x), {}, rows);
}

torch::nn::ModuleList MakeBlocks(torch::nn::Module* owner, const TransformerOptions& options) {
  torch::nn::ModuleList blocks = owner->register_module("blocks", torch::nn::ModuleList());
  for (const std::string& position : LayerPositions(options.position, options.depth)) {
    blocks->push_back(TransformerBlock(options, position));
  }
  return blocks;
}

nn::TokenPosition MakeTokenPosition(const TransformerOptions& options, bool causal) {
  return nn::TokenPosition(nn::TokenPositionOptions(Join(PatternOf(options.position), "+"),
                                                    options.dim, options.max_length)
                               .causal(causal));
}

EncoderImpl::EncoderImpl(const TransformerOptions& options)
    : blocks_(MakeBlocks(this, options)),
      norm_(register_module("norm", Norm(options.norm, options.dim))),
      token_position_(
          register_module("token_position", MakeTokenPosition(options, /*causal=*/false))) {}

torch::Tensor EncoderImpl::forward(torch::Tensor x, const std::optional<torch::Tensor>& lengths,
                                   const std::optional<BatchRows>& rows) {
  nn::TokenCall call = TokenCallOf(rows);
  call.lengths = lengths;
  x = token_position_->forward(x, call);
  for (const auto& block : *blocks_) {
    x = block->as<TransformerBlock>()->forward(x, nn::AttentionCall{.key_lengths = lengths}, {},
                                               rows);
  }
  return norm_->forward(x);
}

torch::Tensor EncoderImpl::last_attention_weights(torch::Tensor x,
                                                  const std::vector<int64_t>& rows) {
  x = token_position_->forward(x);
  const size_t last = blocks_->size() - 1;
  for (size_t layer = 0; layer < last; ++layer) {
    x = blocks_[layer]->as<TransformerBlock>()->forward(x);
  }
  return blocks_[last]->as<TransformerBlock>()->attention_weights(x, rows);
}

}  // namespace gnomon::lab
