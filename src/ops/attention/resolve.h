// Resolves specifications: parses terms, and gives a value to each parameter that may be a tensor.
// Calls and modules differ only in where the values come from.
#ifndef GNOMON_OPS_ATTENTION_RESOLVE_H_
#define GNOMON_OPS_ATTENTION_RESOLVE_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ops/attention/call.h"
#include "ops/attention/starts.h"
#include "ops/catalogue/registry.h"

namespace gnomon {

// A parsed term, and the settings of its parameters that may be tensors, in catalogue order. S is
// Setting or derives from it.
template <class Entry, class S>
struct ParsedTerm {
  const Entry* entry;
  std::shared_ptr<const Component> component;
  std::vector<S> settings;
};
template <class S>
using ParsedSimilarity = ParsedTerm<SimilarityEntry, S>;
template <class S>
using ParsedPosition = ParsedTerm<PositionEntry, S>;

inline bool IsHeadParameter(const SimilarityEntry& entry, const Parameter& parameter) {
  return &parameter == entry.head_parameter();
}

// setting(component, parameter) returns the S of a parameter. Throws c10::ValueError for an invalid
// specification.
template <class S, class Read>
ParsedSimilarity<S> ParseSimilarity(const std::string& spec, const Read& setting) {
  const auto component = std::make_shared<const Component>(Component::Parse(spec));
  const SimilarityEntry& entry = FindSimilarity(*component);
  ParsedSimilarity<S> term{&entry, component, {}};
  if (const Parameter* parameter = entry.head_parameter()) {
    term.settings.push_back(setting(*component, *parameter));
  }
  for (const Parameter* parameter : entry.other_head_parameters()) {
    term.settings.push_back(setting(*component, *parameter));
  }
  return term;
}

// The terms of a sum; see FindPositionInAttention.
template <class S, class Read>
std::vector<ParsedPosition<S>> ParsePositions(const char* operation, const std::string& sum,
                                              bool holds_tables, const Read& setting) {
  std::vector<ParsedPosition<S>> terms;
  for (Component& parsed : ParseSum(sum)) {
    const auto component = std::make_shared<const Component>(std::move(parsed));
    const PositionEntry& entry = FindPositionInAttention(operation, *component, holds_tables);
    ParsedPosition<S>& term = terms.emplace_back(ParsedPosition<S>{&entry, component, {}});
    for (const Parameter* parameter : entry.Tensors(*component)) {
      term.settings.push_back(setting(*component, *parameter));
    }
  }
  return terms;
}

// values.HeadParameter(entry, component, setting) returns the value (H,) of the similarity's head
// parameter, and values.Heads(component, setting) that of any other per-head parameter.
template <class S, class Values>
ResolvedSimilarity Resolve(const ParsedSimilarity<S>& term, Values& values) {
  ResolvedSimilarity resolved{term.entry, term.component, {}, {}};
  for (const S& setting : term.settings) {
    if (IsHeadParameter(*term.entry, *setting.parameter)) {
      resolved.head_parameter = values.HeadParameter(*term.entry, *term.component, setting);
    } else {
      resolved.others.push_back(values.Heads(*term.component, setting));
    }
  }
  return resolved;
}

// values.Table(component, setting) returns the value of a parameter that is not per-head.
template <class S, class Values>
ResolvedPosition Resolve(const ParsedPosition<S>& term, Values& values) {
  ResolvedPosition resolved{term.entry, term.component, {}};
  for (const S& setting : term.settings) {
    resolved.tensors.push_back(setting.parameter->is_per_head()
                                   ? values.Heads(*term.component, setting)
                                   : values.Table(*term.component, setting));
  }
  return resolved;
}

}  // namespace gnomon

#endif  // GNOMON_OPS_ATTENTION_RESOLVE_H_
