// Options that a comparison tunes on held-out data (--tune), by Optuna (python/gnomon/_tuning.py).
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

namespace gnomon::cli {

// An option and the values to try: a list, or a range.
struct TunedOption {
  std::string name;  // "learning-rate", or a parameter of a term, "mu"
  std::vector<double> values;
  double low = 0;
  double high = 0;
  bool is_integer = false;
  std::vector<int64_t> combinations;  // that have the option
};

// Values for a combination, and how far a model with them has been trained.
struct Trial {
  int64_t combination = 0;
  int64_t number = 0;     // of the combination's trials
  nlohmann::json values;  // by option
  int64_t steps = 0;      // to train for, so far
  // The held-out value after some numbers of steps; none if training diverged.
  std::vector<std::pair<int64_t, std::optional<double>>> measured;
  double seconds = 0;
};

struct Tuning {
  std::vector<TunedOption> options;
  std::optional<int64_t> trials;  // for each combination; none: the default of _tuning.py
  int64_t seed = 0;               // of all trials; no reported run has it
  std::vector<Trial> tried;
  bool is_finished = false;
  std::vector<nlohmann::json> chosen;  // for each combination: values, or null if all diverged

  Trial* Find(int64_t combination, int64_t number);
};

nlohmann::json ToJson(const Tuning& tuning);
Tuning TuningFromJson(const nlohmann::json& object);

// --tune NAME=VALUES; throws Error if the name or a value is wrong for all combinations.
TunedOption ParseTuned(const std::string& text, models::Task& task,
                       models::TrainingOptions training,
                       const std::vector<models::Terms>& combinations);

// The terms and training options of a combination with tuned values. While it exists, the task's
// options have tuned values, too.
class TunedModel {
 public:
  TunedModel(models::Task& task, const models::TrainingOptions& base, models::Terms base_terms,
             const nlohmann::json& values);
  ~TunedModel();
  TunedModel(const TunedModel&) = delete;
  TunedModel& operator=(const TunedModel&) = delete;

  models::Terms terms;
  models::TrainingOptions training;

 private:
  models::OptionList options_;  // of the task, those that are changed
  nlohmann::json before_;
};

// "learning-rate 0.001, mu 0.5".
std::string DescribeValues(const nlohmann::json& values);

// Throws Error if Optuna is missing.
void CheckOptuna();

// Asks Optuna for the trials to run next, and adds them; false once the values are chosen.
bool NextTrials(const std::filesystem::path& folder, Tuning* tuning,
                std::vector<std::pair<int64_t, int64_t>>* trials);

}  // namespace gnomon::cli

#endif  // GNOMON_CLI_TUNING_H_
