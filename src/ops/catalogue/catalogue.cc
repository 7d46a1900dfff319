#include "gnomon/catalogue.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <utility>

#include "gnomon/attention.h"
#include "ops/catalogue/registry.h"

namespace gnomon {
namespace {

using Kind = CatalogueParameter::Kind;
using Role = CatalogueEntry::Role;

// The cost as text, such as "height: 9 + 1; log: 11 + 2".
std::string CostOf(const SimilarityEntry& entry) {
  std::string text;
  for (const auto& [choice, name] : entry.functions) {
    const PairFunction& function = FindPairFunction(name);
    if (!text.empty()) text += "; ";
    if (!choice.empty()) text += choice + ": ";
    text += std::to_string(function.operations.simple) + " + " +
            std::to_string(function.operations.special);
    if (function.input == PairInput::kNone) text += ", without the inner product";
  }
  return text;
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
                    {"lead", entry.lead()},
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

const char* CatalogueEntry::lead() const {
  switch (role) {
    case Role::kSimilarity:
      return "The score of a query q and a key k is";
    case Role::kNone:
      return "";
    case Role::kEmbedding:
      return "The following encoding is added to the embeddings:";
    case Role::kRotation:
      return "Each pair of coordinates of q and k is rotated by an angle:";
    case Role::kBias:
    case Role::kGridBias:
    case Role::kKeyBias:
    case Role::kPairBias:
    case Role::kContent:
      return "The following term is added to the score of query i and key j:";
    case Role::kNorm:
      return "Before all other terms, q and k are replaced by";
    case Role::kTemperature:
      return "The scores of query i are multiplied by";
    case Role::kSink:
      return "The output of query i becomes";
    case Role::kGate:
      return "The output of each head is replaced by";
  }
  return "";
}

bool CatalogueEntry::HasTable(CatalogueParameter::Index index) const {
  return std::any_of(parameters.begin(), parameters.end(),
                     [&](const CatalogueParameter& parameter) { return parameter.index == index; });
}

std::string CatalogueEntry::use() const {
  if (role == Role::kEmbedding) return "modules that run before attention()";
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

std::vector<CatalogueEntry> SimilarityCatalogue() {
  std::vector<CatalogueEntry> catalogue;
  for (const SimilarityEntry* entry : AllSimilarities()) {
    catalogue.push_back(entry->catalogue);
    catalogue.back().cost = CostOf(*entry);
  }
  return catalogue;
}

std::vector<CatalogueEntry> PositionCatalogue() {
  std::vector<CatalogueEntry> catalogue;
  for (const PositionEntry* entry : AllPositions()) catalogue.push_back(entry->catalogue);
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
