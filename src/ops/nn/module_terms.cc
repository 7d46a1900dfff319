#include "ops/nn/module_terms.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <gnomon/attention.h>

#include <cmath>
#include <map>
#include <mutex>
#include <utility>

#include "ops/coordinates/token_grid.h"
#include "ops/coordinates/token_positions.h"
#include "ops/positions/content_tables.h"

namespace gnomon {
namespace {

// How a specification sets a parameter that has one value a head.
enum class Setting { kNumber, kFixed, kLearned, kTensor };

Setting SettingOf(const Component& component, const Parameter& parameter) {
  const std::optional<std::string> value = component.Find(parameter.name);
  if (!value) return parameter.tensor.learned ? Setting::kLearned : Setting::kFixed;
  if (*value == "learned") return Setting::kLearned;
  if (*value == "fixed") return Setting::kFixed;
  return *value == "tensor" ? Setting::kTensor : Setting::kNumber;
}

// How far the logits of one query lie apart, gamma or beta = 1, for N(0, 1) tokens: the root of the
// mean over queries of the variance over keys. Measured through the pair function, so that it holds
// for any similarity.
double LogitSpread(const SimilarityEntry& entry, const Component& component, int64_t head_dim) {
  constexpr int64_t kTokens = 256;
  constexpr uint64_t kSeed = 20230906;
  // Tracing and transforms of the caller are not about these tokens.
  const c10::impl::ExcludeDispatchKeyGuard plain(
      c10::python_ks |
      c10::DispatchKeySet({c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                           c10::DispatchKey::FuncTorchDynamicLayerBackMode,
                           c10::DispatchKey::FuncTorchVmapMode, c10::DispatchKey::Functionalize}));
  const at::Generator generator = at::detail::createCPUGenerator(kSeed);
  const at::TensorOptions options = at::TensorOptions().dtype(at::kDouble);
  const at::Tensor q = at::randn({1, 1, kTokens, head_dim}, generator, options);
  const at::Tensor k = at::randn({1, 1, kTokens, head_dim}, generator, options);
  std::vector<at::Tensor> others;
  for (const Parameter* parameter : entry.other_head_parameters()) {
    others.push_back(SettingOf(component, *parameter) == Setting::kNumber
                         ? at::full({1}, component.Number(parameter->name), options)
                         : parameter->tensor.start(component, {1, head_dim, 0, 0}).to(options));
  }
  const MappedTokens tokens = entry.map(component, q, k, {at::ones({1}, options), others});
  const PairFunction& function = FindPairFunction(tokens.function);

  at::Tensor inputs = at::zeros({kTokens, kTokens}, options);
  if (function.input == PairInput::kInnerProduct) {
    inputs = at::matmul(tokens.x, tokens.y.transpose(2, 3)).contiguous();
  } else if (function.input == PairInput::kSquaredDistance) {
    inputs = at::cdist(tokens.x, tokens.y).square().contiguous();
  }
  const double* g = inputs.const_data_ptr<double>();
  // (scalars, ...) as one row of scalars for each token, or for the head.
  const auto by_token = [](const at::Tensor& scalars) {
    return scalars.defined() ? scalars.reshape({scalars.size(0), -1}).t().contiguous() : scalars;
  };
  const at::Tensor rows = by_token(tokens.row_scalars);
  const at::Tensor columns = by_token(tokens.column_scalars);
  const at::Tensor heads = by_token(tokens.head_scalars);
  const auto scalars_of = [](const at::Tensor& scalars, int64_t token) {
    return scalars.defined() ? scalars.const_data_ptr<double>() + token * scalars.size(1) : nullptr;
  };
  double variance = 0;
  for (int64_t i = 0; i < kTokens; ++i) {
    double sum = 0;
    double squares = 0;
    for (int64_t j = 0; j < kTokens; ++j) {
      const double value = function.value(g[i * kTokens + j], scalars_of(rows, i),
                                          scalars_of(columns, j), scalars_of(heads, 0));
      sum += value;
      squares += value * value;
    }
    variance += squares / kTokens - (sum / kTokens) * (sum / kTokens);
  }
  return std::abs(tokens.factor.item<double>()) * std::sqrt(variance / kTokens);
}

// More specifications than any program of one kind of model has.
constexpr size_t kMostStarts = 1024;

// What a module's tensors are named: a second component of a name is told apart by its number.
class Namer {
 public:
  std::string Name(const std::string& component, const std::string& parameter) {
    std::string name = component + "_" + parameter;
    int count = 1;
    for (const std::string& used : used_) count += used == name;
    used_.push_back(name);
    return count == 1 ? name : component + std::to_string(count) + "_" + parameter;
  }

