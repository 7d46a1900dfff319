// The program: from the words of a command line to an exit code.
#ifndef GNOMON_CLI_PROGRAM_H_
#define GNOMON_CLI_PROGRAM_H_

#include <functional>

#include "training/processes.h"

namespace gnomon::cli {

// Whether the working directory was deleted and the process moved to the root folder; commands that
// need a working directory are then rejected.
extern bool working_folder_is_deleted;

// Prints one line on failure. Several processes return the same code where possible; only train
// accepts several processes.
int RunProgram(int argc, char** argv, const lab::ProcessesPtr& processes);

// Runs work that may fail in some of the processes and contains no collective that the others would
// wait in. Returns when all processes have finished. If it threw in any process, the first of these
// prints the reason, and Stopped is thrown in all.
void RunInEveryProcess(const lab::Processes& processes, const std::function<void()>& part);

// Ends the program; the message has already been printed.
struct Stopped {
  int code;
};

}  // namespace gnomon::cli

#endif  // GNOMON_CLI_PROGRAM_H_
