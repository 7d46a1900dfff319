#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/checks.h"
#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/interrupts.h"
#include "cli/one_run.h"
#include "cli/progress.h"
#include "cli/python.h"
#include "cli/record.h"
#include "cli/results.h"
#include "cli/run_folder.h"
#include "cli/scalars.h"
#include "cli/tuning.h"
#include "cli/workers.h"
#include "gnomon/attention.h"
#include "gnomon/sha256.h"
#include "training/device.h"
#include "training/files.h"
#include "training/strings.h"
#include "training/task.h"

namespace gnomon::lab::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int64_t kResultsFormat = 1;
constexpr const char* kTableName = "table.md";
constexpr int64_t kMostSeeds = 1000;

#define GNOMON_RUN_CHOICES(OPTION)                                                                 \
  OPTION(std::vector<std::string>, positions, {},                                                  \
         .help = "Comma-separated position specifications; see `gnomon list`", .flag = "position") \
  OPTION(                                                                                          \
      std::vector<std::string>, similarities, std::vector<std::string>({"dot"}),                   \
      .help = "Comma-separated similarity specifications; each is combined with every position",   \
      .flag = "similarity")                                                                        \
  OPTION(std::vector<std::string>, runs, {},                                                       \
         .help =                                                                                   \
             "An additional combination, SIMILARITY/POSITION; repeatable. Without --position "     \
             "and --similarity, only the combinations given by --run are compared",                \
         .flag = "run", .has_commas = false)                                                       \
  OPTION(std::string, seeds, "1",                                                                  \
         .help =                                                                                   \
             "Number of seeds; FEWEST..MOST adds seeds while the verdict on any pair of "          \
             "combinations is undecided, and needs --margin")                                      \
  OPTION(int64_t, first_seed, 0, .help = "The first seed",                                         \
         .highest = static_cast<double>(kLargestSeed - kMostSeeds), .flag = "seed")

// The flags that select runs. A record stores the resulting combinations and seeds
// (CompareSettings).
struct RunChoices {
  GNOMON_OPTIONS(GNOMON_RUN_CHOICES)
};

struct CompareFlags {
  std::string task = kTextTask;
  std::string data;
  RunChoices choices;
  double margin = 0;
  bool until_flat = false;
  UntilFlat flat;
  std::vector<std::string> tune;
  int64_t tune_trials = 0;  // 0 means the default
  TrainingOptions training;
  RunOptions run;
  std::string out;
  std::string resume;
  std::string only;  // COMBINATION,SEED: the one run that a worker executes
  WorkerFlags workers;
  bool tensorboard = false;
  std::string device = "cpu";
  int64_t threads = 0;
};

// A running comparison: its settings, and the record of finished runs.
struct Comparison {
  Task* task = nullptr;
  CompareSettings settings;
  torch::Device device = torch::kCPU;
  std::string data;
  fs::path folder;
  FolderLock lock;  // locks the folder
  int64_t checkpoint_every = 0;
  std::vector<RunResult> runs;
  json record;  // without the runs and the summary, which Save() adds

  // For a trial, `seed` is TrialSeed(number).
  OneRun At(int64_t combination, int64_t seed) {
    Trial* const trial = seed < 0 ? settings.tuning->Find(combination, -1 - seed) : nullptr;
    return {settings, *task, device, folder, combination, seed, checkpoint_every, trial};
  }
};

// Represents a trial in a list of runs, in place of a seed. Seeds are never negative, so the two
// cannot be confused.
int64_t TrialSeed(int64_t number) { return -1 - number; }

void Save(Comparison* work, const char* status) {
  json& record = work->record;
  const Task& task = *work->task;
  record["status"] = status;
  record["updated"] = Now();
  record["settings"] = ToJson(work->settings, *work->task);
  record["runs"] = json::array();
  for (const RunResult& run : work->runs) record["runs"].push_back(ToJson(task, run));
  record["summary"] = Summarize(task, work->settings, work->runs);
  WriteFileAtomically(work->folder / kResultsName, {record.dump(1) + "\n"});
  WriteFileAtomically(work->folder / kTableName,
                      {FormatTable(task, work->settings, record["summary"])});
}

