#include "models/language_model.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <utility>

#include "gnomon/attention.h"
#include "models/strings.h"

namespace gnomon::models {
namespace {

void CheckAtLeastOne(const char* name, int64_t value) {
  if (value < 1) throw Error(StrCat("language model: ", name, " is ", value, ", expected >= 1"));
}

void CheckOptions(const LanguageModelOptions& options) {
  CheckAtLeastOne("dim", options.dim);
  CheckAtLeastOne("depth", options.depth);
  CheckAtLeastOne("heads", options.heads);
  CheckAtLeastOne("mlp", options.mlp);
  CheckAtLeastOne("max_length", options.max_length);
  if (options.dim % options.heads != 0) {
    throw Error(
        StrCat("language model: dim ", options.dim, " is not a multiple of heads ", options.heads));
  }
  if (!(options.dropout >= 0 && options.dropout < 1)) {
    throw Error(StrCat("language model: dropout is ", options.dropout, ", expected [0, 1)"));
  }
}

// Weights of variance gain^2 / fan_in keep the variance of unit inputs at gain^2.
void InitializeLinear(torch::nn::Linear& linear, double gain) {
  const double deviation = gain / std::sqrt(static_cast<double>(linear->options.in_features()));
  torch::nn::init::normal_(linear->weight, 0, deviation);
  torch::nn::init::zeros_(linear->bias);
}

nn::AttentionCall CausalCall(nn::KVCache* cache) {
  nn::AttentionCall call;
  call.causal = true;
  call.cache = cache;
  return call;
}

// A number in [0, 1) of 53 random bits: the same on every platform, unlike the standard library's.
double Uniform(std::mt19937_64* generator) {
  return static_cast<double>((*generator)() >> 11) * 0x1p-53;
}

int64_t Sample(const torch::Tensor& logits, const GenerationOptions& options,
               std::mt19937_64* generator) {
  const torch::Tensor row = logits.to(torch::kDouble).contiguous();
  const double* values = row.const_data_ptr<double>();
  const int64_t size = row.numel();
  if (options.temperature == 0) return std::max_element(values, values + size) - values;
  std::vector<int64_t> order(size);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return values[a] > values[b]; });
  if (options.top_k > 0 && options.top_k < size) order.resize(options.top_k);
  std::vector<double> cumulative;
  double total = 0;
  for (const int64_t token : order) {
    total += std::exp((values[token] - values[order[0]]) / options.temperature);
    cumulative.push_back(total);
  }
  const double drawn = Uniform(generator) * total;
  const auto chosen = std::upper_bound(cumulative.begin(), cumulative.end() - 1, drawn);
  return order[chosen - cumulative.begin()];
}

}  // namespace

TransformerBlockImpl::TransformerBlockImpl(const LanguageModelOptions& options)
    : dropout_(options.dropout) {
  // Each of the 2 * depth residual branches adds its share of the stream's variance.
  const double residual_gain = 1 / std::sqrt(2.0 * static_cast<double>(options.depth));
  nn::MultiheadAttentionOptions attention(options.dim, options.heads);
  attention.similarity(options.similarity)
      .position(options.position)
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

torch::Tensor TransformerBlockImpl::forward(torch::Tensor x, nn::KVCache* cache) {
  const torch::Tensor attended =
      attention_->forward(attention_norm_->forward(x), {}, {}, CausalCall(cache));
  x = x + torch::dropout(attended, dropout_, is_training());
  const torch::Tensor hidden = torch::gelu(mlp_in_->forward(mlp_norm_->forward(x)));
  return x + torch::dropout(mlp_out_->forward(hidden), dropout_, is_training());
}

LanguageModelImpl::LanguageModelImpl(LanguageModelOptions options) : options_(std::move(options)) {
  CheckOptions(options_);
  embedding_ = register_module("embedding", torch::nn::Embedding(kByteVocabulary, options_.dim));
  // Unit logits from a normalised stream; forward() brings the inputs to unit variance.
  torch::nn::init::normal_(embedding_->weight, 0, 1 / std::sqrt(static_cast<double>(options_.dim)));
  blocks_ = register_module("blocks", torch::nn::ModuleList());
  for (int64_t layer = 0; layer < options_.depth; ++layer) {
    blocks_->push_back(TransformerBlock(options_));
  }
  norm_ =
      register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({options_.dim})));
  token_position_ = register_module(
      "token_position", nn::TokenPosition(nn::TokenPositionOptions(options_.position, options_.dim,
                                                                   options_.max_length)
                                              .causal(true)));
}

torch::Tensor LanguageModelImpl::forward(const torch::Tensor& tokens, LanguageModelCache* cache) {
  torch::Tensor x = embedding_->forward(tokens) * std::sqrt(static_cast<double>(options_.dim));
  nn::TokenCall call;
  call.cache = cache == nullptr ? nullptr : &cache->tokens;
  x = token_position_->forward(x, call);
  for (int64_t layer = 0; layer < options_.depth; ++layer) {
    nn::KVCache* layer_cache = cache == nullptr ? nullptr : &cache->layers[layer];
    x = blocks_[layer]->as<TransformerBlock>()->forward(x, layer_cache);
  }
  return torch::matmul(norm_->forward(x), embedding_->weight.t());
}

std::optional<int64_t> LanguageModelImpl::max_length() const {
  return token_position_->max_length();
}

int64_t LanguageModelImpl::CountParameters() const {
  int64_t count = 0;
  for (const torch::Tensor& parameter : parameters()) count += parameter.numel();
  return count;
}

std::string Generate(LanguageModel& model, std::string_view prompt,
                     const GenerationOptions& options, const std::function<bool(char)>& emit) {
  if (prompt.empty()) throw Error("generate: the prompt is empty, expected at least one byte");
  const torch::NoGradGuard no_grad;
  model->eval();
  std::mt19937_64 generator(options.seed);
  std::vector<int64_t> tokens;
  for (const char byte : prompt) tokens.push_back(static_cast<unsigned char>(byte));
  LanguageModelCache cache(model->options().depth);
  int64_t seen = 0;  // tokens already in the caches
  std::string text;
  for (int64_t n = 0; n < options.tokens; ++n) {
    const std::vector<int64_t> fresh(tokens.begin() + seen, tokens.end());
    const torch::Tensor input = torch::tensor(fresh, torch::kLong).unsqueeze(0);
    const torch::Tensor logits = model->forward(input, options.use_cache ? &cache : nullptr);
    if (options.use_cache) seen = static_cast<int64_t>(tokens.size());
    tokens.push_back(Sample(logits[0][-1], options, &generator));
    text.push_back(static_cast<char>(tokens.back()));
    if (emit != nullptr && !emit(text.back())) break;
  }
  return text;
}

}  // namespace gnomon::models
