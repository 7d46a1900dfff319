// The program inside an interpreter of Python, which loads it as a library (gnomon/__main__.py):
// torch.distributed can be started there alone.
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "cli/program.h"
#include "tasks/text.h"

// Runs the program with the words argv[0] to argv[argc - 1] and returns its exit code. `group` is
// the registered name of the process group that it is run by, or null for one process.
extern "C" int gnomon_run_program(int argc, char** argv, const char* group, int rank, int size) {
  using namespace gnomon::models;
  if (group == nullptr) return gnomon::cli::RunProgram(argc, argv, std::make_shared<Processes>());
  return gnomon::cli::RunProgram(argc, argv, std::make_shared<ProcessGroup>(group, rank, size));
}

// The options that checkpoints of the language model hold, as JSON: a list for each section. The
// text stays.
extern "C" const char* gnomon_options() {
  using namespace gnomon::models;
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
