// The similarities and positions that there are. Each is a file of similarities/, positions/ or
// encodings/: its functions, and an object that registers what the file says of itself; or a
// definition that is a similarity by itself (similarities/definition.h). There is no other list.
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

// An object of these in a file makes its entry, or its pair function, one of the library's. A name
// that there is already, or an entry without what its role asks for, is an error that LoadTerms
// throws, and terminates the program otherwise.
struct RegisterSimilarity {
  explicit RegisterSimilarity(SimilarityEntry entry);
};
struct RegisterPosition {
  explicit RegisterPosition(PositionEntry entry);
};

// What the objects above register while `load` runs, under the name of a library: it is added when
// `load` has returned, all of it or, if a name is taken, nothing. Returns the names of the terms.
std::vector<std::string> RegisterAllOrNone(const std::string& library,
                                           const std::function<void()>& load);

const PositionEntry* FindPositionEntry(const std::string& name);

// In the order of the catalogue.
std::vector<const SimilarityEntry*> AllSimilarities();
std::vector<const PositionEntry*> AllPositions();

// The entry of that name; checks the component's keys and values. Throws c10::ValueError naming the
// nearest and all known ones.
const SimilarityEntry& FindSimilarity(const Component& component);
const PositionEntry& FindPosition(const Component& component);
// The same where positions act in attention: throws, beginning with `operation`, for a position
// that is added to embeddings, and names only those that a specification alone says all of there,
// with tables where the caller holds them.
const PositionEntry& FindPositionInAttention(const char* operation, const Component& component,
                                             bool holds_tables);

// The positions at which all of a sum is defined in a module; nullopt: all.
std::optional<int64_t> LongestSequence(const std::vector<Component>& components,
                                       int64_t max_length);

}  // namespace gnomon

#endif  // GNOMON_OPS_CATALOGUE_REGISTRY_H_
