// The splits of the data on which a model is evaluated.
#ifndef GNOMON_MODELS_SPLITS_H_
#define GNOMON_MODELS_SPLITS_H_

#include <string>
#include <vector>

#include "training/options.h"
#include "training/task.h"

namespace gnomon::lab {

#define GNOMON_SPLITS_OPTIONS(OPTION)                                                   \
  OPTION(std::vector<std::string>, splits, std::vector<std::string>({"test", "valid"}), \
         .help = "Splits to evaluate: train, valid, test", .choices = {"train", "valid", "test"})

struct SplitsOptions {
  GNOMON_OPTIONS(GNOMON_SPLITS_OPTIONS)
};

// A task that is evaluated on splits of the data.
class SplitsTask : public Task {
 public:
  std::vector<std::string> splits() const {
    return evaluates_held_out() ? std::vector<std::string>{"valid"} : evaluation_.splits;
  }
  Conditions conditions() const override {
    return {.key = "split",
            .title = description().examples,
            .values = {evaluation_.splits.begin(), evaluation_.splits.end()}};
  }

 protected:
  SplitsOptions evaluation_;
};

// Throws an Error that names --splits if the list is empty or contains a split twice.
void CheckSplits(const std::vector<std::string>& splits);

// A comparison that holds out the split "valid" cannot report results on it. If the splits are the
// default, "test" and "valid", removes "valid". Throws an Error that names --splits if the user
// chose "valid".
void HoldOutValid(std::vector<std::string>* splits);

}  // namespace gnomon::lab

#endif  // GNOMON_MODELS_SPLITS_H_
