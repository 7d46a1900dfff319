#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/python.h"

namespace gnomon::lab::cli {

// The command is implemented in Python (python/gnomon/lab/inspect), which receives all words after
// `inspect`, including --help.
void AddInspect(CLI::App& app, Action* action) {
  CLI::App* command =
      app.add_subcommand("inspect",
                         "Draw encodings, their decay with distance, the attention of a trained "
                         "model, or hyperbolic cones; `gnomon inspect --help` lists the figures");
  command->set_help_flag();
  command->prefix_command();
  command->callback([action, command] {
    *action = [command] { return BecomePython("gnomon.inspect", command->remaining()); };
  });
}

}  // namespace gnomon::lab::cli
