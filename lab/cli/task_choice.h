// Determines the task from the command line; the available flags depend on it.
#ifndef GNOMON_CLI_TASK_CHOICE_H_
#define GNOMON_CLI_TASK_CHOICE_H_

#include <memory>
#include <string>

#include "training/task.h"

namespace gnomon::lab::cli {

struct TaskChoice {
  std::shared_ptr<Task> task;
  // The reason why the task of the given run or checkpoint is unknown; empty if it is known or if
  // no run or checkpoint is given.
  std::string fault;
};

// Returns the task named by --task. Without --task, returns the task of the run or checkpoint given
// by --resume or --model; without any of these, returns `text`. Throws Error if the task does not
// exist.
TaskChoice ChooseTask(int argc, char** argv);

}  // namespace gnomon::lab::cli

#endif  // GNOMON_CLI_TASK_CHOICE_H_
