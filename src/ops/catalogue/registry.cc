#include "ops/catalogue/registry.h"

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <shared_mutex>
#include <stdexcept>
#include <utility>

#include <ATen/ATen.h>

#include "gnomon/attention.h"
#include "ops/coordinates/token_grid.h"

namespace gnomon {
namespace {

using Kind = CatalogueParameter::Kind;
using Role = CatalogueEntry::Role;

// Entries stay where they are once they are added.
template <class Entry>
class Registry {
 public:
  const Entry* Find(const std::string& name) const {
    const std::shared_lock<std::shared_mutex> lock(mutex_);
    const auto found = by_name_.find(name);
    return found == by_name_.end() ? nullptr : found->second;
  }

  void Add(Entry entry) {
    const std::unique_lock<std::shared_mutex> lock(mutex_);
    entries_.push_back(std::move(entry));
    const Entry& added = entries_.back();
    by_name_.emplace(added.catalogue.name, &added);
  }

  // In the order of the catalogue.
  std::vector<const Entry*> All() const {
    std::vector<const Entry*> all;
    {
      const std::shared_lock<std::shared_mutex> lock(mutex_);
      for (const auto& [name, entry] : by_name_) all.push_back(entry);
    }
    const auto rank = [](const Entry* entry) {
      return std::pair(entry->catalogue.role, entry->catalogue.name != "dot");
    };
    std::stable_sort(all.begin(), all.end(),
                     [&](const Entry* a, const Entry* b) { return rank(a) < rank(b); });
    return all;
  }

