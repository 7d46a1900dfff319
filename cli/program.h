// The program: from the words of a command line to an exit code.
#ifndef GNOMON_CLI_PROGRAM_H_
#define GNOMON_CLI_PROGRAM_H_

#include <functional>

#include "training/processes.h"

namespace gnomon::cli {

// Whether the process has left a working folder that was deleted, for the root: commands that need
// one are refused.
extern bool working_folder_is_deleted;

// Prints one line where something fails. Of several processes all return the same code, where they
// can; commands other than train are refused.
int RunProgram(int argc, char** argv, const models::ProcessesPtr& processes);

// Does a part of the work that may fail in some processes and not in others, without a collective
// that the others could be left waiting in. Returns when all have done it. Where it threw in any of
// several processes, the first of them prints why, and this throws Stopped in all.
void RunInEveryProcess(const models::Processes& processes, const std::function<void()>& part);

// Leaves the program; what there is to say has been said.
struct Stopped {
  int code;
};

}  // namespace gnomon::cli

#endif  // GNOMON_CLI_PROGRAM_H_
