#include "core/dual_tables.h"

#include <map>
#include <mutex>

#include "core/targets.h"

namespace gnomon {
namespace {

struct Tables {
  std::mutex mutex;
  std::map<const PairFunction*, GetDualTable> by_function;
};

Tables& AllTables() {
  static Tables tables;
  return tables;
}

}  // namespace

bool AddDualTable(const PairFunction& function, GetDualTable get) {
  Tables& tables = AllTables();
  const std::lock_guard<std::mutex> lock(tables.mutex);
  tables.by_function[&function] = get;
  return true;
}

template <>
const DualTableOf<float>* FindDualTable(const PairFunction& function) {
  ChooseTargetOnce();
  Tables& tables = AllTables();
  const std::lock_guard<std::mutex> lock(tables.mutex);
  const auto found = tables.by_function.find(&function);
  return found == tables.by_function.end() ? nullptr : &found->second();
}

}  // namespace gnomon