// All pairs of a similarity and a position (only if `product`), followed by the combinations given
// by --run.
std::vector<Terms> Combinations(const RunChoices& choices, bool product) {
  std::vector<Terms> all;
  if (product) {
    for (const std::string& similarity : choices.similarities) {
      for (const std::string& position : choices.positions) {
        all.push_back({similarity, position});
      }
    }
  }
  for (const std::string& run : choices.runs) {
    Terms terms = ParseTerms("--run", run);
    if (std::find(all.begin(), all.end(), terms) != all.end()) {
      throw Error(StrCat("--run: ", run, " is given twice"));
    }
    all.push_back(std::move(terms));
  }
  return all;
}

// "3" is {3, 3}; "3..12" is {3, 12}.
std::pair<int64_t, int64_t> ParseSeeds(const std::string& text) {
  const size_t dots = text.find("..");
  const std::optional<int64_t> fewest = ParseInteger(text.substr(0, dots));
  const std::optional<int64_t> most =
      dots == std::string::npos ? fewest : ParseInteger(text.substr(dots + 2));
  if (!fewest || !most || *fewest < 1 || *most < *fewest || *most > kMostSeeds) {
    throw Error(StrCat("--seeds is ", text, "; expected an integer from 1 to ", kMostSeeds,
                       ", or FEWEST..MOST"));
  }
  constexpr int64_t kFewestOfTests = 3;
  if (*fewest < *most && *fewest < kFewestOfTests) {
    throw Error(StrCat("--seeds is ", text, "; expected at least ", kFewestOfTests,
                       " before the dots, because the significance tests need that many seeds"));
  }
  return {*fewest, *most};
}

// Checks all combinations before the first one is trained. The data must have been read.
void CheckAll(Comparison* work) {
  for (const Terms& terms : work->settings.combinations) {
    TrainingOptions training = work->settings.training;
    training.seed = work->settings.seeds[0];
    CheckTerms(*work->task, terms, training, Command::kCompare, work->device);
  }
}

// Checks each --tune option on its own: all its values, or both ends of its range, in each
// combination that has the option.
void CheckTuned(const Comparison& work) {
  const CompareSettings& settings = work.settings;
  for (const TunedOption& option : settings.tuning->options) {
    const std::vector<double> ends = {option.low, option.high};
    for (const double value : option.values.empty() ? ends : option.values) {
      const json number = option.is_integer ? json(static_cast<int64_t>(value)) : json(value);
      for (const int64_t combination : option.combinations) {
        const TunedModel model(*work.task, settings.training, settings.combinations[combination],
                               {{option.name, number}});
        try {
          CheckTrainingOptions(model.training);
          CheckTerms(*work.task, model.terms, model.training, Command::kCompare, work.device);
          work.task->CheckData(&model.training);
        } catch (const Error& error) {
          throw Error(StrCat("--tune ", option.name, ": ", error.what()));
        }
      }
    }
  }
}

// Checks the data and its assets.
void CheckData(const Comparison& work) {
  work.task->CheckData(&work.settings.training);
  work.task->CheckFits(work.settings.training, /*processes=*/1);
  if (work.settings.tuning) CheckTuned(work);
}

std::string Sha256Of(const std::string& bytes) {
  Sha256 hash;
  hash.Update(bytes);
  return hash.Hex();
}

