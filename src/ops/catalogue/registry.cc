#include "ops/catalogue/registry.h"

#include <algorithm>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <stdexcept>
#include <utility>

#include <ATen/ATen.h>

#include "ops/coordinates/token_grid.h"

namespace gnomon {
namespace {

using Kind = CatalogueParameter::Kind;
using Role = CatalogueEntry::Role;

// Entries are never moved once added.
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

  // In catalogue order.
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

// Created with the first entry, before main.
Registry<SimilarityEntry>& Similarities() {
  static Registry<SimilarityEntry> registry;
  return registry;
}
Registry<PositionEntry>& Positions() {
  static Registry<PositionEntry> registry;
  return registry;
}

// The entries that RegisterAllOrNone has collected so far.
struct Collection {
  std::string library;
  std::vector<const PairFunction*> functions;
  std::vector<SimilarityEntry> similarities;
  std::vector<PositionEntry> positions;
};

// The collection of the RegisterAllOrNone call running in this thread, or null.
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

bool IsName(const std::string& text) {
  const auto is_letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); };
  return !text.empty() && is_letter(text.front()) &&
         std::all_of(text.begin(), text.end(),
                     [&](char c) { return is_letter(c) || (c >= '0' && c <= '9') || c == '_'; });
}

// Whether a specification accepts a parameter's default. Details are valid only together with the
// choice that they refine, so they are not checked.
bool TakesDefault(const CatalogueEntry& entry, const Parameter& parameter) {
  if (parameter.default_value.empty() || !parameter.detail_of.empty()) return true;
  try {
    Component::Parse(entry.name + ":" + parameter.name + "=" + parameter.default_value, entry)
        .Check();
  } catch (const c10::Error&) {
    return false;
  }
  return true;
}

// Returns the fault of an entry's parameters, such as "with two parameters w"; empty if there is
// none.
std::string FaultOfParameters(const CatalogueEntry& entry,
                              const std::vector<Parameter>& parameters) {
  // The parameters of grids, which have the same kinds in all terms.
  const std::map<std::string, Kind> of_grids = {
      {"shape", Kind::kShape}, {"prefix", Kind::kInteger}, {"axis", Kind::kInteger}};
  std::set<std::string> names;
  for (const Parameter& parameter : parameters) {
    const std::string& name = parameter.name;
    if (!IsName(name)) return "with a parameter \"" + name + "\", which is not a valid name";
    if (!names.insert(name).second) return "with two parameters " + name;
    const auto of_grid = of_grids.find(name);
    if (of_grid != of_grids.end() && of_grid->second != parameter.kind) {
      return "with a parameter " + name +
             " of the wrong kind; this name is reserved for a parameter of grids";
    }
    if (parameter.kind == Kind::kChoice && parameter.choices.empty()) {
      return "with a parameter " + name + ", a choice without values";
    }
    if (!TakesDefault(entry, parameter)) {
      return "with a parameter " + name +
             ", which has an invalid default value: " + parameter.default_value;
    }
  }
  return "";
}

// Returns the first missing member that the entry's role requires, such as "a function `rotate`";
// empty if there is none.
std::string LackOf(const SimilarityEntry& entry) {
  if (entry.map == nullptr) return "a function `map`";
  for (const Parameter* parameter : entry.other_head_parameters()) {
    if (parameter->tensor.start == nullptr) {
      return "an initial value for its parameter " + parameter->name;
    }
  }
  return "";
}
std::string LackOf(const PositionEntry& entry) {
  for (const Parameter& parameter : entry.parameters) {
    if (parameter.is_per_head() && !parameter.tensor.HasStart()) {
      return "an initial value for its parameter " + parameter.name;
    }
    const std::optional<TokenProjection>& projection = parameter.tensor.projection;
    if (projection && projection->columns == nullptr) {
      return "a function `columns` in the projection for its parameter " + parameter.name;
    }
  }
  const auto lacks = [](const auto function, const char* name) {
    return function == nullptr ? std::string("a function `") + name + "`" : "";
  };
  const auto lacks_table = [&]() -> std::string {
    for (const Parameter& parameter : entry.parameters) {
      if (!parameter.takes_tensor) continue;
      if (parameter.kind == Kind::kTable && parameter.tensor.present == nullptr) return "";
      break;
    }
    return "a table that is always present as its first tensor";
  };
  switch (entry.role()) {
    case Role::kBias:
      return lacks(entry.bias, "bias");
    case Role::kPairBias:
      return entry.pair_bias == nullptr ? lacks_table() : "";
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
    case Role::kGridBias: {
      const auto has = [&](const char* name) { return entry.catalogue.Find(name) != nullptr; };
      if (!has("shape") || !has("prefix")) {
        return "the parameters shape and prefix, which OnGrid() adds";
      }
      return lacks_table();
    }
    case Role::kKeyBias:
    case Role::kSink:
    case Role::kGate:
      return lacks_table();
    case Role::kSimilarity:
      return "a role";
    case Role::kNone:
      break;
  }
  return "";
}

