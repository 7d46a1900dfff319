#include <algorithm>
#include <mutex>
#include <string>
#include <vector>

#include "core/pair_function_name.h"
#include "definition_list.h"
#include "gnomon/attention.h"

namespace gnomon {

#define GNOMON_DECLARE(Struct, name) const PairFunction& GNOMON_PAIR_FUNCTION(Struct)();
GNOMON_FOR_EACH_DEFINITION(GNOMON_DECLARE)
#undef GNOMON_DECLARE

const std::vector<const PairFunction*>& PairFunctions() {
#define GNOMON_ENTRY(Struct, name) &GNOMON_PAIR_FUNCTION(Struct)(),
  static const std::vector<const PairFunction*> functions = {
      GNOMON_FOR_EACH_DEFINITION(GNOMON_ENTRY)};
#undef GNOMON_ENTRY
  return functions;
}

namespace {

// Pair functions registered from outside the library.
struct Added {
  std::mutex mutex;
  std::vector<const PairFunction*> functions;
};

Added& AddedFunctions() {
  static Added added;
  return added;
}

const PairFunction* FindIn(const std::vector<const PairFunction*>& functions,
                           std::string_view name) {
  const auto found =
      std::find_if(functions.begin(), functions.end(),
                   [&](const PairFunction* function) { return function->name == name; });
  return found == functions.end() ? nullptr : *found;
}

std::string NamesOf(const std::vector<const PairFunction*>& functions) {
  std::string names;
  for (const PairFunction* function : functions) {
    names += (names.empty() ? "" : ", ") + std::string(function->name);
  }
  return names;
}

}  // namespace

void AddPairFunction(const PairFunction& function) {
  Added& added = AddedFunctions();
  const std::lock_guard<std::mutex> lock(added.mutex);
  if (FindIn(PairFunctions(), function.name) != nullptr ||
      FindIn(added.functions, function.name) != nullptr) {
    throw Error("two pair functions are named " + std::string(function.name));
  }
  added.functions.push_back(&function);
}

const PairFunction& FindPairFunction(std::string_view name) {
  if (const PairFunction* function = FindIn(PairFunctions(), name)) return *function;
  Added& added = AddedFunctions();
  const std::lock_guard<std::mutex> lock(added.mutex);
  if (const PairFunction* function = FindIn(added.functions, name)) return *function;
  const std::string own = NamesOf(PairFunctions());
  throw Error("attention: unknown pair function '" + std::string(name) + "'; known: " + own +
              (added.functions.empty() ? "" : ", " + NamesOf(added.functions)));
}

}  // namespace gnomon
