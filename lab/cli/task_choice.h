// Determines the task from the command line; the available flags depend on it.
#ifndef GNOMON_CLI_TASK_CHOICE_H_
#define GNOMON_CLI_TASK_CHOICE_H_

#include <memory>
#include <string>

#include "training/task.h"

namespace gnomon::cli {

struct TaskChoice {
  std::shared_ptr<lab::Task> task;
  // The reason why the given run or checkpoint does not state its task; empty if it does or if none
  // is given.
  std::string fault;
};

// The task named by --task, otherwise that of the run or checkpoint given to --resume or --model,
// otherwise `text`. Throws Error if there is no task with that name.
TaskChoice ChooseTask(int argc, char** argv);

}  // namespace gnomon::cli

#endif  // GNOMON_CLI_TASK_CHOICE_H_
