#include "core/definition_source.h"

#include <map>
#include <mutex>

#include "core/pair_function_name.h"
#include "definition_list.h"

namespace gnomon {

#define GNOMON_DECLARE(Struct, name)                  \
  const PairFunction& GNOMON_PAIR_FUNCTION(Struct)(); \
  const DefinitionSource& GNOMON_DEFINITION_SOURCE(Struct)();
GNOMON_FOR_EACH_DEFINITION(GNOMON_DECLARE)
#undef GNOMON_DECLARE

namespace {

struct Sources {
  std::mutex mutex;
  std::map<const PairFunction*, const DefinitionSource*> by_function;
};

Sources& AllSources() {
#define GNOMON_ENTRY(Struct, name) \
  {&GNOMON_PAIR_FUNCTION(Struct)(), &GNOMON_DEFINITION_SOURCE(Struct)()},
  static Sources sources = {.mutex = {}, .by_function = {GNOMON_FOR_EACH_DEFINITION(GNOMON_ENTRY)}};
#undef GNOMON_ENTRY
  return sources;
}

}  // namespace

void AddDefinitionSource(const PairFunction& function, const DefinitionSource& text) {
  Sources& sources = AllSources();
  const std::lock_guard<std::mutex> lock(sources.mutex);
  sources.by_function[&function] = &text;
}

const DefinitionSource* FindDefinitionSource(const PairFunction& function) {
  Sources& sources = AllSources();
  const std::lock_guard<std::mutex> lock(sources.mutex);
  const auto found = sources.by_function.find(&function);
  return found == sources.by_function.end() ? nullptr : found->second;
}

}  // namespace gnomon
