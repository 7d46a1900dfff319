#include <mutex>
#include <string>

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

// Those from outside the library.
struct Added {
  std::mutex mutex;
  std::vector<const PairFunction*> functions;
};

Added& AddedFunctions() {
  static Added added;
  return added;
}

}  // namespace

void AddPairFunction(const PairFunction& function) {
  Added& added = AddedFunctions();
  const std::lock_guard<std::mutex> lock(added.mutex);
  added.functions.push_back(&function);
}

const PairFunction& FindPairFunction(std::string_view name) {
  std::string known;
  for (const PairFunction* function : PairFunctions()) {
    if (function->name == name) return *function;
    known += (known.empty() ? "" : ", ") + std::string(function->name);
  }
  Added& added = AddedFunctions();
  const std::lock_guard<std::mutex> lock(added.mutex);
  for (const PairFunction* function : added.functions) {
    if (function->name == name) return *function;
    known += ", " + std::string(function->name);
  }
  throw Error("attention: no pair function '" + std::string(name) + "'; there are " + known);
}

}  // namespace gnomon
