// Tunes a comparison's options on held-out data (--tune) with Optuna
// (python/gnomon/lab/_tuning.py).
#ifndef GNOMON_CLI_TUNING_H_
#define GNOMON_CLI_TUNING_H_

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "training/options.h"
#include "training/task.h"
#include "training/training_options.h"

namespace gnomon::lab::cli {

// An option and the values to try: a list or a range.
struct TunedOption {
  std::string name;  // "learning-rate", or a parameter of a term such as "mu"
  std::vector<double> values;
  double low = 0;
  double high = 0;
  bool is_integer = false;
  std::vector<int64_t> combinations;  // the combinations that have the option
};

// Values for a combination, and the progress of the model trained with them.
struct Trial {
  int64_t combination = 0;
  int64_t number = 0;     // index within the combination
  nlohmann::json values;  // by option
  int64_t steps = 0;      // number of steps to train for; may grow
  // Pairs of a step and the held-out metric at that step; no metric if training diverged.
  std::vector<std::pair<int64_t, std::optional<double>>> measured;
  double seconds = 0;
};

struct Tuning {
  std::vector<TunedOption> options;
  std::optional<int64_t> trials;  // per combination; if absent, the default in _tuning.py
  int64_t seed = 0;               // seed of all trials; reported runs never use it
  std::vector<Trial> tried;
  bool is_finished = false;
  std::vector<nlohmann::json> chosen;  // per combination: values, or null if all trials diverged

  Trial* Find(int64_t combination, int64_t number);
};

nlohmann::json ToJson(const Tuning& tuning);
Tuning TuningFromJson(const nlohmann::json& object);

// Parses --tune NAME=VALUES. Throws Error if the name or a value is invalid for all combinations.
TunedOption ParseTuned(const std::string& text, TaskOptions& task, TrainingOptions training,
                       const std::vector<Terms>& combinations);

// The terms and training options of a combination, with tuned values. While this object exists, the
// task's own options also have tuned values.
class TunedModel {
 public:
  TunedModel(Task& task, const TrainingOptions& base, Terms base_terms,
             const nlohmann::json& values);
  ~TunedModel();
  TunedModel(const TunedModel&) = delete;
  TunedModel& operator=(const TunedModel&) = delete;

  Terms terms;
  TrainingOptions training;

 private:
  OptionList options_;  // the task's options that it changes
  nlohmann::json before_;
};

// Formats values, such as "learning-rate 0.001, mu 0.5".
std::string DescribeValues(const nlohmann::json& values);

// Throws Error if Optuna is not installed.
void CheckOptuna();

// Asks Optuna for the next trials, stores them in `tuning` and lists them in `trials` as
// (combination, number). Returns false once the values are chosen.
bool NextTrials(const std::filesystem::path& folder, Tuning* tuning,
                std::vector<std::pair<int64_t, int64_t>>* trials);

}  // namespace gnomon::lab::cli

#endif  // GNOMON_CLI_TUNING_H_
