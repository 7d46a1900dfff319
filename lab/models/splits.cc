#include "models/splits.h"

#include <algorithm>
#include <set>

#include "gnomon/attention.h"
#include "training/strings.h"

namespace gnomon::lab {

void CheckSplits(const std::vector<std::string>& splits) {
  std::set<std::string> seen;
  for (const std::string& split : splits) {
    if (!seen.insert(split).second) throw Error(StrCat("--splits: ", split, " is given twice"));
  }
  if (seen.empty()) throw Error("--splits: the list is empty; expected at least one split");
}

void HoldOutValid(std::vector<std::string>* splits) {
  if (*splits == std::vector<std::string>{"test", "valid"}) *splits = {"test"};
  if (std::find(splits->begin(), splits->end(), "valid") == splits->end()) return;
  throw Error(
      "--splits: the split 'valid' is held out for --tune and --until-flat, so it cannot be "
      "evaluated; choose train or test");
}

}  // namespace gnomon::lab
