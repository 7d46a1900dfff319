// The record of a comparison: results.json (docs/results.md) and table.md.
#ifndef GNOMON_CLI_RESULTS_H_
#define GNOMON_CLI_RESULTS_H_

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/tuning.h"
#include "training/options.h"
#include "training/task.h"
#include "training/training_options.h"

namespace gnomon::lab::cli {

inline constexpr const char* kResultsName = "results.json";

// Parses "SIMILARITY/POSITION" from an option; throws Error if the format is different.
Terms ParseTerms(const std::string& option, const std::string& text);

// A seed added for the combinations of undecided pairs.
struct AddedSeed {
  int64_t seed = 0;
  std::vector<int64_t> combinations;
};

// The criterion of --until-flat: a run is flat if its best held-out value improved by less than the
// fraction `margin` over the last fraction `share` of the steps.
struct UntilFlat {
  double margin = 0.005;
  double share = 0.2;
};

// Whether a run is flat, given its held-out values and their steps. `total` is the maximum number
// of steps.
bool IsFlat(const UntilFlat& how, const std::vector<int64_t>& steps,
            const std::vector<double>& values, int64_t total, bool higher_is_better);

struct CompareSettings {
  std::vector<Terms> combinations;
  std::vector<int64_t> seeds;  // initial seeds, used for all combinations
  // The smallest relevant difference, in the unit of the first metric.
  std::optional<double> margin;
  // The minimum and maximum number of seeds if seeds are added on demand, and the added seeds.
  std::optional<std::pair<int64_t, int64_t>> seed_range;
  std::vector<AddedSeed> added;
  std::optional<UntilFlat> until_flat;
  std::optional<Tuning> tuning;
  TrainingOptions training;  // the seed is set per run

  // Whether part of the training data is held out.
  bool holds_out() const { return until_flat || tuning; }
  // All runs as (combination, seed), in execution order.
  std::vector<std::pair<int64_t, int64_t>> Runs() const;
};

// The metrics, conditions and units of a configured task, for the report.
nlohmann::json DescribeTask(const Task& task);
// The task of the record in `file`; none if the file is not a valid record.
std::optional<std::string> TaskOfRecord(const std::filesystem::path& file);

// Converts the settings and the task's options to JSON.
nlohmann::json ToJson(const CompareSettings& settings, TaskOptions& task);
// Reads settings from JSON, and also sets the task's options. Throws Error if a field is missing or
// invalid.
CompareSettings CompareFromJson(const nlohmann::json& object, TaskOptions& task);

nlohmann::json ToJson(const TaskResults& task, const Measurement& measurement);
// Formats a condition, such as "128" or "test".
std::string FormatCondition(const nlohmann::json& condition);

// The outcome of one combination with one seed.
struct RunResult {
  int64_t combination = 0;
  int64_t seed = 0;
  bool diverged = false;  // the loss became infinite or NaN, so there are no measurements
  int64_t parameters = 0;
  double ms_per_step = 0;  // median
  // The quartiles of the step time, and the fraction of CPU time used by other programs, if known.
  std::optional<std::pair<double, double>> ms_quartiles;
  std::optional<double> others;
  // Median CPU time per step, summed over all threads; other programs affect it less than
  // ms_per_step.
  std::optional<double> processor_ms_per_step;
  double seconds = 0;  // training and evaluation together
  std::vector<int64_t> curve_steps;
  std::vector<double> curve_losses;       // mean training loss since the previous point
  std::vector<Measurement> measurements;  // one per condition
  // With --until-flat: the number of steps, whether the held-out value became flat before the last
  // step, and the held-out values before the final decay.
  struct Ended {
    int64_t step = 0;
    bool is_flat = false;
    std::vector<int64_t> steps;
    std::vector<double> values;
  };
  std::optional<Ended> ended;
  // For a trial: its held-out value, which is not reported; none if the trial diverged.
  std::optional<double> tried;
  // If the task draws a picture: its title and its path within the folder. Only runs with the first
  // seed have one.
  std::optional<std::pair<std::string, std::string>> picture;
};

nlohmann::json ToJson(const TaskResults& task, const RunResult& run);
// Reads a result from JSON. Throws Error if a field is missing, invalid, or inconsistent with the
// settings.
RunResult RunFromJson(const TaskResults& task, const CompareSettings& settings,
                      const nlohmann::json& object);

// Mean and sample standard deviation over the available seeds, per combination.
nlohmann::json Summarize(const TaskResults& task, const CompareSettings& settings,
                         const std::vector<RunResult>& runs);

// Formats a summary as a Markdown table.
std::string FormatTable(const TaskResults& task, const CompareSettings& settings,
                        const nlohmann::json& summary);

}  // namespace gnomon::lab::cli

#endif  // GNOMON_CLI_RESULTS_H_
