#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/python.h"

namespace gnomon::lab::cli {

// The command is implemented in Python (python/gnomon/lab/data), which receives all words after
// `data`, including --help.
void AddData(CLI::App& app, Action* action) {
  CLI::App* command = app.add_subcommand(
      "data",
      "Convert data (images, audio, IDX, NumPy arrays, JSON, text; each optionally gzipped) to the "
      "arrays that a task reads; `gnomon data --help` lists the formats. `gnomon data get NAME` "
      "downloads a data set by name");
  command->set_help_flag();
  command->prefix_command();
  command->callback([action, command] {
    *action = [command] { return BecomePython("gnomon.data", command->remaining()); };
  });
}

}  // namespace gnomon::lab::cli