 private:
  std::vector<std::string> used_;
};

// The weights of a projection of tokens, and their starts.
std::vector<ModuleTensor> ProjectionTensors(const TokenProjection& projection,
                                            const Component& component, const std::string& name,
                                            const ModuleShape& shape) {
  const int64_t rows = shape.heads * projection.columns(component, shape);
  const int64_t dim = projection.of_keys ? shape.key_tokens : shape.query_tokens;
  if (projection.bias_start == nullptr) {
    return {{name + "_weight", RandomRows(Stream::kProjection, {rows}, dim), /*learned=*/true}};
  }
  const at::Tensor bias = projection.bias_start(shape.heads).to(at::kDouble);
  return {{name + "_weight", at::zeros({rows, dim}, bias.options()), /*learned=*/true},
          {name + "_bias", bias, /*learned=*/true}};
}

// AdamW moves every parameter by about its step size: the exponent gives a large tau the same
// relative step as a small slope.
at::Tensor LearnedValue(const at::Tensor& start, const at::Tensor& theta) {
  return start * (theta * 5).exp();
}

CallLengths LengthsOf(const at::Tensor& q, const at::Tensor& k, const CallArguments& arguments) {
  if (arguments.positions && arguments.positions->dim() > 0 && SizeOf(q, 2) * SizeOf(k, 2) > 0) {
    const at::Tensor& keys = arguments.key_positions.value_or(*arguments.positions);
    TORCH_CHECK_VALUE(keys.dim() > 0, "gnomon.attention: key_positions has shape ()");
    return {SizeOf(q, 2), SizeOf(k, 2), (arguments.positions->amax(-1) - keys.amin(-1)).max()};
  }
  int64_t offset = arguments.query_offset ? Concrete(*arguments.query_offset) : 0;
  if (arguments.query_offsets && arguments.query_offsets->numel() > 0) {
    offset = arguments.query_offsets->max().item<int64_t>();
  }
  return {SizeOf(q, 2) + offset, SizeOf(k, 2)};
}

}  // namespace

double HeadParameterStart(const SimilarityEntry& entry, const Component& component,
                          int64_t head_dim) {
  // Calls of attention() ask for it, too.
  static std::mutex mutex;
  static std::map<std::pair<std::string, int64_t>, double> known;
  const std::pair<std::string, int64_t> key(component.Text(), head_dim);
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (const auto found = known.find(key); found != known.end()) return found->second;
  }
  const double start = 1.0 / LogitSpread(entry, component, head_dim);
  const std::lock_guard<std::mutex> lock(mutex);
  known.emplace(key, start);
  return start;
}

at::Tensor PositionStart(const Parameter& parameter, const Component& component,
                         const ModuleShape& shape, const at::Tensor& q) {
  const auto make = [&] {
    return parameter.tensor.start(component, shape).to(q.options().dtype(ComputingType(q)));
  };
  // Where a call is traced or transformed, its tensors are its own.
  if (!HasNumbers(q)) return make();
  // Every forward pass of a module asks for it.
  static std::mutex mutex;
  static std::map<std::string, at::Tensor> known;
  std::string key = component.Text();
  for (const int64_t number : {shape.heads, shape.head_dim, shape.value_dim, shape.max_length,
                               static_cast<int64_t>(ComputingType(q))}) {
    key.append("|").append(std::to_string(number));
  }
  key.append("|").append(parameter.name).append("|").append(q.device().str());
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (const auto found = known.find(key); found != known.end()) return found->second;
  }
  // A tensor of inference mode would not serve a later call that records gradients.
  const c10::InferenceMode outside(false);
  const at::NoGradGuard no_grad;
  const at::Tensor start = make();
  const std::lock_guard<std::mutex> lock(mutex);
  if (known.size() >= kMostStarts) known.clear();
  known.emplace(std::move(key), start);
  return start;
}

int64_t HeadColumns(const std::string& similarity, int64_t otherwise) {
  const int64_t columns = FindSimilarity(Component::Parse(similarity)).columns;
  return columns == 0 ? otherwise : columns;
}

