#include "core/dual_tables.h"

#include <map>
#include <mutex>

#include "core/targets.h"

namespace gnomon {
namespace {

template <class T>
struct Tables {
  std::mutex mutex;
  std::map<const PairFunction*, GetDualTable<T>> by_function;
};

template <class T>
Tables<T>& AllTables() {
  static Tables<T> tables;
  return tables;
}

template <class T>
bool Add(const PairFunction& function, GetDualTable<T> get) {
  Tables<T>& tables = AllTables<T>();
  const std::lock_guard<std::mutex> lock(tables.mutex);
  tables.by_function[&function] = get;
  return true;
}

template <class T>
const DualTableOf<T>* Find(const PairFunction& function) {
  ChooseTargetOnce();
  Tables<T>& tables = AllTables<T>();
  const std::lock_guard<std::mutex> lock(tables.mutex);
  const auto found = tables.by_function.find(&function);
  return found == tables.by_function.end() ? nullptr : found->second();
}

}  // namespace

bool AddDualTable(const PairFunction& function, GetDualTable<float> get) {
  return Add(function, get);
}
bool AddDualTable(const PairFunction& function, GetDualTable<double> get) {
  return Add(function, get);
}

template <>
const DualTableOf<float>* FindDualTable(const PairFunction& function) {
  return Find<float>(function);
}
const DualTableOf<double>* FindAddedDoubles(const PairFunction& function) {
  return Find<double>(function);
}

}  // namespace gnomon