// Returns a member that the entry's role does not use, such as "a function `bias`", or an empty
// string.
std::string ExcessOf(const SimilarityEntry& /*entry*/) { return ""; }
std::string ExcessOf(const PositionEntry& entry) {
  const auto is_unused = [&](const auto function, Role role) {
    return function != nullptr && entry.role() != role;
  };
  if (is_unused(entry.bias, Role::kBias)) return "a function `bias`";
  if (is_unused(entry.key_bias, Role::kKeyBias)) return "a function `key_bias`";
  if (is_unused(entry.pair_bias, Role::kPairBias)) return "a function `pair_bias`";
  if (is_unused(entry.rotate, Role::kRotation)) return "a function `rotate`";
  if (is_unused(entry.encoder, Role::kEmbedding)) return "a function `encoder`";
  if (is_unused(entry.content, Role::kContent)) return "a function `content`";
  if (is_unused(entry.norm, Role::kNorm)) return "a function `norm`";
  if (is_unused(entry.temperature, Role::kTemperature)) return "a function `temperature`";
  const bool reads_one = entry.role() == Role::kGridBias || entry.role() == Role::kSink ||
                         entry.role() == Role::kGate ||
                         (entry.role() == Role::kKeyBias && entry.key_bias == nullptr) ||
                         (entry.role() == Role::kPairBias && entry.pair_bias == nullptr);
  int64_t tensors = 0;
  for (const Parameter& parameter : entry.parameters) {
    if (parameter.takes_tensor && ++tensors > 1 && reads_one) {
      return "a second tensor, " + parameter.name;
    }
  }
  return "";
}

// Returns the fault of an entry, such as "without a function `rotate`"; empty if there is none.
template <class Entry>
std::string FaultOf(const Entry& entry) {
  if (!IsName(entry.catalogue.name))
    return "with an invalid name; expected letters, digits and underscores";
  const std::string fault = FaultOfParameters(entry.catalogue, entry.parameters);
  if (!fault.empty()) return fault;
  if (const std::string lack = LackOf(entry); !lack.empty()) return "without " + lack;
  const std::string excess = ExcessOf(entry);
  return excess.empty() ? "" : "with " + excess + ", which its role does not use";
}

template <class Entry>
void AddNow(Entry entry, Registry<Entry>* registry) {
  if (const std::string fault = FaultOf(entry); !fault.empty()) {
    throw std::runtime_error("gnomon: invalid term: \"" + entry.catalogue.name + "\" " + fault);
  }
  if (FindCatalogueEntry(entry.catalogue.name) != nullptr) {
    throw std::runtime_error("gnomon: two terms are named " + entry.catalogue.name);
  }
  registry->Add(std::move(entry));
}

