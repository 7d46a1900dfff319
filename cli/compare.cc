#include <algorithm>
#include <cmath>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/sha256.h"
#include "cli/checks.h"
#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/interrupts.h"
#include "cli/measure.h"
#include "cli/progress.h"
#include "cli/python.h"
#include "cli/record.h"
#include "cli/results.h"
#include "cli/run_folder.h"
#include "cli/shortage.h"
#include "gnomon/attention.h"
#include "training/device.h"
#include "training/files.h"
#include "training/strings.h"
#include "training/task.h"
#include "training/trainer.h"

namespace gnomon::cli {
namespace {

namespace fs = std::filesystem;
using models::Command;
using models::Counted;
using models::StrCat;
using nlohmann::json;

constexpr int64_t kResultsFormat = 1;
constexpr const char* kTableName = "table.md";
// Points of a training curve.
constexpr int64_t kCurvePoints = 100;
constexpr int64_t kMostSeeds = 1000;

#define GNOMON_RUN_CHOICES(OPTION)                                                                \
  OPTION(std::vector<std::string>, positions, {},                                                 \
         .help = "Position specifications joined by commas; see `gnomon list`",                   \
         .flag = "position")                                                                      \
  OPTION(                                                                                         \
      std::vector<std::string>, similarities, std::vector<std::string>({"dot"}),                  \
      .help = "Similarity specifications joined by commas; each is combined with every position", \
      .flag = "similarity")                                                                       \
  OPTION(std::vector<std::string>, runs, {},                                                      \
         .help =                                                                                  \
             "SIMILARITY/POSITION: one additional combination, repeatable; without --position "   \
             "and --similarity, only these are run",                                              \
         .flag = "run", .has_commas = false)                                                      \
  OPTION(int64_t, seeds, 1,                                                                       \
         .help = "Number of seeds; with several, results are means with standard deviations",     \
         .lowest = 1, .highest = static_cast<double>(kMostSeeds))                                 \
  OPTION(int64_t, first_seed, 0, .help = "The first seed",                                        \
         .highest = static_cast<double>(kLargestSeed - kMostSeeds), .flag = "seed")

// The flags. A record stores the resulting combinations and seeds (CompareSettings).
struct RunChoices {
  GNOMON_OPTIONS(GNOMON_RUN_CHOICES)
};

struct CompareFlags {
  std::string task = models::kTextTask;
  std::string data;
  RunChoices choices;
  models::TrainingOptions training;
  std::string out;
  std::string resume;
  std::string device = "cpu";
  int64_t threads = 0;
};

// A running comparison: its settings, and the record of finished runs.
struct Comparison {
  models::Task* task = nullptr;
  CompareSettings settings;
  torch::Device device = torch::kCPU;
  std::string data;
  fs::path folder;
  models::FolderLock lock;  // of the folder
  std::vector<RunResult> runs;
  json record;  // without the runs and their summary, which Save() adds
};

void Save(Comparison* work, const char* status) {
  json& record = work->record;
  const models::Task& task = *work->task;
  record["status"] = status;
  record["updated"] = Now();
  record["runs"] = json::array();
  for (const RunResult& run : work->runs) record["runs"].push_back(ToJson(task, run));
  record["summary"] = Summarize(task, work->settings, work->runs);
  models::WriteFileAtomically(work->folder / kResultsName, {record.dump(1) + "\n"});
  models::WriteFileAtomically(work->folder / kTableName,
                              {FormatTable(task, work->settings, record["summary"])});
}

// The cross product of positions and similarities, or, if only single runs are given, those.
std::vector<models::Terms> Combinations(const RunChoices& choices, bool product) {
  std::vector<models::Terms> all;
  if (product) {
    for (const std::string& similarity : choices.similarities) {
      for (const std::string& position : choices.positions) {
        all.push_back({similarity, position});
      }
    }
  }
  for (const std::string& run : choices.runs) {
    models::Terms terms = ParseTerms("--run", run);
    if (std::find(all.begin(), all.end(), terms) != all.end()) {
      throw Error(StrCat("--run: ", run, " is given twice"));
    }
    all.push_back(std::move(terms));
  }
  return all;
}

// All checks run before the first combination is trained. The data has been read.
void CheckAll(Comparison* work) {
  for (const models::Terms& terms : work->settings.combinations) {
    models::TrainingOptions training = work->settings.training;
    training.seed = work->settings.seeds[0];
    CheckTerms(*work->task, terms, training, Command::kCompare, work->device);
  }
}

// Including the assets.
void CheckData(const Comparison& work) {
  work.task->CheckData(&work.settings.training);
  work.task->CheckFits(work.settings.training, /*processes=*/1);
}

std::string Sha256Of(const std::string& bytes) {
  Sha256 hash;
  hash.Update(bytes);
  return hash.Hex();
}

// The original assets of the comparison: another library version may learn different ones.
void ResumeAssets(const Comparison& work) {
  std::vector<std::string> assets;
  for (const models::Asset& asset : work.task->Assets()) {
    std::string& bytes = assets.emplace_back();
    if (asset.file.empty()) continue;
    const fs::path file = work.folder / asset.file;
    std::ifstream in(file, std::ios::binary);
    if (!in) throw Error(StrCat("cannot read its ", asset.name, " ", file.string()));
    bytes.assign(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
    if (Sha256Of(bytes) != work.record.at(json::json_pointer(asset.sha256_at))) {
      throw Error(
          StrCat("the ", asset.name, " ", file.string(), " has changed since this run started"));
    }
  }
  work.task->TakeAssets(assets, /*is_stored=*/true);
}

json DescribeSession(torch::Device device) {
  return {{"started", Now()}, {"command", CommandWords()}, {"machine", DescribeMachine(device)}};
}

Comparison NewComparison(const CLI::App& command, const CompareFlags& flags, models::Task& task) {
  if (task.data_help() != nullptr && flags.data.empty()) {
    throw Error("compare: --data is required");
  }
  const bool named = command.count("--position") > 0 || command.count("--similarity") > 0;
  Comparison work;
  work.task = &task;
  work.device = models::FindDevice(flags.device);
  work.data = flags.data;
  CompareSettings& settings = work.settings;
  const RunChoices& choices = flags.choices;
  settings.combinations = Combinations(choices, named || choices.runs.empty());
  for (int64_t n = 0; n < choices.seeds; ++n) settings.seeds.push_back(choices.first_seed + n);
  settings.training = flags.training;
  SetWarmup(command, &settings.training);
  settings.training.seed = choices.first_seed;
  models::CheckTrainingOptions(settings.training);
  task.Settle(Command::kCompare, /*is_resumed=*/false, &settings.training);
  models::CheckRanges(task.Options(Command::kCompare), "");
  task.ReadData(flags.data);
  // Values filled in from the data may make two combinations identical.
  std::vector<models::Terms> completed;
  for (const models::Terms& terms : settings.combinations) {
    models::Terms complete = CompleteTerms(task, terms);
    const auto same = std::find(completed.begin(), completed.end(), complete);
    if (same != completed.end()) {
      const models::Terms& first = settings.combinations[same - completed.begin()];
      throw Error(
          StrCat(terms.label(), " is given twice: ", first.label(), " is the same on this data"));
    }
    completed.push_back(std::move(complete));
  }
  settings.combinations = std::move(completed);
  CheckAll(&work);
  task.Prepare();
  CheckData(work);
  RunFolder folder =
      CreateRunFolder(flags.out, flags.data.empty() ? task.name() : NameOfData(flags.data));
  work.folder = std::move(folder.path);
  work.lock = std::move(folder.lock);
  for (const models::Asset& asset : task.Assets()) {
    if (!asset.file.empty()) models::WriteFileAtomically(work.folder / asset.file, {asset.bytes});
  }
  work.record = task.DescribeData();
  work.record.update({{"format", kResultsFormat},
                      {"name", work.folder.filename().string()},
                      {"started", Now()},
                      {"sessions", json::array({DescribeSession(work.device)})},
                      {"versions", DescribeVersions()},
                      {"task", DescribeTask(task)},
                      {"settings", ToJson(settings, task)}});
  return work;
}

json ReadRecord(const fs::path& file) {
  std::ifstream in(file);
  if (!in) throw Error(StrCat("--resume: cannot read ", file.string()));
  json record = json::parse(in, nullptr, /*allow_exceptions=*/false);
  const bool sound =
      record.is_object() && record.value("format", json()) == kResultsFormat &&
      record.value("settings", json()).is_object() && record.value("data", json()).is_object() &&
      record.value("sessions", json()).is_array() && record.value("runs", json()).is_array();
  if (!sound) throw Error(StrCat(file.string(), " is not the record of a comparison"));
  return record;
}

Comparison ResumedComparison(const CompareFlags& flags, models::Task& task) {
  Comparison work;
  work.task = &task;
  work.device = models::FindDevice(flags.device);
  work.folder = flags.resume;
  const fs::path file = work.folder / kResultsName;
  if (fs::is_directory(work.folder)) work.lock = models::FolderLock(work.folder);
  work.record = ReadRecord(file);
  for (const char* name : {kResultsName, kTableName}) {
    models::RemoveUnfinished(work.folder / name);
  }
  try {
    if (const auto name = TaskOfRecord(file); name != task.name()) {
      throw Error(
          StrCat("it belongs to the task '", name.value_or(""), "'; expected '", task.name(), "'"));
    }
    work.settings = CompareFromJson(work.record["settings"], task);
    task.Settle(Command::kCompare, /*is_resumed=*/true, &work.settings.training);
    for (const json& run : work.record["runs"]) {
      work.runs.push_back(RunFromJson(task, work.settings, run));
    }
    const json& data = work.record["data"];
    work.data = data.value("path", "");
    task.ReadData(work.data);
    if (task.data_sha256() != data.value("sha256", "")) {
      throw Error(StrCat("the ", task.data_noun(), " at ", work.data,
                         " has changed since this run started"));
    }
    task.CheckResumes(data);
    ResumeAssets(work);
  } catch (const json::exception& error) {
    throw Error(StrCat(file.string(), " is not the record of a comparison: ", error.what()));
  } catch (const Error& error) {
    throw Error(StrCat("cannot resume ", file.string(), ": ", error.what()));
  }
  CheckAll(&work);
  CheckData(work);
  work.record["task"] = DescribeTask(task);
  work.record["sessions"].push_back(DescribeSession(work.device));
  return work;
}

// Estimated remaining time of a session, from its finished steps.
class Schedule {
 public:
  explicit Schedule(int64_t total) : total_(total) {}
  void Done(int64_t steps) { done_ += steps; }
  std::string Left() const {
    return TimeLeft(clock_.seconds(), static_cast<double>(done_), static_cast<double>(total_));
  }

 private:
  int64_t total_;
  int64_t done_ = 0;
  Stopwatch clock_;
};

// Trains and evaluates one combination with one seed. Returns nothing if Ctrl-C was pressed first.
std::optional<RunResult> RunOne(const Comparison& work, int64_t combination, int64_t seed,
                                const std::string& title, Schedule* schedule, Progress* progress) {
  const CompareSettings& settings = work.settings;
  models::Task& task = *work.task;
  const Stopwatch clock;
  models::TrainingOptions training = settings.training;
  training.seed = seed;
  models::Trainer trainer(
      models::NewLearner(task, settings.combinations[combination], training, work.device),
      training);
  RunResult result;
  result.combination = combination;
  result.seed = seed;
  result.parameters = models::CountParameters(trainer.learner().module());
  std::vector<double> milliseconds;
  std::vector<double> processor_milliseconds;
  const OtherPrograms others;
  const int64_t stride = std::max<int64_t>(training.steps / kCurvePoints, 1);
  double sum = 0;
  int64_t summed = 0;
  while (trainer.step() < training.steps) {
    if (Interrupted()) return std::nullopt;
    const Stopwatch step_clock;
    const double processor_before = ProcessorSeconds();
    double loss = 0;
    NamingOptions(task.StepFlags(Command::kCompare, training), [&] { loss = trainer.Step(); });
    milliseconds.push_back(step_clock.seconds() * 1e3);
    processor_milliseconds.push_back((ProcessorSeconds() - processor_before) * 1e3);
    if (!std::isfinite(loss)) {
      result.diverged = true;
      break;
    }
    schedule->Done(1);
    sum += loss;
    ++summed;
    if (trainer.step() % stride == 0 || trainer.step() == training.steps) {
      result.curve_steps.push_back(trainer.step());
      result.curve_losses.push_back(sum / static_cast<double>(summed));
      sum = 0;
      summed = 0;
    }
    const double shown =
        summed > 0 ? sum / static_cast<double>(summed) : result.curve_losses.back();
    progress->Update(StrCat(title, ", step ", trainer.step(), " of ", training.steps, ", loss ",
                            FormatLoss(shown), ", ", schedule->Left()));
  }
  result.ms_per_step = Median(milliseconds);
  result.ms_quartiles = {Quantile(milliseconds, 0.25), Quantile(milliseconds, 0.75)};
  result.processor_ms_per_step = Median(processor_milliseconds);
  result.others = others.Share();
  if (result.diverged) {
    schedule->Done(training.steps - trainer.step());
  } else {
    progress->Update(StrCat(title, ", evaluating, ", schedule->Left()));
    NamingOptions(task.EvaluationFlags(Command::kCompare), [&] {
      result.measurements = trainer.learner().Evaluate([] { return !Interrupted(); });
    });
    if (result.measurements.empty()) return std::nullopt;
    if (seed == settings.seeds[0]) {
      const std::optional<models::Picture> picture =
          trainer.learner().Draw([] { return !Interrupted(); });
      if (Interrupted()) return std::nullopt;
      if (picture) {
        const std::string file = StrCat("picture-", combination, ".png");
        models::WriteFileAtomically(work.folder / file, {picture->png});
        result.picture = {picture->title, file};
      }
    }
  }
  result.seconds = clock.seconds();
  return result;
}

bool IsDone(const std::vector<RunResult>& runs, int64_t combination, int64_t seed) {
  return std::any_of(runs.begin(), runs.end(), [&](const RunResult& run) {
    return run.combination == combination && run.seed == seed;
  });
}

int RunAll(const CLI::App& command, Comparison* work) {
  const CompareSettings& settings = work->settings;
  std::vector<RunResult>& runs = work->runs;
  std::vector<std::pair<int64_t, int64_t>> todo;
  for (const int64_t seed : settings.seeds) {
    for (size_t c = 0; c < settings.combinations.size(); ++c) {
      const auto combination = static_cast<int64_t>(c);
      if (!IsDone(runs, combination, seed)) todo.emplace_back(combination, seed);
    }
  }
  const size_t total = settings.combinations.size() * settings.seeds.size();
  Save(work, "running");
  CatchInterrupts();
  Progress progress;
  progress.Note(StrCat(Counted(static_cast<int64_t>(todo.size()), "run"), " of ",
                       settings.training.steps, " steps on ", work->task->DescribeSize(),
                       work->data.empty() ? "" : " of ", work->data, ", into ",
                       work->folder.string()));
  Schedule schedule(static_cast<int64_t>(todo.size()) * settings.training.steps);
  for (const auto& [combination, seed] : todo) {
    const std::string title = StrCat("run ", runs.size() + 1, " of ", total, ": ",
                                     settings.combinations[combination].label(), ", seed ", seed);
    const std::optional<RunResult> result =
        RunOne(*work, combination, seed, title, &schedule, &progress);
    if (!result) {
      Save(work, "interrupted");
      progress.Note(
          StrCat("stopped: ", runs.size(), " of ", total,
                 " runs are finished; resume with: ", ResumeLine(command, work->folder.string())));
      return kInterrupted;
    }
    runs.push_back(*result);
    Save(work, "running");
    std::string outcome = result->diverged ? " diverged" : "";
    for (const models::Measurement& at : result->measurements) {
      outcome += StrCat(" ", FormatLoss(at.values[0]), " at ", FormatCondition(at.condition), ",");
    }
    progress.Note(StrCat(title, ":", outcome, " ", Duration(result->seconds)));
  }
  Save(work, "finished");
  const Report report = DrawReport(work->folder);
  if (!report.fault.empty()) progress.Note(report.fault);
  std::cout << FormatTable(*work->task, settings, work->record["summary"]) << "\n"
            << (work->folder / (report.fault.empty() ? "report.html" : kTableName)).string()
            << std::endl;
  return report.is_refused ? kWrongInput : 0;
}

int Run(const CLI::App& command, const CompareFlags& flags, models::Task& task) {
  SetThreads(flags.threads);
  if (!flags.resume.empty()) CheckResumes(command);
  Comparison work =
      flags.resume.empty() ? NewComparison(command, flags, task) : ResumedComparison(flags, task);
  return RunAll(command, &work);
}

}  // namespace

void AddCompare(CLI::App& app, const std::shared_ptr<models::Task>& task, Action* action) {
  CLI::App* command = app.add_subcommand(
      "compare",
      "Train a small model with each combination of similarity and position on the same data, in "
      "the same order, with the same budget, and evaluate each under several conditions, such as "
      "lengths. Writes results.json, table.md and report.html to a folder.");
  auto flags = std::make_shared<CompareFlags>();
  flags->task = task->name();
  flags->choices.positions = task->DefaultPositions();
  flags->training = task->DefaultTraining(Command::kCompare);
  AddTaskFlag(command, &flags->task);
  AddDataFlag(command, *task, &flags->data);
  AddFlags(command, flags->choices.Options());
  command->add_option("--out", flags->out,
                      "Folder for the results; default runs/<date>-<time>-<name of the data>");
  command->add_option("--resume", flags->resume,
                      "Resume the comparison in this folder with its own settings; finished runs "
                      "are kept, and an unfinished run restarts");
  AddDeviceFlag(command, &flags->device, "to train the models");
  AddThreadsFlag(command, &flags->threads);
  AddFlags(command,
           task->Options(Command::kCompare) +
               models::InSection("training", models::Without(flags->training.Options(), {"seed"})));
  command->callback([action, command, flags, task] {
    *action = [command, flags, task] { return Run(*command, *flags, *task); };
  });
}

}  // namespace gnomon::cli
