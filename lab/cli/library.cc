// The command-line program as a library. Python loads it (gnomon/__main__.py), because
// torch.distributed can be initialized only from Python.
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "cli/program.h"
#include "tasks/text.h"

// Runs the program with the words argv[0] to argv[argc - 1] and returns its exit code. `group` is
// the registered name of the process group that runs it, or null for a single process.
extern "C" int gnomon_run_program(int argc, char** argv, const char* group, int rank, int size) {
  using namespace gnomon::lab;
  if (group == nullptr) return gnomon::cli::RunProgram(argc, argv, std::make_shared<Processes>());
  return gnomon::cli::RunProgram(argc, argv, std::make_shared<ProcessGroup>(group, rank, size));
}

// Returns the options stored in language model checkpoints as JSON, with one list per section. The
// returned text is never freed.
extern "C" const char* gnomon_options() {
  using namespace gnomon::lab;
  static const std::string text = [] {
    TextTask task;
    Terms terms;
    TrainingOptions training;
    RunOptions run;
    const OptionList list = InSection("model", terms.Options()) + InSection("run", run.Options()) +
                            task.Options(Command::kTrain) +
                            InSection("training", training.Options());
    nlohmann::json sections;
    for (const Option& option : list) {
      sections[option.section].push_back(DescribeOption(option));
    }
    return sections.dump();
  }();
  return text.c_str();
}
