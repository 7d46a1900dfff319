// The program's commands; each is implemented in its own file.
#ifndef GNOMON_CLI_COMMANDS_H_
#define GNOMON_CLI_COMMANDS_H_

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>

#include "training/processes.h"
#include "training/task.h"

namespace gnomon::lab::cli {

// Exit codes other than 0. Invalid input throws gnomon::Error.
inline constexpr int kInternalFailure = 1;
inline constexpr int kWrongInput = 2;
inline constexpr int kInterrupted = 130;

// The action that the command line selects; returns an exit code.
using Action = std::function<int()>;

// Each function adds a subcommand, which sets *action if the command line selects it.
void AddTrain(CLI::App& app, const std::shared_ptr<Task>& task, const ProcessesPtr& processes,
              Action* action);
void AddEval(CLI::App& app, const std::shared_ptr<Task>& task, Action* action);
void AddGenerate(CLI::App& app, const std::shared_ptr<Task>& task, Action* action);
void AddCompare(CLI::App& app, const std::shared_ptr<Task>& task, Action* action);
void AddData(CLI::App& app, Action* action);
void AddList(CLI::App& app, Action* action);
void AddInspect(CLI::App& app, Action* action);
void AddBench(CLI::App& app, Action* action);

}  // namespace gnomon::lab::cli

#endif  // GNOMON_CLI_COMMANDS_H_
