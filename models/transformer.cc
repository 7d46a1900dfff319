#include "models/transformer.h"

#include <cmath>
#include <utility>
#include <vector>

#include "gnomon/attention.h"
#include "training/strings.h"

namespace gnomon::models {

void CheckTransformer(const std::string& where, int64_t dim, int64_t heads, double dropout) {
  if (dim % heads != 0) {
    throw Error(StrCat(where, ": dim ", dim, " is not a multiple of heads ", heads));
  }
  if (dropout == 1) throw Error(StrCat(where, ": dropout is 1, expected [0, 1)"));
}

void InitializeLinear(torch::nn::Linear& linear, double gain) {
  const double deviation = gain / std::sqrt(static_cast<double>(linear->options.in_features()));
  torch::nn::init::normal_(linear->weight, 0, deviation);
  torch::nn::init::zeros_(linear->bias);
}

double ResidualGain(int64_t branches) { return 1 / std::sqrt(static_cast<double>(branches)); }

torch::Tensor DropOut(const torch::Tensor& x, double dropout,
                      const std::optional<BatchRows>& rows) {
  if (!rows || dropout == 0) return torch::dropout(x, dropout, /*train=*/true);
  std::vector<int64_t> shape = x.sizes().vec();
  shape[0] = rows->total;
  const torch::Tensor kept = torch::empty(shape, x.options()).bernoulli_(1 - dropout);
  // The quotient, which the backward pass keeps, is of these rows alone.
  return x * kept.narrow(0, rows->first, x.size(0)).div(1 - dropout);
}

TransformerBlockImpl::TransformerBlockImpl(const TransformerOptions& options)
    : dropout_(options.dropout) {
  const double residual_gain = ResidualGain(2 * options.depth);
  nn::MultiheadAttentionOptions attention(options.dim, options.heads);
  attention.similarity(options.similarity)
      .position(nn::attention_position(options.position))
      .max_length(options.max_length);
  attention_norm_ = register_module(
      "attention_norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.dim})));
  attention_ = register_module("attention", nn::MultiheadAttention(attention));
  mlp_norm_ =
      register_module("mlp_norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.dim})));
  mlp_in_ = register_module("mlp_in", torch::nn::Linear(options.dim, options.mlp));
  mlp_out_ = register_module("mlp_out", torch::nn::Linear(options.mlp, options.dim));
  InitializeLinear(attention_->out_proj, residual_gain);
  InitializeLinear(mlp_in_, 1);
  InitializeLinear(mlp_out_, residual_gain);
}

torch::Tensor TransformerBlockImpl::forward(torch::Tensor x, nn::AttentionCall call,
                                            const torch::Tensor& memory,
                                            const std::optional<BatchRows>& rows) {
  const auto drop_out = [&](const torch::Tensor& branch) {
    return is_training() ? DropOut(branch, dropout_, rows) : branch;
  };
  const torch::Tensor queries = attention_norm_->forward(x);
  torch::Tensor keys;
  if (memory.defined()) {
    keys = torch::cat({attention_norm_->forward(memory), queries}, 1);
    call.query_offset = memory.size(1);
  }
  const torch::Tensor attended = attention_->forward(queries, keys, {}, call);
  x = x + drop_out(attended);
  const torch::Tensor hidden = torch::gelu(mlp_in_->forward(mlp_norm_->forward(x)));
  return x + drop_out(mlp_out_->forward(hidden));
}

EncoderImpl::EncoderImpl(const TransformerOptions& options) {
  blocks_ = register_module("blocks", torch::nn::ModuleList());
  for (int64_t layer = 0; layer < options.depth; ++layer) {
    blocks_->push_back(TransformerBlock(options));
  }
  norm_ = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.dim})));
  token_position_ =
      register_module("token_position", nn::TokenPosition(nn::TokenPositionOptions(
                                            options.position, options.dim, options.max_length)));
}

torch::Tensor EncoderImpl::forward(torch::Tensor x, const std::optional<torch::Tensor>& lengths,
                                   const std::optional<BatchRows>& rows) {
  x = token_position_->forward(x, nn::TokenCall{.lengths = lengths, .rows = rows});
  for (const auto& block : *blocks_) {
    x = block->as<TransformerBlock>()->forward(x, nn::AttentionCall{.key_lengths = lengths}, {},
                                               rows);
  }
  return norm_->forward(x);
}

}  // namespace gnomon::models
