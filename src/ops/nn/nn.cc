#include <gnomon/torch/nn.h>

#include <torch/nn/init.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <map>
#include <memory>
#include <utility>

#include "ops/attention/attention.h"
#include "ops/attention/attention_weights.h"
#include "ops/attention/options.h"
#include "ops/coordinates/token_grid.h"
#include "ops/nn/module_terms.h"
#include "ops/nn/token_encoding.h"

namespace gnomon::nn {
namespace {

torch::Tensor AsDefaultDtype(const torch::Tensor& tensor) {
  return tensor.to(torch::get_default_dtype());
}

ModuleSizes SizesOf(const MultiheadAttentionOptions& options) {
  return SizesOfModule(options.similarity().spec, options.embed_dim(), options.num_heads(),
                       options.kv_heads(), options.qk_dim(), options.kdim(), options.vdim());
}

// What was read of its specifications when it was built.
std::shared_ptr<const ModuleTerms> TermsOf(const MultiheadAttentionOptions& options) {
  return ModuleTerms::Of(options.similarity().spec, options.position().spec);
}

// (B, L, heads columns) to (B, heads, L, columns).
torch::Tensor Heads(const torch::Tensor& projected, int64_t count) {
  return projected.unflatten(2, {count, -1}).transpose(1, 2);
}

void Check(const MultiheadAttentionOptions& options) {
  SizesOf(options);  // throws unless they fit together
  CheckModule("gnomon.nn.MultiheadAttention", options.dropout(), options.tolerance(),
              options.sink(), options.position().spec);
}

// Adds to embeddings what each makes of them.
torch::Tensor AddEncodings(const std::vector<TokenEncodingImpl*>& encodings,
                           const torch::Tensor& embeddings, const TokenCall& call) {
  TORCH_CHECK_VALUE(!call.cache || !call.lengths,
                    "gnomon.nn: lengths and a cache are both given; expected lengths in a call of "
                    "all tokens, without a cache");
  TORCH_CHECK_VALUE(!call.positions || !call.offset,
                    "gnomon.nn: positions and offset are both given; expected one of them");
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

// Whether tokens can be copied behind those that are kept.
bool HaveOneForm(const std::vector<torch::Tensor*>& kept, const std::vector<torch::Tensor>& fresh) {
  for (size_t n = 0; n < kept.size(); ++n) {
    const torch::Tensor& before = *kept[n];
    const torch::Tensor& after = fresh[n];
    std::vector<int64_t> sizes = after.sizes().vec();
    if (before.dim() != after.dim() || before.numel() == 0 ||
        before.scalar_type() != after.scalar_type() || before.device() != after.device()) {
      return false;
    }
    sizes[2] = before.size(2);
    if (before.sizes() != sizes || after.size(2) != fresh[0].size(2) ||
        before.size(2) != kept[0]->size(2)) {
      return false;
    }
  }
  return true;
}

void CheckEmbeddings(const char* name, const torch::Tensor& embeddings, int64_t dim) {
  TORCH_CHECK_VALUE(embeddings.dim() == 3 && embeddings.size(2) == dim, "gnomon.nn.", name,
                    ": embeddings have shape ", embeddings.sizes(), "; expected (B, L, ", dim, ")");
}

}  // namespace

std::string attention_position(const std::string& position) { return AttentionPosition(position); }

std::vector<std::string> layer_positions(const std::string& pattern) {
  return LayerPositions(pattern);
}

torch::Tensor learned_number(const torch::Tensor& start, const torch::Tensor& theta) {
  return LearnedNumber(start, theta);
}

// Tensors (B, H, places, ...), the first places of which are taken.
struct KVCache::Room {
  // Half as many places again as the tokens of `kept` and `more` need; those of `kept` are copied.
  Room(const std::vector<torch::Tensor*>& kept, int64_t more) {
    const int64_t count = kept[0]->size(2);
    for (torch::Tensor* tensor : kept) {
      std::vector<int64_t> sizes = tensor->sizes().vec();
      sizes[2] = (count + more) + (count + more) / 2;
      const torch::Tensor whole = torch::empty(sizes, tensor->options());
      whole.narrow(2, 0, count).copy_(*tensor);
      *tensor = whole.narrow(2, 0, count);
      tensors.push_back(whole);
    }
    taken = count;
  }

