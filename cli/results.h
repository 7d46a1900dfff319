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

#include "models/evaluation.h"
#include "models/language_model.h"
#include "text/tokens.h"
#include "training/options.h"
#include "training/training_options.h"

namespace gnomon::cli {

struct Combination {
  std::string similarity;
  std::string position;
  std::string label() const { return similarity + "/" + position; }
  bool operator==(const Combination&) const = default;
};

// "SIMILARITY/POSITION" as `option` gave it; throws Error where it is not that.
Combination ParseCombination(const std::string& option, const std::string& text);

#define GNOMON_EVALUATION_OPTIONS(OPTION)                                                          \
  OPTION(std::vector<int64_t>, lengths, std::vector<int64_t>({128, 256, 512}),                     \
         .help = "Tokens per window, joined by commas: the first is trained at, all are "          \
                 "evaluated at")                                                                   \
  OPTION(int64_t, evaluation_bytes, 65536,                                                         \
         .help = "Bytes of validation text to measure at each length", .lowest = 1)                \
  OPTION(std::optional<int64_t>, evaluation_memory, std::nullopt,                                  \
         .help = "Tokens of earlier windows that each layer sees in the evaluation; default: as "  \
                 "in training")

struct EvaluationOptions {
  GNOMON_OPTIONS(GNOMON_EVALUATION_OPTIONS)
};

struct CompareSettings {
  std::vector<Combination> combinations;
  std::vector<int64_t> seeds;
  EvaluationOptions evaluation;
  models::TokenOptions tokens;
  models::LanguageModelOptions model;  // similarity and position come from the combination
  models::TrainingOptions training;    // length and seed come from above

  // All but the combinations and seeds, as a record holds them.
  models::OptionList Options();
};

nlohmann::json ToJson(const models::LengthLoss& loss);

nlohmann::json ToJson(const CompareSettings& settings);
// Throws Error where a field is missing or wrong.
CompareSettings CompareFromJson(const nlohmann::json& object);

// The outcome of one combination with one seed.
struct RunResult {
  int64_t combination = 0;
  int64_t seed = 0;
  bool diverged = false;  // the loss became infinite or NaN; there are no losses then
  int64_t parameters = 0;
  double ms_per_step = 0;  // median
  // What a quarter of the steps lie below and above, and the share of the machine that other
  // programs took meanwhile, where that is known.
  std::optional<std::pair<double, double>> ms_quartiles;
  std::optional<double> others;
  double seconds = 0;  // training and evaluation together
  std::vector<int64_t> curve_steps;
  std::vector<double> curve_losses;  // mean training loss since the step before
  std::vector<models::LengthLoss> losses;
};

nlohmann::json ToJson(const RunResult& run);
// Throws Error where a field is missing or wrong, or does not belong to these settings.
RunResult RunFromJson(const CompareSettings& settings, const nlohmann::json& object);

// Mean and sample standard deviation over the seeds at hand, for each combination.
nlohmann::json Summarize(const CompareSettings& settings, const std::vector<RunResult>& runs);

// A Markdown table of a summary.
std::string FormatTable(const CompareSettings& settings, const nlohmann::json& summary);

}  // namespace gnomon::cli

#endif  // GNOMON_CLI_RESULTS_H_