std::vector<ModuleTensor> ModuleTensors(const std::string& similarity, const std::string& position,
                                        const ModuleShape& outer, at::TensorList given) {
  constexpr const char* kName = "gnomon.nn.MultiheadAttention";
  ModuleShape shape = outer;
  std::vector<ModuleTensor> tensors;
  size_t next = 0;
  const auto take = [&](const std::string& term, const std::string& parameter,
                        const std::string& name) {
    TORCH_CHECK_VALUE(next < given.size(), kName, ": ", parameter, " of ", term, " is missing");
    const at::Tensor& tensor = given[next++];
    TORCH_CHECK_TYPE(tensor.is_floating_point(), kName, ": ", parameter, " of ", term,
                     " has dtype ", tensor.scalar_type(), "; expected a floating-point one");
    tensors.push_back({name, tensor, tensor.requires_grad()});
    return tensor;
  };
  const auto take_heads = [&](const std::string& term, const std::string& parameter,
                              const std::string& name) {
    const at::Tensor tensor = take(term, parameter, name);
    TORCH_CHECK_VALUE(tensor.dim() == 0 || (tensor.dim() == 1 && tensor.size(0) == shape.heads),
                      kName, ": ", parameter, " of ", term, " has shape ", tensor.sizes(),
                      "; expected (H,) = (", shape.heads, ",), or () for all heads");
  };
  const int64_t head_dim = shape.head_dim;
  const at::Tensor theta = at::zeros({shape.heads}, at::TensorOptions().dtype(at::kDouble));
  const Component component = Component::Parse(similarity);
  const SimilarityEntry& entry = FindSimilarity(component);
  shape.has_height = entry.HasHeight(component);
  entry.CheckColumns(component, head_dim, "gnomon.nn.MultiheadAttention: qk_dim is ");
  if (const Parameter* parameter = entry.head_parameter()) {
    const std::string& name = parameter->name;
    const Setting setting = SettingOf(component, *parameter);
    if (setting == Setting::kTensor) {
      take_heads(component.name(), name, name);
    } else if (setting != Setting::kNumber) {
      const double start = HeadParameterStart(entry, component, head_dim);
      tensors.push_back({name + "_start", at::scalar_tensor(start, theta.options()),
                         /*learned=*/false});
    }
    if (setting == Setting::kLearned) tensors.push_back({name + "_theta", theta, /*learned=*/true});
  }
  for (const Parameter* parameter : entry.other_head_parameters()) {
    const std::string& name = parameter->name;
    const Setting setting = SettingOf(component, *parameter);
    if (setting == Setting::kTensor) take_heads(component.name(), name, name);
    if (setting != Setting::kLearned) continue;
    parameter->tensor.start(component, shape);  // throws where it cannot be learned
    tensors.push_back({name + "_theta", theta.clone(), /*learned=*/true});
  }
  Namer namer;
  for (const Component& term : ParseSum(position)) {
    const PositionEntry& position_entry =
        FindPositionInAttention(kName, term, /*holds_tables=*/true);
    TokenGrid::Find(term);  // throws for a mistake in it
    for (const Parameter* parameter : position_entry.Tensors(term)) {
      const std::string name = namer.Name(term.name(), parameter->name);
      if (term.IsTensor(parameter->name)) {
        if (parameter->is_per_head()) {
          take_heads(term.name(), parameter->name, name);
        } else {
          take(term.name(), parameter->name, name);
        }
        continue;
      }
      if (const auto& projection = parameter->tensor.projection) {
        for (ModuleTensor& tensor : ProjectionTensors(*projection, term, name, shape)) {
          tensors.push_back(std::move(tensor));
        }
        continue;
      }
      const at::Tensor start = parameter->tensor.start(term, shape);
      if (!parameter->is_per_head()) {
        tensors.push_back({name, start, /*learned=*/true});
      } else if (SettingOf(term, *parameter) == Setting::kLearned) {
        tensors.push_back({name + "_theta", theta.clone(), /*learned=*/true});
      }
    }
  }
  TORCH_CHECK_VALUE(next == given.size(), kName, ": ", given.size(), " tensors; expected ", next);
  return tensors;
}

