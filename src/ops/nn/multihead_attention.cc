#include <gnomon/torch/nn.h>
#include <torch/nn/init.h>

#include <cmath>
#include <memory>
#include <utility>

#include "ops/attention/options.h"
#include "ops/nn/module_attention.h"
#include "ops/nn/module_call.h"
#include "ops/nn/module_tensors.h"

namespace gnomon::nn {
namespace {

ModuleSizes SizesOf(const MultiheadAttentionOptions& options) {
  return SizesOfModule(options.similarity().spec, options.embed_dim(), options.num_heads(),
                       options.kv_heads(), options.qk_dim(), options.kdim(), options.vdim());
}

void Check(const MultiheadAttentionOptions& options) {
  SizesOf(options);  // throws if the sizes are inconsistent
  CheckModule("gnomon.nn.MultiheadAttention", options.dropout(), options.tolerance(),
              {options.sink(), options.gate(), options.qk_norm()}, options.position().spec);
}

}  // namespace

std::string attention_position(const std::string& position) { return AttentionPosition(position); }

std::vector<std::string> layer_positions(const std::string& pattern) {
  return LayerPositions(pattern);
}

torch::Tensor learned_number(const torch::Tensor& start, const torch::Tensor& theta) {
  return LearnedNumber(start, theta);
}

RMSNormImpl::RMSNormImpl(int64_t columns) : dim(columns) {
  TORCH_CHECK_VALUE(dim >= 1, "gnomon.nn.RMSNorm: dim is ", dim, "; expected at least 1");
  reset();
}

void RMSNormImpl::reset() { weight = register_parameter("weight", torch::ones({dim})); }

torch::Tensor RMSNormImpl::forward(const torch::Tensor& x) const {
  return torch::rms_norm(x, {dim}, weight, kRMSNormEpsilon);
}

MultiheadAttentionImpl::MultiheadAttentionImpl(const MultiheadAttentionOptions& options_)
    : options(options_) {
  Check(options);
  reset();
}

void MultiheadAttentionImpl::reset() {
  const int64_t embed_dim = options.embed_dim();
  const ModuleSizes sizes = SizesOf(options);
  key_heads_ = sizes.key_heads;
  const int64_t value_dim = embed_dim / options.num_heads();
  const auto linear = [&](const char* name, int64_t in, int64_t out) {
    torch::nn::Linear layer = register_module(
        name, torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(options.bias())));
    torch::nn::init::normal_(layer->weight, 0, 1 / std::sqrt(static_cast<double>(in)));
    if (options.bias()) torch::nn::init::zeros_(layer->bias);
    return layer;
  };
  q_proj = linear("q_proj", embed_dim, options.num_heads() * sizes.head_dim);
  k_proj = linear("k_proj", sizes.key_dim, sizes.key_heads * sizes.head_dim);
  v_proj = linear("v_proj", sizes.value_dim, sizes.key_heads * value_dim);
  out_proj = linear("out_proj", embed_dim, embed_dim);
  if (options.gate()) gate_proj = linear("gate_proj", embed_dim, embed_dim);
  if (options.qk_norm()) {
    q_norm = register_module("q_norm", RMSNorm(sizes.head_dim));
    k_norm = register_module("k_norm", RMSNorm(sizes.head_dim));
  }
  if (options.sink()) sink = register_parameter("sink", torch::zeros({options.num_heads()}));
  terms_ = ModuleTerms::Of(options.similarity().spec, options.position().spec);
  term_names_.clear();
  const ModuleShape shape{options.num_heads(),  sizes.head_dim, value_dim,
                          options.max_length(), embed_dim,      sizes.key_dim};
  has_projections_ = HasProjections(options.position().spec);
  std::vector<torch::Tensor> given = options.similarity().tensors;
  given.insert(given.end(), options.position().tensors.begin(), options.position().tensors.end());
  for (const ModuleTensor& tensor : ModuleTensors(*terms_, shape, given)) {
    // Copies even if the dtype matches: a clone must have its own parameters.
    const torch::Tensor start = AsDefaultDtype(tensor.start).detach().clone();
    if (tensor.learned) {
      register_parameter(tensor.name, start);
    } else {
      register_buffer(tensor.name, start);
    }
    term_names_.push_back(tensor.name);
  }
}

std::pair<torch::Tensor, torch::Tensor> MultiheadAttentionImpl::QueriesAndKeys(
    const torch::Tensor& query, const torch::Tensor& key) {
  torch::Tensor q = Heads(q_proj(query), options.num_heads());
  torch::Tensor k = Heads(k_proj(key), key_heads_);
  if (options.qk_norm()) {
    q = q_norm(q);
    k = k_norm(k);
  }
  return {q, k};
}

