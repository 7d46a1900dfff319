#include <map>
#include <mutex>
#include <string>

#include "reference/reference.h"

namespace gnomon::reference {
namespace {

struct Tables {
  std::mutex mutex;
  std::map<const PairFunction*, const Table*> by_function;
};

Tables& AllTables() {
  static Tables tables;
  return tables;
}

}  // namespace

bool AddTable(const PairFunction& function, const Table& table) {
  Tables& tables = AllTables();
  const std::lock_guard<std::mutex> lock(tables.mutex);
  tables.by_function[&function] = &table;
  return true;
}

const Table& FindTable(const PairFunction& function) {
  Tables& tables = AllTables();
  const std::lock_guard<std::mutex> lock(tables.mutex);
  const auto found = tables.by_function.find(&function);
  if (found == tables.by_function.end()) {
    throw Error(std::string("attention: the pair function ") + function.name +
                " has no forward-mode or second derivatives; rebuild it with this version of "
                "gnomon");
  }
  return *found->second;
}

}  // namespace gnomon::reference
