#include "models/seq2seq.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "gnomon/attention.h"
#include "training/strings.h"

namespace gnomon::models {
namespace {

void CheckOptions(Seq2SeqOptions options) {
  CheckRanges(options.Options(), "encoder-decoder");
  CheckTransformer("encoder-decoder", options.dim, options.heads, options.dropout);
}

TransformerOptions BlockOptions(const Seq2SeqOptions& options) {
  return {.dim = options.dim,
          .depth = options.depth,
          .heads = options.heads,
          .mlp = options.mlp,
          .similarity = options.similarity,
          .position = options.position,
          .dropout = options.dropout,
          .max_length = options.max_length};
}

// Of embeddings there is none in cross attention: its tokens have got theirs.
std::string CrossPosition(const Seq2SeqOptions& options) {
  if (options.cross_position == kSamePosition) return nn::attention_position(options.position);
  return options.cross_position;
}

}  // namespace

PaddedTokens PadTokens(const std::vector<std::vector<int32_t>>& rows, int64_t padding) {
  const auto count = static_cast<int64_t>(rows.size());
  size_t longest = 0;
  for (const auto& row : rows) longest = std::max(longest, row.size());
  PaddedTokens padded = {torch::full({count, static_cast<int64_t>(longest)}, padding, torch::kLong),
                         torch::empty({count}, torch::kLong)};
  auto tokens = padded.tokens.accessor<int64_t, 2>();
  auto lengths = padded.lengths.accessor<int64_t, 1>();
  for (int64_t n = 0; n < count; ++n) {
    const std::vector<int32_t>& row = rows[n];
    lengths[n] = static_cast<int64_t>(row.size());
    for (int64_t at = 0; at < lengths[n]; ++at) tokens[n][at] = row[at];
  }
  return padded;
}

void Seq2SeqCache::Select(const torch::Tensor& rows, bool is_same_source) {
  const auto select = [&](torch::Tensor* tensor) {
    if (tensor->defined()) *tensor = tensor->index_select(0, rows);
  };
  select(&tokens.embeddings);
  for (nn::KVCache& layer : self) {
    select(&layer.k);
    select(&layer.v);
  }
  if (is_same_source) return;
  for (nn::KVCache& layer : cross) {
    select(&layer.k);
    select(&layer.v);
  }
}

TransformerDecoderBlockImpl::TransformerDecoderBlockImpl(const TransformerOptions& options,
                                                         const std::string& cross_position)
    : dropout_(options.dropout) {
  const double residual_gain = ResidualGain(3 * options.depth);
  const auto norm = [&](const char* name) {
    return register_module(name, torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.dim})));
  };
  const auto attention = [&](const char* name, const std::string& position) {
    nn::MultiheadAttention module = register_module(
        name, nn::MultiheadAttention(nn::MultiheadAttentionOptions(options.dim, options.heads)
                                         .similarity(options.similarity)
                                         .position(position)
                                         .max_length(options.max_length)));
    InitializeLinear(module->out_proj, residual_gain);
    return module;
  };
  attention_norm_ = norm("attention_norm");
  attention_ = attention("attention", nn::attention_position(options.position));
  cross_norm_ = norm("cross_norm");
  try {
    cross_attention_ = attention("cross_attention", cross_position);
  } catch (const c10::Error& error) {
    throw Error(StrCat("the position '", cross_position,
                       "' of cross attention: ", error.what_without_backtrace()));
  }
  mlp_norm_ = norm("mlp_norm");
  mlp_in_ = register_module("mlp_in", torch::nn::Linear(options.dim, options.mlp));
  mlp_out_ = register_module("mlp_out", torch::nn::Linear(options.mlp, options.dim));
  InitializeLinear(mlp_in_, 1);
  InitializeLinear(mlp_out_, residual_gain);
}