// Throws if a name of the collection is already taken, by another library or within the collection,
// or if an entry is invalid.
void CheckTerms(const Collection& collection) {
  std::set<std::string> functions;
  for (const PairFunction* function : collection.functions) {
    TORCH_CHECK_VALUE(functions.insert(function->name).second && !HasPairFunction(function->name),
                      "gnomon.load_terms: ", collection.library, " defines the pair function ",
                      function->name, ", but that name is already in use; choose a different name");
  }
  std::set<std::string> terms;
  const auto check = [&](const auto& term) {
    const CatalogueEntry& entry = term.catalogue;
    const std::string fault = FaultOf(term);
    TORCH_CHECK_VALUE(fault.empty(), "gnomon.load_terms: ", collection.library, " has the ",
                      RoleName(entry.role), " ", entry.name, ", ", fault);
    const CatalogueEntry* known = FindCatalogueEntry(entry.name);
    TORCH_CHECK_VALUE(terms.insert(entry.name).second && known == nullptr,
                      "gnomon.load_terms: ", collection.library, " defines the term ", entry.name,
                      ", but that name is already in use",
                      known == nullptr || known->library.empty() ? "" : " in " + known->library,
                      "; choose a different name");
  };
  for (const SimilarityEntry& entry : collection.similarities) {
    check(entry);
    for (const auto& [choice, function] : entry.functions) {
      TORCH_CHECK_VALUE(functions.count(function) != 0 || HasPairFunction(function),
                        "gnomon.load_terms: ", collection.library, " defines the similarity ",
                        entry.catalogue.name, ", which uses the unknown pair function ", function,
                        "; set the similarity's `functions` to pair functions that are registered "
                        "or defined by the library");
    }
  }
  for (const PositionEntry& entry : collection.positions) check(entry);
}

// `is_known` selects the entries that the message for an unknown name lists.
template <class Entry>
const Entry& FindIn(
    const char* kind, const Registry<Entry>& registry, const Component& component,
    bool (*is_known)(const Entry&) = [](const Entry&) { return true; }) {
  if (const Entry* entry = registry.Find(component.name())) {
    component.Check();
    return *entry;
  }
  TORCH_CHECK_VALUE(!component.name().empty(), "gnomon: a ", kind,
                    " contains a term without a name; `gnomon list` prints the valid names");
  std::vector<std::string> known;
  for (const Entry* entry : registry.All()) {
    if (is_known(*entry)) known.push_back(entry->catalogue.name);
  }
  TORCH_CHECK_VALUE(false, UnknownName(kind, component.name(), known),
                    "; if the term belongs to a term library, load the library first");
}

}  // namespace

RegisterSimilarity::RegisterSimilarity(SimilarityEntry entry) {
  entry.catalogue.role = Role::kSimilarity;
  if (entry.functions.empty()) entry.functions = {{"", entry.catalogue.name}};
  if (entry.raw_map != nullptr) {
    entry.map = [raw = entry.raw_map](const Component& component, const at::Tensor& q,
                                      const at::Tensor& k, const HeadParameters& heads) {
      return raw(component, {q, k}, heads);
    };
  }
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

std::vector<std::string> RegisterAllOrNone(const std::string& library,
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

std::vector<const SimilarityEntry*> AllSimilarities() { return Similarities().All(); }
std::vector<const PositionEntry*> AllPositions() { return Positions().All(); }

const SimilarityEntry& FindSimilarity(const Component& component) {
  return FindIn("similarity", Similarities(), component);
}

const PositionEntry& FindPosition(const Component& component) {
  return FindIn("position", Positions(), component);
}

const PositionEntry& FindPositionInAttention(const char* operation, const Component& component,
                                             bool holds_tables) {
  const auto acts = [](const PositionEntry& entry) { return entry.role() != Role::kEmbedding; };
  // A table without an initial value must be passed with each call, so a module cannot hold it.
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
      " is added to the embeddings and has no effect here; use it in gnomon.nn.TokenPosition");
  for (const Parameter* parameter : entry.Tensors(component)) {
    const TensorUse& use = parameter->tensor;
    const bool has_start = holds_tables ? use.HasStart() : use.start != nullptr;
    const bool is_given = component.IsTensor(parameter->name) || has_start;
    const std::string& name = parameter->name;
    const bool has_class = !entry.catalogue.class_name.empty() && entry.catalogue.library.empty();
    TORCH_CHECK_VALUE(
        is_given, operation, ": position ", component.name(), " needs ", name, ", a tensor",
        parameter->meaning.empty() ? "" : " ", parameter->meaning, "; expected gnomon.position.",
        has_class ? entry.catalogue.class_name + "(" + name + ")"
                  : "Specified(\"" + component.name() + ":" + name + "=tensor\", (" + name + ",))");
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

}  // namespace gnomon