// Loads the comparison's original assets, because a different library version may learn different
// ones.
void ResumeAssets(const fs::path& folder, const json& record, TaskData& task) {
  std::vector<std::string> assets;
  for (const Asset& asset : task.Assets()) {
    std::string& bytes = assets.emplace_back();
    if (asset.file.empty()) continue;
    const fs::path file = folder / asset.file;
    std::ifstream in(file, std::ios::binary);
    if (!in) throw Error(StrCat("cannot read its ", asset.name, " ", file.string()));
    bytes.assign(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
    if (Sha256Of(bytes) != record.at(json::json_pointer(asset.sha256_at))) {
      throw Error(
          StrCat("the ", asset.name, " ", file.string(), " has changed since this run started"));
    }
  }
  task.TakeAssets(assets, /*is_stored=*/true);
}

void SetUntilFlat(const CLI::App& command, const CompareFlags& flags, CompareSettings* settings) {
  if (!flags.until_flat) {
    for (const char* name : {"--flat-margin", "--flat-share"}) {
      if (command.count(name) > 0) throw Error(StrCat(name, " needs --until-flat"));
    }
    return;
  }
  std::string& schedule = settings->training.schedule;
  if (command.count("--schedule") == 0) schedule = "constant";
  if (schedule == "cosine") {
    throw Error("--until-flat needs --schedule constant: a cosine schedule has a fixed end");
  }
  settings->until_flat = flags.flat;
}

json DescribeSession(torch::Device device, int64_t workers) {
  json session = {
      {"started", Now()}, {"command", CommandWords()}, {"machine", DescribeMachine(device)}};
  if (workers > 0) session["workers"] = workers;
  return session;
}

Comparison NewComparison(const CLI::App& command, const CompareFlags& flags, Task& task) {
  if (task.description().takes_data() && flags.data.empty()) {
    throw Error("compare: --data is required");
  }
  const bool named = command.count("--position") > 0 || command.count("--similarity") > 0;
  Comparison work;
  work.task = &task;
  work.device = FindDevice(flags.device);
  work.data = flags.data;
  CompareSettings& settings = work.settings;
  const RunChoices& choices = flags.choices;
  settings.combinations = Combinations(choices, named || choices.runs.empty());
  const auto [fewest, most] = ParseSeeds(choices.seeds);
  for (int64_t n = 0; n < fewest; ++n) settings.seeds.push_back(choices.first_seed + n);
  if (fewest < most) settings.seed_range = {fewest, most};
  if (command.count("--margin") > 0) settings.margin = flags.margin;
  if (settings.seed_range && !settings.margin) {
    throw Error(StrCat("--seeds ", choices.seeds,
                       " needs --margin: the smallest difference that matters, in the unit of the "
                       "first metric"));
  }
  settings.training = flags.training;
  SetUntilFlat(command, flags, &settings);
  if (flags.tune.empty() && flags.tune_trials > 0) throw Error("--tune-trials needs --tune");
  if (!flags.tune.empty()) {
    CheckOptuna();
    Tuning& tuning = settings.tuning.emplace();
    if (flags.tune_trials > 0) tuning.trials = flags.tune_trials;
    tuning.seed = choices.first_seed + kMostSeeds;
  }
  SetWarmup(command, &settings.training);
  settings.training.seed = choices.first_seed;
  CheckTrainingOptions(settings.training);
  task.Settle(Command::kCompare, /*is_resumed=*/false, &settings.training);
  CheckRanges(task.Options(Command::kCompare), "");
  task.ReadData(flags.data);
  const std::string held_out = settings.holds_out() ? task.HoldOut() : "";
  // Completing the specifications from the data may make two combinations identical.
  std::vector<Terms> completed;
  for (const Terms& terms : settings.combinations) {
    Terms complete = CompleteTerms(task, terms);
    const auto same = std::find(completed.begin(), completed.end(), complete);
    if (same != completed.end()) {
      const Terms& first = settings.combinations[same - completed.begin()];
      throw Error(
          StrCat(terms.label(), " is given twice: ", first.label(), " is the same on this data"));
    }
    completed.push_back(std::move(complete));
  }
  settings.combinations = std::move(completed);
  if (settings.tuning) {
    for (const std::string& text : flags.tune) {
      settings.tuning->options.push_back(
          ParseTuned(text, task, settings.training, settings.combinations));
      const auto is_same = [&](const TunedOption& option) {
        return option.name == settings.tuning->options.back().name;
      };
      if (std::count_if(settings.tuning->options.begin(), settings.tuning->options.end(), is_same) >
          1) {
        throw Error(StrCat("--tune: ", settings.tuning->options.back().name, " is given twice"));
      }
    }
  }
  CheckAll(&work);
  task.Prepare();
  CheckData(work);
  RunFolder folder =
      CreateRunFolder(flags.out, flags.data.empty() ? task.name() : NameOfData(flags.data));
  work.folder = std::move(folder.path);
  work.lock = std::move(folder.lock);
  for (const Asset& asset : task.Assets()) {
    if (!asset.file.empty()) WriteFileAtomically(work.folder / asset.file, {asset.bytes});
  }
  work.record = task.DescribeData();
  work.record.update(
      {{"format", kResultsFormat},
       {"name", work.folder.filename().string()},
       {"started", Now()},
       {"sessions", json::array({DescribeSession(work.device, flags.workers.count)})},
       {"versions", DescribeVersions()},
       {"task", DescribeTask(task)}});
  if (settings.holds_out()) {
    work.record["held_out"] = {{"part", held_out},
                               {"metric", task.metrics()[DecidingMetric(task)].key}};
  }
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
  if (!sound) throw Error(StrCat(file.string(), " is not a comparison record"));
  return record;
}

Comparison ResumedComparison(const CompareFlags& flags, Task& task) {
  Comparison work;
  work.task = &task;
  work.device = FindDevice(flags.device);
  work.folder = flags.resume;
  const fs::path file = work.folder / kResultsName;
  // A worker does not lock or clean up the folder; the command that started it does.
  const bool is_worker = !flags.only.empty();
  if (!is_worker && fs::is_directory(work.folder)) work.lock = FolderLock(work.folder);
  work.record = ReadRecord(file);
  for (const char* name : {kResultsName, kTableName}) {
    if (!is_worker) RemoveUnfinished(work.folder / name);
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
      throw Error(StrCat("the ", task.description().data_noun, " at ", work.data,
                         " has changed since this run started"));
    }
    task.CheckResumes(data);
    if (work.settings.holds_out()) task.HoldOut();
    ResumeAssets(work.folder, work.record, task);
  } catch (const json::exception& error) {
    throw Error(StrCat(file.string(), " is not a comparison record: ", error.what()));
  } catch (const Error& error) {
    throw Error(StrCat("cannot resume ", file.string(), ": ", error.what()));
  }
  // The command that started this worker has already checked everything.
  if (is_worker) return work;
  CheckAll(&work);
  CheckData(work);
  work.record["task"] = DescribeTask(task);
  work.record["sessions"].push_back(DescribeSession(work.device, flags.workers.count));
  return work;
}