torch::Tensor TransformerDecoderBlockImpl::forward(torch::Tensor x, const torch::Tensor& encoded,
                                                   const torch::Tensor& lengths, int64_t offset,
                                                   nn::KVCache* self, nn::KVCache* cross,
                                                   const std::optional<BatchRows>& rows) {
  const auto drop_out = [&](const torch::Tensor& branch) {
    return is_training() ? DropOut(branch, dropout_, rows) : branch;
  };
  x = x + drop_out(attention_->forward(attention_norm_->forward(x), {}, {},
                                       {.causal = true, .query_offset = offset, .cache = self}));
  x = x + drop_out(cross_attention_->forward(
              cross_norm_->forward(x), encoded, {},
              {.key_lengths = lengths, .query_offset = offset, .cache = cross}));
  const torch::Tensor hidden = torch::gelu(mlp_in_->forward(mlp_norm_->forward(x)));
  return x + drop_out(mlp_out_->forward(hidden));
}

Seq2SeqImpl::Seq2SeqImpl(Seq2SeqOptions options) : options_(std::move(options)) {
  CheckOptions(options_);
  const std::string cross_position = CrossPosition(options_);
  embedding_ =
      register_module("embedding", torch::nn::Embedding(options_.vocabulary, options_.dim));
  // Unit logits from a normalised stream; Embed() brings the inputs to unit variance.
  torch::nn::init::normal_(embedding_->weight, 0, 1 / std::sqrt(static_cast<double>(options_.dim)));
  // It adds nothing to embeddings, and knows where the position ends.
  cross_length_ =
      nn::TokenPosition(cross_position, options_.dim, options_.max_length)->max_length();
  const TransformerOptions block = BlockOptions(options_);
  decoder_blocks_ = register_module("decoder_blocks", torch::nn::ModuleList());
  for (int64_t layer = 0; layer < options_.depth; ++layer) {
    decoder_blocks_->push_back(TransformerDecoderBlock(block, cross_position));
  }
  decoder_norm_ = register_module(
      "decoder_norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({options_.dim})));
  encoder_ = register_module("encoder", Encoder(block));
  decoder_position_ =
      register_module("decoder_position",
                      nn::TokenPosition(nn::TokenPositionOptions(options_.position, options_.dim,
                                                                 options_.max_length)
                                            .causal(true)));
}

torch::Tensor Seq2SeqImpl::Embed(const torch::Tensor& tokens,
                                 const std::optional<BatchRows>& rows) {
  const torch::Tensor x =
      embedding_->forward(tokens) * std::sqrt(static_cast<double>(options_.dim));
  return is_training() ? DropOut(x, options_.dropout, rows) : x;
}

torch::Tensor Seq2SeqImpl::encode(const PaddedTokens& source,
                                  const std::optional<BatchRows>& rows) {
  return encoder_->forward(Embed(source.tokens, rows), source.lengths, rows);
}

torch::Tensor Seq2SeqImpl::decode(const torch::Tensor& target, const torch::Tensor& encoded,
                                  const torch::Tensor& lengths, Seq2SeqCache* cache,
                                  const std::optional<BatchRows>& rows) {
  const int64_t offset = cache == nullptr ? 0 : cache->tokens.length();
  // From the second call on the cache has the keys and values of the source.
  const torch::Tensor keys = offset > 0 ? encoded.narrow(1, 0, 0) : encoded;
  nn::TokenCall call;
  call.cache = cache == nullptr ? nullptr : &cache->tokens;
  call.rows = rows;
  torch::Tensor x = decoder_position_->forward(Embed(target, rows), call);
  for (int64_t layer = 0; layer < options_.depth; ++layer) {
    x = decoder_blocks_[layer]->as<TransformerDecoderBlock>()->forward(
        x, keys, lengths, offset, cache == nullptr ? nullptr : &cache->self[layer],
        cache == nullptr ? nullptr : &cache->cross[layer], rows);
  }
  return torch::matmul(decoder_norm_->forward(x), embedding_->weight.t());
}

torch::Tensor Seq2SeqImpl::forward(const PaddedTokens& source, const torch::Tensor& target,
                                   const std::optional<BatchRows>& rows) {
  return decode(target, encode(source, rows), source.lengths, nullptr, rows);
}

std::optional<int64_t> Seq2SeqImpl::max_length() const {
  const std::optional<int64_t> own = decoder_position_->max_length();
  if (!own || !cross_length_) return own ? own : cross_length_;
  return std::min(*own, *cross_length_);
}

}  // namespace gnomon::models
