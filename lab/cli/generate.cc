#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cli/checks.h"
#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/interrupts.h"
#include "cli/shortage.h"
#include "gnomon/attention.h"
#include "training/checkpoint.h"
#include "training/device.h"
#include "training/strings.h"
#include "training/task.h"

namespace gnomon::lab::cli {
namespace {

struct GenerateFlags {
  std::string model;
  std::string out;
  std::string device = "cpu";
  int64_t threads = 0;
};

// Throws Error if the task does not support generation.
Generation GenerationOf(Task& task) {
  if (std::optional<Generation> generation = task.generation()) return *generation;
  std::vector<std::string> names;
  for (const std::unique_ptr<Task>& other : AllTasks()) {
    if (other->generation()) names.emplace_back(other->name());
  }
  throw Error(StrCat("generate: the task '", task.name(),
                     "' does not support generation; tasks that do: ", Join(names, ", ")));
}

int Run(const GenerateFlags& flags, Task& task) {
  SetThreads(flags.threads);
  const Checkpoint checkpoint = LoadModel(flags.model, task, FindDevice(flags.device));
  const Generation generation = GenerationOf(task);
  CheckRanges(generation.options, "");
  if (!generation.file.empty() && flags.out.empty()) {
    throw Error("generate: --out is required");
  }
  // Ctrl-C is caught only after the first call of proceed(). Before that call, a learner may wait
  // for standard input, and Ctrl-C should then end the program.
  bool is_caught = false;
  const auto proceed = [&is_caught] {
    if (!is_caught) CatchInterrupts();
    is_caught = true;
    return !Interrupted();
  };
  NamingOptions(generation.memory_flags, [&] {
    checkpoint.learner->Generate(
        {.path = flags.out,
         .print = [](std::string_view text) { std::cout << text << std::flush; },
         .proceed = proceed});
  });
  return Interrupted() ? kInterrupted : 0;
}

}  // namespace

void AddGenerate(CLI::App& app, const std::shared_ptr<Task>& task, Action* action) {
  // Run() reports a task that does not support generation after it has read the model.
  const Generation generation =
      task->generation().value_or(Generation{.help = "Generate output from a trained model"});
  CLI::App* command = app.add_subcommand("generate", generation.help);
  auto flags = std::make_shared<GenerateFlags>();
  command->add_option("--model", flags->model, "A checkpoint file, or the folder of a run")
      ->required();
  if (!generation.file.empty()) command->add_option("--out", flags->out, generation.file);
  AddFlags(command, generation.options);
  AddDeviceFlag(command, &flags->device, "to run the model");
  AddThreadsFlag(command, &flags->threads);
  command->callback(
      [action, flags, task] { *action = [flags, task] { return Run(*flags, *task); }; });
}

}  // namespace gnomon::lab::cli
