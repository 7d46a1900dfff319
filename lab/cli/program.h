// The program, which takes a command line and returns an exit code.
#ifndef GNOMON_CLI_PROGRAM_H_
#define GNOMON_CLI_PROGRAM_H_

#include <functional>
#include <string>

namespace gnomon::lab {
class Processes;
}

namespace gnomon::lab::cli {

// The processes that run a command together.
struct Group {
  const char* name = nullptr;  // as registered with torch.distributed; null for a single process
  int rank = 0;
  int size = 1;
};

// Whether the process moved to the root directory because its working directory had been deleted.
// Commands that need a working directory are then rejected.
extern bool working_folder_is_deleted;

// Runs a command line and returns the exit code. On failure, prints a one-line message. If several
// processes run the command, which only train supports, they return the same code where possible.
int RunProgram(int argc, char** argv, const Group& group = {});

// Returns the options stored in language model checkpoints as JSON, with one list per section.
std::string CheckpointOptions();

// Runs `part`, which may fail in only some of the processes. It must not contain a collective
// operation: if one process failed before it, the others would wait forever. Returns when all
// processes have finished `part`. If it threw in any process, the first of these (by rank) prints
// the reason, and all processes throw Stopped.
void RunInEveryProcess(const Processes& processes, const std::function<void()>& part);

// Thrown to end the program after the message has been printed.
struct Stopped {
  int code;
};

}  // namespace gnomon::lab::cli

#endif  // GNOMON_CLI_PROGRAM_H_
