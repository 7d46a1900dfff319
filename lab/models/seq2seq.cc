#include "models/seq2seq.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "gnomon/attention.h"
#include "training/strings.h"

namespace gnomon::lab {
namespace {

void CheckOptions(Seq2SeqOptions options) {
  CheckRanges(options.Options(), "encoder-decoder");
  CheckTransformer("encoder-decoder", options.dim, options.heads, options.dropout);
}

TransformerOptions BlockOptions(const Seq2SeqOptions& options) {
  return ToTransformer(options, options.similarity, options.position, options.max_length);
}

// Returns the cross-attention position of each layer. The value "same" omits token encodings,
// because the inputs of cross-attention already contain them.
std::vector<std::string> CrossPositions(const Seq2SeqOptions& options) {
  if (options.cross_position == kSamePosition) {
    return LayerPositions(options.position, options.depth);
  }
  return std::vector<std::string>(options.depth, options.cross_position);
}

// Creates the attention module of a residual branch. A decoder layer has three such branches.
nn::MultiheadAttention MakeBranch(const TransformerOptions& options, const std::string& position) {
  nn::MultiheadAttention attention = MakeAttention(options, position);
  InitializeLinear(attention->out_proj, ResidualGain(3 * options.depth));
  return attention;
}

nn::MultiheadAttention MakeCrossAttention(const TransformerOptions& options,
                                          const std::string& position) {
  try {
    return MakeBranch(options, position);
  } catch (const c10::Error& error) {
    throw Error(StrCat("the position '", position,
                       "' of cross-attention: ", error.what_without_backtrace()));
  }
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
  const auto select_layers = [&](std::vector<nn::KVCache>* layers) {
    for (nn::KVCache& layer : *layers) {
      select(&layer.k);
      select(&layer.v);
      for (torch::Tensor& projection : layer.projections) select(&projection);
    }
  };
  select_layers(&self);
  if (!is_same_source) select_layers(&cross);
}

TransformerDecoderBlockImpl::TransformerDecoderBlockImpl(const TransformerOptions& options,
                                                         const std::string& position,
                                                         const std::string& cross_position)
    : dropout_(options.dropout),
      attention_norm_(register_module("attention_norm", Norm(options.norm, options.dim))),
      attention_(register_module("attention", MakeBranch(options, position))),
      cross_norm_(register_module("cross_norm", Norm(options.norm, options.dim))),
      cross_attention_(
          register_module("cross_attention", MakeCrossAttention(options, cross_position))),
      mlp_norm_(register_module("mlp_norm", Norm(options.norm, options.dim))),
      mlp_(this, options) {
  InitializeLinear(mlp_.in, 1);
  InitializeLinear(mlp_.out, ResidualGain(3 * options.depth));
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
  return x + drop_out(mlp_.forward(mlp_norm_->forward(x)));
}

Seq2SeqImpl::Seq2SeqImpl(Seq2SeqOptions options) : options_(std::move(options)) {
  CheckOptions(options_);
  const std::vector<std::string> cross_positions = CrossPositions(options_);
  embedding_ =
      register_module("embedding", torch::nn::Embedding(options_.vocabulary, options_.dim));
  // With these weights, the decoder's normalised output gives logits of unit variance. Embed()
  // scales the inputs to unit variance.
  torch::nn::init::normal_(embedding_->weight, 0, 1 / std::sqrt(static_cast<double>(options_.dim)));
  // This module is created only to get its maximum length; it adds nothing to the embeddings.
  cross_length_ = nn::TokenPosition(Join(cross_positions, "+"), options_.dim, options_.max_length)
                      ->max_length();
  const TransformerOptions block = BlockOptions(options_);
  decoder_blocks_ = register_module("decoder_blocks", torch::nn::ModuleList());
  const std::vector<std::string> positions = LayerPositions(options_.position, options_.depth);
  for (int64_t layer = 0; layer < options_.depth; ++layer) {
    decoder_blocks_->push_back(
        TransformerDecoderBlock(block, positions[layer], cross_positions[layer]));
  }
  decoder_norm_ = register_module("decoder_norm", Norm(options_.norm, options_.dim));
  encoder_ = register_module("encoder", Encoder(block));
  decoder_position_ =
      register_module("decoder_position", MakeTokenPosition(block, /*causal=*/true));
}

torch::Tensor Seq2SeqImpl::Embed(const torch::Tensor& tokens,
                                 const std::optional<BatchRows>& rows) {
  const torch::Tensor x = embedding_->forward(tokens.to(decoder_norm_->device())) *
                          std::sqrt(static_cast<double>(options_.dim));
  return is_training() ? DropOut(x, options_.dropout, rows) : x;
}

torch::Tensor Seq2SeqImpl::encode(const PaddedTokens& source,
                                  const std::optional<BatchRows>& rows) {
  return encoder_->forward(Embed(source.tokens, rows), source.lengths.to(decoder_norm_->device()),
                           rows);
}

torch::Tensor Seq2SeqImpl::decode(const torch::Tensor& target, const torch::Tensor& encoded,
                                  const torch::Tensor& lengths, Seq2SeqCache* cache,
                                  const std::optional<BatchRows>& rows) {
  const int64_t offset = cache == nullptr ? 0 : cache->tokens.length();
  // From the second call on, the cache contains the keys and values of the source.
  const torch::Tensor keys = offset > 0 ? encoded.narrow(1, 0, 0) : encoded;
  nn::TokenCall call = TokenCallOf(rows);
  call.cache = cache == nullptr ? nullptr : &cache->tokens;
  torch::Tensor x = decoder_position_->forward(Embed(target, rows), call);
  const torch::Tensor here = lengths.to(x.device());
  for (int64_t layer = 0; layer < options_.depth; ++layer) {
    x = decoder_blocks_[layer]->as<TransformerDecoderBlock>()->forward(
        x, keys, here, offset, cache == nullptr ? nullptr : &cache->self[layer],
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

}  // namespace gnomon::lab
