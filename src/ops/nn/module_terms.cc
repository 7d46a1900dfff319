#include "ops/nn/module_terms.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <map>
#include <utility>

#include "base/kept.h"
#include "ops/attention/attention_weights.h"
#include "ops/attention/call_checks.h"
#include "ops/attention/compose.h"
#include "ops/attention/starts.h"
#include "ops/coordinates/token_grid.h"
#include "ops/operators/kept_tensor.h"
#include "ops/operators/tensors.h"
#include "ops/positions/content_tables.h"

namespace gnomon {
namespace {

using Use = ModuleTerms::Use;
using Setting = Use::Setting;

Use UseOf(const Component& component, const Parameter& parameter) {
  Use use{&parameter, parameter.tensor.learned ? Setting::kLearned : Setting::kFixed};
  use.is_given = component.IsTensor(parameter.name);
  if (!parameter.is_per_head()) return use;
  if (const std::optional<double> number = HeadNumberIn(component, parameter)) {
    use.setting = Setting::kNumber;
    use.number = *number;
  } else if (use.is_given) {
    use.setting = Setting::kTensor;
  } else if (const std::optional<std::string> value = component.Find(parameter.name)) {
    use.setting = *value == "learned" ? Setting::kLearned : Setting::kFixed;
  }
  return use;
}

// Where the weight (H columns, dim) and the bias (H,) of a projection of tokens start.
at::Tensor ProjectionStart(const TokenProjection& projection, const Component& component,
                           TensorPart part, const ModuleShape& shape) {
  const at::TensorOptions options = at::TensorOptions().dtype(at::kDouble);
  if (part == TensorPart::kBias) return projection.bias_start(shape.heads).to(options);
  const int64_t rows = shape.heads * projection.columns(component, shape);
  const int64_t dim = projection.of_keys ? shape.key_tokens : shape.query_tokens;
  return projection.bias_start == nullptr ? RandomRows(Stream::kProjection, {rows}, dim)
                                          : at::zeros({rows, dim}, options);
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

const char* PartName(TensorPart part) {
  constexpr std::array kNames = {"value", "start", "theta", "weight", "bias"};
  static_assert(kNames.size() == static_cast<size_t>(TensorPart::kBias) + 1);
  return kNames[static_cast<size_t>(part)];
}

std::string TensorName(const std::string& name, TensorPart part) {
  return part == TensorPart::kValue ? name : name + "_" + PartName(part);
}

ModuleTerms::ModuleTerms(const std::string& similarity, const std::string& position)
    : component_(std::make_shared<const Component>(Component::Parse(similarity))),
      text_("\"" + similarity + "\" and \"" + position + "\"") {
  similarity_ = &FindSimilarity(*component_);
  if (const Parameter* parameter = similarity_->head_parameter()) {
    head_ = UseOf(*component_, *parameter);
    head_->keeps_start = true;
    Place(*head_, parameter->name);
  }
  for (const Parameter* parameter : similarity_->other_head_parameters()) {
    Place(others_.emplace_back(UseOf(*component_, *parameter)), parameter->name);
  }
  std::map<std::string, int> names;
  for (Component& term : ParseSum(position)) {
    const PositionEntry& entry =
        FindPositionInAttention("gnomon.nn.MultiheadAttention", term, /*holds_tables=*/true);
    std::vector<Use> uses;
    for (const Parameter* parameter : entry.Tensors(term)) {
      // A second component of a name is told apart by its number.
      const int count = ++names[term.name() + "_" + parameter->name];
      Use& use = uses.emplace_back(UseOf(term, *parameter));
      use.component = static_cast<int64_t>(positions_.size());
      Place(use, term.name() + (count == 1 ? "" : std::to_string(count)) + "_" + parameter->name);
    }
    const auto called = [&](bool looks_ahead) {
      return std::make_shared<const Component>(
          entry.Complete(term, {.has_tables_of_positions = true, .looks_ahead = looks_ahead}));
    };
    // Along the axes of a grid a token looks both ways even at those before it.
    const bool lies_on_grid = term.Find("shape").has_value();
    positions_.push_back({&entry, term, std::move(uses), called(lies_on_grid), called(true)});
  }
}

void ModuleTerms::Place(Use& use, const std::string& name) {
  use.name = name;
  use.first = count_;
  use.first_of_call = count_of_call_;
  if (use.is_projected()) {
    use.parts = {TensorPart::kWeight};
    if (use.parameter->tensor.projection->bias_start != nullptr) {
      use.parts.push_back(TensorPart::kBias);
    }
  } else if (use.is_given || !use.parameter->is_per_head()) {
    use.parts = {TensorPart::kValue};
  } else if (use.setting != Setting::kNumber) {
    if (use.keeps_start) use.parts.push_back(TensorPart::kStart);
    if (use.setting == Setting::kLearned) use.parts.push_back(TensorPart::kTheta);
  }
  use.count_of_call = use.is_projected() ? 1 : use.parts.size();
  count_ += use.parts.size();
  count_of_call_ += use.count_of_call;
}

void ModuleTerms::CheckCount(at::TensorList tensors, bool of_call) const {
  const size_t expected = of_call ? count_of_call_ : count_;
  TORCH_CHECK_VALUE(tensors.size() == expected, "gnomon.nn: ", tensors.size(), " tensors for ",
                    text_, "; expected ", expected);
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

ModuleSizes SizesOfModule(const std::string& similarity, int64_t embed_dim, int64_t num_heads,
                          std::optional<int64_t> kv_heads, std::optional<int64_t> qk_dim,
                          std::optional<int64_t> kdim, std::optional<int64_t> vdim) {
  constexpr const char* kName = "gnomon.nn.MultiheadAttention: ";
  TORCH_CHECK_VALUE(num_heads >= 1 && embed_dim >= 1 && embed_dim % num_heads == 0, kName,
                    "embed_dim is ", embed_dim, " and num_heads ", num_heads,
                    "; expected a positive multiple");
  const int64_t columns = FindSimilarity(Component::Parse(similarity)).columns;
  const ModuleSizes sizes{
      .key_heads = kv_heads.value_or(num_heads),
      .head_dim = qk_dim.value_or(columns == 0 ? embed_dim / num_heads : columns),
      .key_dim = kdim.value_or(embed_dim),
      .value_dim = vdim.value_or(embed_dim)};
  TORCH_CHECK_VALUE(sizes.key_heads >= 1 && num_heads % sizes.key_heads == 0, kName, "kv_heads is ",
                    sizes.key_heads, "; expected a divisor of num_heads = ", num_heads);
  for (const auto& [name, size] :
       {std::pair("qk_dim", sizes.head_dim), std::pair("kdim", sizes.key_dim),
        std::pair("vdim", sizes.value_dim)}) {
    TORCH_CHECK_VALUE(size >= 1, kName, name, " is ", size, "; expected at least 1");
  }
  return sizes;
}

namespace {

// Whether a position came with a table, which may be that of calls of some lengths.
bool HasGivenTable(const ModuleTerms::Position& position) {
  return std::any_of(position.uses.begin(), position.uses.end(),
                     [](const Use& use) { return use.is_given && !use.parameter->is_per_head(); });
}

// Throws what every call of a module would: a call of no batches asks the terms all that they
// check.
void CheckCall(const ModuleTerms& terms, const ModuleShape& shape,
               const std::vector<ModuleTensor>& tensors) {
  const at::NoGradGuard no_grad;
  const auto ones = [](at::IntArrayRef sizes) {
    return at::ones(sizes, at::TensorOptions().dtype(at::kFloat).device(at::kCPU));
  };
  std::vector<Component> components;
  for (const ModuleTerms::Position& position : terms.positions()) {
    components.push_back(position.component);
  }
  const int64_t tokens = SmallestGrid(components).value_or(1);
  const auto heads_of = [&](int64_t columns) { return ones({0, shape.heads, tokens, columns}); };
  std::vector<at::Tensor> held;
  for (const ModuleTensor& tensor : tensors) held.push_back(ones(tensor.start.sizes()));
  const ProjectedTensors call =
      ProjectTokens(terms, shape.heads, held, ones({0, tokens, shape.query_tokens}),
                    ones({0, tokens, shape.key_tokens}));
  const auto attend = [&](bool causal) {
    CallArguments arguments;
    arguments.causal = causal;
    ModuleAttention(heads_of(shape.head_dim), heads_of(shape.head_dim), heads_of(shape.value_dim),
                    terms, call.tensors, arguments);
  };
  // Some terms need a causal mask, and of some the causal form has another range.
  try {
    attend(/*causal=*/true);
  } catch (const c10::Error&) {
    try {
      attend(/*causal=*/false);
    } catch (const c10::Error&) {
      // As the first one said.
      attend(/*causal=*/true);
    }
  }
}

// The same, once for equal modules, as the layers of a model are. It depends on no number of a
// tensor, given ones included: of all of them ones stand in.
void CheckCallOnce(const ModuleTerms& terms, const ModuleShape& shape,
                   const std::vector<ModuleTensor>& tensors) {
  std::vector<int64_t> sizes = {shape.heads,      shape.head_dim,     shape.value_dim,
                                shape.max_length, shape.query_tokens, shape.key_tokens};
  for (const ModuleTensor& tensor : tensors) {
    sizes.push_back(tensor.start.dim());
    sizes.insert(sizes.end(), tensor.start.sizes().begin(), tensor.start.sizes().end());
  }
  static Kept<std::pair<std::string, std::vector<int64_t>>, bool> known;
  known.Get({terms.text(), sizes}, [&] {
    CheckCall(terms, shape, tensors);
    return true;
  });
}

// The same of those positions that came without tables.
void CheckOthers(const ModuleTerms& terms, const std::string& positions, const ModuleShape& shape,
                 at::TensorList given) {
  std::vector<at::Tensor> kept;
  size_t next = 0;
  const auto take = [&](const Use& use, bool is_kept) {
    if (!use.is_given) return;
    if (is_kept) kept.push_back(given[next]);
    ++next;
  };
  if (terms.head()) take(*terms.head(), true);
  for (const Use& use : terms.others()) take(use, true);
  for (const ModuleTerms::Position& position : terms.positions()) {
    for (const Use& use : position.uses) take(use, !HasGivenTable(position));
  }
  ModuleTensors(*ModuleTerms::Of(terms.component().Text(), positions), shape, kept);
}

}  // namespace

std::vector<ModuleTensor> ModuleTensors(const ModuleTerms& terms, const ModuleShape& outer,
                                        at::TensorList given) {
  constexpr const char* kName = "gnomon.nn.MultiheadAttention";
  ModuleShape shape = outer;
  std::vector<ModuleTensor> tensors;
  size_t next = 0;
  const auto take = [&](const Component& term, const Parameter& parameter) {
    TORCH_CHECK_VALUE(next < given.size(), kName, ": ", parameter.name, " of ", term.name(),
                      " is missing");
    const at::Tensor& tensor = given[next++];
    TORCH_CHECK_TYPE(tensor.is_floating_point(), kName, ": ", parameter.name, " of ", term.name(),
                     " has dtype ", tensor.scalar_type(), "; expected a floating-point one");
    TORCH_CHECK_VALUE(!parameter.is_per_head() || tensor.dim() == 0 ||
                          (tensor.dim() == 1 && tensor.size(0) == shape.heads),
                      kName, ": ", parameter.name, " of ", term.name(), " has shape ",
                      tensor.sizes(), "; expected (H,) = (", shape.heads,
                      ",), or () for all heads");
    return tensor;
  };
  const SimilarityEntry& entry = terms.similarity();
  shape.has_height = entry.HasHeight(terms.component());
  entry.CheckColumns(terms.component(), shape.head_dim, kName, ": qk_dim is ");
  for (const ModuleTerms::Position& position : terms.positions()) {
    TokenGrid::Find(position.component);  // throws for a mistake in it
  }
  const at::TensorOptions options = at::TensorOptions().dtype(at::kDouble);
  terms.ForEachUse([&](const Component& term, const Use& use) {
    const Parameter& parameter = *use.parameter;
    if (parameter.is_per_head() && !use.is_given && !use.keeps_start &&
        use.setting != Setting::kNumber) {
      parameter.tensor.start(term, shape);  // throws where it cannot be learned
    }
    for (const TensorPart part : use.parts) {
      ModuleTensor tensor{TensorName(use.name, part), {}, /*learned=*/true};
      if (use.is_given) {
        tensor.start = take(term, parameter);
        tensor.learned = tensor.start.requires_grad();
      } else if (use.is_projected()) {
        tensor.start = ProjectionStart(*parameter.tensor.projection, term, part, shape);
      } else if (part == TensorPart::kStart) {
        const double start = HeadParameterStart(entry, term, shape.head_dim);
        tensor.start = at::scalar_tensor(start, options);
        tensor.learned = false;
      } else if (part == TensorPart::kTheta) {
        tensor.start = at::zeros({shape.heads}, options);
      } else {
        tensor.start = parameter.tensor.start(term, shape);
      }
      tensors.push_back(std::move(tensor));
    }
  });
  TORCH_CHECK_VALUE(next == given.size(), kName, ": ", given.size(), " tensors; expected ", next);
  std::string rest;
  bool is_whole = true;
  for (const ModuleTerms::Position& position : terms.positions()) {
    if (HasGivenTable(position)) {
      is_whole = false;
    } else {
      rest += (rest.empty() ? "" : "+") + position.component.Text();
    }
  }
  if (is_whole) {
    CheckCallOnce(terms, shape, tensors);
  } else {
    CheckOthers(terms, rest.empty() ? "none" : rest, outer, given);
  }
  return tensors;
}

std::vector<TensorOrigin> TensorOrigins(const ModuleTerms& terms) {
  std::vector<TensorOrigin> origins;
  terms.ForEachUse([&](const Component& term, const Use& use) {
    const auto holds_table = use.parameter->tensor.holds_table;
    for (const TensorPart part : use.parts) {
      const bool is_table =
          part == TensorPart::kValue && (holds_table == nullptr || holds_table(term));
      origins.push_back({TensorName(use.name, part), use.component, use.parameter, part,
                         is_table ? use.parameter->index : Index::kNone});
    }
  });
  return origins;
}

std::vector<LearnedTensor> LearnedTensors(const ModuleTerms& terms, const ModuleShape& shape,
                                          at::TensorList tensors) {
  terms.CheckCount(tensors, /*of_call=*/false);
  std::vector<LearnedTensor> learned;
  terms.ForEachUse([&](const Component& term, const Use& use) {
    // What a projection makes is of tokens, not of the module.
    if (use.parts.empty() || use.is_projected()) return;
    const at::Tensor last = tensors[use.first + use.parts.size() - 1];
    if (use.is_given) {
      // Unless it is a buffer.
      if (last.requires_grad()) learned.push_back({use.name, last.detach(), std::nullopt});
    } else if (!use.parameter->is_per_head()) {
      learned.push_back({use.name, last.detach(), std::nullopt});
    } else if (use.setting == Setting::kLearned) {
      const at::Tensor theta = last.detach();
      const at::Tensor start = use.keeps_start
                                   ? tensors[use.first].detach().expand({shape.heads})
                                   : use.parameter->tensor.start(term, shape).to(theta.options());
      learned.push_back({use.name, LearnedNumber(start, theta), start});
    }
  });
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

void CheckModule(const char* module, double dropout, double tolerance, bool sink,
                 const std::string& position) {
  CheckDropoutRate(module, dropout);
  CheckTolerance(module, tolerance);
  if (!sink) return;
  for (const Component& term : ParseSum(position)) {
    TORCH_CHECK_VALUE(FindPosition(term).role() != PositionEntry::Role::kSink, module,
                      ": sink is set, and position has one; expected one of them");
  }
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
  terms.CheckCount(tensors, /*of_call=*/false);
  ProjectedTensors call;
  terms.ForEachUse([&](const Component& /*term*/, const Use& use) {
    if (!use.is_projected()) {
      for (size_t n = 0; n < use.parts.size(); ++n) call.tensors.push_back(tensors[use.first + n]);
      return;
    }
    const TokenProjection& projection = *use.parameter->tensor.projection;
    const at::Tensor& tokens = projection.of_keys ? key_tokens : query_tokens;
    const OptionalTensor bias =
        use.parts.size() == 1 ? std::nullopt : OptionalTensor(tensors[use.first + 1]);
    const at::Tensor product =
        at::linear(tokens, tensors[use.first], bias).unflatten(2, {heads, -1}).transpose(1, 2);
    // Gates are close to 1, and multiply: those of low precision would lose what they say.
    const at::Tensor computed = product.to(ComputingType(product));
    if (projection.of_keys) call.of_keys.push_back(static_cast<int64_t>(call.tensors.size()));
    call.tensors.push_back(projection.finish == nullptr ? computed : projection.finish(computed));
  });
  return call;
}

namespace {

// A parameter with one value per head (H,) for a call of q, from the call's tensors in the
// computing type.
at::Tensor PerHeadValue(const at::Tensor& q, const Component& term, const Use& use,
                        const ModuleShape& shape, const std::vector<at::Tensor>& held) {
  if (use.setting == Setting::kNumber) return HeadNumber(q, use.number);
  if (use.setting == Setting::kTensor) return held[use.first_of_call].expand({shape.heads});
  const at::Tensor start =
      use.keeps_start ? held[use.first_of_call] : PositionStart(*use.parameter, term, shape, q);
  if (use.setting == Setting::kLearned) {
    return LearnedNumber(start, held[use.first_of_call + use.count_of_call - 1]);
  }
  return use.keeps_start ? start.expand({shape.heads}) : start;
}

}  // namespace

ResolvedTerms ResolveModule(const at::Tensor& q, const at::Tensor& k, int64_t value_dim,
                            const ModuleTerms& terms, at::TensorList tensors,
                            const CallArguments& arguments) {
  terms.CheckCount(tensors, /*of_call=*/true);
  const ModuleShape shape{SizeOf(q, 1), SizeOf(q, 3), value_dim, /*max_length=*/0};
  std::vector<at::Tensor> held;
  for (const at::Tensor& tensor : tensors) {
    held.push_back(AsParameter(tensor, q, "gnomon.nn: a parameter"));
  }
  ResolvedTerms resolved{{&terms.similarity(), terms.shared_component(), {}, {}}, {}};
  if (const std::optional<Use>& use = terms.head()) {
    resolved.similarity.head_parameter = PerHeadValue(q, terms.component(), *use, shape, held);
  }
  for (const Use& use : terms.others()) {
    resolved.similarity.others.push_back(PerHeadValue(q, terms.component(), use, shape, held));
  }
  for (const ModuleTerms::Position& position : terms.positions()) {
    if (position.entry->role() == PositionEntry::Role::kNone) continue;
    std::vector<at::Tensor> values;
    for (const Use& use : position.uses) {
      if (use.parameter->is_per_head()) {
        values.push_back(PerHeadValue(q, position.component, use, shape, held));
        continue;
      }
      const at::Tensor& table = held[use.first_of_call];
      const auto expand = use.parameter->tensor.expand;
      values.push_back(expand == nullptr
                           ? table
                           : expand(position.component, table, LengthsOf(q, k, arguments)));
    }
    resolved.positions.push_back({position.entry,
                                  arguments.causal ? position.causal : position.both_ways,
                                  std::move(values), /*of_module=*/true});
  }
  return resolved;
}

std::vector<at::Tensor> SimilarityTensors(const at::Tensor& q, const ModuleTerms& terms,
                                          at::TensorList tensors) {
  const WithoutAutocast guard;
  terms.CheckCount(tensors, /*of_call=*/true);
  const ModuleShape shape{SizeOf(q, 1), SizeOf(q, 3), /*value_dim=*/0, /*max_length=*/0};
  std::vector<at::Tensor> held;
  for (const at::Tensor& tensor : tensors) held.push_back(tensor.to(ComputingType(q)));
  std::vector<at::Tensor> values;
  terms.ForEachUse([&](const Component& term, const Use& use) {
    if (!use.parts.empty()) values.push_back(PerHeadValue(q, term, use, shape, held));
  });
  return values;
}

at::Tensor ModuleAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const ModuleTerms& terms, at::TensorList tensors,
                           const CallArguments& arguments) {
  const WithoutAutocast guard;
  CheckTokens("gnomon.attention", q, k, v);
  const ResolvedTerms resolved = ResolveModule(q, k, SizeOf(v, 3), terms, tensors, arguments);
  return std::get<0>(Compose(q, k, v, resolved.similarity, resolved.positions, arguments));
}

at::Tensor ModuleAttentionWeights(const at::Tensor& q, const at::Tensor& k,
                                  const std::vector<int64_t>& rows, const ModuleTerms& terms,
                                  at::TensorList tensors, int64_t value_dim,
                                  const CallArguments& arguments) {
  const WithoutAutocast guard;
  CheckTokens("gnomon.attention_weights", q, k, k);
  ResolvedTerms resolved = ResolveModule(q, k, value_dim, terms, tensors, arguments);
  return AttentionWeights(q, k, rows, resolved.similarity, std::move(resolved.positions),
                          arguments);
}

}  // namespace gnomon