 private:
  mutable std::shared_mutex mutex_;
  std::deque<Entry> entries_;
  std::map<std::string, const Entry*> by_name_;
};

// Made when the first entry comes, which is before main.
Registry<SimilarityEntry>& Similarities() {
  static Registry<SimilarityEntry> registry;
  return registry;
}
Registry<PositionEntry>& Positions() {
  static Registry<PositionEntry> registry;
  return registry;
}

// What RegisterTogether has collected so far.
struct Collection {
  std::string library;
  std::vector<const PairFunction*> functions;
  std::vector<SimilarityEntry> similarities;
  std::vector<PositionEntry> positions;
};

// That of the RegisterTogether which runs in this thread, or null.
thread_local Collection* collecting = nullptr;

bool HasPairFunction(const std::string& name) {
  try {
    FindPairFunction(name);
  } catch (const Error&) {
    return false;
  }
  return true;
}

template <class Entry>
Entry Completed(Entry entry) {
  for (Parameter& parameter : entry.parameters) {
    parameter.of_call = parameter.kind == Kind::kTable && !parameter.tensor.HasStart();
  }
  entry.catalogue.parameters.assign(entry.parameters.begin(), entry.parameters.end());
  return entry;
}

// What an entry lacks of what its role asks for, "a function `rotate`"; empty: nothing.
std::string LackOf(const SimilarityEntry& entry) {
  return entry.map == nullptr ? "a function `map`" : "";
}
std::string LackOf(const PositionEntry& entry) {
  const auto lacks = [](const auto function, const char* name) {
    return function == nullptr ? std::string("a function `") + name + "`" : "";
  };
  const auto lacks_table = [&]() -> std::string {
    for (const Parameter& parameter : entry.parameters) {
      if (!parameter.takes_tensor) continue;
      if (parameter.kind == Kind::kTable && parameter.tensor.present == nullptr) return "";
      break;
    }
    return "a table that is always there as its first tensor";
  };
  switch (entry.role()) {
    case Role::kBias:
    case Role::kPairBias:
      return lacks(entry.bias, "bias");
    case Role::kKeyBias:
      return entry.bias == nullptr ? lacks(entry.bias, "bias") : lacks_table();
    case Role::kRotation:
      return lacks(entry.rotate, "rotate");
    case Role::kEmbedding:
      return lacks(entry.encoder, "encoder");
    case Role::kContent:
      return lacks(entry.content, "content");
    case Role::kNorm:
      return lacks(entry.norm, "norm");
    case Role::kTemperature:
      return lacks(entry.temperature, "temperature");
    case Role::kGridBias:
    case Role::kSink:
    case Role::kGate:
      return lacks_table();
    case Role::kNone:
    case Role::kSimilarity:
      break;
  }
  return "";
}

template <class Entry>
void AddNow(Entry entry, Registry<Entry>* registry) {
  if (const std::string lack = LackOf(entry); !lack.empty()) {
    throw std::runtime_error("gnomon: " + entry.catalogue.name + " is without " + lack);
  }
  if (FindCatalogueEntry(entry.catalogue.name) != nullptr) {
    throw std::runtime_error("gnomon: there are two terms of the name " + entry.catalogue.name);
  }
  registry->Add(std::move(entry));
}

// Throws where one of a collection's names is taken, by another library or within it, or where an
// entry lacks something.
void CheckTerms(const Collection& collection) {
  std::set<std::string> functions;
  for (const PairFunction* function : collection.functions) {
    TORCH_CHECK_VALUE(functions.insert(function->name).second && !HasPairFunction(function->name),
                      "gnomon.load_terms: ", collection.library, " has the pair function ",
                      function->name, ", and there is one of that name; expected another name");
  }
  std::set<std::string> terms;
  const auto check = [&](const auto& term) {
    const CatalogueEntry& entry = term.catalogue;
    const std::string lack = LackOf(term);
    TORCH_CHECK_VALUE(lack.empty(), "gnomon.load_terms: ", collection.library, " has the ",
                      RoleName(entry.role), " ", entry.name, " without ", lack, "; expected it");
    const CatalogueEntry* known = FindCatalogueEntry(entry.name);
    TORCH_CHECK_VALUE(terms.insert(entry.name).second && known == nullptr,
                      "gnomon.load_terms: ", collection.library, " has the term ", entry.name,
                      ", and there is one of that name",
                      known == nullptr || known->library.empty() ? "" : " of " + known->library,
                      "; expected another name");
  };
  for (const SimilarityEntry& entry : collection.similarities) check(entry);
  for (const PositionEntry& entry : collection.positions) check(entry);
}

// "height: 9 + 1; log: 11 + 2".
std::string CostOf(const SimilarityEntry& entry) {
  std::vector<std::pair<std::string, std::string>> functions = entry.functions;
  if (functions.empty()) functions.emplace_back("", entry.catalogue.name);
  std::string text;
  for (const auto& [choice, name] : functions) {
    const PairFunction& function = FindPairFunction(name);
    if (!text.empty()) text += "; ";
    if (!choice.empty()) text += choice + ": ";
    text += std::to_string(function.operations.simple) + " + " +
            std::to_string(function.operations.special);
    if (function.input == PairInput::kNone) text += ", and no product";
  }
  return text;
}

// `is_known` says which entries the message for an unknown name has.
template <class Entry>
const Entry& FindIn(
    const char* kind, const Registry<Entry>& registry, const Component& component,
    bool (*is_known)(const Entry&) = [](const Entry&) { return true; }) {
  if (const Entry* entry = registry.Find(component.name())) {
    component.Check();
    return *entry;
  }
  std::vector<std::string> known;
  for (const Entry* entry : registry.All()) {
    if (is_known(*entry)) known.push_back(entry->catalogue.name);
  }
  TORCH_CHECK_VALUE(false, UnknownName(kind, component.name(), known));
}

Parameter Of(Kind kind, const char* name, const char* default_value) {
  Parameter parameter;
  parameter.name = name;
  parameter.kind = kind;
  parameter.default_value = default_value;
  parameter.argument = CatalogueParameter::Argument::kOptional;
  return parameter;
}

std::string TitleOf(const CatalogueEntry& entry, const Component& component) {
  std::string title = entry.title;
  std::string details;
  for (const auto& [key, value] : component.options()) {
    if (value == "learned" || value == "fixed") {
      if (title == entry.title) title = value + " " + entry.title;
    } else {
      details += (details.empty() ? "" : ", ") + key + (value == "true" ? "" : " " + value);
    }
  }
  return details.empty() ? title : title + " (" + details + ")";
}

const char* KindName(Kind kind) {
  constexpr std::array kNames = {"number", "integer", "flag",     "choice",
                                 "shape",  "numbers", "per_head", "table"};
  static_assert(kNames.size() == static_cast<size_t>(Kind::kTable) + 1);
  return kNames[static_cast<size_t>(kind)];
}

const char* ArgumentName(CatalogueParameter::Argument argument) {
  constexpr const char* kNames[] = {"", "required", "optional"};
  return kNames[static_cast<size_t>(argument)];
}

nlohmann::json ToJson(const CatalogueParameter& parameter) {
  const auto text_or_null = [](const std::string& text) {
    return text.empty() ? nlohmann::json() : nlohmann::json(text);
  };
  const auto number_or_null = [](const std::optional<double>& number) {
    return number ? nlohmann::json(*number) : nlohmann::json();
  };
  return {{"name", parameter.name},
          {"kind", KindName(parameter.kind)},
          {"values", parameter.values()},
          {"default", text_or_null(parameter.default_value)},
          {"otherwise", text_or_null(parameter.otherwise)},
          {"meaning", text_or_null(parameter.meaning)},
          {"detail_of", text_or_null(parameter.detail_of)},
          {"read_by", parameter.read_by},
          {"choices", parameter.choices},
          {"lowest", number_or_null(parameter.lowest)},
          {"highest", number_or_null(parameter.highest)},
          {"above", parameter.above},
          {"takes_tensor", parameter.takes_tensor},
          {"index", text_or_null(IndexName(parameter.index))},
          {"argument", text_or_null(ArgumentName(parameter.argument))},
          {"argument_name", text_or_null(parameter.argument_name)},
          {"of_call", parameter.of_call},
          {"axes", parameter.axes}};
}

nlohmann::json ToJson(const std::vector<CatalogueEntry>& entries) {
  nlohmann::json list = nlohmann::json::array();
  for (const CatalogueEntry& entry : entries) {
    nlohmann::json parameters = nlohmann::json::array();
    for (const CatalogueParameter& parameter : entry.parameters) {
      parameters.push_back(ToJson(parameter));
    }
    list.push_back({{"name", entry.name},
                    {"title", entry.title},
                    {"formula", entry.formula},
                    {"latex", entry.latex},
                    {"note", entry.note},
                    {"details", entry.details},
                    {"source", entry.source},
                    {"role", RoleName(entry.role)},
                    {"parameters", parameters},
                    {"cost", entry.cost},
                    {"use", entry.use()},
                    {"tokens", entry.tokens()},
                    {"needs_grid", entry.needs_grid},
                    {"needs_causal", entry.needs_causal},
                    {"needs_dot", entry.needs_dot},
                    {"sums_over_keys", entry.sums_over_keys},
                    {"takes_scale", entry.takes_scale},
                    {"takes_causal", entry.takes_causal},
                    {"class_name", entry.class_name},
                    {"library", entry.library}});
  }
  return list;
}

}  // namespace

const char* IndexName(Index index) {
  constexpr std::array kNames = {"",        "buckets",     "offsets", "near_offsets", "distances",
                                 "keys",    "key_entries", "grid",    "first_axis",   "second_axis",
                                 "queries", "pairs",       "tokens",  "bucket_rows"};
  static_assert(kNames.size() == static_cast<size_t>(Index::kBucketRows) + 1);
  return kNames[static_cast<size_t>(index)];
}

const char* RoleName(Role role) {
  constexpr std::array kNames = {"similarity",  "none",     "embedding", "rotation", "bias",
                                 "grid_bias",   "key_bias", "pair_bias", "content",  "norm",
                                 "temperature", "sink",     "gate"};
  static_assert(kNames.size() == static_cast<size_t>(Role::kGate) + 1);
  return kNames[static_cast<size_t>(role)];
}

const CatalogueParameter* CatalogueEntry::Find(const std::string& parameter) const {
  for (const CatalogueParameter& candidate : parameters) {
    if (candidate.name == parameter) return &candidate;
  }
  return nullptr;
}

bool CatalogueEntry::HasTable(CatalogueParameter::Index index) const {
  return std::any_of(parameters.begin(), parameters.end(),
                     [&](const CatalogueParameter& parameter) { return parameter.index == index; });
}

std::string CatalogueEntry::use() const {
  if (role == Role::kEmbedding) return "modules, beside attention()";
  const bool is_of_call =
      std::any_of(parameters.begin(), parameters.end(), [](const CatalogueParameter& parameter) {
        return parameter.of_call && parameter.argument == CatalogueParameter::Argument::kRequired;
      });
  if (is_of_call) return "attention()";
  std::string text = "attention(), modules";
  if (needs_dot) text += "; dot";
  if (needs_causal) text += needs_dot ? " and causal" : "; causal";
  return text;
}

std::string CatalogueEntry::tokens() const {
  if (role == Role::kSimilarity) return "";
  if (needs_grid) return "grid";
  return Find("shape") == nullptr ? "sequence" : "sequence, grid";
}

Parameter Parameter::Means(const char* text) const {
  Parameter parameter = *this;
  parameter.meaning = text;
  return parameter;
}

Parameter Parameter::Otherwise(const char* text) const {
  Parameter parameter = *this;
  parameter.otherwise = text;
  return parameter;
}

Parameter Parameter::AtLeast(double number) const {
  Parameter parameter = *this;
  parameter.lowest = number;
  return parameter;
}

Parameter Parameter::AtMost(double number) const {
  Parameter parameter = *this;
  parameter.highest = number;
  return parameter;
}

Parameter Parameter::Required() const {
  Parameter parameter = *this;
  parameter.argument = Argument::kRequired;
  return parameter;
}

Parameter Parameter::NoArgument() const {
  Parameter parameter = *this;
  parameter.argument = Argument::kNone;
  return parameter;
}

Parameter Parameter::Called(const char* other_name) const {
  Parameter parameter = *this;
  parameter.argument_name = other_name;
  return parameter;
}

Parameter Parameter::OfAxes(std::vector<std::string> names) const {
  Parameter parameter = *this;
  parameter.axes = std::move(names);
  return parameter;
}

Parameter Parameter::Points(const char* choice) const {
  Parameter parameter = *this;
  parameter.points = choice;
  return parameter;
}

Parameter Number(const char* name, const char* default_value) {
  return Of(Kind::kNumber, name, default_value);
}

Parameter PositiveNumber(const char* name, const char* default_value) {
  Parameter parameter = Number(name, default_value).AtLeast(0);
  parameter.above = true;
  return parameter;
}

Parameter Numbers(const char* name) { return Of(Kind::kNumbers, name, ""); }

Parameter Integer(const char* name, const char* default_value) {
  return Of(Kind::kInteger, name, default_value);
}

Parameter Flag(const char* name, const char* default_value) {
  return Of(Kind::kFlag, name, default_value);
}

Parameter Choice(const char* name, std::vector<std::string> choices) {
  Parameter parameter = Of(Kind::kChoice, name, choices.front().c_str());
  parameter.choices = std::move(choices);
  return parameter;
}

Parameter PerHead(const char* name, const char* default_value, const TensorUse& tensor) {
  Parameter parameter = Of(Kind::kHeads, name, default_value).Required();
  parameter.takes_tensor = true;
  parameter.tensor = tensor;
  parameter.tensor.learned = parameter.default_value == "learned";
  return parameter;
}

Parameter Table(const char* name, Index index, const TensorUse& tensor) {
  Parameter parameter = Of(Kind::kTable, name, "").Required();
  parameter.index = index;
  parameter.takes_tensor = true;
  parameter.tensor = tensor;
  return parameter;
}

Parameter Shape() {
  return Of(Kind::kShape, "shape", "")
      .Means("lengths of the axes of the grid that tokens lie on, in row-major order")
      .Otherwise("none: a sequence");
}

std::vector<Parameter> OnGrid(std::vector<Parameter> parameters, const Parameter& shape) {
  parameters.push_back(shape);
  parameters.push_back(
      Integer("prefix", "0").Means("tokens before the grid, such as a class token").AtLeast(0));
  return parameters;
}

std::vector<Parameter> OnAxis(std::vector<Parameter> parameters) {
  parameters = OnGrid(std::move(parameters), Shape().NoArgument());
  parameters.back() = parameters.back().NoArgument();
  parameters.push_back(Integer("axis", "")
                           .Means("the axis of the grid along which it reads coordinates")
                           .Otherwise("all, summed")
                           .NoArgument());
  return parameters;
}

Parameter Length() {
  return Integer("length", "")
      .Means("number of positions in a module's table")
      .Otherwise("the module's")
      .AtLeast(1)
      .NoArgument();
}

Parameter TablePerHead() {
  return Flag("per_head", "false")
      .Means("whether each head of a module has its own table")
      .NoArgument();
}

std::optional<int64_t> LengthOf(const Component& component, int64_t otherwise) {
  const int64_t length = component.FindInteger("length").value_or(otherwise);
  TORCH_CHECK_VALUE(length > 0, "gnomon: ", component.name(), ":length=", length,
                    "; expected an integer of at least 1");
  return length;
}

RegisterSimilarity::RegisterSimilarity(SimilarityEntry entry) {
  entry.catalogue.role = Role::kSimilarity;
  entry = Completed(std::move(entry));
  if (collecting != nullptr) {
    collecting->similarities.push_back(std::move(entry));
  } else {
    AddNow(std::move(entry), &Similarities());
  }
}

RegisterPosition::RegisterPosition(PositionEntry entry) {
  entry = Completed(std::move(entry));
  if (collecting != nullptr) {
    collecting->positions.push_back(std::move(entry));
  } else {
    AddNow(std::move(entry), &Positions());
  }
}

RegisterPairFunction::RegisterPairFunction(const PairFunction& function) {
  if (collecting != nullptr) {
    collecting->functions.push_back(&function);
  } else {
    AddPairFunction(function);
  }
}

std::vector<std::string> RegisterTogether(const std::string& library,
                                          const std::function<void()>& load) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  Collection collection;
  collection.library = library;
  {
    struct Collecting {
      explicit Collecting(Collection* into) { collecting = into; }
      ~Collecting() { collecting = nullptr; }
    };
    const Collecting into(&collection);
    load();
  }
  CheckTerms(collection);
  std::vector<std::string> names;
  for (const PairFunction* function : collection.functions) AddPairFunction(*function);
  for (SimilarityEntry& entry : collection.similarities) {
    entry.catalogue.library = library;
    names.push_back(entry.catalogue.name);
    Similarities().Add(std::move(entry));
  }
  for (PositionEntry& entry : collection.positions) {
    entry.catalogue.library = library;
    names.push_back(entry.catalogue.name);
    Positions().Add(std::move(entry));
  }
  return names;
}

