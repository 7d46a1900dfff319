#include "models/language_model.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <utility>

#include "gnomon/attention.h"
#include "training/strings.h"

namespace gnomon::lab {
namespace {

void CheckOptions(LanguageModelOptions options) {
  CheckRanges(options.Options(), "language model");
  CheckTransformer("language model", options.dim, options.heads, options.dropout);
}

// Returns the last `length` tokens of the concatenation of `before` (B, L, dim) and x, detached.
torch::Tensor Remember(const torch::Tensor& before, const torch::Tensor& x, int64_t length) {
  const torch::Tensor fresh = x.detach();
  const torch::Tensor all = before.defined() ? torch::cat({before, fresh}, 1) : fresh;
  return all.slice(1, std::max<int64_t>(all.size(1) - length, 0)).contiguous();
}

// Returns a number in [0, 1) from 53 random bits. Unlike the standard library's distribution, it
// gives the same numbers on all platforms.
double Uniform(std::mt19937_64* generator) {
  return static_cast<double>((*generator)() >> 11) * 0x1p-53;
}

int64_t Sample(const torch::Tensor& logits, const GenerationOptions& options,
               std::mt19937_64* generator) {
  const torch::Tensor row = logits.to(torch::kCPU, torch::kDouble).contiguous();
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

TransformerOptions BlockOptions(const LanguageModelOptions& options) {
  return ToTransformer(options, options.similarity, options.position, options.max_length);
}

}  // namespace

LanguageModelImpl::LanguageModelImpl(LanguageModelOptions options) : options_(std::move(options)) {
  CheckOptions(options_);
  // With these weights, the normalised output gives logits of unit variance. Rows() scales the
  // inputs to unit variance.
  if (options_.adaptive.empty()) {
    embedding_ =
        register_module("embedding", torch::nn::Embedding(options_.vocabulary, options_.dim));
    torch::nn::init::normal_(embedding_->weight, 0,
                             1 / std::sqrt(static_cast<double>(options_.dim)));
  } else {
    adaptive_ = register_module(
        "embedding", AdaptiveEmbedding(options_.vocabulary, options_.dim, options_.adaptive));
  }
  const TransformerOptions transformer = BlockOptions(options_);
  blocks_ = MakeBlocks(this, transformer);
  norm_ = register_module("norm", Norm(options_.norm, options_.dim));
  token_position_ =
      register_module("token_position", MakeTokenPosition(transformer, /*causal=*/true));
}

void LanguageModelMemory::reset() {
  layers.clear();
  tokens.reset();
}

torch::Tensor LanguageModelImpl::Rows(const torch::Tensor& tokens) {
  const torch::Tensor here = tokens.to(norm_->device());
  const torch::Tensor rows =
      adaptive_.is_empty() ? embedding_->forward(here) : adaptive_->forward(here);
  return rows * std::sqrt(static_cast<double>(options_.dim));
}

torch::Tensor LanguageModelImpl::Embed(const torch::Tensor& tokens, LanguageModelCache* cache,
                                       LanguageModelMemory* memory,
                                       const std::optional<BatchRows>& rows,
                                       const std::optional<torch::Tensor>& positions) {
  if (cache != nullptr && memory != nullptr) {
    throw Error("language model: a cache and a memory are both given; pass only one of them");
  }
  if (memory != nullptr && memory->length() > 0 && memory->layers[0].size(0) != tokens.size(0)) {
    throw Error(StrCat("language model: the memory has a batch size of ", memory->layers[0].size(0),
                       ", but the tokens have a batch size of ", tokens.size(0),
                       "; start a new memory for each batch size"));
  }
  torch::Tensor x = Rows(tokens);
  nn::TokenCall call = TokenCallOf(rows);
  call.cache = cache != nullptr ? &cache->tokens : memory != nullptr ? &memory->tokens : nullptr;
  call.positions = positions;
  x = token_position_->forward(x, call);
  if (memory != nullptr) {
    torch::Tensor& embeddings = memory->tokens.embeddings;
    if (embeddings.defined()) embeddings = embeddings.detach();
    memory->layers.resize(options_.depth);
  }
  return x;
}

torch::Tensor LanguageModelImpl::TakeBefore(int64_t layer, const torch::Tensor& x,
                                            LanguageModelMemory* memory) {
  if (memory == nullptr) return {};
  const torch::Tensor before = memory->layers[layer];
  memory->layers[layer] = Remember(before, x, memory->max_length);
  return before;
}

torch::Tensor LanguageModelImpl::forward(const torch::Tensor& tokens, LanguageModelCache* cache,
                                         LanguageModelMemory* memory,
                                         const std::optional<BatchRows>& rows) {
  return Logits(Layers(Embed(tokens, cache, memory, rows), cache, memory, rows));
}

torch::Tensor LanguageModelImpl::losses(const torch::Tensor& tokens, const torch::Tensor& targets,
                                        LanguageModelCache* cache, LanguageModelMemory* memory,
                                        const std::optional<BatchRows>& rows) {
  const torch::Tensor x = Layers(Embed(tokens, cache, memory, rows), cache, memory, rows,
                                 std::nullopt, /*last=*/targets.size(1));
  if (targets.size(1) == 0) return torch::zeros_like(targets, x.options());
  const torch::Tensor told = targets.to(x.device());
  if (!adaptive_.is_empty()) return adaptive_->Losses(x, told);
  const torch::Tensor logits = Logits(x);
  return torch::nn::functional::cross_entropy(
             logits.reshape({-1, logits.size(2)}), told.reshape({-1}),
             torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kNone))
      .view_as(targets);
}

torch::Tensor LanguageModelImpl::forward_at(const torch::Tensor& tokens,
                                            const torch::Tensor& positions,
                                            const std::optional<BatchRows>& rows) {
  CheckPlacedAnywhere(options_);
  const torch::Tensor here = positions.to(norm_->device());
  return Logits(Layers(Embed(tokens, nullptr, nullptr, rows, here), nullptr, nullptr, rows, here));
}

torch::Tensor LanguageModelImpl::Layers(torch::Tensor x, LanguageModelCache* cache,
                                        LanguageModelMemory* memory,
                                        const std::optional<BatchRows>& rows,
                                        const std::optional<torch::Tensor>& positions,
                                        const std::optional<int64_t>& last) {
  for (int64_t layer = 0; layer < options_.depth; ++layer) {
    nn::AttentionCall call;
    call.causal = true;
    call.cache = cache == nullptr ? nullptr : &cache->layers[layer];
    call.positions = positions;
    const torch::Tensor before = TakeBefore(layer, x, memory);
    // All layers except the last must compute their outputs for all tokens, because later layers
    // attend to them.
    x = blocks_[layer]->as<TransformerBlock>()->forward(
        x, call, before, rows, layer + 1 == options_.depth ? last : std::nullopt);
    if (cache != nullptr && cache->max_length) cache->layers[layer].keep_last(*cache->max_length);
  }
  return norm_->forward(x);
}

torch::Tensor LanguageModelImpl::Logits(const torch::Tensor& x) {
  if (!adaptive_.is_empty()) return adaptive_->LogProbabilities(x);
  return torch::matmul(x, embedding_->weight.t());
}

std::optional<int64_t> LanguageModelImpl::max_length() const {
  return token_position_->max_length();
}

void CheckPlacedAnywhere(const LanguageModelOptions& options) {
  for (const std::string& part : nn::layer_positions(options.position)) {
    const auto found = nn::encoding_with_history(
        nn::TokenPositionOptions(part, options.dim, options.max_length).causal(true));
    if (!found) continue;
    throw Error(StrCat("'", *found,
                       "' reads neighbouring tokens and does not support random positions; "
                       "choose another position"));
  }
}

void CheckMemory(const LanguageModel& model, int64_t memory) {
  const std::optional<int64_t> longest = model->max_length();
  if (memory == 0 || !longest) return;
  throw Error(StrCat("memory is ", memory,
                     ", so positions continue through the whole text, but the position '",
                     model->options().position, "' is defined only up to length ", *longest,
                     "; choose a position without a maximum length"));
}

std::vector<int64_t> Generate(LanguageModel& model, const TokenText& prompt,
                              const GenerationOptions& options,
                              const std::function<bool(int64_t)>& emit) {
  if (prompt.size() == 0) throw Error("generate: the prompt is empty; expected at least one token");
  const torch::NoGradGuard no_grad;
  model->eval();
  std::mt19937_64 generator(options.seed);
  std::vector<int64_t> tokens;
  for (int64_t n = 0; n < prompt.size(); ++n) tokens.push_back(prompt[n]);
  LanguageModelCache cache(model->options().depth);
  int64_t seen = 0;  // number of tokens in the cache
  for (int64_t n = 0; n < options.tokens; ++n) {
    const std::vector<int64_t> fresh(tokens.begin() + seen, tokens.end());
    const torch::Tensor input = torch::tensor(fresh, torch::kLong).unsqueeze(0);
    const torch::Tensor logits = model->forward(input, options.use_cache ? &cache : nullptr);
    if (options.use_cache) seen = static_cast<int64_t>(tokens.size());
    tokens.push_back(Sample(logits[0][-1], options, &generator));
    if (emit != nullptr && !emit(tokens.back())) break;
  }
  return {tokens.begin() + prompt.size(), tokens.end()};
}

}  // namespace gnomon::lab
