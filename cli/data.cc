#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/python.h"

namespace gnomon::cli {

// Formats are read by Python's libraries (python/gnomon/data), which has all words after the
// command, --help among them.
void AddData(CLI::App& app, Action* action) {
  CLI::App* command =
      app.add_subcommand("data",
                         "Convert data (images, sounds, IDX, arrays of NumPy, JSON, text; "
                         "any of them in gzip) to the arrays that a task may read: `gnomon data "
                         "--help` lists the formats. `gnomon data get NAME` fetches a set by its "
                         "name");
  command->set_help_flag();
  command->prefix_command();
  command->callback([action, command] {
    *action = [command] { return BecomePython("gnomon.data", command->remaining()); };
  });
}

}  // namespace gnomon::cli
