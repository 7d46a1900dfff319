// The task `generated`: synthetic problems with known answers, trained on short inputs and
// evaluated on longer ones. A causal Transformer reads an input, a separator and the answer, and
// predicts each token of the answer from the preceding ones, as in Kazemnejad et al. 2023. The loss
// covers the answer only. As in Deletang et al. 2023, the answer's length is given, so the model
// need not predict its end.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gnomon/attention.h"
#include "models/language_model.h"
#include "models/language_model_size.h"
#include "models/problems.h"
#include "models/transformer.h"
#include "models/windows.h"
#include "training/files.h"
#include "training/processes.h"
#include "training/strings.h"
#include "training/task.h"

namespace gnomon::lab {
namespace generated {
namespace {

using nlohmann::json;

// The purpose of a stream of random numbers.
enum Purpose : uint32_t {
  kTraining,
  kEvaluation,
  kTrainingPositions,
  kEvaluationPositions,
  kHeldOut,
  kHeldOutPositions
};

// The approximate number of tokens in an evaluation batch of any length.
constexpr int64_t kEvaluationBatch = 8192;

const char* HelpOnProblem() {
  static const std::string help =
      StrCat("Problem: ", Join(ProblemNames(), ", "), "; see docs/tasks.md");
  return help.c_str();
}

const char* HelpOnSymbols() {
  static const std::string help = [] {
    std::vector<std::string> defaults;
    for (const Problem& problem : Problems()) {
      defaults.push_back(StrCat(problem.symbols, " for ", problem.name));
    }
    return StrCat(
        "Number of different symbols (in recall, this many keys and this many values); default: ",
        Join(defaults, ", "));
  }();
  return help.c_str();
}

#define GNOMON_PROBLEM_OPTIONS(OPTION)                                                     \
  OPTION(std::string, problem, "copy", .help = HelpOnProblem(), .choices = ProblemNames()) \
  OPTION(std::optional<int64_t>, symbols, std::nullopt, .help = HelpOnSymbols(), .lowest = 1)

struct ProblemOptions {
  GNOMON_OPTIONS(GNOMON_PROBLEM_OPTIONS)
};

#define GNOMON_GENERATED_MODEL_OPTIONS(OPTION)                                                 \
  GNOMON_TRANSFORMER_SIZES(OPTION, 64, 4, 4, 256)                                              \
  OPTION(int64_t, random_positions, 0,                                                         \
         .help =                                                                               \
             "In training and evaluation, give the tokens of each row random positions below " \
             "this number, in increasing order; 0 means positions 0, 1, 2 ...")                \
  /* The number of rows in a table of learned absolute positions. */                           \
  OPTION(int64_t, max_length, 512, .lowest = 1, .has_flag = false)

struct GeneratedModelOptions {
  GNOMON_OPTIONS(GNOMON_GENERATED_MODEL_OPTIONS)
};

#define GNOMON_GENERATED_ROW_OPTIONS(OPTION)                                                       \
  OPTION(std::vector<int64_t>, lengths, std::vector<int64_t>({40, 100, 200, 500}),                 \
         .help =                                                                                   \
             "Input lengths in symbols, comma-separated: training uses lengths from 1 to the "     \
             "first length listed; all listed lengths are evaluated",                              \
         .lowest = 1)                                                                              \
  OPTION(int64_t, evaluation_examples, 128, .help = "Number of inputs to evaluate at each length", \
         .lowest = 1)

struct GeneratedRowOptions {
  GNOMON_OPTIONS(GNOMON_GENERATED_ROW_OPTIONS)
};

#define GNOMON_GENERATED_EVALUATION_OPTIONS(OPTION)                                            \
  OPTION(std::string, examples, "",                                                            \
         .help = "Also write each example and the model's answer to this file, as JSON lines", \
         .shows_default = false)

struct GeneratedEvaluationOptions {
  GNOMON_OPTIONS(GNOMON_GENERATED_EVALUATION_OPTIONS)
};

class GeneratedTask final : public Task {
 public:
  const Problem& problem() const { return FindProblem(problem_.problem); }
  int64_t symbols() const { return problem_.symbols.value_or(problem().symbols); }
  const GeneratedRowOptions& rows() const { return rows_; }
  const std::string& examples_file() const { return evaluation_.examples; }
  int64_t random_positions() const { return model_.random_positions; }

  const char* name() const override { return "generated"; }
  TaskDescription description() const override {
    return {.summary =
                "synthetic problems: copy, reverse, sort, parity, stack, recall ...; accuracy at "
                "lengths beyond the training lengths",
            .loss_unit = "nats per token of the answer"};
  }