// Estimates a session's remaining time from the steps finished so far.
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

bool IsDone(const std::vector<RunResult>& runs, int64_t combination, int64_t seed) {
  return std::any_of(runs.begin(), runs.end(), [&](const RunResult& run) {
    return run.combination == combination && run.seed == seed;
  });
}

// The runs that are not finished yet.
std::vector<std::pair<int64_t, int64_t>> Remaining(const Comparison& work) {
  std::vector<std::pair<int64_t, int64_t>> runs = work.settings.Runs();
  std::erase_if(runs, [&](const auto& run) { return IsDone(work.runs, run.first, run.second); });
  return runs;
}

// Draws the report of a running comparison: at most once a minute, and in at most a fortieth of the
// time.
class LiveReport {
 public:
  void Update(const fs::path& folder) {
    if (clock_.seconds() < pause_) return;
    const Stopwatch drawing;
    DrawReport(folder);  // errors are ignored here; RunAll() reports them
    pause_ = std::max(kSeconds, 39 * drawing.seconds());
    clock_ = Stopwatch();
  }

 private:
  static constexpr double kSeconds = 60;
  Stopwatch clock_;
  double pause_ = kSeconds;
};

// State that RunHere() and RunByWorkers() share.
class Session {
 public:
  explicit Session(Comparison* of) : work(of) {}