const CatalogueEntry* FindCatalogueEntry(const std::string& name) {
  if (const SimilarityEntry* entry = Similarities().Find(name)) return &entry->catalogue;
  if (const PositionEntry* entry = Positions().Find(name)) return &entry->catalogue;
  return nullptr;
}

const PositionEntry* FindPositionEntry(const std::string& name) { return Positions().Find(name); }

const Parameter* SimilarityEntry::head_parameter() const {
  if (catalogue.takes_scale) return nullptr;
  for (const Parameter& parameter : parameters) {
    if (parameter.is_per_head()) return &parameter;
  }
  return nullptr;
}

std::vector<const Parameter*> SimilarityEntry::other_head_parameters() const {
  std::vector<const Parameter*> others;
  for (const Parameter& parameter : parameters) {
    if (parameter.is_per_head() && &parameter != head_parameter()) others.push_back(&parameter);
  }
  return others;
}

at::Tensor SimilarityEntry::WithHeightLast(const Component& component,
                                           const at::Tensor& tokens) const {
  const bool is_first = height_is_first != nullptr && height_is_first(component);
  return is_first ? tokens.roll(-1, -1) : tokens;
}

std::vector<const Parameter*> PositionEntry::Tensors(const Component& component) const {
  std::vector<const Parameter*> tensors;
  for (const Parameter& parameter : parameters) {
    if (parameter.takes_tensor && parameter.tensor.IsPresent(component)) {
      tensors.push_back(&parameter);
    }
  }
  return tensors;
}

