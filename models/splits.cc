#include "models/splits.h"

#include <set>

#include "gnomon/attention.h"
#include "training/strings.h"

namespace gnomon::models {

void CheckSplits(const std::vector<std::string>& splits) {
  std::set<std::string> seen;
  for (const std::string& split : splits) {
    if (!seen.insert(split).second) throw Error(StrCat("--splits: ", split, " is given twice"));
  }
  if (seen.empty()) throw Error("--splits: the list is empty; expected at least one");
}

}  // namespace gnomon::models
