// The splits of the data on which a model is evaluated.
#ifndef GNOMON_MODELS_SPLITS_H_
#define GNOMON_MODELS_SPLITS_H_

#include <string>
#include <vector>

#include "training/arrays.h"
#include "training/options.h"
#include "training/task.h"

namespace gnomon::lab {

#define GNOMON_SPLITS_OPTIONS(OPTION)                                                   \
  OPTION(std::vector<std::string>, splits, std::vector<std::string>({"test", "valid"}), \
         .help = "Splits to evaluate: train, valid, test", .choices = {"train", "valid", "test"})

struct SplitsOptions {
  GNOMON_OPTIONS(GNOMON_SPLITS_OPTIONS)
};

// A task on the nodes of a file, which have no order. It is evaluated on splits of the data.
class SplitsTask : public Task {
 public:
  std::vector<std::string> DefaultPositions() const override { return {"none"}; }
  // Throws an Error that names --splits if the list is empty or contains a split twice.
  void Settle(Command command, bool is_resumed, const TrainingOptions* training) override;
  std::string data_sha256() const override { return sha256_; }
  std::vector<std::string> splits() const {
    return evaluates_held_out() ? std::vector<std::string>{"valid"} : evaluation_.splits;
  }
  Conditions conditions() const override {
    return {.key = "split",
            .title = description().examples,
            .values = {evaluation_.splits.begin(), evaluation_.splits.end()}};
  }

 protected:
  // Reads the file, and sets path_ and sha256_.
  Arrays ReadFile(const std::string& path);
  // A comparison that holds out the split "valid" cannot report results on it. If the splits are
  // the default, "test" and "valid", removes "valid". Throws an Error that names --splits if the
  // user chose "valid".
  void HoldOutValid();

  SplitsOptions evaluation_;
  std::string path_;
  std::string sha256_;
};

}  // namespace gnomon::lab

#endif  // GNOMON_MODELS_SPLITS_H_
