#include "ops/nn/module_terms.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <gnomon/attention.h>

#include <cmath>
#include <utility>

#include "base/kept.h"
#include "ops/attention/call_checks.h"
#include "ops/attention/compose.h"
#include "ops/attention/kept_tensor.h"
#include "ops/coordinates/token_grid.h"
#include "ops/coordinates/token_positions.h"
#include "ops/positions/content_tables.h"

namespace gnomon {
namespace {

using Use = ModuleTerms::Use;
using Setting = Use::Setting;

Use UseOf(const Component& component, const Parameter& parameter) {
  Use use{&parameter, parameter.tensor.learned ? Setting::kLearned : Setting::kFixed};
  use.is_given = component.IsTensor(parameter.name);
  if (!parameter.is_per_head()) return use;
  const std::optional<std::string> value = component.Find(parameter.name);
  if (!value) return use;
  if (*value == "learned") {
    use.setting = Setting::kLearned;
  } else if (*value == "fixed") {
    use.setting = Setting::kFixed;
  } else if (use.is_given) {
    use.setting = Setting::kTensor;
  } else {
    use.setting = Setting::kNumber;
    use.number = component.Number(parameter.name);
  }
  return use;
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
    const Use use = UseOf(component, *parameter);
    others.push_back(use.setting == Setting::kNumber
                         ? at::full({1}, use.number, options)
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

// Names the tensors of a module: a second component of a name is told apart by its number.
class TensorNames {
 public:
  std::string Next(const std::string& component, const std::string& parameter) {
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

ModuleTerms::ModuleTerms(const std::string& similarity, const std::string& position)
    : component_(std::make_shared<const Component>(Component::Parse(similarity))),
      text_("\"" + similarity + "\" and \"" + position + "\"") {
  similarity_ = &FindSimilarity(*component_);
  if (const Parameter* parameter = similarity_->head_parameter()) {
    head_ = UseOf(*component_, *parameter);
  }
  for (const Parameter* parameter : similarity_->other_head_parameters()) {
    others_.push_back(UseOf(*component_, *parameter));
  }
  for (Component& term : ParseSum(position)) {
    const PositionEntry& entry =
        FindPositionInAttention("gnomon.nn.MultiheadAttention", term, /*holds_tables=*/true);
    std::vector<Use> uses;
    for (const Parameter* parameter : entry.Tensors(term)) uses.push_back(UseOf(term, *parameter));
    const auto called = [&](bool both_ways) {
      Component component = term;
      component.SetDefault("bidirectional", both_ways ? "true" : "false");
      // A table of offsets is that of positions, of which a call has some.
      if (!term.Find("shape")) component.SetDefault("centred", "true");
      return std::make_shared<const Component>(std::move(component));
    };
    // Along the axes of a grid a token looks both ways even at those before it.
    const bool lies_on_grid = term.Find("shape").has_value();
    positions_.push_back({&entry, term, std::move(uses), called(lies_on_grid), called(true)});
  }
}

std::shared_ptr<const ModuleTerms> ModuleTerms::Of(const std::string& similarity,
                                                   const std::string& position) {
  static Kept<std::pair<std::string, std::string>, std::shared_ptr<const ModuleTerms>> known;
  return known.Get({similarity, position}, [&] {
    return std::shared_ptr<const ModuleTerms>(new ModuleTerms(similarity, position));
  });
}

std::shared_ptr<const Component> ModuleComponent(const std::string& spec) {
  static Kept<std::string, std::shared_ptr<const Component>> known;
  return known.Get(spec, [&] { return std::make_shared<const Component>(Component::Parse(spec)); });
}

at::Tensor LearnedNumber(const at::Tensor& start, const at::Tensor& theta) {
  return start * (theta * 5).exp();
}

double HeadParameterStart(const SimilarityEntry& entry, const Component& component,
                          int64_t head_dim) {
  // Calls of attention() ask for it, too.
  static Kept<std::pair<std::string, int64_t>, double> known;
  return known.Get({component.Text(), head_dim},
                   [&] { return 1.0 / LogitSpread(entry, component, head_dim); });
}

at::Tensor PositionStart(const Parameter& parameter, const Component& component,
                         const ModuleShape& shape, const at::Tensor& q) {
  const auto make = [&] {
    return parameter.tensor.start(component, shape).to(q.options().dtype(ComputingType(q)));
  };
  std::string key = component.Text() + "|" + parameter.name;
  for (const int64_t number : {shape.heads, shape.head_dim, shape.value_dim, shape.max_length}) {
    key.append("|").append(std::to_string(number));
  }
  return KeptTensor(key, q, make);
}

int64_t HeadColumns(const std::string& similarity, int64_t otherwise) {
  const int64_t columns = FindSimilarity(Component::Parse(similarity)).columns;
  return columns == 0 ? otherwise : columns;
}

std::vector<ModuleTensor> ModuleTensors(const ModuleTerms& terms, const ModuleShape& outer,
                                        at::TensorList given) {
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
  const Component& component = terms.component();
  const SimilarityEntry& entry = terms.similarity();
  shape.has_height = entry.HasHeight(component);
  entry.CheckColumns(component, head_dim, "gnomon.nn.MultiheadAttention", ": qk_dim is ");
  if (const std::optional<Use>& use = terms.head()) {
    const std::string& name = use->parameter->name;
    if (use->setting == Setting::kTensor) {
      take_heads(component.name(), name, name);
    } else if (use->setting != Setting::kNumber) {
      const double start = HeadParameterStart(entry, component, head_dim);
      tensors.push_back({name + "_start", at::scalar_tensor(start, theta.options()),
                         /*learned=*/false});
    }
    if (use->setting == Setting::kLearned) {
      tensors.push_back({name + "_theta", theta, /*learned=*/true});
    }
  }
  for (const Use& use : terms.others()) {
    const std::string& name = use.parameter->name;
    if (use.setting == Setting::kTensor) take_heads(component.name(), name, name);
    if (use.setting != Setting::kLearned) continue;
    use.parameter->tensor.start(component, shape);  // throws where it cannot be learned
    tensors.push_back({name + "_theta", theta.clone(), /*learned=*/true});
  }
  TensorNames names;
  for (const ModuleTerms::Position& position : terms.positions()) {
    const Component& term = position.component;
    TokenGrid::Find(term);  // throws for a mistake in it
    for (const Use& use : position.uses) {
      const Parameter* parameter = use.parameter;
      const std::string name = names.Next(term.name(), parameter->name);
      if (use.is_given) {
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
      } else if (use.setting == Setting::kLearned) {
        tensors.push_back({name + "_theta", theta.clone(), /*learned=*/true});
      }
    }
  }
  TORCH_CHECK_VALUE(next == given.size(), kName, ": ", given.size(), " tensors; expected ", next);
  return tensors;
}

std::vector<LearnedTensor> LearnedTensors(const ModuleTerms& terms, const ModuleShape& shape,
                                          at::TensorList tensors) {
  std::vector<LearnedTensor> learned;
  size_t next = 0;
  const auto take = [&] {
    TORCH_CHECK_VALUE(next < tensors.size(), "gnomon.nn: too few tensors for ", terms.text());
    return tensors[next++];
  };
  // A tensor that was given, unless it is a buffer.
  const auto take_given = [&](const std::string& name) {
    const at::Tensor tensor = take();
    if (tensor.requires_grad()) learned.push_back({name, tensor.detach(), std::nullopt});
  };
  const auto take_theta = [&](const Component& term, const Parameter& parameter,
                              const std::string& name) {
    const at::Tensor theta = take().detach();
    const at::Tensor start = parameter.tensor.start(term, shape).to(theta.options());
    learned.push_back({name, LearnedNumber(start, theta), start});
  };
  if (const std::optional<Use>& use = terms.head()) {
    const std::string& name = use->parameter->name;
    if (use->setting == Setting::kTensor) {
      take_given(name);
    } else if (use->setting != Setting::kNumber) {
      const at::Tensor start = take().detach();
      if (use->setting == Setting::kLearned) {
        const at::Tensor theta = take().detach();
        learned.push_back({name, LearnedNumber(start, theta), start.expand({shape.heads})});
      }
    }
  }
  for (const Use& use : terms.others()) {
    const std::string& name = use.parameter->name;
    if (use.setting == Setting::kTensor) take_given(name);
    if (use.setting == Setting::kLearned) take_theta(terms.component(), *use.parameter, name);
  }
  TensorNames names;
  for (const ModuleTerms::Position& position : terms.positions()) {
    const Component& term = position.component;
    for (const Use& use : position.uses) {
      const Parameter* parameter = use.parameter;
      const std::string name = names.Next(term.name(), parameter->name);
      if (use.is_given) {
        take_given(name);
      } else if (const auto& projection = parameter->tensor.projection) {
        // What it makes is of tokens, not of the module.
        take();
        if (projection->bias_start != nullptr) take();
      } else if (!parameter->is_per_head()) {
        learned.push_back({name, take().detach(), std::nullopt});
      } else if (use.setting == Setting::kLearned) {
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

std::vector<std::string> LayerPositions(const std::string& pattern) {
  std::vector<std::string> positions;
  for (size_t begin = 0; begin <= pattern.size();) {
    const size_t end = std::min(pattern.find_first_of(";,", begin), pattern.size());
    positions.push_back(pattern.substr(begin, end - begin));
    begin = end + 1;
  }
  return positions;
}

bool HasProjections(const std::string& position) {
  for (const Component& term : ParseSum(position)) {
    for (const Parameter* parameter : FindPosition(term).Tensors(term)) {
      if (parameter->tensor.projection && !term.IsTensor(parameter->name)) return true;
    }
  }
  return false;
}

ProjectedTensors ProjectTokens(const ModuleTerms& terms, int64_t heads, at::TensorList tensors,
                               const at::Tensor& query_tokens, const at::Tensor& key_tokens) {
  ProjectedTensors call;
  size_t next = 0;
  const auto take = [&]() -> const at::Tensor& {
    TORCH_CHECK_VALUE(next < tensors.size(), "gnomon.nn: too few tensors for ", terms.text());
    return tensors[next++];
  };
  const auto keep = [&](int64_t count) {
    for (int64_t n = 0; n < count; ++n) call.tensors.push_back(take());
  };
  if (const std::optional<Use>& use = terms.head()) {
    keep(use->setting == Setting::kNumber ? 0 : use->setting == Setting::kLearned ? 2 : 1);
  }
  const auto keep_value = [&](const Use& use) {
    keep(use.setting == Setting::kTensor || use.setting == Setting::kLearned ? 1 : 0);
  };
  for (const Use& use : terms.others()) keep_value(use);
  for (const ModuleTerms::Position& position : terms.positions()) {
    for (const Use& use : position.uses) {
      const auto& projection = use.parameter->tensor.projection;
      if (!projection || use.is_given) {
        if (use.parameter->is_per_head()) {
          keep_value(use);
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
                            const ModuleTerms& terms, at::TensorList tensors,
                            const CallArguments& arguments) {
  size_t next = 0;
  const auto take = [&] {
    TORCH_CHECK_VALUE(next < tensors.size(), "gnomon.nn: too few tensors for ", terms.text());
    const at::Tensor& tensor = tensors[next++];
    return AsParameter(tensor, q, "gnomon.nn: a parameter");
  };
  ResolvedTerms resolved{{&terms.similarity(), terms.shared_component(), {}, {}}, {}};
  if (const std::optional<Use>& use = terms.head()) {
    at::Tensor& value = resolved.similarity.head_parameter;
    switch (use->setting) {
      case Setting::kNumber:
        value = HeadNumber(q, use->number);
        break;
      case Setting::kFixed:
      case Setting::kTensor:
        value = take().expand({SizeOf(q, 1)});
        break;
      case Setting::kLearned: {
        const at::Tensor start = take();
        value = LearnedNumber(start, take());
        break;
      }
    }
  }
  const ModuleShape shape{SizeOf(q, 1), SizeOf(q, 3), value_dim, /*max_length=*/0};
  const auto head_value = [&](const Component& term, const Use& use) {
    if (use.setting == Setting::kNumber) return HeadNumber(q, use.number);
    if (use.setting == Setting::kTensor) return take().expand({shape.heads});
    const at::Tensor start = PositionStart(*use.parameter, term, shape, q);
    return use.setting == Setting::kLearned ? LearnedNumber(start, take()) : start;
  };
  for (const Use& use : terms.others()) {
    resolved.similarity.others.push_back(head_value(terms.component(), use));
  }
  for (const ModuleTerms::Position& position : terms.positions()) {
    if (position.entry->role() == PositionEntry::Role::kNone) continue;
    std::vector<at::Tensor> values;
    for (const Use& use : position.uses) {
      if (use.parameter->is_per_head()) {
        values.push_back(head_value(position.component, use));
        continue;
      }
      const at::Tensor held = take();
      const auto expand = use.parameter->tensor.expand;
      values.push_back(
          expand == nullptr ? held : expand(position.component, held, LengthsOf(q, k, arguments)));
    }
    resolved.positions.push_back({position.entry,
                                  arguments.causal ? position.causal : position.both_ways,
                                  std::move(values)});
  }
  return resolved;
}

at::Tensor ModuleAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const ModuleTerms& terms, at::TensorList tensors,
                           const CallArguments& arguments) {
  const WithoutAutocast guard;
  CheckTokens("gnomon.attention", q, k, v);
  const ResolvedTerms resolved = ResolveModule(q, k, SizeOf(v, 3), terms, tensors, arguments);
  return std::get<0>(Compose(q, k, v, resolved.similarity, resolved.positions, arguments));
}

}  // namespace gnomon
