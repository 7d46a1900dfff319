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

#include "training/options.h"
#include "training/task.h"
#include "training/training_options.h"

namespace gnomon::cli {

inline constexpr const char* kResultsName = "results.json";

// "SIMILARITY/POSITION" as `option` gave it; throws Error where it is not that.
models::Terms ParseTerms(const std::string& option, const std::string& text);

// A seed that was added for the combinations of undecided pairs.
struct AddedSeed {
  int64_t seed = 0;
  std::vector<int64_t> combinations;
};

struct CompareSettings {
  std::vector<models::Terms> combinations;
  std::vector<int64_t> seeds;  // of all combinations; the first ones
  // The least difference that matters, in the unit of the first metric.
  std::optional<double> margin;
  // The fewest and the most seeds, where they are added as they are needed; those that were.
  std::optional<std::pair<int64_t, int64_t>> seed_range;
  std::vector<AddedSeed> added;
  models::TrainingOptions training;  // the seed comes from above

  // All runs, a combination and a seed each, in the order in which they are run.
  std::vector<std::pair<int64_t, int64_t>> Runs() const;
};

// What is measured, as the report draws it: the metrics, conditions and units of a settled task.
nlohmann::json DescribeTask(const models::Task& task);
// The name of the task that a record is of; none where there is no sound one.
std::optional<std::string> TaskOfRecord(const std::filesystem::path& file);

// Settings and the task's options.
nlohmann::json ToJson(const CompareSettings& settings, models::Task& task);
// Sets the task's options, too. Throws Error where a field is missing or wrong.
CompareSettings CompareFromJson(const nlohmann::json& object, models::Task& task);

nlohmann::json ToJson(const models::Task& task, const models::Measurement& measurement);
// "128", or "test".
std::string FormatCondition(const nlohmann::json& condition);

// The outcome of one combination with one seed.
struct RunResult {
  int64_t combination = 0;
  int64_t seed = 0;
  bool diverged = false;  // the loss became infinite or NaN; there are no measurements then
  int64_t parameters = 0;
  double ms_per_step = 0;  // median
  // What a quarter of the steps lie below and above, and the share of the machine that other
  // programs took meanwhile, where that is known.
  std::optional<std::pair<double, double>> ms_quartiles;
  std::optional<double> others;
  // Median of the processor time of all threads, which other programs change less.
  std::optional<double> processor_ms_per_step;
  double seconds = 0;  // training and evaluation together
  std::vector<int64_t> curve_steps;
  std::vector<double> curve_losses;               // mean training loss since the step before
  std::vector<models::Measurement> measurements;  // one for each condition
  // Of the first seed's runs, where the task draws one: its title, and its place in the folder.
  std::optional<std::pair<std::string, std::string>> picture;
};

nlohmann::json ToJson(const models::Task& task, const RunResult& run);
// Throws Error where a field is missing or wrong, or does not belong to these settings.
RunResult RunFromJson(const models::Task& task, const CompareSettings& settings,
                      const nlohmann::json& object);

// Mean and sample standard deviation over the seeds at hand, for each combination.
nlohmann::json Summarize(const models::Task& task, const CompareSettings& settings,
                         const std::vector<RunResult>& runs);

// A Markdown table of a summary.
std::string FormatTable(const models::Task& task, const CompareSettings& settings,
                        const nlohmann::json& summary);

}  // namespace gnomon::cli

#endif  // GNOMON_CLI_RESULTS_H_
