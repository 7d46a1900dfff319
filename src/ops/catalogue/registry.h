// The registry of similarities and positions. Each is defined in a file in similarities/,
// positions/ or encodings/ that contains its functions and an object that registers them, or by a
// definition that is itself a similarity (similarities/definition.h). No other list of terms
// exists.
#ifndef GNOMON_OPS_CATALOGUE_REGISTRY_H_
#define GNOMON_OPS_CATALOGUE_REGISTRY_H_

#include <gnomon/attention.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ops/catalogue/entries.h"
#include "ops/catalogue/pair_function.h"
#include "ops/catalogue/parameters.h"
#include "ops/grammar/component.h"

namespace gnomon {

// A static object of one of these types registers an entry or a pair function. A duplicate name or
// an incomplete entry is an error: LoadTerms throws it, and at program start it terminates the
// program.
struct RegisterSimilarity {
  explicit RegisterSimilarity(SimilarityEntry entry);
};
struct RegisterPosition {
  explicit RegisterPosition(PositionEntry entry);
};

// Collects the registrations that occur while `load` runs, under the name of a library. They are
// added when `load` has returned: all of them or, if a name is taken, none. Returns the names of
// the terms.
std::vector<std::string> RegisterAllOrNone(const std::string& library,
                                           const std::function<void()>& load);

const PositionEntry* FindPositionEntry(const std::string& name);

// All entries, in the order of the catalogue.
std::vector<const SimilarityEntry*> AllSimilarities();
std::vector<const PositionEntry*> AllPositions();

// Returns the entry with that name, and checks the component's keys and values. Throws
// c10::ValueError, listing similar names and all known names.
const SimilarityEntry& FindSimilarity(const Component& component);
const PositionEntry& FindPosition(const Component& component);
// Like FindPosition, for positions that act in attention. Throws, with a message that begins with
// `operation`, for a position that is added to embeddings. For an unknown name, the message lists
// only positions that a specification fully describes, including those with tables only if the
// caller holds the tables.
const PositionEntry& FindPositionInAttention(const char* operation, const Component& component,
                                             bool holds_tables);

// Returns the number of positions at which a sum is defined in a module; nullopt if it is
// unlimited.
std::optional<int64_t> LongestSequence(const std::vector<Component>& components,
                                       int64_t max_length);

}  // namespace gnomon

#endif  // GNOMON_OPS_CATALOGUE_REGISTRY_H_
