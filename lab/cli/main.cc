#include <linux/limits.h>
#include <unistd.h>

#include <array>
#include <cerrno>

#include "cli/program.h"

namespace {

// If the working directory was deleted, shared libraries terminate the process while loading, with
// their own messages. Functions in .preinit_array run before the libraries' initializers.
void LeaveDeletedFolder(int /*argc*/, char** /*argv*/, char** /*environment*/) {
  std::array<char, PATH_MAX> path;
  const bool is_deleted = ::getcwd(path.data(), path.size()) == nullptr && errno == ENOENT;
  if (is_deleted && ::chdir("/") == 0) gnomon::lab::cli::working_folder_is_deleted = true;
}

[[gnu::used, gnu::section(".preinit_array")]] void (*const leave)(int, char**,
                                                                  char**) = LeaveDeletedFolder;

}  // namespace

int main(int argc, char** argv) { return gnomon::lab::cli::RunProgram(argc, argv); }