const Parameter* SimilarityEntry::points_parameter(const Component& component) const {
  for (const Parameter& parameter : parameters) {
    const std::string value = component.Find(parameter.name).value_or(parameter.default_value);
    if (!parameter.points.empty() && value == parameter.points) return &parameter;
  }
  return nullptr;
}

void SimilarityEntry::CheckColumns(const Component& component, int64_t head_dim,
                                   const char* operation, const char* what) const {
  TORCH_CHECK_VALUE(!HasHeight(component) || head_dim >= 2, operation, what, head_dim, "; ",
                    catalogue.name, " needs two columns, ",
                    height_is_first != nullptr && height_is_first(component)
                        ? "the first of them the time"
                        : "the last of them the height");
  TORCH_CHECK_VALUE(columns == 0 || head_dim == columns, operation, what, head_dim, "; ",
                    catalogue.name, " has ", columns);
}

const SimilarityEntry& FindSimilarity(const Component& component) {
  return FindIn("similarity", Similarities(), component);
}

const PositionEntry& FindPosition(const Component& component) {
  return FindIn("position", Positions(), component);
}

const PositionEntry& FindPositionInAttention(const char* operation, const Component& component,
                                             bool holds_tables) {
  const auto acts = [](const PositionEntry& entry) { return entry.role() != Role::kEmbedding; };
  // A table without a start comes with a call.
  const auto has_starts = [](const PositionEntry& entry) {
    return entry.role() != Role::kEmbedding &&
           std::none_of(entry.parameters.begin(), entry.parameters.end(), [](const Parameter& p) {
             return p.of_call && p.argument == CatalogueParameter::Argument::kRequired;
           });
  };
  const auto has_no_table = [](const PositionEntry& entry) {
    return entry.role() != Role::kEmbedding &&
           std::none_of(entry.parameters.begin(), entry.parameters.end(), [](const Parameter& p) {
             return p.kind == Kind::kTable && p.argument == CatalogueParameter::Argument::kRequired;
           });
  };
  const PositionEntry& entry =
      holds_tables ? FindIn<PositionEntry>("position", Positions(), component, has_starts)
                   : FindIn<PositionEntry>("position", Positions(), component, has_no_table);
  TORCH_CHECK_VALUE(
      acts(entry), operation, ": position ", component.name(),
      " is added to the embeddings and does nothing here; expected it in gnomon.nn.TokenPosition");
  for (const Parameter* parameter : entry.Tensors(component)) {
    const TensorUse& use = parameter->tensor;
    const bool has_start = holds_tables ? use.HasStart() : use.start != nullptr;
    const bool is_given = component.IsTensor(parameter->name) || has_start;
    const std::string& term = entry.catalogue.class_name;
    TORCH_CHECK_VALUE(is_given, operation, ": position ", component.name(), " without its ",
                      parameter->name, ", a tensor ", parameter->meaning, "; expected ",
                      term.empty() ? "it in gnomon.nn.MultiheadAttention"
                                   : "gnomon.position." + term + "(" + parameter->name + ")");
  }
  return entry;
}

