// Which task a command line is about: its flags depend on it.
#ifndef GNOMON_CLI_TASK_CHOICE_H_
#define GNOMON_CLI_TASK_CHOICE_H_

#include <memory>

#include "training/task.h"

namespace gnomon::cli {

// The task that --task names, else the one that the run or checkpoint after --resume or --model is
// of, else `text`. Throws Error where there is no task of that name.
std::shared_ptr<models::Task> ChooseTask(int argc, char** argv);

}  // namespace gnomon::cli

#endif  // GNOMON_CLI_TASK_CHOICE_H_
