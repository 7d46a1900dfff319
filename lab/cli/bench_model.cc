#include "cli/bench_model.h"

#include <cmath>
#include <iostream>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>

#include "cli/checks.h"
#include "cli/commands.h"
#include "cli/interrupts.h"
#include "cli/measure.h"
#include "cli/progress.h"
#include "cli/record.h"
#include "cli/results.h"
#include "cli/shortage.h"
#include "training/strings.h"
#include "training/trainer.h"

namespace gnomon::lab::cli {
namespace {

using nlohmann::json;

constexpr int64_t kTextBytes = int64_t{1} << 16;

// Random text suffices, because times do not depend on the content.
std::string RandomText(int64_t bytes) {
  std::mt19937 generator(0);
  std::string text(static_cast<size_t>(bytes), '\0');
  for (char& c : text) c = static_cast<char>(generator());
  return text;
}

double TimeStep(Trainer* trainer) {
  const Stopwatch clock;
  const double loss = trainer->Step();
  const double taken = clock.seconds();
  // A step with a non-finite loss omits the backward pass, so its time would be meaningless.
  if (!std::isfinite(loss)) throw std::runtime_error("the loss is not finite");
  return taken;
}

void PrintRecord(const json& record, torch::Device device) {
  const json& model = record["model"];
  const json& training = record["training"];
  const std::string first = record["models"][0]["label"];
  std::cout << MachineLine(device) << "\nbatch " << training["batch"] << ", length "
            << training["length"] << ", dim " << model["dim"] << ", depth " << model["depth"]
            << ", heads " << model["heads"] << ", mlp " << model["mlp"] << "; medians of "
            << record["repeats"] << ", interleaved\n\n### training step\n\n"
            << "| model | parameters | ms | / " << first << " |\n|:--|--:|--:|--:|\n";
  for (const json& row : record["models"]) {
    std::cout << "| " << row["label"].get<std::string>() << " | " << row["parameters"] << " | "
              << FormatNumber(row["ms"], "%.2f") << " | " << FormatNumber(row["to_first"], "%.3f")
              << " |\n";
  }
  std::cout << std::flush;
}

}  // namespace

int BenchModels(const ModelBench& bench) {
  TrainingOptions training = bench.training;
  training.steps = bench.repeats + 1;
  training.warmup = training.steps;
  const LanguageModelOptions& model = bench.text.model;
  const int64_t length = bench.text.window.length;
  text::TextOptions text = bench.text;
  text.model.max_length = length;
  text::TextTask task(text);
  task.CheckFits(training, /*processes=*/1);
  TextData data;
  data.train = RandomText(std::max(kTextBytes, length + 1));
  task.SetText(std::move(data));
  task.Prepare();
  const std::string batch = task.StepFlags(Command::kTrain, training);
  std::vector<Terms> combinations;
  std::vector<std::unique_ptr<Trainer>> trainers;
  for (const std::string& name : bench.models) {
    combinations.push_back(ParseTerms("--model", name));
    trainers.push_back(std::make_unique<Trainer>(
        CheckTerms(task, combinations.back(), training, Command::kTrain, bench.device), training));
  }
  std::vector<std::vector<double>> seconds(trainers.size());
  Progress progress;
  // The first round is a warm-up.
  for (int64_t round = 0; round <= bench.repeats; ++round) {
    for (size_t m = 0; m < trainers.size(); ++m) {
      if (Interrupted()) return kInterrupted;
      double taken = 0;
      NamingOptions(batch, [&] { taken = TimeStep(trainers[m].get()); });
      if (round > 0) seconds[m].push_back(taken);
    }
    progress.Update(StrCat("round ", round, " of ", bench.repeats));
  }
  progress.Clear();
  json rows = json::array();
  for (size_t m = 0; m < trainers.size(); ++m) {
    const double median = Median(seconds[m]);
    rows.push_back({{"label", combinations[m].label()},
                    {"similarity", combinations[m].similarity},
                    {"position", combinations[m].position},
                    {"parameters", CountParameters(trainers[m]->learner().module())},
                    {"ms", median * 1e3},
                    {"to_first", median / Median(seconds[0])}});
  }
  const json record = {
      {"machine", DescribeMachine(bench.device)},
      {"versions", DescribeVersions()},
      {"model",
       {{"dim", model.dim}, {"depth", model.depth}, {"heads", model.heads}, {"mlp", model.mlp}}},
      {"training", {{"batch", training.batch}, {"length", length}}},
      {"repeats", bench.repeats},
      {"models", rows}};
  if (bench.as_json) {
    std::cout << record.dump(2) << std::endl;
  } else {
    PrintRecord(record, bench.device);
  }
  return 0;
}

}  // namespace gnomon::lab::cli
