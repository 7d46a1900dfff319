// Modules that add encodings to token embeddings.
#include <gnomon/torch/nn.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ops/coordinates/token_grid.h"
#include "ops/nn/module_call.h"
#include "ops/nn/module_terms.h"
#include "ops/nn/token_encoding.h"

namespace gnomon::nn {
namespace {

// Adds each encoding to the embeddings.
torch::Tensor AddEncodings(const std::vector<TokenEncodingImpl*>& encodings,
                           const torch::Tensor& embeddings, const TokenCall& call) {
  TORCH_CHECK_VALUE(
      !call.cache || !call.lengths,
      "gnomon.nn: lengths and a cache are both given; pass lengths only in calls without a cache, "
      "which contain all tokens");
  TORCH_CHECK_VALUE(!call.positions || !call.offset,
                    "gnomon.nn: positions and offset are both given; pass only one of them");
  const int64_t offset = call.offset.value_or(call.cache ? call.cache->length() : 0);
  const torch::Tensor before = call.cache ? call.cache->embeddings : torch::Tensor();
  torch::Tensor tokens = embeddings;
  int64_t history = 0;
  for (TokenEncodingImpl* encoding : encodings) {
    tokens = tokens + encoding->encode(embeddings, offset, before, call);
    history = std::max(history, encoding->history());
  }
  if (call.cache) call.cache->append(embeddings, history);
  return tokens;
}

}  // namespace

void TokenCache::append(const torch::Tensor& new_embeddings, int64_t history) {
  tokens += new_embeddings.size(1);
  if (history == 0) return;
  const torch::Tensor all =
      embeddings.defined() ? torch::cat({embeddings, new_embeddings}, 1) : new_embeddings;
  embeddings = all.slice(1, std::max<int64_t>(all.size(1) - history, 0));
}

void TokenCache::reset() { *this = TokenCache(); }

TokenEncodingImpl::TokenEncodingImpl(const TokenEncodingOptions& options_) : options(options_) {
  reset();
}

void TokenEncodingImpl::reset() {
  const std::unique_ptr<TokenEncoder> encoder =
      MakeTokenEncoder(Component::Parse(options.spec()), options.dim(), options.causal());
  max_length_ = encoder->max_length();
  history_ = encoder->history();
  tensor_names_.clear();
  for (const ModuleTensor& tensor : encoder->Tensors()) {
    register_parameter(tensor.name, AsDefaultDtype(tensor.start));
    tensor_names_.push_back(tensor.name);
  }
}

torch::Tensor TokenEncodingImpl::encode(const torch::Tensor& embeddings, int64_t offset,
                                        const torch::Tensor& before, const TokenCall& call) {
  std::vector<torch::Tensor> tensors;
  const auto parameters = named_parameters(/*recurse=*/false);
  for (const std::string& name : tensor_names_) tensors.push_back(parameters[name]);
  const OptionalTensor known = before.defined() ? OptionalTensor(before) : std::nullopt;
  return EncodeTokens(*ModuleComponent(options.spec()), options.dim(), options.causal(), tensors,
                      {.embeddings = embeddings,
                       .offset = call.positions ? 0 : offset,
                       .training = is_training(),
                       .lengths = call.lengths,
                       .before = known,
                       .generator = call.generator,
                       .first_sequence = call.first_sequence,
                       .batch_size = call.batch_size,
                       .positions = call.positions});
}

torch::Tensor TokenEncodingImpl::forward(const torch::Tensor& embeddings, const TokenCall& call) {
  return AddEncodings({this}, embeddings, call);
}

TokenPositionImpl::TokenPositionImpl(const TokenPositionOptions& options_) : options(options_) {
  reset();
}

void TokenPositionImpl::reset() {
  // Positions in attention, such as alibi on a grid, also limit the length.
  max_length_ = LongestSequence(ParseSum(options.position()), options.max_length());
  encodings_.clear();
  std::map<std::string, int64_t> count;
  for (const Component& component : TokenEncodings(options.position(), options.max_length())) {
    const std::string& name = component.name();
    TokenEncoding encoding(
        TokenEncodingOptions(component.Text(), options.dim()).causal(options.causal()));
    encodings_.push_back(register_module(name + std::to_string(count[name]++), encoding));
    if (const std::optional<int64_t> length = encoding->max_length()) {
      max_length_ = std::min(max_length_.value_or(*length), *length);
    }
  }
}

torch::Tensor TokenPositionImpl::forward(const torch::Tensor& embeddings, const TokenCall& call) {
  CheckEmbeddings("TokenPosition", embeddings, options.dim());
  std::vector<TokenEncodingImpl*> encodings;
  for (TokenEncoding& encoding : encodings_) encodings.push_back(encoding.get());
  return AddEncodings(encodings, embeddings, call);
}

std::optional<std::string> encoding_with_history(const TokenPositionOptions& options) {
  for (const Component& component : TokenEncodings(options.position(), options.max_length())) {
    const auto encoder = MakeTokenEncoder(component, options.dim(), options.causal());
    if (encoder->history() > 0) return component.Text();
  }
  return std::nullopt;
}

}  // namespace gnomon::nn
