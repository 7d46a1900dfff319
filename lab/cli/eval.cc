#include <algorithm>
#include <cmath>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/checks.h"
#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/interrupts.h"
#include "cli/progress.h"
#include "cli/results.h"
#include "cli/shortage.h"
#include "gnomon/attention.h"
#include "training/checkpoint.h"
#include "training/device.h"
#include "training/strings.h"
#include "training/task.h"

namespace gnomon::lab::cli {
namespace {

struct EvalFlags {
  std::string model;
  std::string data;
  std::string device = "cpu";
  int64_t threads = 0;
  bool as_json = false;
};

void PrintTable(const TaskResults& task, const std::vector<Measurement>& measurements) {
  std::string head = StrCat("| ", task.conditions().key, " |");
  std::string rule = "|--:|";
  for (const Metric& metric : task.metrics()) {
    head += StrCat(" ", metric.title, " |");
    rule += "--:|";
  }
  std::cout << head << " " << task.description().examples << " |\n" << rule << "--:|\n";
  for (const Measurement& at : measurements) {
    std::cout << "| " << FormatCondition(at.condition);
    for (const std::optional<double>& value : at.values) std::cout << " | " << FormatLoss(value);
    std::cout << " | " << at.examples << " |\n";
  }
}

int Run(CLI::App& command, const EvalFlags& flags, Task& task) {
  SetThreads(flags.threads);
  Checkpoint checkpoint = LoadModel(flags.model, task, FindDevice(flags.device));
  // Some evaluation options are also training options, so loading the checkpoint has overwritten
  // them.
  SetAgain(command, task.Options(Command::kEval));
  const std::optional<TrainingState>& training = checkpoint.training;
  task.Settle(Command::kEval, /*is_resumed=*/true, training ? &training->options : nullptr);
  CheckRanges(task.Options(Command::kEval), "");
  if (task.description().takes_data() && flags.data.empty() && !training) {
    throw Error(
        StrCat("eval: ", flags.model, " contains only a model, with no data path; pass --data"));
  }
  const std::string trained_on = training ? training->data_path : "";
  const std::string data = flags.data.empty() ? trained_on : flags.data;
  task.ReadData(data);
  task.CheckData(nullptr);
  // Null if there is no training state, because the training data are then unknown.
  nlohmann::json same_data;
  if (training) same_data = task.data_sha256() == training->data_sha256;
  CatchInterrupts();
  std::vector<Measurement> measurements;
  NamingOptions(task.EvaluationFlags(Command::kEval), [&] {
    measurements = checkpoint.learner->Evaluate([] { return !Interrupted(); });
  });
  if (measurements.empty()) return kInterrupted;
  for (const Measurement& at : measurements) {
    if (!at.values.empty() && at.values[0] && std::isnan(*at.values[0])) {
      throw Error(StrCat("the loss of ", flags.model,
                         " is NaN: the checkpoint contains non-finite weights"));
    }
  }
  if (same_data == false) {
    std::cerr << "gnomon: "
              << OneLine(StrCat("note: the ", task.description().data_noun, " at ", data,
                                flags.data.empty()
                                    ? " has changed since the model was trained"
                                    : " differs from the model's training data, " + trained_on))
              << std::endl;
  }
  if (flags.as_json) {
    nlohmann::json record = task.DescribeData();
    record.update(task.DescribeEvaluation());
    std::string noun = task.description().data_noun;
    std::replace(noun.begin(), noun.end(), ' ', '_');
    record["trained_on_this_" + noun] = same_data;
    record["step"] = training ? nlohmann::json(training->step) : nullptr;
    record["losses"] = nlohmann::json::array();
    for (const Measurement& at : measurements) {
      record["losses"].push_back(ToJson(task, at));
    }
    std::cout << record.dump(2) << "\n";
    return 0;
  }
  PrintTable(task, measurements);
  return 0;
}

}  // namespace

void AddEval(CLI::App& app, const std::shared_ptr<Task>& task, Action* action) {
  CLI::App* command = app.add_subcommand("eval", "Evaluate a trained model on held-out data");
  auto flags = std::make_shared<EvalFlags>();
  command->add_option("--model", flags->model, "A checkpoint file, or the folder of a run")
      ->required();
  AddDataFlag(command, *task, &flags->data,
              "; default: the training run's data, if the checkpoint contains its training state");
  AddFlags(command, task->Options(Command::kEval));
  command->add_flag("--json", flags->as_json, "Print JSON");
  AddDeviceFlag(command, &flags->device, "to evaluate the model");
  AddThreadsFlag(command, &flags->threads);
  command->callback([action, command, flags, task] {
    *action = [command, flags, task] { return Run(*command, *flags, *task); };
  });
}

}  // namespace gnomon::lab::cli