  TrainingOptions DefaultTraining(Command command) const override {
    TrainingOptions training;
    training.batch = 32;
    training.learning_rate = 1e-3;
    training.steps = command == Command::kCompare ? 1000 : 5000;
    return training;
  }

  OptionList Options(Command command) override {
    if (command == Command::kEval) return rows_.Options() + evaluation_.Options();
    return rows_.Options() + InSection("problem", problem_.Options()) +
           InSection("model", model_.Options());
  }

  void Settle(Command command, bool is_resumed, const TrainingOptions* training) override;
  std::string StepFlags(Command /*command*/, const TrainingOptions& training) const override {
    return StrCat("--batch ", training.batch, " and --lengths ", rows_.lengths[0]);
  }
  std::string EvaluationFlags(Command /*command*/) const override { return "--lengths"; }
  void CheckModelFits() const override { CheckWeightsFit(ModelOptions({})); }
  void CheckFits(const TrainingOptions& training, int64_t processes) const override {
    CheckStepFits(ModelOptions({}), CountRows(training.batch, 0, processes), Read(rows_.lengths[0]),
                  StepFlags(Command::kTrain, training));
  }

  void ReadData(const std::string& /*path*/) override {}
  std::string HoldOut() override {
    return StrCat(rows_.evaluation_examples, " separately drawn inputs");
  }
  json DescribeData() const override {
    return {{"data", {{"problem", problem_.problem}, {"symbols", symbols()}}}};
  }
  std::string DescribeSize() const override {
    return StrCat(problem_.problem, " with 1 to ", rows_.lengths[0], " symbols");
  }

  std::unique_ptr<Learner> MakeLearner(const Terms& terms,
                                       const TrainingOptions& training) override;
  void CheckSizes(const StoredSizes& file) const override {
    CheckSymbols();
    CheckStoredSizes(ModelOptions({}), file);
  }

  std::vector<Metric> metrics() const override {
    return {{.key = "accuracy",
             .title = "accuracy of the answer tokens",
             .column = "tokens",
             .higher_is_better = true},
            {.key = "exact",
             .title = "share of fully correct answers",
             .column = "answers",
             .higher_is_better = true},
            {.key = "loss",
             .title = "loss, " + description().loss_unit,
             .column = "loss",
             .is_compared = false}};
  }
  Conditions conditions() const override {
    Conditions conditions = {.key = "length",
                             .title = "input length in symbols",
                             .values = {rows_.lengths.begin(), rows_.lengths.end()}};
    if (is_trained_) conditions.trained = 0;
    return conditions;
  }
  std::string TrainedAs(const TrainingOptions& training) const override {
    return StrCat("trained on ", problem_.problem, " with 1 to ", rows_.lengths[0], " symbols for ",
                  training.steps, " steps of ", training.batch, " examples",
                  model_.random_positions > 0
                      ? StrCat(" at random positions below ", model_.random_positions)
                      : "",
                  "; \"tokens\": accuracy of the answer tokens, each predicted from the correct "
                  "prefix; \"answers\": share of fully correct answers");
  }

  // The number of tokens that a model reads per row: all but the last.
  int64_t Read(int64_t length) const { return problem().tokens(length) - 1; }

 private:
  LanguageModelOptions ModelOptions(const Terms& terms) const {
    LanguageModelOptions model;
    model.vocabulary = static_cast<int64_t>(problem().vocabulary(symbols()).size());
    CopySizes(model_, &model);
    model.similarity = terms.similarity;
    model.position = terms.position;
    model.max_length = model_.max_length;
    return model;
  }

  void CheckSymbols() const;
  void CheckLongest() const;