  Comparison* const work;
  Progress progress;

  std::string Title(int64_t combination, int64_t seed) const {
    if (seed < 0) {
      const Trial& trial = *work->At(combination, seed).trial;
      return StrCat("trial ", trial.number + 1, " of ",
                    work->settings.combinations[combination].label(), ", ",
                    DescribeValues(trial.values), ", to step ", trial.steps);
    }
    return StrCat("run ", work->runs.size() + 1, " of ", work->settings.Runs().size(), ": ",
                  work->settings.combinations[combination].label(), ", seed ", seed);
  }

  void Take(const RunResult& result) {
    if (result.seed < 0) return TakeTrial(result);
    const std::string title = Title(result.combination, result.seed);
    work->runs.push_back(result);
    // Sort the runs, so that their order does not depend on the number of workers.
    const auto runs = work->settings.Runs();
    const auto place = [&](const RunResult& run) {
      return std::find(runs.begin(), runs.end(), std::pair(run.combination, run.seed));
    };
    std::sort(work->runs.begin(), work->runs.end(),
              [&](const RunResult& a, const RunResult& b) { return place(a) < place(b); });
    Save(work, "running");
    fs::remove_all(work->At(result.combination, result.seed).own_folder());
    std::string outcome = result.diverged ? " diverged" : "";
    for (const Measurement& at : result.measurements) {
      outcome += StrCat(" ", FormatLoss(at.values[0]), " at ", FormatCondition(at.condition), ",");
    }
    progress.Note(StrCat(title, ":", outcome, " ", Duration(result.seconds)));
    report_.Update(work->folder);
  }

 private:
  void TakeTrial(const RunResult& result) {
    const OneRun run = work->At(result.combination, result.seed);
    Trial& trial = *work->settings.tuning->Find(result.combination, run.trial->number);
    trial.measured.emplace_back(trial.steps, result.tried);
    trial.seconds = result.seconds;
    Save(work, "running");
    fs::remove(run.result_file());
    progress.Note(StrCat(Title(result.combination, result.seed), ": ",
                         result.tried ? StrCat("held-out ", FormatLoss(*result.tried)) : "diverged",
                         ", ", Duration(result.seconds)));
    report_.Update(work->folder);
  }

  LiveReport report_;
};

// Executes runs in this process. Returns true if all are finished, false after Ctrl-C.
bool RunHere(const std::vector<std::pair<int64_t, int64_t>>& todo, bool tensorboard,
             Session* session) {
  Comparison& work = *session->work;
  Scalars scalars(tensorboard, *work.task, work.settings, work.folder);
  const auto steps_of = [&](const OneRun& run) {
    return run.trial != nullptr ? run.trial->steps : work.settings.training.steps;
  };
  int64_t total = 0;
  for (const auto& [combination, seed] : todo) total += steps_of(work.At(combination, seed));
  Schedule schedule(total);
  for (const auto& [combination, seed] : todo) {
    const std::string title = session->Title(combination, seed);
    const OneRun run = work.At(combination, seed);
    const int64_t steps = steps_of(run);
    int64_t done = 0;
    const auto reach = [&](int64_t step) {
      schedule.Done(step - done);
      done = step;
    };
    const std::optional<RunResult> result = Execute(
        run,
        {.started = reach,
         .step =
             [&](int64_t step, double loss) {
               reach(step);
               session->progress.Update(StrCat(title, ", step ", step, " of ", steps, ", loss ",
                                               FormatLoss(loss), ", ", schedule.Left()));
             },
         .point =
             [&, combination = combination, seed = seed](int64_t step, double loss) {
               if (seed >= 0) scalars.Loss(combination, seed, step, loss);
             },
         .evaluating =
             [&] { session->progress.Update(StrCat(title, ", evaluating, ", schedule.Left())); }});
    if (!result) return false;
    reach(steps);
    if (seed >= 0) scalars.Result(*result);
    session->Take(*result);
  }
  return true;
}