  // The first of `more` places behind those of `kept`, which nobody else then gets; none where
  // `kept` is not here, somebody has taken them, or there are too few.
  std::optional<int64_t> Take(const std::vector<torch::Tensor*>& kept, int64_t more) {
    int64_t end = taken;
    if (kept.size() != tensors.size() || end + more > tensors[0].size(2)) return std::nullopt;
    for (size_t n = 0; n < kept.size(); ++n) {
      const torch::Tensor& whole = tensors[n];
      const int64_t first = end - kept[n]->size(2);
      const bool is_here =
          first >= 0 && kept[n]->is_alias_of(whole) &&
          whole.is_inference() == at::InferenceMode::is_enabled() &&
          kept[n]->strides() == whole.strides() &&
          kept[n]->storage_offset() == whole.storage_offset() + first * whole.stride(2);
      if (!is_here) return std::nullopt;
    }
    if (!taken.compare_exchange_strong(end, end + more)) return std::nullopt;
    return end;
  }

  std::vector<torch::Tensor> tensors;
  std::atomic<int64_t> taken;
};

void KVCache::append(const torch::Tensor& new_k, const torch::Tensor& new_v,
                     const std::vector<torch::Tensor>& new_projections,
                     const torch::Tensor& new_positions) {
  if (!k.defined()) {
    k = new_k;
    v = new_v;
    projections = new_projections;
    positions = new_positions;
    return;
  }
  TORCH_CHECK_VALUE(!positions.defined() || new_positions.defined(),
                    "gnomon.nn.KVCache: it has positions of its tokens; expected those of the "
                    "tokens that it takes");
  TORCH_CHECK_VALUE(projections.size() == new_projections.size(), "gnomon.nn.KVCache: it has ",
                    projections.size(), " projections and takes ", new_projections.size(),
                    "; expected the same number");
  if (new_positions.defined()) {
    torch::Tensor known =
        positions.defined() ? positions : torch::arange(length(), new_positions.options());
    torch::Tensor fresh = new_positions;
    if (fresh.dim() == 3) {
      // Coordinates: those of all batches beside those of each.
      TORCH_CHECK_VALUE(known.dim() == 3 && known.size(2) == fresh.size(2),
                        "gnomon.nn.KVCache: its tokens have positions of another number of axes; "
                        "expected positions as those of the first tokens");
      if (known.size(0) != fresh.size(0)) {
        known = known.expand({new_k.size(0), -1, -1});
        fresh = fresh.expand({new_k.size(0), -1, -1});
      }
      positions = torch::cat({known, fresh}, 1);
    } else {
      TORCH_CHECK_VALUE(known.dim() < 3,
                        "gnomon.nn.KVCache: its tokens have positions of several axes; expected "
                        "positions as those of the first tokens");
      // Positions of all batches beside those of each.
      for (torch::Tensor* one : {&known, &fresh}) {
        if (one->dim() < std::max(known.dim(), fresh.dim())) {
          *one = one->expand({new_k.size(0), one->size(-1)});
        }
      }
      positions = torch::cat({known, fresh}, -1);
    }
  }
  std::vector<torch::Tensor*> kept = {&k, &v};
  std::vector<torch::Tensor> fresh = {new_k, new_v};
  for (torch::Tensor& projection : projections) kept.push_back(&projection);
  fresh.insert(fresh.end(), new_projections.begin(), new_projections.end());
  // What a backward pass reads must stay as it is.
  const bool in_place =
      !at::GradMode::is_enabled() &&
      std::all_of(kept.begin(), kept.end(),
                  [](const torch::Tensor* tensor) { return tensor->has_storage(); }) &&
      HaveOneForm(kept, fresh);
  if (!in_place) {
    for (size_t n = 0; n < kept.size(); ++n) *kept[n] = torch::cat({*kept[n], fresh[n]}, 2);
    room_.reset();
    return;
  }
  const int64_t more = new_k.size(2);
  std::optional<int64_t> end = room_ == nullptr ? std::nullopt : room_->Take(kept, more);
  if (!end) {
    room_ = std::make_shared<Room>(kept, more);
    end = room_->Take(kept, more);
  }
  for (size_t n = 0; n < kept.size(); ++n) {
    const torch::Tensor& whole = room_->tensors[n];
    whole.narrow(2, *end, more).copy_(fresh[n]);
    const int64_t count = kept[n]->size(2) + more;
    *kept[n] = whole.narrow(2, *end + more - count, count);
  }
}

void KVCache::keep_last(int64_t length) {
  const int64_t forgotten = this->length() - length;
  if (forgotten <= 0) return;
  const auto keep = [&](torch::Tensor* tensor, int64_t axis) {
    *tensor = tensor->narrow(axis, forgotten, length);
  };
  keep(&k, 2);
  keep(&v, 2);
  for (torch::Tensor& projection : projections) keep(&projection, 2);
  if (positions.defined()) keep(&positions, positions.dim() == 3 ? 1 : positions.dim() - 1);
}

void KVCache::reset() {
  room_.reset();
  k = torch::Tensor();
  v = torch::Tensor();
  projections.clear();
  positions = torch::Tensor();
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
  term_names_.clear();
  const ModuleShape shape{options.num_heads(),  sizes.head_dim, value_dim,
                          options.max_length(), embed_dim,      sizes.key_dim};
  has_projections_ = HasProjections(options.position().spec);
  std::vector<torch::Tensor> given = options.similarity().tensors;
  given.insert(given.end(), options.position().tensors.begin(), options.position().tensors.end());
  for (const ModuleTensor& tensor : ModuleTensors(*TermsOf(options), shape, given)) {
    // A copy also where the dtype is that already: a clone has parameters of its own.
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

namespace {

// The rest is the module's to say, or as it is by default.
static_assert(SaysAllBut<AttentionCall>({"scale", "dropout", "seed", "aggregation", "sink",
                                         "temperature", "tolerance"}));

// What a call of a module says to the operator. Where it has a cache, k and v become those of the
// cache and the call's own, and `joined` what the cache is to hold once nothing can be refused any
// more. query and key (B, L, ...) are the call's own tokens, of_keys what else a position computes
// from the keys.
CallArguments JoinCache(const char* module, const AttentionCall& call, const torch::Tensor& query,
                        const torch::Tensor& key, const std::vector<torch::Tensor>& of_keys,
                        torch::Tensor& k, torch::Tensor& v, KVCache& joined) {
  CallArguments arguments = ArgumentsOf(call);
  if (call.positions && !call.key_positions) {
    TORCH_CHECK_VALUE(query.size(1) == key.size(1), "gnomon.nn.", module,
                      ": key_positions is nullopt, query has ", query.size(1), " tokens and key ",
                      key.size(1), "; expected the positions of the keys");
    arguments.key_positions = call.positions;
  }
  if (call.cache == nullptr) return arguments;
  // Positions of several axes do not say what a query sees.
  const bool says_order = call.positions && call.positions->dim() < 3;
  if (!call.query_offset && !call.query_offsets && !says_order) {
    arguments.query_offset = call.cache->length();
  }
  joined = *call.cache;
  joined.append(k, v, of_keys, arguments.key_positions.value_or(torch::Tensor()));
  if (joined.positions.defined()) arguments.key_positions = joined.positions;
  k = joined.k;
  v = joined.v;
  // Of padding on the left there may be more than keys so far.
  if (arguments.key_starts) arguments.key_starts = arguments.key_starts->clamp_max(k.size(2));
  return arguments;
}

}  // namespace

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
    terms = ProjectTokens(*TermsOf(options), options.num_heads(), terms.tensors, query, keys);
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
  const torch::Tensor o = ModuleAttention(q, k, v, *TermsOf(options), terms.tensors, arguments);
  if (call.cache) *call.cache = joined;
  torch::Tensor joined_heads = o.transpose(1, 2).flatten(2);
  if (options.gate()) joined_heads = joined_heads * gate_proj(query).sigmoid();
  return out_proj(joined_heads);
}

torch::Tensor MultiheadAttentionImpl::attention_weights(const torch::Tensor& query,
                                                        const torch::Tensor& key,
                                                        const std::vector<int64_t>& rows,
                                                        const AttentionCall& call) {
  TORCH_CHECK_VALUE(call.cache == nullptr,
                    "MultiheadAttention.attention_weights: a cache is given, expected none");
  const torch::Tensor& keys = key.defined() ? key : query;
  CheckEmbeddings("MultiheadAttention", query, options.embed_dim());
  CheckEmbeddings("MultiheadAttention", keys, k_proj->options.in_features());
  const auto [q, k] = QueriesAndKeys(query, keys);
  std::vector<torch::Tensor> tensors = TermTensors();
  if (has_projections_) {
    tensors = ProjectTokens(*TermsOf(options), options.num_heads(), tensors, query, keys).tensors;
  }
  CallArguments arguments = ArgumentsOf(call);
  if (options.sink()) arguments.sink = sink;
  return ModuleAttentionWeights(q, k, rows, *TermsOf(options), tensors,
                                options.embed_dim() / options.num_heads(), arguments);
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
  for (LearnedTensor& learned : LearnedTensors(*TermsOf(options), shape, TermTensors())) {
    values.push_back({std::move(learned.name), learned.value, learned.start});
  }
  return values;
}

LorentzMultiheadAttentionImpl::LorentzMultiheadAttentionImpl(
    const LorentzMultiheadAttentionOptions& options_)
    : options(options_) {
  constexpr const char* kName = "gnomon.nn.LorentzMultiheadAttention: ";
  TORCH_CHECK_VALUE(options.in_channels() >= 1 && options.num_heads() >= 1, kName,
                    "in_channels is ", options.in_channels(), " and num_heads ",
                    options.num_heads(), "; expected at least 1");
  TORCH_CHECK_VALUE(options.out_channels() >= 2, kName, "out_channels is ", options.out_channels(),
                    "; expected at least 2");
  TORCH_CHECK_VALUE(options.use_weight() || options.in_channels() == options.out_channels(), kName,
                    "use_weight is false, in_channels ", options.in_channels(),
                    " and out_channels ", options.out_channels(), "; expected the same number");
  TORCH_CHECK_VALUE(options.c() > 0, kName, "c is ", options.c(), "; expected a positive number");
  CheckDropoutRate("gnomon.nn.LorentzMultiheadAttention", options.dropout());
  reset();
}

void LorentzMultiheadAttentionImpl::reset() {
  const int64_t tokens = options.num_heads() * options.in_channels();
  const int64_t space = options.num_heads() * (options.out_channels() - 1);
  const int64_t columns = options.num_heads() * options.out_channels();
  Wk = register_module("Wk", torch::nn::Linear(tokens, space));
  Wq = register_module("Wq", torch::nn::Linear(tokens, space));
  if (options.use_weight()) Wv = register_module("Wv", torch::nn::Linear(tokens, space));
  scale = register_parameter("scale", torch::full({1}, std::sqrt(static_cast<double>(columns)),
                                                  torch::get_default_dtype()));
  bias = register_parameter("bias", torch::zeros({}));
  if (options.trans_heads_concat()) {
    final_linear = register_module("final_linear", torch::nn::Linear(columns, columns - 1));
  }
  if (options.learned_c()) {
    c = register_parameter("c", torch::scalar_tensor(options.c(), torch::get_default_dtype()));
  }
}

torch::Tensor LorentzMultiheadAttentionImpl::forward(const torch::Tensor& query,
                                                     const torch::Tensor& source_or_none,
                                                     const AttentionCall& call) {
  const torch::Tensor& source = source_or_none.defined() ? source_or_none : query;
  const int64_t tokens = options.num_heads() * options.in_channels();
  CheckEmbeddings("LorentzMultiheadAttention", query, tokens);
  CheckEmbeddings("LorentzMultiheadAttention", source, tokens);
  const auto heads = [&](const torch::Tensor& columns) {
    return columns.unflatten(2, {options.num_heads(), -1}).transpose(1, 2);
  };
  const HeadValue curvature = options.learned_c() ? HeadValue(c) : HeadValue(options.c());
  torch::Tensor q = heads(Wq(query));
  torch::Tensor k = heads(Wk(source));
  if (options.normalize()) {
    q = q / q.norm(2, {-1}, /*keepdim=*/true);
    k = k / k.norm(2, {-1}, /*keepdim=*/true);
  }
  torch::Tensor v =
      options.use_weight() ? lorentz::lift(heads(Wv(source)), curvature) : heads(source);
  KVCache joined;
  CallArguments arguments =
      JoinCache("LorentzMultiheadAttention", call, query, source, /*of_keys=*/{}, k, v, joined);
  arguments.aggregation = "lorentz_centroid";
  if (is_training()) arguments.dropout = options.dropout();
  const Outputs outputs =
      AttentionOfTerms(q, k, v, similarity::Lorentz(1 / scale.reshape({}), curvature, bias),
                       options.position(), arguments, /*returns_lse=*/false);
  const torch::Tensor o = std::get<0>(outputs).transpose(1, 2);
  if (call.cache) *call.cache = joined;
  if (!options.trans_heads_concat()) return lorentz::centroid(o, curvature);
  return lorentz::lift(final_linear(o.flatten(2)), curvature);
}

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
                      {embeddings, call.positions ? 0 : offset, is_training(), call.lengths, known,
                       call.generator, call.rows, call.positions});
}

torch::Tensor TokenEncodingImpl::forward(const torch::Tensor& embeddings, const TokenCall& call) {
  return AddEncodings({this}, embeddings, call);
}

TokenPositionImpl::TokenPositionImpl(const TokenPositionOptions& options_) : options(options_) {
  reset();
}

void TokenPositionImpl::reset() {
  // Of positions in attention, too, such as a grid of alibi's.
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

}  // namespace gnomon::nn