  ProblemOptions problem_;
  GeneratedModelOptions model_;
  GeneratedRowOptions rows_;
  GeneratedEvaluationOptions evaluation_;
  bool is_trained_ = false;  // whether a model is trained, at the first length
};

const RegisterTask<GeneratedTask> registered;

void GeneratedTask::Settle(Command command, bool is_resumed, const TrainingOptions* /*training*/) {
  is_trained_ = command != Command::kEval;
  CheckRanges(problem_.Options(), "");
  CheckLengths(rows_.lengths);
  CheckSymbols();
  CheckLongest();
  if (is_resumed) return;
  problem_.symbols = symbols();
  const int64_t read = Read(rows_.lengths[0]);
  const int64_t limit = model_.random_positions;
  if (limit > 0 && limit < read) {
    throw Error(StrCat("--random-positions is ", limit,
                       "; expected at least the longest row length in training, ", read,
                       " tokens"));
  }
  model_.max_length = limit > 0 ? limit : read;
}

void GeneratedTask::CheckSymbols() const {
  const Problem& of = problem();
  const int64_t count = symbols();
  if (count >= of.fewest_symbols && count <= of.most_symbols) return;
  throw Error(StrCat("--symbols is ", count, ": ", of.name, " allows ", of.fewest_symbols,
                     of.most_symbols > of.fewest_symbols ? StrCat(" to ", of.most_symbols) : ""));
}

// Checks that the problem supports the longest length, and that one row of that length fits in
// memory.
void GeneratedTask::CheckLongest() const {
  const int64_t length = *std::max_element(rows_.lengths.begin(), rows_.lengths.end());
  const int64_t most = problem().longest(symbols());
  if (length > most) {
    throw Error(StrCat("--lengths: ", length, " is too long for ", problem().name, " with ",
                       symbols(), " symbols; expected at most ", most));
  }
  // One layer stores at least its input, the values, the output of attention and the hidden units.
  const double numbers = static_cast<double>(2 * model_.dim + model_.mlp) + ValueColumns(model_);
  CheckMemoryHolds(StrCat("--lengths ", length),
                   sizeof(float) * numbers * static_cast<double>(Read(length)));
}

class GeneratedLearner final : public Learner {
 public:
  GeneratedLearner(const GeneratedTask& task, LanguageModel model, const TrainingOptions& training)
      : task_(task), model_(std::move(model)), training_(training) {}

  torch::nn::Module& module() override { return *model_; }
  torch::Tensor Probe() override;
  torch::Tensor Loss(const Batch& batch) override;
  std::vector<Measurement> Evaluate(const std::function<bool()>& proceed) override;

 private:
  // Returns the logits of all `tokens` (B, L + 1) except the first.
  torch::Tensor Predict(const torch::Tensor& tokens, const torch::Tensor& positions,
                        const std::optional<BatchRows>& rows);
  // Draws positions (rows, length); undefined without --random-positions.
  torch::Tensor DrawPositions(uint32_t purpose, int64_t seed, int64_t step, int64_t rows,
                              int64_t length) const;
  // The maximum row length that the model supports; none if unlimited.
  std::optional<int64_t> most() const {
    const int64_t limit = task_.random_positions();
    return limit > 0 ? std::optional(limit) : model_->max_length();
  }

