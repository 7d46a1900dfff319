// Options that several commands take.
#ifndef GNOMON_CLI_FLAGS_H_
#define GNOMON_CLI_FLAGS_H_

#include <CLI/CLI.hpp>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "models/training.h"

namespace gnomon::cli {

// Takes decimal integers from `lowest` to `highest` alone; throws Error naming the option.
CLI::Validator WholeNumber(const std::string& name, int64_t lowest, int64_t highest);

// Tokens a window of a training step, unless another number is asked for.
inline constexpr int64_t kTrainingLength = 256;

// More than any count that a run can have, and less than what could overflow beside another.
inline constexpr int64_t kMany = 1'000'000'000'000;
// The largest seed: what JSON keeps exactly.
inline constexpr int64_t kLargestSeed = int64_t{1} << 53;

// Adds an option that takes a number, or several joined by commas, from `lowest` to `highest`; any
// other word, NaN too, is refused with an Error that names the option.
template <class Value>
CLI::Option* AddNumber(CLI::App* command, const std::string& name, Value* value, int64_t lowest,
                       int64_t highest, const std::string& help) {
  return command->add_option(name, *value, help)->transform(WholeNumber(name, lowest, highest));
}
CLI::Option* AddReal(CLI::App* command, const std::string& name, double* value, double lowest,
                     double highest, const std::string& help);

// --dim, --depth, --heads, --mlp, --dropout.
void AddModelFlags(CLI::App* command, models::LanguageModelOptions* options);

// --steps, --batch, --learning-rate, --warmup, --weight-decay, --clip.
void AddTrainingFlags(CLI::App* command, models::TrainingOptions* options);

// --tokens, --vocabulary.
void AddTokenFlags(CLI::App* command, models::TokenOptions* options);

// --memory of training.
void AddMemoryFlag(CLI::App* command, models::TrainingOptions* options);

// The default of --warmup, which depends on --steps.
void SetWarmup(const CLI::App& command, models::TrainingOptions* options);

// --threads.
void AddThreadsFlag(CLI::App* command, int64_t* threads);

// Throws Error if any option but `allowed` was given beside `chosen`.
void CheckStandsAlone(const CLI::App& command, const std::string& chosen,
                      const std::vector<std::string>& allowed);

// Builds the model and runs it on a few tokens, so that a wrong option or specification is known
// before any work; throws Error with the operator's own words. The memory is the longest one that
// the model is used with.
models::LanguageModel BuildModel(const models::LanguageModelOptions& options, int64_t seed,
                                 int64_t memory);

// The checkpoint at `path`, which is the file itself or the folder of a run.
std::filesystem::path CheckpointFile(const std::string& path);
inline constexpr const char* kCheckpointName = "checkpoint.safetensors";

// Throws Error unless every length is one that a text can have and none comes twice.
void CheckLengths(const std::vector<int64_t>& lengths);

// "1.234", or a dash for no number.
std::string FormatLoss(const std::optional<double>& loss);

}  // namespace gnomon::cli

#endif  // GNOMON_CLI_FLAGS_H_