// The result of a trial in the format in which workers store it.
json TrialToJson(const OneRun& run, const RunResult& result) {
  return {{"steps", run.trial->steps},
          {"value", result.tried ? json(*result.tried) : json()},
          {"seconds", result.seconds}};
}

// Returns nullopt if the result is from an earlier stage of a trial, with fewer steps.
std::optional<RunResult> ReadResult(const OneRun& run) {
  const fs::path file = run.result_file();
  std::ifstream in(file);
  const json object = json::parse(in, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) throw Error(StrCat(file.string(), " contains no run result"));
  if (run.trial == nullptr) return RunFromJson(run.task, run.settings, object);
  if (object.value("steps", json()) != run.trial->steps) return std::nullopt;
  RunResult result;
  result.combination = run.combination;
  result.seed = run.seed;
  if (const json& value = object.at("value"); !value.is_null()) result.tried = value.get<double>();
  result.seconds = object.at("seconds").get<double>();
  return result;
}

// Executes runs on workers, which store their results in the folder.
bool RunByWorkers(const std::vector<std::pair<int64_t, int64_t>>& todo, Workers* workers,
                  Session* session) {
  Comparison& work = *session->work;
  const Stopwatch clock;
  size_t done = 0;
  const auto take = [&](int64_t combination, int64_t seed) {
    session->Take(ReadResult(work.At(combination, seed)).value());
    ++done;
  };
  const auto total = static_cast<double>(todo.size());
  return workers->Run(todo, take, [&] {
    session->progress.Update(StrCat(done, " of ", Counted(std::ssize(todo), "run"), " finished, ",
                                    TimeLeft(clock.seconds(), static_cast<double>(done), total)));
  });
}

// Adds a seed for all combinations that occur in an undecided pair. Returns false if it adds none.
bool AddSeed(Comparison* work) {
  CompareSettings& settings = work->settings;
  if (!settings.seed_range) return false;
  const int64_t count = std::ssize(settings.seeds) + std::ssize(settings.added);
  if (count >= settings.seed_range->second) return false;
  const json undecided =
      json::parse(AskPython("gnomon.report", {work->folder.string(), "--undecided"}));
  if (undecided.empty()) return false;
  settings.added.push_back({settings.seeds[0] + count, undecided.get<std::vector<int64_t>>()});
  return true;
}

// Executes runs on workers or in this process. If a worker finished a run after the comparison was
// stopped, reads its result instead of repeating the run. Returns whether all runs are finished.
bool RunThem(std::vector<std::pair<int64_t, int64_t>> todo, bool tensorboard, Workers* workers,
             Session* session) {
  std::erase_if(todo, [&](const auto& at) {
    const OneRun run = session->work->At(at.first, at.second);
    if (!fs::exists(run.result_file())) return false;
    const std::optional<RunResult> result = ReadResult(run);
    if (result) session->Take(*result);
    return result.has_value();
  });
  return workers != nullptr ? RunByWorkers(todo, workers, session)
                            : RunHere(todo, tensorboard, session);
}

// Runs trials until all values are chosen, and returns true; returns false after Ctrl-C.
bool Tune(Workers* workers, Session* session) {
  Comparison& work = *session->work;
  Tuning& tuning = *work.settings.tuning;
  std::vector<std::pair<int64_t, int64_t>> trials;
  while (!tuning.is_finished) {
    Save(&work, "running");
    if (!NextTrials(work.folder, &tuning, &trials)) break;
    Save(&work, "running");  // workers read the trials from the record
    for (auto& [combination, number] : trials) number = TrialSeed(number);
    if (!RunThem(trials, /*tensorboard=*/false, workers, session)) return false;
  }
  for (const Trial& trial : tuning.tried) {
    fs::remove_all(work.At(trial.combination, TrialSeed(trial.number)).own_folder());
  }
  return true;
}

