#include "models/splits.h"

#include <algorithm>
#include <filesystem>
#include <set>

#include "gnomon/attention.h"
#include "training/strings.h"

namespace gnomon::lab {

void SplitsTask::Settle(Command /*command*/, bool /*is_resumed*/,
                        const TrainingOptions* /*training*/) {
  std::set<std::string> seen;
  for (const std::string& split : evaluation_.splits) {
    if (!seen.insert(split).second) throw Error(StrCat("--splits: ", split, " is given twice"));
  }
  if (seen.empty()) throw Error("--splits: the list is empty; expected at least one split");
}

Arrays SplitsTask::ReadFile(const std::string& path) {
  Arrays arrays(path);
  path_ = std::filesystem::absolute(path).lexically_normal().string();
  sha256_ = arrays.sha256();
  return arrays;
}

void SplitsTask::HoldOutValid() {
  std::vector<std::string>& splits = evaluation_.splits;
  if (splits == std::vector<std::string>{"test", "valid"}) splits = {"test"};
  if (std::find(splits.begin(), splits.end(), "valid") == splits.end()) return;
  throw Error(
      "--splits: the split 'valid' is held out for --tune and --until-flat, so it cannot be "
      "evaluated; choose train or test");
}

}  // namespace gnomon::lab
