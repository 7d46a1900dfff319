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
#include "models/evaluation.h"
#include "models/trainer.h"
#include "training/files.h"
#include "training/sha256.h"
#include "training/strings.h"

namespace gnomon::cli {
namespace {

namespace fs = std::filesystem;
using models::StrCat;
using nlohmann::json;

constexpr int64_t kResultsFormat = 1;
constexpr const char* kResultsName = "results.json";
constexpr const char* kTableName = "table.md";
// Points of a training curve.
constexpr int64_t kCurvePoints = 100;
constexpr int64_t kMostSeeds = 1000;

struct CompareFlags {
  std::string data;
  std::vector<std::string> positions = {
      "none", "sinusoidal", "rope", "alibi", "t5", "hype:tau=learned", "rope+hype:tau=learned"};
  std::vector<std::string> similarities = {"dot"};
  std::vector<std::string> runs;
  int64_t seeds = 1;
  int64_t first_seed = 0;
  EvaluationOptions evaluation;
  models::TokenOptions tokens;
  models::LanguageModelOptions model;
  models::TrainingOptions training;
  std::string out;
  std::string resume;
  int64_t threads = 0;
};

// A comparison under way: what is to be done, and the record of what is done.
struct Comparison {
  CompareSettings settings;
  models::TextData data;
  models::TokenData tokens;
  fs::path folder;
  models::FolderLock lock;  // of the folder
  std::vector<RunResult> runs;
  json record;  // all but the runs and their summary, which Save() adds
};

void Save(Comparison* work, const char* status) {
  json& record = work->record;
  record["status"] = status;
  record["updated"] = Now();
  record["runs"] = json::array();
  for (const RunResult& run : work->runs) record["runs"].push_back(ToJson(run));
  record["summary"] = Summarize(work->settings, work->runs);
  models::WriteFileAtomically(work->folder / kResultsName, {record.dump(1) + "\n"});
  models::WriteFileAtomically(work->folder / kTableName,
                              {FormatTable(work->settings, record["summary"])});
}

// The cross product of positions and similarities unless only single runs were asked for, then
// those, each combination once.
std::vector<Combination> Combinations(const CompareFlags& flags, bool product) {
  std::vector<Combination> all;
  const auto add = [&](Combination combination) {
    if (std::find(all.begin(), all.end(), combination) == all.end()) {
      all.push_back(std::move(combination));
    }
  };
  if (product) {
    for (const std::string& similarity : flags.similarities) {
      for (const std::string& position : flags.positions) add({similarity, position});
    }
  }
  for (const std::string& run : flags.runs) add(ParseCombination("--run", run));
  return all;
}

models::LanguageModelOptions ModelOptions(const CompareSettings& settings,
                                          const Combination& combination) {
  models::LanguageModelOptions options = settings.model;
  options.similarity = combination.similarity;
  options.position = combination.position;
  options.max_length = settings.evaluation.lengths[0];
  return options;
}

// Everything that can be wrong is found here, before the first combination is trained.
void Check(const CompareSettings& settings) {
  CheckLengths(settings.evaluation.lengths);
  models::CheckTrainingOptions(settings.training);
  models::CheckTokenOptions(settings.tokens);
  const int64_t memory = std::max(settings.training.memory, *settings.evaluation.evaluation_memory);
  for (const Combination& combination : settings.combinations) {
    BuildModel(ModelOptions(settings, combination), settings.seeds[0], memory);
  }
}

void CheckData(const Comparison& work) {
  const std::vector<int64_t>& lengths = work.settings.evaluation.lengths;
  CheckTextHolds(work.data, work.tokens, models::NeededTokens(work.settings.training),
                 *std::max_element(lengths.begin(), lengths.end()) + 1);
  CheckTrainingFits(work.settings.model, work.settings.training);
}

// The file of the vocabulary in the run's folder; none for bytes.
std::optional<fs::path> VocabularyFile(const Comparison& work) {
  const std::string& kind = work.settings.tokens.kind;
  if (kind == "bytes") return std::nullopt;
  return work.folder / (kind == "words" ? "vocabulary.txt" : "vocabulary.model");
}

void SetTokens(models::TokenizerPtr tokenizer, Comparison* work) {
  work->settings.model.vocabulary = tokenizer->size();
  work->tokens = models::Tokenize(std::move(tokenizer), work->data);
}

// The vocabulary that the comparison began with: another SentencePiece may learn another one.
void ResumeTokens(Comparison* work) {
  const std::optional<fs::path> file = VocabularyFile(*work);
  std::string vocabulary;
  if (file) {
    std::ifstream in(*file, std::ios::binary);
    if (!in) throw Error(StrCat("cannot read its vocabulary ", file->string()));
    vocabulary.assign(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
    models::Sha256 hash;
    hash.Update(vocabulary);
    if (hash.Hex() != work->record.at("tokens").at("sha256").get<std::string>()) {
      throw Error(StrCat("the vocabulary ", file->string(), " is not what the run began with"));
    }
  }
  SetTokens(models::ReadTokenizer(work->settings.tokens.kind, vocabulary), work);
}

json DescribeSession() {
  return {{"started", Now()}, {"command", CommandWords()}, {"machine", DescribeMachine()}};
}

Comparison NewComparison(const CLI::App& command, const CompareFlags& flags) {
  if (flags.data.empty()) throw Error("compare: --data is required");
  const bool named = command.count("--position") > 0 || command.count("--similarity") > 0;
  Comparison work;
  CompareSettings& settings = work.settings;
  settings.combinations = Combinations(flags, named || flags.runs.empty());
  for (int64_t n = 0; n < flags.seeds; ++n) settings.seeds.push_back(flags.first_seed + n);
  settings.evaluation = flags.evaluation;
  settings.model = flags.model;
  settings.training = flags.training;
  SetWarmup(command, &settings.training);
  settings.training.length = flags.evaluation.lengths[0];
  settings.training.seed = flags.first_seed;
  settings.tokens = flags.tokens;
  std::optional<int64_t>& memory = settings.evaluation.evaluation_memory;
  if (!memory) memory = flags.training.memory;
  Check(settings);
  work.data = models::ReadText(flags.data);
  SetTokens(models::BuildTokenizer(settings.tokens, work.data.train), &work);
  CheckData(work);
  RunFolder folder = CreateRunFolder(flags.out, NameOfData(flags.data));
  work.folder = std::move(folder.path);
  work.lock = std::move(folder.lock);
  if (const std::optional<fs::path> file = VocabularyFile(work)) {
    models::WriteFileAtomically(*file, {work.tokens.tokenizer->vocabulary()});
  }
  work.record = {{"format", kResultsFormat},
                 {"name", work.folder.filename().string()},
                 {"started", Now()},
                 {"sessions", json::array({DescribeSession()})},
                 {"versions", DescribeVersions()},
                 {"data", DescribeData(work.data)},
                 {"tokens", DescribeTokens(work.tokens)},
                 {"settings", ToJson(settings)}};
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

Comparison ResumedComparison(const std::string& folder) {
  Comparison work;
  work.folder = folder;
  const fs::path file = work.folder / kResultsName;
  if (fs::is_directory(work.folder)) work.lock = models::FolderLock(work.folder);
  work.record = ReadRecord(file);
  for (const char* name : {kResultsName, kTableName}) {
    models::RemoveUnfinished(work.folder / name);
  }
  try {
    work.settings = CompareFromJson(work.record["settings"]);
    for (const json& run : work.record["runs"]) {
      work.runs.push_back(RunFromJson(work.settings, run));
    }
    const json& data = work.record["data"];
    work.data = models::ReadText(data.at("path").get<std::string>());
    if (work.data.sha256 != data.at("sha256").get<std::string>()) {
      throw Error(StrCat("the text at ", work.data.path, " is not what the run began with"));
    }
    models::CheckTokenOptions(work.settings.tokens);
    ResumeTokens(&work);
  } catch (const json::exception& error) {
    throw Error(StrCat(file.string(), " is not the record of a comparison: ", error.what()));
  } catch (const Error& error) {
    throw Error(StrCat("cannot resume ", file.string(), ": ", error.what()));
  }
  Check(work.settings);
  CheckData(work);
  work.record["sessions"].push_back(DescribeSession());
  return work;
}

// Time left of a session, judged by the steps that it has done.
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

// Trains and evaluates one combination with one seed. Nothing comes back if Ctrl-C came first.
std::optional<RunResult> RunOne(const Comparison& work, int64_t combination, int64_t seed,
                                const std::string& title, Schedule* schedule, Progress* progress) {
  const CompareSettings& settings = work.settings;
  const Stopwatch clock;
  models::TrainingOptions training = settings.training;
  training.seed = seed;
  const models::LanguageModelOptions options =
      ModelOptions(settings, settings.combinations[combination]);
  models::Trainer trainer(models::NewModel(options, seed), work.tokens.train, training);
  RunResult result;
  result.combination = combination;
  result.seed = seed;
  result.parameters = trainer.model()->CountParameters();
  std::vector<double> milliseconds;
  const OtherPrograms others;
  const int64_t stride = std::max<int64_t>(training.steps / kCurvePoints, 1);
  double sum = 0;
  int64_t summed = 0;
  while (trainer.step() < training.steps) {
    if (Interrupted()) return std::nullopt;
    const Stopwatch step_clock;
    double loss = 0;
    NamingOptions(StrCat("--batch ", training.batch, " and --lengths ", training.length),
                  [&] { loss = trainer.Step(); });
    milliseconds.push_back(step_clock.seconds() * 1e3);
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
  result.others = others.Share();
  if (result.diverged) {
    schedule->Done(training.steps - trainer.step());
  } else {
    progress->Update(StrCat(title, ", evaluating, ", schedule->Left()));
    NamingOptions("--lengths and --evaluation-memory", [&] {
      result.losses =
          models::Evaluate(trainer.model(), work.tokens.valid, settings.evaluation.lengths,
                           models::TokensOfBytes(work.tokens.valid, settings.evaluation.evaluation_bytes),
                           *settings.evaluation.evaluation_memory, [] { return !Interrupted(); });
    });
    if (result.losses.empty()) return std::nullopt;
  }
  result.seconds = clock.seconds();
  return result;
}

bool IsDone(const std::vector<RunResult>& runs, int64_t combination, int64_t seed) {
  return std::any_of(runs.begin(), runs.end(), [&](const RunResult& run) {
    return run.combination == combination && run.seed == seed;
  });
}

int RunAll(Comparison* work) {
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
  progress.Note(StrCat(todo.size(), todo.size() == 1 ? " run of " : " runs of ",
                       settings.training.steps, " steps on ", work->tokens.train.size(), " ",
                       settings.tokens.kind, " of ", work->data.path, ", into ",
                       work->folder.string()));
  Schedule schedule(static_cast<int64_t>(todo.size()) * settings.training.steps);
  for (const auto& [combination, seed] : todo) {
    const std::string title = StrCat("run ", runs.size() + 1, " of ", total, ": ",
                                     settings.combinations[combination].label(), ", seed ", seed);
    const std::optional<RunResult> result =
        RunOne(*work, combination, seed, title, &schedule, &progress);
    if (!result) {
      Save(work, "interrupted");
      progress.Note(StrCat("stopped: ", runs.size(), " of ", total,
                           " runs are finished; resume with: gnomon compare --resume ",
                           work->folder.string()));
      return kInterrupted;
    }
    runs.push_back(*result);
    Save(work, "running");
    std::string outcome = result->diverged ? " diverged" : "";
    for (const models::LengthLoss& at : result->losses) {
      outcome += StrCat(" ", FormatLoss(at.loss), " at ", at.length, ",");
    }
    progress.Note(StrCat(title, ":", outcome, " ", Duration(result->seconds)));
  }
  Save(work, "finished");
  const std::string missing = DrawReport(work->folder);
  if (!missing.empty()) progress.Note(missing);
  std::cout << FormatTable(settings, work->record["summary"]) << "\n"
            << (work->folder / (missing.empty() ? "report.html" : kTableName)).string()
            << std::endl;
  return 0;
}

int Run(const CLI::App& command, const CompareFlags& flags) {
  SetThreads(flags.threads);
  if (!flags.resume.empty()) CheckStandsAlone(command, "--resume", {"--threads", "--terms"});
  Comparison work =
      flags.resume.empty() ? NewComparison(command, flags) : ResumedComparison(flags.resume);
  return RunAll(&work);
}

}  // namespace

void AddCompare(CLI::App& app, Action* action) {
  CLI::App* command = app.add_subcommand(
      "compare",
      "Train a small language model with each combination of similarity and position on the same "
      "data, order and budget, and evaluate each at several lengths. Leaves results.json, table.md "
      "and report.html in a folder.");
  auto flags = std::make_shared<CompareFlags>();
  flags->training.steps = 700;
  command->add_option("--data", flags->data,
                      "A text file, or a folder of text files; the last tenth is for validation "
                      "unless the folder has parts called train and valid");
  command
      ->add_option("--position", flags->positions,
                   "Position specifications joined by commas, see `gnomon list`")
      ->delimiter(',')
      ->capture_default_str();
  command
      ->add_option("--similarity", flags->similarities,
                   "Similarity specifications joined by commas; each is combined with each "
                   "position")
      ->delimiter(',')
      ->capture_default_str();
  command->add_option("--run", flags->runs,
                      "SIMILARITY/POSITION: one more combination, repeatable; without --position "
                      "and --similarity, these alone are run");
  AddFlags(command, flags->evaluation.Options());
  AddNumber(command, "--seeds", &flags->seeds, 1, kMostSeeds,
            "Number of seeds; several give mean and spread")
      ->capture_default_str();
  AddNumber(command, "--seed", &flags->first_seed, 0, kLargestSeed - kMostSeeds, "The first seed")
      ->capture_default_str();
  command->add_option("--out", flags->out,
                      "Folder for the results; default runs/<date>-<time>-<name of the data>");
  command->add_option(
      "--resume", flags->resume,
      "Resume the comparison in this folder with its own settings: finished runs are "
      "kept, an unfinished one starts again");
  AddThreadsFlag(command, &flags->threads);
  AddFlags(command, flags->tokens.Options());
  AddFlags(command, models::Without(flags->model.Options(), {"similarity", "position"}), "Model");
  AddFlags(command, models::Without(flags->training.Options(), {"length", "seed"}), "Training");
  command->callback(
      [action, command, flags] { *action = [command, flags] { return Run(*command, *flags); }; });
}

}  // namespace gnomon::cli
