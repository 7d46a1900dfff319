// The float64 tables of the library's pair functions, in one translation unit.
#include "definition_list.h"

// Tables are in the order of PairFunctions().
#define GNOMON_DEFINITION_FILE "definition_files.h"
#define GNOMON_DOUBLE_ENTRIES(X) GNOMON_FOR_EACH_DEFINITION(X)
#include "core/double_template.cc"

#include <algorithm>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "core/dual_tables.h"
#include "core/engine.h"
#include "core/targets.h"
#include "gnomon/attention.h"

namespace gnomon {
namespace {

bool UsesReference() {
  const char* const value = std::getenv("GNOMON_FLOAT64");
  if (value == nullptr || *value == '\0') return false;
  if (std::string_view(value) == "reference") return true;
  throw Error("attention: GNOMON_FLOAT64 is '" + std::string(value) +
              "'; expected reference or an empty value");
}

}  // namespace

template <>
const DualTableOf<double>* FindDualTable(const PairFunction& function) {
  if (UsesReference()) return nullptr;
  ChooseTargetOnce();
  const std::vector<const PairFunction*>& own = PairFunctions();
  const auto found = std::find(own.begin(), own.end(), &function);
  if (found == own.end()) return FindAddedDoubles(function);
  return DoubleTable(static_cast<size_t>(found - own.begin()));
}

const PairTableOf<double>* FindDoubleTable(const PairFunction& function) {
  const DualTableOf<double>* const table = FindDualTable<double>(function);
  return table == nullptr ? nullptr : table->pairs;
}

}  // namespace gnomon