std::vector<LearnedTensor> LearnedTensors(const std::string& similarity,
                                          const std::string& position, const ModuleShape& shape,
                                          at::TensorList tensors) {
  std::vector<LearnedTensor> learned;
  size_t next = 0;
  const auto take = [&] {
    TORCH_CHECK_VALUE(next < tensors.size(), "gnomon.nn: too few tensors for \"", similarity,
                      "\" and \"", position, "\"");
    return tensors[next++];
  };
  // A tensor that was given, unless it is a buffer.
  const auto take_given = [&](const std::string& name) {
    const at::Tensor tensor = take();
    if (tensor.requires_grad()) learned.push_back({name, tensor.detach(), std::nullopt});
  };
  const Component component = Component::Parse(similarity);
  const SimilarityEntry& entry = FindSimilarity(component);
  const auto take_theta = [&](const Component& term, const Parameter& parameter,
                              const std::string& name) {
    const at::Tensor theta = take().detach();
    const at::Tensor start = parameter.tensor.start(term, shape).to(theta.options());
    learned.push_back({name, LearnedValue(start, theta), start});
  };
  if (const Parameter* parameter = entry.head_parameter()) {
    const std::string& name = parameter->name;
    const Setting setting = SettingOf(component, *parameter);
    if (setting == Setting::kTensor) {
      take_given(name);
    } else if (setting != Setting::kNumber) {
      const at::Tensor start = take().detach();
      if (setting == Setting::kLearned) {
        const at::Tensor theta = take().detach();
        learned.push_back({name, LearnedValue(start, theta), start.expand({shape.heads})});
      }
    }
  }
  for (const Parameter* parameter : entry.other_head_parameters()) {
    const Setting setting = SettingOf(component, *parameter);
    if (setting == Setting::kTensor) take_given(parameter->name);
    if (setting == Setting::kLearned) take_theta(component, *parameter, parameter->name);
  }
  Namer namer;
  for (const Component& term : ParseSum(position)) {
    for (const Parameter* parameter : FindPosition(term).Tensors(term)) {
      const std::string name = namer.Name(term.name(), parameter->name);
      if (term.IsTensor(parameter->name)) {
        take_given(name);
      } else if (const auto& projection = parameter->tensor.projection) {
        // What it makes is of tokens, not of the module.
        take();
        if (projection->bias_start != nullptr) take();
      } else if (!parameter->is_per_head()) {
        learned.push_back({name, take().detach(), std::nullopt});
      } else if (SettingOf(term, *parameter) == Setting::kLearned) {
        take_theta(term, *parameter, name);
      }
    }
  }
  return learned;
}

std::string AttentionPosition(const std::string& position) {
  std::string text;
  for (const Component& term : ParseSum(position)) {
    const PositionEntry::Role role = FindPosition(term).role();
    if (role == PositionEntry::Role::kEmbedding || role == PositionEntry::Role::kNone) continue;
    if (!text.empty()) text += '+';
    text += term.Text();
  }
  return text.empty() ? "none" : text;
}

bool HasProjections(const std::string& position) {
  for (const Component& term : ParseSum(position)) {
    for (const Parameter* parameter : FindPosition(term).Tensors(term)) {
      if (parameter->tensor.projection && !term.IsTensor(parameter->name)) return true;
    }
  }
  return false;
}

ProjectedTensors ProjectTokens(const std::string& similarity, const std::string& position,
                               int64_t heads, at::TensorList tensors,
                               const at::Tensor& query_tokens, const at::Tensor& key_tokens) {
  ProjectedTensors call;
  size_t next = 0;
  const auto take = [&]() -> const at::Tensor& {
    TORCH_CHECK_VALUE(next < tensors.size(), "gnomon.nn: too few tensors for \"", similarity,
                      "\" and \"", position, "\"");
    return tensors[next++];
  };
  const auto keep = [&](int64_t count) {
    for (int64_t n = 0; n < count; ++n) call.tensors.push_back(take());
  };
  const Component component = Component::Parse(similarity);
  const SimilarityEntry& entry = FindSimilarity(component);
  if (const Parameter* parameter = entry.head_parameter()) {
    const Setting setting = SettingOf(component, *parameter);
    keep(setting == Setting::kNumber ? 0 : setting == Setting::kLearned ? 2 : 1);
  }
  const auto keep_value = [&](const Component& term, const Parameter& parameter) {
    const Setting setting = SettingOf(term, parameter);
    keep(setting == Setting::kTensor || setting == Setting::kLearned ? 1 : 0);
  };
  for (const Parameter* parameter : entry.other_head_parameters()) {
    keep_value(component, *parameter);
  }
  for (const Component& term : ParseSum(position)) {
    for (const Parameter* parameter : FindPosition(term).Tensors(term)) {
      const auto& projection = parameter->tensor.projection;
      if (!projection || term.IsTensor(parameter->name)) {
        if (parameter->is_per_head()) {
          keep_value(term, *parameter);
        } else {
          keep(1);
        }
        continue;
      }
      const at::Tensor& tokens = projection->of_keys ? key_tokens : query_tokens;
      const at::Tensor& weight = take();
      const OptionalTensor bias =
          projection->bias_start == nullptr ? std::nullopt : OptionalTensor(take());
      const at::Tensor product =
          at::linear(tokens, weight, bias).unflatten(2, {heads, -1}).transpose(1, 2);
      // Gates are close to 1, and multiply: those of low precision would lose what they say.
      const at::Tensor computed = product.to(ComputingType(product));
      if (projection->of_keys) call.of_keys.push_back(static_cast<int64_t>(call.tensors.size()));
      call.tensors.push_back(projection->finish == nullptr ? computed
                                                           : projection->finish(computed));
    }
  }
  return call;
}