  const GeneratedTask& task_;
  LanguageModel model_;
  TrainingOptions training_;
};

std::unique_ptr<Learner> GeneratedTask::MakeLearner(const Terms& terms,
                                                    const TrainingOptions& training) {
  const LanguageModelOptions options = ModelOptions(terms);
  if (random_positions() > 0) CheckPlacedAnywhere(options);
  return std::make_unique<GeneratedLearner>(*this, LanguageModel(options), training);
}

torch::Tensor GeneratedLearner::Predict(const torch::Tensor& tokens, const torch::Tensor& positions,
                                        const std::optional<BatchRows>& rows) {
  const torch::Tensor read = tokens.narrow(1, 0, tokens.size(1) - 1);
  return positions.defined() ? model_->forward_at(read, positions, rows)
                             : model_->forward(read, nullptr, nullptr, rows);
}

torch::Tensor GeneratedLearner::DrawPositions(uint32_t purpose, int64_t seed, int64_t step,
                                              int64_t rows, int64_t length) const {
  const int64_t limit = task_.random_positions();
  if (limit == 0) return {};
  // These draws have a separate stream, so that the examples do not change with --random-positions.
  Draws draws(purpose, seed, step);
  return RandomSubsets(limit, length, rows, &draws);
}

torch::Tensor GeneratedLearner::Probe() {
  const LanguageModelOptions& options = model_->options();
  const std::optional<int64_t> most = model_->max_length();
  CheckReaches(most, options.max_length,
               StrCat("the longest rows have ", options.max_length, " tokens"));
  const int64_t length = ProbeLength(most, options.max_length);
  const torch::Tensor tokens = torch::arange(length + 1).remainder(options.vocabulary).unsqueeze(0);
  return Predict(tokens, DrawPositions(kTrainingPositions, 0, 0, 1, length), std::nullopt);
}

torch::Tensor GeneratedLearner::Loss(const Batch& batch) {
  Draws draws(kTraining, training_.seed, batch.step);
  const int64_t length = 1 + draws.Below(task_.rows().lengths[0]);
  const ProblemRows all = MakeRows(task_.problem(), task_.symbols(), length, batch.total, &draws);
  torch::Tensor positions = DrawPositions(kTrainingPositions, training_.seed, batch.step,
                                          batch.total, all.tokens.size(1) - 1);
  if (positions.defined()) positions = positions.narrow(0, batch.first, batch.count);
  const torch::Tensor tokens = all.tokens.narrow(0, batch.first, batch.count);
  const torch::Tensor logits = Predict(tokens, positions, batch.rows());
  constexpr int64_t kNone = -100;
  const torch::Tensor is_answer = all.is_answer.narrow(0, batch.first, batch.count);
  const torch::Tensor targets = tokens.masked_fill(is_answer.logical_not(), kNone).slice(1, 1);
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1),
                                              targets.flatten().to(logits.device()),
                                              torch::nn::functional::CrossEntropyFuncOptions()
                                                  .reduction(torch::kSum)
                                                  .ignore_index(kNone)) /
         all.is_answer.sum().item<double>();
}

// A line of JSON with the length, all tokens of a row, the indices of the answer's tokens, and the
// predictions at these indices.
std::string ExampleLine(int64_t length, const std::vector<std::string>& words,
                        const torch::Tensor& tokens, const torch::Tensor& is_answer,
                        const torch::Tensor& told) {
  json line = {{"length", length},
               {"tokens", json::array()},
               {"answer", json::array()},
               {"told", json::array()}};
  for (int64_t n = 0; n < tokens.size(0); ++n) {
    line["tokens"].push_back(words[tokens[n].item<int64_t>()]);
    if (!is_answer[n].item<bool>()) continue;
    line["answer"].push_back(n);
    line["told"].push_back(words[told[n - 1].item<int64_t>()]);
  }
  return line.dump() + "\n";
}

std::vector<Measurement> GeneratedLearner::Evaluate(const std::function<bool()>& proceed) {
  const torch::NoGradGuard no_grad;
  model_->eval();
  const Problem& problem = task_.problem();
  const std::vector<std::string> words = problem.vocabulary(task_.symbols());
  const int64_t examples = task_.rows().evaluation_examples;
  const bool is_held_out = task_.evaluates_held_out();
  const bool are_kept = !is_held_out && !task_.examples_file().empty();
  std::string kept;
  std::vector<Measurement> measured;
  std::vector<int64_t> lengths = task_.rows().lengths;
  if (is_held_out) lengths.resize(1);
  for (const int64_t length : lengths) {
    const int64_t read = task_.Read(length);
    if (most() && *most() < read) {
      measured.push_back({length, {std::nullopt, std::nullopt, std::nullopt}, 0});
      continue;
    }
    const int64_t rows = std::max<int64_t>(kEvaluationBatch / read, 1);
    double loss = 0;
    int64_t tokens = 0;
    int64_t right_tokens = 0;
    int64_t right_answers = 0;
    // All examples of a length share one stream, so that they do not depend on the batch size.
    Draws draws(is_held_out ? kHeldOut : kEvaluation, 0, length);
    for (int64_t at = 0; at < examples; at += rows) {
      if (!proceed()) return {};
      const int64_t count = std::min(rows, examples - at);
      const ProblemRows batch = MakeRows(problem, task_.symbols(), length, count, &draws);
      const torch::Tensor positions = DrawPositions(
          is_held_out ? kHeldOutPositions : kEvaluationPositions, length, at, count, read);
      const torch::Tensor logits = Predict(batch.tokens, positions, std::nullopt).cpu();
      const torch::Tensor targets = batch.tokens.slice(1, 1);
      const torch::Tensor is_answer = batch.is_answer.slice(1, 1);
      const torch::Tensor losses =
          torch::nn::functional::cross_entropy(
              logits.flatten(0, 1), targets.flatten(),
              torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kNone))
              .view_as(targets);
      const torch::Tensor told = logits.argmax(2);
      const torch::Tensor is_wrong = told.ne(targets).logical_and(is_answer);
      loss +=
          losses.to(torch::kDouble).masked_fill(is_answer.logical_not(), 0).sum().item<double>();
      const auto in_batch = is_answer.sum().item<int64_t>();
      tokens += in_batch;
      right_tokens += in_batch - is_wrong.sum().item<int64_t>();
      right_answers += count - is_wrong.any(1).sum().item<int64_t>();
      for (int64_t row = 0; are_kept && row < count; ++row) {
        kept += ExampleLine(length, words, batch.tokens[row], batch.is_answer[row], told[row]);
      }
    }
    const auto of_tokens = static_cast<double>(tokens);
    measured.push_back(
        {length,
         {static_cast<double>(right_tokens) / of_tokens,
          static_cast<double>(right_answers) / static_cast<double>(examples), loss / of_tokens},
         examples});
  }
  if (are_kept) WriteFileAtomically(task_.examples_file(), {kept});
  return measured;
}

}  // namespace
}  // namespace generated
}  // namespace gnomon::lab
