// Which task a command line is about: its flags depend on it.
#ifndef GNOMON_CLI_TASK_CHOICE_H_
#define GNOMON_CLI_TASK_CHOICE_H_

#include <memory>
#include <string>

#include "training/task.h"

namespace gnomon::cli {

struct TaskChoice {
  std::shared_ptr<models::Task> task;
  // Why the run or checkpoint that is named does not tell its task; empty: it does, or none is.
  std::string fault;
};

// The task that --task names, else the one that the run or checkpoint after --resume or --model is
// of, else `text`. Throws Error where there is no task of that name.
TaskChoice ChooseTask(int argc, char** argv);

}  // namespace gnomon::cli

#endif  // GNOMON_CLI_TASK_CHOICE_H_