ResolvedTerms ResolveModule(const at::Tensor& q, const at::Tensor& k, int64_t value_dim,
                            const std::string& similarity, const std::string& position,
                            at::TensorList tensors, const CallArguments& arguments) {
  size_t next = 0;
  const auto take = [&] {
    TORCH_CHECK_VALUE(next < tensors.size(), "gnomon.nn: too few tensors for \"", similarity,
                      "\" and \"", position, "\"");
    const at::Tensor& tensor = tensors[next++];
    return AsParameter(tensor, q, "gnomon.nn: a parameter");
  };
  ResolvedSimilarity resolved_similarity{nullptr, Component::Parse(similarity), {}, {}};
  const Component& component = resolved_similarity.component;
  resolved_similarity.entry = &FindSimilarity(component);
  if (const Parameter* parameter = resolved_similarity.entry->head_parameter()) {
    at::Tensor& value = resolved_similarity.head_parameter;
    switch (SettingOf(component, *parameter)) {
      case Setting::kNumber:
        value = HeadNumber(q, component.Number(parameter->name));
        break;
      case Setting::kFixed:
      case Setting::kTensor:
        value = HeadNumber(q, 1) * take();
        break;
      case Setting::kLearned: {
        const at::Tensor start = take();
        value = LearnedValue(start, take());
        break;
      }
    }
  }
  const ModuleShape shape{SizeOf(q, 1), SizeOf(q, 3), value_dim, /*max_length=*/0};
  const auto head_value = [&](const Component& term, const Parameter& parameter) {
    const Setting setting = SettingOf(term, parameter);
    if (setting == Setting::kNumber) return HeadNumber(q, term.Number(parameter.name));
    if (setting == Setting::kTensor) return take().expand({shape.heads});
    const at::Tensor start = PositionStart(parameter, term, shape, q);
    return setting == Setting::kLearned ? LearnedValue(start, take()) : start;
  };
  for (const Parameter* parameter : resolved_similarity.entry->other_head_parameters()) {
    resolved_similarity.others.push_back(head_value(component, *parameter));
  }
  std::vector<ResolvedPosition> resolved;
  for (Component& term : ParseSum(position)) {
    const PositionEntry& entry =
        FindPositionInAttention("gnomon.nn.MultiheadAttention", term, /*holds_tables=*/true);
    if (entry.role() == PositionEntry::Role::kNone) continue;
    std::vector<at::Tensor> values;
    for (const Parameter* parameter : entry.Tensors(term)) {
      const TensorUse& use = parameter->tensor;
      if (!parameter->is_per_head()) {
        const at::Tensor held = take();
        values.push_back(use.expand ? use.expand(term, held, LengthsOf(q, k, arguments)) : held);
        continue;
      }
      values.push_back(head_value(term, *parameter));
    }
    // Along the axes of a grid a token looks both ways even at those before it.
    const bool both_ways = !arguments.causal || term.Find("shape");
    term.SetDefault("bidirectional", both_ways ? "true" : "false");
    // A table of offsets is that of positions, of which a call has some.
    if (!term.Find("shape")) term.SetDefault("centred", "true");
    resolved.push_back({&entry, std::move(term), std::move(values)});
  }
  return {std::move(resolved_similarity), std::move(resolved)};
}

at::Tensor ModuleAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const std::string& similarity, const std::string& position,
                           at::TensorList tensors, const CallArguments& arguments) {
  const WithoutAutocast guard;
  CheckTokens("gnomon.attention", q, k, v);
  const ResolvedTerms terms =
      ResolveModule(q, k, SizeOf(v, 3), similarity, position, tensors, arguments);
  return std::get<0>(Compose(q, k, v, terms.similarity, terms.positions, arguments));
}

}  // namespace gnomon