torch::Tensor MultiheadAttentionImpl::forward(const torch::Tensor& query, const torch::Tensor& key,
                                              const torch::Tensor& value,
                                              const AttentionCall& call) {
  const torch::Tensor& keys = key.defined() ? key : query;
  const torch::Tensor& values = value.defined() ? value : keys;
  CheckEmbeddings("MultiheadAttention", query, options.embed_dim());
  CheckEmbeddings("MultiheadAttention", keys, k_proj->options.in_features());
  CheckEmbeddings("MultiheadAttention", values, v_proj->options.in_features());
  auto [q, k] = QueriesAndKeys(query, keys);
  torch::Tensor v = Heads(v_proj(values), key_heads_);
  ProjectedTensors terms{TermTensors(), {}};
  if (has_projections_) {
    terms = ProjectTokens(*terms_, options.num_heads(), terms.tensors, query, keys);
  }
  std::vector<torch::Tensor> of_keys;
  for (const int64_t n : terms.of_keys) of_keys.push_back(terms.tensors[n]);
  KVCache joined;
  CallArguments arguments =
      JoinCache("MultiheadAttention", call, query, keys, of_keys, k, v, joined);
  if (call.cache) {
    for (size_t n = 0; n < of_keys.size(); ++n) {
      terms.tensors[terms.of_keys[n]] = joined.projections[n];
    }
  }
  if (options.sink()) arguments.sink = sink;
  if (is_training()) arguments.dropout = options.dropout();
  arguments.tolerance = options.tolerance();
  const OptionalTensor& key_positions = arguments.key_positions;
  const bool turns = call.cache != nullptr && TurnsKeysOnce(*terms_) &&
                     (k.scalar_type() == at::kFloat || k.scalar_type() == at::kDouble) &&
                     (!key_positions || key_positions->dim() < 3);
  if (turns) {
    const auto turn = [&](const torch::Tensor& some, int64_t first) {
      const OptionalTensor of_some =
          key_positions ? OptionalTensor(key_positions->narrow(-1, first, some.size(2)))
                        : std::nullopt;
      return TurnedKeys(some, *terms_, options.num_heads(), first, of_some);
    };
    k = joined.turned(turn, terms_->text());
  }
  const torch::Tensor o = turns ? ModuleAttentionOfTurnedKeys(q, k, v, *terms_, terms.tensors,
                                                              /*new_keys=*/{}, arguments)
                                : ModuleAttention(q, k, v, *terms_, terms.tensors, arguments);
  if (call.cache) *call.cache = std::move(joined);
  torch::Tensor joined_heads = o.transpose(1, 2).flatten(2);
  if (options.gate()) joined_heads = joined_heads * gate_proj(query).sigmoid();
  return out_proj(joined_heads);
}

torch::Tensor MultiheadAttentionImpl::attention_weights(const torch::Tensor& query,
                                                        const torch::Tensor& key,
                                                        const std::vector<int64_t>& rows,
                                                        const AttentionCall& call) {
  TORCH_CHECK_VALUE(
      call.cache == nullptr,
      "MultiheadAttention.attention_weights: a cache is given, but it is not supported; omit it");
  const torch::Tensor& keys = key.defined() ? key : query;
  CheckEmbeddings("MultiheadAttention", query, options.embed_dim());
  CheckEmbeddings("MultiheadAttention", keys, k_proj->options.in_features());
  const auto [q, k] = QueriesAndKeys(query, keys);
  std::vector<torch::Tensor> tensors = TermTensors();
  if (has_projections_) {
    tensors = ProjectTokens(*terms_, options.num_heads(), tensors, query, keys).tensors;
  }
  CallArguments arguments = ArgumentsOf(call);
  if (options.sink()) arguments.sink = sink;
  return ModuleAttentionWeights(q, k, rows, *terms_, tensors, arguments);
}

std::vector<torch::Tensor> MultiheadAttentionImpl::TermTensors() const {
  std::vector<torch::Tensor> tensors;
  const auto parameters = named_parameters(/*recurse=*/false);
  const auto buffers = named_buffers(/*recurse=*/false);
  for (const std::string& name : term_names_) {
    tensors.push_back(parameters.contains(name) ? parameters[name] : buffers[name]);
  }
  return tensors;
}

std::vector<LearnedValue> MultiheadAttentionImpl::learned_values() const {
  const ModuleShape shape{options.num_heads(), SizesOf(options).head_dim,
                          options.embed_dim() / options.num_heads(), options.max_length()};
  std::vector<LearnedValue> values;
  for (LearnedTensor& learned : LearnedTensors(*terms_, shape, TermTensors())) {
    values.push_back({std::move(learned.name), learned.value, learned.start});
  }
  return values;
}

}  // namespace gnomon::nn
