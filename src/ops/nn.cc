#include <gnomon/torch/nn.h>

#include <torch/nn/init.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "ops/module_terms.h"

namespace gnomon::nn {
namespace {

torch::Tensor AsDefaultDtype(const torch::Tensor& tensor) {
  return tensor.to(torch::get_default_dtype());
}

int64_t KeyHeads(const MultiheadAttentionOptions& options) {
  return options.kv_heads().value_or(options.num_heads());
}

int64_t HeadDim(const MultiheadAttentionOptions& options) {
  if (options.qk_dim()) return *options.qk_dim();
  return HeadColumns(options.similarity(), options.embed_dim() / options.num_heads());
}

void Check(const MultiheadAttentionOptions& options) {
  constexpr const char* kName = "gnomon.nn.MultiheadAttention: ";
  TORCH_CHECK_VALUE(options.num_heads() >= 1 && options.embed_dim() >= 1 &&
                        options.embed_dim() % options.num_heads() == 0,
                    kName, "embed_dim is ", options.embed_dim(), " and num_heads ",
                    options.num_heads(), "; expected a positive multiple");
  const int64_t key_heads = KeyHeads(options);
  TORCH_CHECK_VALUE(key_heads >= 1 && options.num_heads() % key_heads == 0, kName, "kv_heads is ",
                    key_heads, "; expected a divisor of num_heads = ", options.num_heads());
  TORCH_CHECK_VALUE(HeadDim(options) >= 1, kName, "qk_dim is ", HeadDim(options),
                    "; expected at least 1");
  TORCH_CHECK_NOT_IMPLEMENTED(options.dropout() == 0, kName, "dropout is ", options.dropout(),
                              "; it is not implemented in this version");
}

torch::Tensor AddToTokens(const torch::Tensor& embeddings, const torch::Tensor& encoding) {
  return embeddings + encoding.to(embeddings.options());
}

void CheckEmbeddings(const char* name, const torch::Tensor& embeddings, int64_t dim) {
  TORCH_CHECK_VALUE(embeddings.dim() == 3 && embeddings.size(2) == dim, "gnomon.nn.", name,
                    ": embeddings have shape ", embeddings.sizes(), "; expected (B, L, ", dim, ")");
}

}  // namespace

void KVCache::append(const torch::Tensor& new_k, const torch::Tensor& new_v) {
  k = k.defined() ? torch::cat({k, new_k}, 2) : new_k;
  v = v.defined() ? torch::cat({v, new_v}, 2) : new_v;
}

void KVCache::reset() {
  k = torch::Tensor();
  v = torch::Tensor();
}

MultiheadAttentionImpl::MultiheadAttentionImpl(const MultiheadAttentionOptions& options_)
    : options(options_) {
  Check(options);
  reset();
}

void MultiheadAttentionImpl::reset() {
  const int64_t embed_dim = options.embed_dim();
  const int64_t key_heads = KeyHeads(options);
  const int64_t value_dim = embed_dim / options.num_heads();
  const auto linear = [&](const char* name, int64_t out) {
    torch::nn::Linear layer = register_module(
        name, torch::nn::Linear(torch::nn::LinearOptions(embed_dim, out).bias(options.bias())));
    torch::nn::init::normal_(layer->weight, 0, 1 / std::sqrt(static_cast<double>(embed_dim)));
    if (options.bias()) torch::nn::init::zeros_(layer->bias);
    return layer;
  };
  q_proj = linear("q_proj", options.num_heads() * HeadDim(options));
  k_proj = linear("k_proj", key_heads * HeadDim(options));
  v_proj = linear("v_proj", key_heads * value_dim);
  out_proj = linear("out_proj", embed_dim);
  term_names_.clear();
  for (const ModuleTensor& tensor : ModuleTensors(options.similarity(), options.position(),
                                                  options.num_heads(), HeadDim(options))) {
    const torch::Tensor start = AsDefaultDtype(tensor.start);
    if (tensor.learned) {
      register_parameter(tensor.name, start);
    } else {
      register_buffer(tensor.name, start);
    }
    term_names_.push_back(tensor.name);
  }
}

torch::Tensor MultiheadAttentionImpl::forward(const torch::Tensor& query, const torch::Tensor& key,
                                              const torch::Tensor& value,
                                              const AttentionCall& call) {
  const torch::Tensor& keys = key.defined() ? key : query;
  const torch::Tensor& values = value.defined() ? value : keys;
  CheckEmbeddings("MultiheadAttention", query, options.embed_dim());
  CheckEmbeddings("MultiheadAttention", keys, options.embed_dim());
  CheckEmbeddings("MultiheadAttention", values, options.embed_dim());
  const auto heads = [](const torch::Tensor& projected, int64_t count) {
    return projected.unflatten(2, {count, -1}).transpose(1, 2);
  };
  const torch::Tensor q = heads(q_proj(query), options.num_heads());
  torch::Tensor k = heads(k_proj(keys), KeyHeads(options));
  torch::Tensor v = heads(v_proj(values), KeyHeads(options));
  std::optional<int64_t> query_offset = call.query_offset;
  if (call.cache) {
    if (!query_offset) query_offset = call.cache->length();
    call.cache->append(k, v);
    k = call.cache->k;
    v = call.cache->v;
  }
  CallArguments arguments;
  arguments.causal = call.causal;
  if (call.window) {
    arguments.left = call.window->first;
    arguments.right = call.window->second;
  }
  arguments.key_lengths = call.key_lengths;
  arguments.query_offset = query_offset;
  std::vector<torch::Tensor> tensors;
  const auto parameters = named_parameters(/*recurse=*/false);
  const auto buffers = named_buffers(/*recurse=*/false);
  for (const std::string& name : term_names_) {
    tensors.push_back(parameters.contains(name) ? parameters[name] : buffers[name]);
  }
  const torch::Tensor o =
      ModuleAttention(q, k, v, options.similarity(), options.position(), tensors, arguments);
  return out_proj(o.transpose(1, 2).flatten(2));
}

SinusoidalImpl::SinusoidalImpl(int64_t dim, std::string layout)
    : dim_(dim), layout_(std::move(layout)) {
  sinusoid(torch::zeros({0}), dim_, layout_);
}

void SinusoidalImpl::reset() {}

torch::Tensor SinusoidalImpl::forward(const torch::Tensor& embeddings, int64_t offset) {
  CheckEmbeddings("Sinusoidal", embeddings, dim_);
  const torch::Tensor positions =
      torch::arange(offset, offset + embeddings.size(1), embeddings.options().dtype(torch::kLong));
  return AddToTokens(embeddings, sinusoid(positions, dim_, layout_));
}

LearnedAbsoluteImpl::LearnedAbsoluteImpl(int64_t max_length, int64_t dim)
    : max_length_(max_length), dim_(dim) {
  reset();
}

void LearnedAbsoluteImpl::reset() {
  table = register_parameter("table", torch::empty({max_length_, dim_}));
  torch::nn::init::normal_(table, 0, 0.02);
}

torch::Tensor LearnedAbsoluteImpl::forward(const torch::Tensor& embeddings, int64_t offset) {
  CheckEmbeddings("LearnedAbsolute", embeddings, dim_);
  const int64_t length = embeddings.size(1);
  TORCH_CHECK_VALUE(offset >= 0 && offset + length <= max_length_,
                    "gnomon.nn.LearnedAbsolute: positions ", offset, " to ", offset + length - 1,
                    "; the table has ", max_length_, " rows");
  return AddToTokens(embeddings, table.narrow(0, offset, length));
}

TokenPositionImpl::TokenPositionImpl(const TokenPositionOptions& options_) : options(options_) {
  reset();
}

void TokenPositionImpl::reset() {
  max_length_ = std::nullopt;
  sinusoidal_.clear();
  learned_.clear();
  for (const TokenEncoding& encoding : TokenEncodings(options.position(), options.max_length())) {
    if (encoding.learned) {
      max_length_ = std::min(max_length_.value_or(encoding.length), encoding.length);
      learned_.push_back(register_module("learned" + std::to_string(learned_.size()),
                                         LearnedAbsolute(encoding.length, options.dim())));
    } else {
      sinusoidal_.push_back(register_module("sinusoidal" + std::to_string(sinusoidal_.size()),
                                            Sinusoidal(options.dim(), encoding.layout)));
    }
  }
}

torch::Tensor TokenPositionImpl::forward(const torch::Tensor& embeddings, int64_t offset) {
  torch::Tensor tokens = embeddings;
  for (Sinusoidal& encoding : sinusoidal_) tokens = encoding(tokens, offset);
  for (LearnedAbsolute& encoding : learned_) tokens = encoding(tokens, offset);
  return tokens;
}

}  // namespace gnomon::nn
