// Options as flags of a command.
#ifndef GNOMON_CLI_FLAGS_H_
#define GNOMON_CLI_FLAGS_H_

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "training/options.h"
#include "training/task.h"
#include "training/training_options.h"

namespace gnomon::cli {

using models::kLargestSeed;
using models::kMany;

// Takes decimal integers from `lowest` to `highest` alone; throws Error naming the option.
CLI::Validator WholeNumber(const std::string& name, int64_t lowest, int64_t highest);

// Adds an option that takes a number from `lowest` to `highest`; any other word, NaN too, is
// refused with an Error that names the option.
template <class Value>
CLI::Option* AddNumber(CLI::App* command, const std::string& name, Value* value, int64_t lowest,
                       int64_t highest, const std::string& help) {
  return command->add_option(name, *value, help)->transform(WholeNumber(name, lowest, highest));
}
CLI::Option* AddReal(CLI::App* command, const std::string& name, double* value, double lowest,
                     double highest, const std::string& help);

// Adds an option that takes items joined by commas, or integers from `lowest` to `highest`, and
// shows those at hand as the default. An empty item, an item that is given twice, or another word
// than such an integer is refused with an Error that names the option and the word.
CLI::Option* AddList(CLI::App* command, const std::string& name, std::vector<std::string>* items,
                     const std::string& help);
CLI::Option* AddList(CLI::App* command, const std::string& name, std::vector<int64_t>* numbers,
                     int64_t lowest, int64_t highest, const std::string& help);

// A flag for each option of a list that has one, in the group of its section; the values at hand
// are the defaults.
void AddFlags(CLI::App* command, const models::OptionList& list);

// Sets those of the list again that were given, after a file has set all.
void SetAgain(CLI::App& command, const models::OptionList& list);

// --task, for --help: ChooseTask() has read it.
void AddTaskFlag(CLI::App* command, std::string* name);

// The default of --warmup, which depends on --steps.
void SetWarmup(const CLI::App& command, models::TrainingOptions* options);

// --data, where the task takes any; `more` follows its help.
void AddDataFlag(CLI::App* command, const models::Task& task, std::string* path,
                 const std::string& more = "");

// --device, of which `what` tells what is done there.
void AddDeviceFlag(CLI::App* command, std::string* device, const std::string& what);

// --threads.
void AddThreadsFlag(CLI::App* command, int64_t* threads);
// 0 leaves Torch's own choice, the number of cores.
void SetThreads(int64_t threads);

// Throws Error if any option that is not of the machine, nor one of `list` that may change, was
// given beside --resume.
void CheckResumes(const CLI::App& command, const models::OptionList& list = {});
// The command line that goes on with the run in a folder, with the options of the machine as given.
std::string ResumeLine(const CLI::App& command, const std::string& folder);

}  // namespace gnomon::cli

#endif  // GNOMON_CLI_FLAGS_H_
