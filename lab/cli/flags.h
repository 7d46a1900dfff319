// Adds option lists to commands as flags, and parses them.
#ifndef GNOMON_CLI_FLAGS_H_
#define GNOMON_CLI_FLAGS_H_

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "training/options.h"
#include "training/task.h"
#include "training/training_options.h"

namespace gnomon::lab::cli {

// Parses a word as an integer; returns nothing if it is not one.
std::optional<int64_t> ParseInteger(const std::string& word);

// A validator that accepts only decimal integers from `lowest` to `highest`; for any other word, it
// throws an Error that names the option.
CLI::Validator WholeNumber(const std::string& name, int64_t lowest, int64_t highest);

// Adds an option that accepts a number from `lowest` to `highest`; any other word, including NaN,
// throws an Error that names the option.
template <class Value>
CLI::Option* AddNumber(CLI::App* command, const std::string& name, Value* value, int64_t lowest,
                       int64_t highest, const std::string& help) {
  return command->add_option(name, *value, help)->transform(WholeNumber(name, lowest, highest));
}
CLI::Option* AddReal(CLI::App* command, const std::string& name, double* value, double lowest,
                     double highest, const std::string& help);

// Adds an option that accepts comma-separated items, or comma-separated integers from `lowest` to
// `highest`. The help shows the current values as the default. Empty, repeated or invalid items
// throw an Error that names the option and the item.
CLI::Option* AddList(CLI::App* command, const std::string& name, std::vector<std::string>* items,
                     const std::string& help);
CLI::Option* AddList(CLI::App* command, const std::string& name, std::vector<int64_t>* numbers,
                     int64_t lowest, int64_t highest, const std::string& help);

// Adds a flag for each option in `list` that has `has_flag`. The option's section is the flag's
// help group; its current value is the default.
void AddFlags(CLI::App* command, const OptionList& list);

// Sets the options given on the command line again, after a checkpoint or record has overwritten
// them.
void SetAgain(CLI::App& command, const OptionList& list);

// Adds --task to the help; ChooseTask() has already read its value.
void AddTaskFlag(CLI::App* command, std::string* name);

// Sets the default warm-up, which depends on --steps, unless --warmup is given.
void SetWarmup(const CLI::App& command, TrainingOptions* options);

// Adds --data if the task reads data; `more` is appended to its help.
void AddDataFlag(CLI::App* command, const Task& task, std::string* path,
                 const std::string& more = "");

// Adds --device; its help contains `what`, such as "to train the model".
void AddDeviceFlag(CLI::App* command, std::string* device, const std::string& what);

void AddThreadsFlag(CLI::App* command, int64_t* threads);
// Sets the number of threads; 0 keeps PyTorch's default, the number of cores.
void SetThreads(int64_t threads);

// Throws Error if --resume is combined with an option that a resumed run cannot change. It can
// change machine options (such as --device) and the options in `list` that have `may_change`.
void CheckResumes(const CLI::App& command, const OptionList& list = {});
// The command line that resumes the run in a folder, with the machine options of `command`.
std::string ResumeLine(const CLI::App& command, const std::string& folder);

}  // namespace gnomon::lab::cli

#endif  // GNOMON_CLI_FLAGS_H_
