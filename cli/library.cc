// The program inside an interpreter of Python, which loads it as a library (gnomon/__main__.py):
// torch.distributed can be started there alone.
#include <memory>
#include <string>

#include "cli/program.h"

// Runs the program with the words argv[0] to argv[argc - 1] and returns its exit code. `group` is
// the registered name of the process group that it is run by, or null for one process.
extern "C" int gnomon_run_program(int argc, char** argv, const char* group, int rank, int size) {
  using namespace gnomon::models;
  if (group == nullptr) return gnomon::cli::RunProgram(argc, argv, std::make_shared<Processes>());
  return gnomon::cli::RunProgram(argc, argv, std::make_shared<ProcessGroup>(group, rank, size));
}