// The command-line options passed to each worker's run.
std::vector<std::string> WorkerWords(const CLI::App& command, const Comparison& work) {
  std::vector<std::string> words = {"--task", work.task->name(), "--checkpoint-every",
                                    std::to_string(work.checkpoint_every)};
  for (const char* name : {"--device", "--threads", "--terms"}) {
    const CLI::Option* const option = command.get_option(name);
    for (const std::string& value : option->results()) words.insert(words.end(), {name, value});
  }
  if (command.count("--tensorboard") > 0) words.emplace_back("--tensorboard");
  return words;
}

int RunAll(const CLI::App& command, const CompareFlags& flags, Comparison* work) {
  const CompareSettings& settings = work->settings;
  std::unique_ptr<Workers> workers;
  if (flags.workers.any()) {
    workers = std::make_unique<Workers>(flags.workers, work->folder, WorkerWords(command, *work));
  }
  CatchInterrupts();
  Session session(work);
  Save(work, "running");
  session.progress.Note(StrCat(Counted(std::ssize(Remaining(*work)), "run"), " of ",
                               settings.training.steps, " steps on ", work->task->DescribeSize(),
                               work->data.empty() ? "" : " of ", work->data, ", into ",
                               work->folder.string()));
  bool finished = !settings.tuning || Tune(workers.get(), &session);
  do {
    Save(work, "running");  // workers read the settings from the record
    finished = finished && RunThem(Remaining(*work), flags.tensorboard, workers.get(), &session);
    if (!finished) {
      Save(work, "interrupted");
      session.progress.Note(
          StrCat("stopped: ", work->runs.size(), " of ", settings.Runs().size(),
                 " runs are finished; resume with: ", ResumeLine(command, work->folder.string())));
      return kInterrupted;
    }
  } while (AddSeed(work));
  workers = nullptr;
  Save(work, "finished");
  std::error_code ignored;
  fs::remove(UnfinishedRuns(work->folder), ignored);  // it is empty
  const Report report = DrawReport(work->folder);
  if (!report.fault.empty()) session.progress.Note(report.fault);
  std::cout << FormatTable(*work->task, settings, work->record["summary"]) << "\n";
  if (!report.verdicts.empty()) std::cout << report.verdicts << "\n";
  std::cout << (work->folder / (report.fault.empty() ? "report.html" : kTableName)).string()
            << std::endl;
  return report.is_refused ? kWrongInput : 0;
}

// Executes one run in a worker and writes its result to a file.
int RunOnly(Comparison* work, const CompareFlags& flags) {
  const std::string& only = flags.only;
  auto runs = work->settings.Runs();
  if (work->settings.tuning) {
    for (const Trial& trial : work->settings.tuning->tried) {
      runs.emplace_back(trial.combination, TrialSeed(trial.number));
    }
  }
  const auto found = std::find_if(runs.begin(), runs.end(), [&](const auto& run) {
    return StrCat(run.first, ",", run.second) == only;
  });
  if (found == runs.end()) {
    throw Error(StrCat("--only is ", only, ", which is not a run of this comparison"));
  }
  // This process must end when its worker does; otherwise it would interfere with the process that
  // repeats the run.
  if (const char* parent = std::getenv("GNOMON_PARENT"); parent != nullptr) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (std::to_string(::getppid()) != parent) return kInternalFailure;
  }
  const OneRun run = work->At(found->first, found->second);
  fs::create_directories(run.own_folder());
  const FolderLock lock(run.own_folder());
  CatchInterrupts();
  const bool is_trial = run.trial != nullptr;
  Scalars scalars(flags.tensorboard && !is_trial, *work->task, work->settings, work->folder);
  RunEvents events;
  events.point = [&](int64_t step, double loss) {
    scalars.Loss(run.combination, run.seed, step, loss);
  };
  const std::optional<RunResult> result = Execute(run, events);
  if (!result) return kInterrupted;
  if (!is_trial) scalars.Result(*result);
  const json text = is_trial ? TrialToJson(run, *result) : ToJson(*work->task, *result);
  WriteFileAtomically(run.result_file(), {text.dump()});
  return 0;
}

