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

// Tokens a window of a training step, unless another number is asked for.
inline constexpr int64_t kTrainingLength = 256;

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

// Throws Error unless every length is at least 1 and none comes twice.
void CheckLengths(const std::vector<int64_t>& lengths);

// "1.234", or a dash for no number.
std::string FormatLoss(const std::optional<double>& loss);

}  // namespace gnomon::cli

#endif  // GNOMON_CLI_FLAGS_H_
