// The command-line program as a library. Python loads it (gnomon/__main__.py), because
// torch.distributed can be initialized only from Python.
#include <string>

#include "cli/program.h"

// Runs the program with the words argv[0] to argv[argc - 1] and returns its exit code. `group` is
// the registered name of the process group that runs it, or null for a single process.
extern "C" int gnomon_run_program(int argc, char** argv, const char* group, int rank, int size) {
  return gnomon::lab::cli::RunProgram(argc, argv, {.name = group, .rank = rank, .size = size});
}

// Returns gnomon::lab::cli::CheckpointOptions(). The returned text is never freed.
extern "C" const char* gnomon_options() {
  static const std::string text = gnomon::lab::cli::CheckpointOptions();
  return text.c_str();
}
