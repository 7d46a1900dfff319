// The program, which takes a command line and returns an exit code.
#ifndef GNOMON_CLI_PROGRAM_H_
#define GNOMON_CLI_PROGRAM_H_

#include <functional>

#include "training/processes.h"

namespace gnomon::cli {

// Whether the working directory was deleted, so that the process moved to the root folder. Commands
// that need a working directory are then rejected.
extern bool working_folder_is_deleted;

// Runs a command line and returns the exit code. On failure, prints one line. If several processes
// run the command, which only train supports, they return the same code where possible.
int RunProgram(int argc, char** argv, const lab::ProcessesPtr& processes);

// Runs work that may fail in some processes only. The work must not contain a collective operation,
// in which the other processes would wait forever. Returns when all processes have finished. If the
// work threw in any process, the first such process prints the reason, and all throw Stopped.
void RunInEveryProcess(const lab::Processes& processes, const std::function<void()>& part);

// Ends the program; the message has already been printed.
struct Stopped {
  int code;
};

}  // namespace gnomon::cli

#endif  // GNOMON_CLI_PROGRAM_H_