std::optional<int64_t> LongestSequence(const std::vector<Component>& components,
                                       int64_t max_length) {
  std::optional<int64_t> longest = SmallestGrid(components);
  for (const Component& component : components) {
    const PositionEntry& entry = FindPosition(component);
    if (entry.max_length == nullptr) continue;
    if (const std::optional<int64_t> length = entry.max_length(component, max_length)) {
      longest = std::min(longest.value_or(*length), *length);
    }
  }
  return longest;
}

std::vector<CatalogueEntry> SimilarityCatalogue() {
  std::vector<CatalogueEntry> catalogue;
  for (const SimilarityEntry* entry : Similarities().All()) {
    catalogue.push_back(entry->catalogue);
    catalogue.back().cost = CostOf(*entry);
  }
  return catalogue;
}

std::vector<CatalogueEntry> PositionCatalogue() {
  std::vector<CatalogueEntry> catalogue;
  for (const PositionEntry* entry : Positions().All()) catalogue.push_back(entry->catalogue);
  return catalogue;
}

std::string CatalogueJson() {
  return nlohmann::json{{"similarities", ToJson(SimilarityCatalogue())},
                        {"positions", ToJson(PositionCatalogue())}}
      .dump();
}

std::string SimilarityTitle(const std::string& specification) {
  const Component component = Component::Parse(specification);
  return TitleOf(FindSimilarity(component).catalogue, component);
}

std::string PositionTitle(const std::string& specification) {
  std::string title;
  for (const Component& component : ParseSum(specification)) {
    title += (title.empty() ? "" : " + ") + TitleOf(FindPosition(component).catalogue, component);
  }
  return title;
}

}  // namespace gnomon