int Run(const CLI::App& command, CompareFlags& flags, Task& task) {
  SetThreads(flags.threads);
  if (!flags.resume.empty()) CheckResumes(command, flags.run.Options());
  if (!flags.only.empty() && flags.resume.empty()) throw Error("--only needs --resume");
  flags.workers.Check(command);
  if (flags.tensorboard && flags.only.empty()) CheckScalars(command);
  Comparison work =
      flags.resume.empty() ? NewComparison(command, flags, task) : ResumedComparison(flags, task);
  work.checkpoint_every = flags.run.checkpoint_every;
  return flags.only.empty() ? RunAll(command, flags, &work) : RunOnly(&work, flags);
}

}  // namespace

void AddCompare(CLI::App& app, const std::shared_ptr<Task>& task, Action* action) {
  CLI::App* command = app.add_subcommand(
      "compare",
      "Train a small model with each combination of similarity and position on the same data, in "
      "the same order, with the same budget, and evaluate each model under several conditions, "
      "such as different lengths. Writes results.json, table.md and report.html to a folder.");
  auto flags = std::make_shared<CompareFlags>();
  flags->task = task->name();
  flags->choices.positions = task->DefaultPositions();
  flags->training = task->DefaultTraining(Command::kCompare);
  AddTaskFlag(command, &flags->task);
  AddDataFlag(command, *task, &flags->data);
  AddFlags(command, flags->choices.Options());
  command->add_option("--out", flags->out,
                      "Folder for the results; default: runs/<date>-<time>-<name of the data>");
  command->add_option(
      "--resume", flags->resume,
      "Resume the comparison in this folder with its own settings; finished runs are kept, and "
      "unfinished runs continue from their checkpoints");
  AddDeviceFlag(command, &flags->device, "to train the models");
  AddThreadsFlag(command, &flags->threads);
  AddReal(command, "--margin", &flags->margin, 0, 1e12,
          "Smallest relevant difference in the first metric; two combinations are called "
          "equivalent if their difference is shown to be smaller")
      ->default_str("");
  command
      ->add_option("--tune", flags->tune,
                   "OPTION=VALUE,VALUE or OPTION=LOW..HIGH; repeatable. Tune a numeric model or "
                   "training option, or a numeric parameter of a similarity or position. Optuna "
                   "tunes each combination separately, on held-out training data")
      ->default_str("");
  AddNumber(command, "--tune-trials", &flags->tune_trials, 1, 10'000,
            "Trials per combination for --tune; default: 12, or the number of grid points if all "
            "options are lists and the grid is smaller")
      ->default_str("");
  command->add_flag("--until-flat", flags->until_flat,
                    "Train until the loss on held-out training data is flat, with --steps as the "
                    "upper limit. The learning rate is constant until the loss is flat and then "
                    "decays to the end of the run");
  AddReal(command, "--flat-margin", &flags->flat.margin, 0, 1,
          "With --until-flat: the loss is flat if its best held-out value improved by less than "
          "this fraction over the last --flat-share of --steps")
      ->capture_default_str();
  AddReal(command, "--flat-share", &flags->flat.share, 0.02, 0.8,
          "With --until-flat: fraction of --steps over which the improvement is measured")
      ->capture_default_str();
  flags->workers.Add(command);
  command->add_flag("--tensorboard", flags->tensorboard,
                    "Write training curves and results to the output folder for TensorBoard");
  command->add_option("--only", flags->only)->group("");
  AddFlags(command, task->Options(Command::kCompare) +
                        InSection("training", Without(flags->training.Options(), {"seed"})) +
                        InSection("run", flags->run.Options()));
  command->callback([action, command, flags, task] {
    *action = [command, flags, task] { return Run(*command, *flags, *task); };
  });
}

}  // namespace gnomon::lab::cli
