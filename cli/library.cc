// The program inside an interpreter of Python, which loads it as a library (gnomon/__main__.py):
// torch.distributed can be started there alone.
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "cli/program.h"
#include "models/language_model.h"
#include "training/training_options.h"

// Runs the program with the words argv[0] to argv[argc - 1] and returns its exit code. `group` is
// the registered name of the process group that it is run by, or null for one process.
extern "C" int gnomon_run_program(int argc, char** argv, const char* group, int rank, int size) {
  using namespace gnomon::models;
  if (group == nullptr) return gnomon::cli::RunProgram(argc, argv, std::make_shared<Processes>());
  return gnomon::cli::RunProgram(argc, argv, std::make_shared<ProcessGroup>(group, rank, size));
}

// What there is in each list of options, as JSON: an object of lists. The text stays.
extern "C" const char* gnomon_options() {
  using namespace gnomon::models;
  static const std::string text = [] {
    LanguageModelOptions model;
    TrainingOptions training;
    RunOptions run;
    return nlohmann::json{{"model", DescribeOptions(model.Options())},
                          {"training", DescribeOptions(training.Options())},
                          {"run", DescribeOptions(run.Options())}}
        .dump();
  }();
  return text.c_str();
}
