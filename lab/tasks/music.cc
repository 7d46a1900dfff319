// The task `music`: a decoder-only Transformer predicts each event of a piece from the preceding
// ones. A piece consists of time steps of equal length, each with a set of sounding pitches. A step
// is encoded as its pitches, in the order of the data, followed by the event "step". This is the
// grid encoding of Huang et al. 2019, Music Transformer, section 4.1, with any number of pitches. A
// separate event marks the start and the end of a piece.
#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "gnomon/attention.h"
#include "models/language_model.h"
#include "models/language_model_size.h"
#include "models/midi.h"
#include "models/png.h"
#include "models/sampling.h"
#include "models/transformer.h"
#include "models/windows.h"
#include "text/tokens.h"
#include "training/arrays.h"
#include "training/files.h"
#include "training/processes.h"
#include "training/strings.h"
#include "training/task.h"

namespace gnomon::lab {
namespace music {
namespace {

using nlohmann::json;

constexpr int64_t kPitches = 128;
constexpr int64_t kStep = kPitches;       // the end of a step
constexpr int64_t kBound = kPitches + 1;  // the start and the end of a piece
constexpr int64_t kVocabulary = kPitches + 2;

// The approximate number of events in an evaluation batch of any length.
constexpr int64_t kEvaluationBatch = 8192;

#define GNOMON_MUSIC_ROW_OPTIONS(OPTION)                                                         \
  OPTION(std::vector<int64_t>, lengths, std::vector<int64_t>({256, 512, 1024}),                  \
         .help =                                                                                 \
             "Window lengths in events, comma-separated: the first is the training length; all " \
             "are evaluated",                                                                    \
         .lowest = 1)

struct MusicRowOptions {
  GNOMON_OPTIONS(GNOMON_MUSIC_ROW_OPTIONS)
};

#define GNOMON_MUSIC_TRAINING_OPTIONS(OPTION)                                               \
  OPTION(int64_t, transpose, 3,                                                             \
         .help =                                                                            \
             "Maximum random transposition of a training window, in semitones up or down; " \
             "pitches stay between 0 and 127",                                              \
         .highest = kPitches)

struct MusicTrainingOptions {
  GNOMON_OPTIONS(GNOMON_MUSIC_TRAINING_OPTIONS)
};

#define GNOMON_MUSIC_EVALUATION_OPTIONS(OPTION)                                  \
  OPTION(std::string, part, "valid", .help = "Split to evaluate: valid or test", \
         .choices = {"valid", "test"})

struct MusicEvaluationOptions {
  GNOMON_OPTIONS(GNOMON_MUSIC_EVALUATION_OPTIONS)
};

#define GNOMON_MUSIC_GENERATION_OPTIONS(OPTION)                                                   \
  OPTION(std::string, prompt, "",                                                                 \
         .help =                                                                                  \
             "Steps to continue, separated by semicolons; each step is a list of pitches "        \
             "separated by spaces (60 is middle C): \"67 62 59 43; 67 62 59 43\"; default: none", \
         .shows_default = false)                                                                  \
  OPTION(int64_t, tokens, 1024,                                                                   \
         .help = "Maximum number of events to add; the piece may end earlier", .lowest = 1)       \
  OPTION(int64_t, steps_per_quarter, 4, .help = "Number of steps per quarter note", .lowest = 1,  \
         .highest = 1000)                                                                         \
  OPTION(double, tempo, 80, .help = "Tempo in quarter notes per minute", .lowest = 4,             \
         .highest = 1000)

struct MusicGenerationOptions {
  GNOMON_OPTIONS(GNOMON_MUSIC_GENERATION_OPTIONS)
  SamplingOptions sampling;
};

struct MusicModelOptions {
#define GNOMON_MUSIC_MODEL_OPTIONS(OPTION)                           \
  GNOMON_TRANSFORMER_SIZES(OPTION, 128, 4, 4, 512)                   \
  /* The number of rows in a table of learned absolute positions. */ \
  OPTION(int64_t, max_length, 256, .lowest = 1, .has_flag = false)

  GNOMON_OPTIONS(GNOMON_MUSIC_MODEL_OPTIONS)
};

// A split of the data: the events of each piece, including the start and end events.
struct Pieces {
  std::vector<torch::Tensor> events;
  int64_t steps = 0;
  // The total number of predicted events, and their number before each piece. All events of a piece
  // except the first are predicted.
  int64_t predicted = 0;
  std::vector<int64_t> before;

  void Add(const torch::Tensor& piece);
};

void Pieces::Add(const torch::Tensor& piece) {
  steps += piece.eq(kStep).sum().item<int64_t>();
  before.push_back(predicted);
  predicted += piece.numel() - 1;
  events.push_back(piece);
}

// Appends the pitches of a step, without silent voices (-1), and the step event.
void AddStep(const torch::Tensor& pitches, std::vector<int64_t>* piece) {
  const int64_t* values = pitches.const_data_ptr<int64_t>();
  std::copy_if(values, values + pitches.numel(), std::back_inserter(*piece),
               [](int64_t pitch) { return pitch >= 0; });
  piece->push_back(kStep);
}

// Reads PART.pieces in one of three formats: all steps as rows of pitches, with the number of steps
// in each piece; the same with a varying number of pitches per step; or pieces of equal length.
Pieces ReadPieces(const Arrays& arrays, const std::string& part) {
  const std::string name = part + ".pieces";
  const std::string lengths = name + "_lengths";
  std::vector<std::vector<torch::Tensor>> pieces;
  const auto check = [&](int64_t axes) {
    return arrays.Integers(name, axes, /*lowest=*/-1, kPitches - 1);
  };
  if (arrays.Has(lengths + "_lengths")) {
    check(1);
    const std::vector<torch::Tensor> steps = arrays.Rows(name, 1);
    size_t at = 0;
    for (const torch::Tensor& piece : arrays.Rows(lengths, 1)) {
      pieces.emplace_back(steps.begin() + static_cast<int64_t>(at),
                          steps.begin() + static_cast<int64_t>(at) + piece.numel());
      at += piece.numel();
    }
  } else if (arrays.Has(lengths)) {
    check(2);
    for (const torch::Tensor& piece : arrays.Rows(name, 2)) pieces.push_back(piece.unbind());
  } else {
    for (const torch::Tensor& piece : check(3).unbind()) pieces.push_back(piece.unbind());
  }
  Pieces all;
  for (size_t n = 0; n < pieces.size(); ++n) {
    if (pieces[n].empty()) {
      throw Error(StrCat(arrays.path(), ": the array '", name, "' contains no steps for piece ", n,
                         "; remove empty pieces"));
    }
    std::vector<int64_t> events = {kBound};
    for (const torch::Tensor& step : pieces[n])
      AddStep(step.to(torch::kLong).contiguous(), &events);
    events.push_back(kBound);
    all.Add(torch::tensor(events, torch::kLong));
  }
  return all;
}

// A range of events within a piece.
struct Window {
  int64_t piece = 0;
  int64_t start = 0;   // first event that is read
  int64_t length = 0;  // number of predicted events
};

// Returns the events of each window, padded with -100 to `longest` predicted events: (windows,
// longest + 1).
torch::Tensor Rows(const Pieces& pieces, const std::vector<Window>& windows, int64_t longest) {
  constexpr int64_t kNone = -100;
  const auto count = static_cast<int64_t>(windows.size());
  torch::Tensor rows = torch::full({count, longest + 1}, kNone, torch::kLong);
  for (int64_t n = 0; n < count; ++n) {
    const Window& window = windows[n];
    const int64_t events = window.length + 1;
    rows[n].narrow(0, 0, events).copy_(pieces.events[window.piece].narrow(0, window.start, events));
  }
  return rows;
}

// Losses (B, L) of all events of a row except the first; 0 in padding. Events do not attend to
// later ones, so padding does not affect them.
torch::Tensor EventLosses(LanguageModel& model, const torch::Tensor& rows,
                          const std::optional<BatchRows>& batch) {
  const int64_t length = rows.size(1) - 1;
  const torch::Tensor logits =
      model->forward(rows.narrow(1, 0, length).clamp_min(0), nullptr, nullptr, batch);
  return torch::nn::functional::cross_entropy(
             logits.flatten(0, 1), rows.narrow(1, 1, length).flatten().to(logits.device()),
             torch::nn::functional::CrossEntropyFuncOptions()
                 .reduction(torch::kNone)
                 .ignore_index(-100))
      .view({-1, length});
}

class MusicTask final : public Task {
 public:
  const MusicRowOptions& rows() const { return rows_; }
  int64_t transpose() const { return training_.transpose; }
  const MusicGenerationOptions& generation() const { return generation_; }
  const Pieces& train() const { return train_; }
  const Pieces& measured() const { return evaluates_held_out() ? held_out_ : measured_; }

  const char* name() const override { return "music"; }
  TaskDescription description() const override {
    return {
        .summary = "a music model that predicts a piece event by event; loss at several lengths",
        .data_help =
            "A safetensors file with train.pieces and valid.pieces, made by `gnomon data` "
            "(docs/tasks.md)",
        .loss_unit = "nats per event",
        .examples = "windows"};
  }

  TrainingOptions DefaultTraining(Command command) const override {
    TrainingOptions training;
    training.batch = 8;
    if (command == Command::kCompare) training.steps = 500;
    return training;
  }

  OptionList Options(Command command) override {
    if (command == Command::kEval) return rows_.Options() + evaluation_.Options();
    return rows_.Options() + InSection("model", model_.Options()) +
           InSection("training", training_.Options());
  }

  void Settle(Command command, bool is_resumed, const TrainingOptions* /*training*/) override {
    is_trained_ = command != Command::kEval;
    CheckLengths(rows_.lengths);
    if (!is_resumed) model_.max_length = rows_.lengths[0];
  }
  std::string StepFlags(Command /*command*/, const TrainingOptions& training) const override {
    return StrCat("--batch ", training.batch, " and --lengths ", rows_.lengths[0]);
  }
  std::string EvaluationFlags(Command /*command*/) const override { return "--lengths"; }
  void CheckModelFits() const override { CheckWeightsFit(ModelOptions({})); }
  void CheckFits(const TrainingOptions& training, int64_t processes) const override {
    CheckStepFits(ModelOptions({}), CountRows(training.batch, 0, processes),
                  std::min(rows_.lengths[0], train_.predicted),
                  StepFlags(Command::kTrain, training));
  }

  void ReadData(const std::string& path) override;
  std::string HoldOut() override;
  std::string data_sha256() const override { return sha256_; }
  json DescribeData() const override {
    const auto describe = [](const Pieces& part) -> json {
      return {{"pieces", part.events.size()}, {"events", part.predicted}, {"steps", part.steps}};
    };
    const std::filesystem::path path = std::filesystem::absolute(path_).lexically_normal();
    return {{"data",
             {{"path", path.string()},
              {"sha256", sha256_},
              {"train", describe(train_)},
              {evaluation_.part, describe(measured_)}}}};
  }
  std::string DescribeSize() const override {
    return StrCat(train_.predicted, " events of ", train_.events.size(), " pieces");
  }

  std::unique_ptr<Learner> MakeLearner(const Terms& terms,
                                       const TrainingOptions& training) override;
  void CheckSizes(const StoredSizes& file) const override {
    CheckStoredSizes(ModelOptions({}), file);
  }

  std::optional<Generation> generation() override {
    return Generation{.help = "Generate a piece of music, or continue one, with a trained model",
                      .file = "The Standard MIDI File to write",
                      .options = generation_.Options() + generation_.sampling.Options(),
                      .memory_flags = "--prompt and --tokens"};
  }

  std::vector<Metric> metrics() const override {
    return {{.key = "loss", .title = "loss, " + description().loss_unit, .column = "loss"},
            {.key = "step_loss", .title = "loss, nats per step", .column = "loss per step"}};
  }
  Conditions conditions() const override {
    Conditions conditions = {.key = "length",
                             .title = "events per window",
                             .values = {rows_.lengths.begin(), rows_.lengths.end()}};
    if (is_trained_) conditions.trained = 0;
    return conditions;
  }
  json DescribeEvaluation() const override { return {{"part", evaluation_.part}}; }
  std::string TrainedAs(const TrainingOptions& training) const override {
    return StrCat("trained at length ", rows_.lengths[0], " for ", training.steps, " steps of ",
                  training.batch, " windows; all events of the split are predicted at each length");
  }

 private:
  LanguageModelOptions ModelOptions(const Terms& terms) const {
    LanguageModelOptions model;
    model.vocabulary = kVocabulary;
    CopySizes(model_, &model);
    model.similarity = terms.similarity;
    model.position = terms.position;
    model.max_length = model_.max_length;
    return model;
  }

  MusicModelOptions model_;
  MusicRowOptions rows_;
  MusicTrainingOptions training_;
  MusicEvaluationOptions evaluation_;
  MusicGenerationOptions generation_;
  bool is_trained_ = false;  // whether a model is trained, at the first length
  std::string path_;
  std::string sha256_;
  Pieces train_;
  Pieces measured_;
  Pieces held_out_;
};

const RegisterTask<MusicTask> registered;

void MusicTask::ReadData(const std::string& path) {
  const Arrays arrays(path);
  path_ = path;
  sha256_ = arrays.sha256();
  train_ = ReadPieces(arrays, "train");
  measured_ = ReadPieces(arrays, evaluation_.part);
}

std::string MusicTask::HoldOut() {
  const HeldOutRows rows = ChooseHeldOut(std::ssize(train_.events), "pieces");
  const Pieces all = std::exchange(train_, {});
  for (const int64_t row : rows.training) train_.Add(all.events[row]);
  for (const int64_t row : rows.held_out) held_out_.Add(all.events[row]);
  return StrCat(Counted(std::ssize(held_out_.events), "piece"), " of the training split");
}

class MusicLearner final : public Learner {
 public:
  MusicLearner(const MusicTask& task, LanguageModel model, const TrainingOptions& training)
      : task_(task), model_(std::move(model)), training_(training) {}

  torch::nn::Module& module() override { return *model_; }

  torch::Tensor Probe() override {
    const LanguageModelOptions& options = model_->options();
    const std::optional<int64_t> most = model_->max_length();
    CheckReaches(most, options.max_length, StrCat("the training length is ", options.max_length));
    const int64_t length = ProbeLength(most, options.max_length);
    return model_->forward(torch::arange(length).remainder(kVocabulary).unsqueeze(0));
  }

  torch::Tensor Loss(const Batch& batch) override;
  std::vector<Measurement> Evaluate(const std::function<bool()>& proceed) override;
  void Generate(const Output& output) override;
  std::optional<Picture> Draw(const std::function<bool()>& proceed) override;

 private:
  // Continues `roll` with steps that the model generates.
  PianoRoll Continue(PianoRoll roll, const SamplingOptions& sampling, int64_t events,
                     const std::function<bool()>& proceed);

  const MusicTask& task_;
  LanguageModel model_;
  TrainingOptions training_;
};

std::unique_ptr<Learner> MusicTask::MakeLearner(const Terms& terms,
                                                const TrainingOptions& training) {
  return std::make_unique<MusicLearner>(*this, LanguageModel(ModelOptions(terms)), training);
}

// Picks a piece with probability proportional to its number of events, a window within the piece,
// and a transposition.
torch::Tensor MusicLearner::Loss(const Batch& batch) {
  const Pieces& pieces = task_.train();
  // Draws for all rows of the batch, with PyTorch's generator, which is reseeded for each step.
  const torch::Tensor drawn = torch::rand({batch.total, 3}, torch::kDouble);
  const auto at = drawn.accessor<double, 2>();
  std::vector<Window> windows;
  std::vector<double> shifts;
  // Rows are padded to the longest window of the whole batch, because all processes must draw
  // dropout for the same shape.
  int64_t predicted = 0;
  int64_t longest = 0;
  for (int64_t row = 0; row < batch.total; ++row) {
    const auto below = [&](int64_t column, int64_t count) {
      return static_cast<int64_t>(at[row][column] * static_cast<double>(count));
    };
    Window window;
    const auto next =
        std::upper_bound(pieces.before.begin(), pieces.before.end(), below(0, pieces.predicted));
    window.piece = next - pieces.before.begin() - 1;
    const int64_t events = pieces.events[window.piece].numel() - 1;
    window.length = std::min(task_.rows().lengths[0], events);
    window.start = below(1, events - window.length + 1);
    predicted += window.length;
    longest = std::max(longest, window.length);
    if (row < batch.first || row >= batch.first + batch.count) continue;
    windows.push_back(window);
    shifts.push_back(static_cast<double>(below(2, 2 * task_.transpose() + 1)) -
                     static_cast<double>(task_.transpose()));
  }
  torch::Tensor rows = Rows(pieces, windows, longest);
  const torch::Tensor is_pitch = rows.ge(0).logical_and(rows.lt(kPitches));
  // Limits the transposition to the range of the row's pitches.
  const torch::Tensor highest = rows.masked_fill(is_pitch.logical_not(), 0).amax(1);
  const torch::Tensor lowest = rows.masked_fill(is_pitch.logical_not(), kPitches - 1).amin(1);
  const torch::Tensor shift = torch::tensor(shifts).to(torch::kLong);
  const torch::Tensor moved =
      rows + torch::minimum(torch::maximum(shift, -lowest), kPitches - 1 - highest).unsqueeze(1);
  rows = torch::where(is_pitch, moved, rows);
  return EventLosses(model_, rows, batch.rows()).sum() / static_cast<double>(predicted);
}

std::vector<Measurement> MusicLearner::Evaluate(const std::function<bool()>& proceed) {
  const torch::NoGradGuard no_grad;
  model_->eval();
  const Pieces& pieces = task_.measured();
  std::vector<Measurement> measured;
  std::vector<int64_t> lengths = task_.rows().lengths;
  if (task_.evaluates_held_out()) lengths.resize(1);
  for (const int64_t length : lengths) {
    if (model_->max_length() && *model_->max_length() < length) {
      measured.push_back({length, {std::nullopt, std::nullopt}, 0});
      continue;
    }
    // Consecutive windows cover each piece; the last one may be shorter.
    std::vector<Window> windows;
    for (size_t piece = 0; piece < pieces.events.size(); ++piece) {
      const int64_t events = pieces.events[piece].numel() - 1;
      for (int64_t start = 0; start < events; start += length) {
        windows.push_back({static_cast<int64_t>(piece), start, std::min(length, events - start)});
      }
    }
    const auto count = static_cast<int64_t>(windows.size());
    const int64_t rows = std::max<int64_t>(kEvaluationBatch / length, 1);
    double sum = 0;
    for (int64_t first = 0; first < count; first += rows) {
      if (!proceed()) return {};
      const std::vector<Window> some(windows.begin() + first,
                                     windows.begin() + std::min(first + rows, count));
      int64_t longest = 0;
      for (const Window& window : some) longest = std::max(longest, window.length);
      const torch::Tensor losses = EventLosses(model_, Rows(pieces, some, longest), std::nullopt);
      sum += losses.to(torch::kDouble).sum().item<double>();
    }
    measured.push_back(
        {length,
         {sum / static_cast<double>(pieces.predicted), sum / static_cast<double>(pieces.steps)},
         count});
  }
  return measured;
}

// Parses steps such as "67 62; 67".
PianoRoll ParseSteps(const std::string& text) {
  PianoRoll steps;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ';');) {
    std::vector<int64_t>& step = steps.emplace_back();
    std::istringstream words(part);
    for (std::string word; words >> word;) {
      const bool is_number = word.size() <= 3 && std::all_of(word.begin(), word.end(), [](char c) {
                               return c >= '0' && c <= '9';
                             });
      const int64_t pitch = is_number ? std::stoll(word) : kPitches;
      if (pitch >= kPitches) {
        throw Error(StrCat("generate: --prompt has '", word, "' in step ", steps.size() - 1,
                           "; expected pitches from 0 to ", kPitches - 1));
      }
      step.push_back(pitch);
    }
  }
  return steps;
}

PianoRoll MusicLearner::Continue(PianoRoll roll, const SamplingOptions& sampling, int64_t events,
                                 const std::function<bool()>& proceed) {
  std::vector<int32_t> prompt = {static_cast<int32_t>(kBound)};
  for (const std::vector<int64_t>& step : roll) {
    prompt.insert(prompt.end(), step.begin(), step.end());
    prompt.push_back(static_cast<int32_t>(kStep));
  }
  const auto read = static_cast<int64_t>(prompt.size());
  std::vector<int64_t> ends(prompt.size());  // unused: the prompt is not a text
  const lab::GenerationOptions how = ToGeneration(sampling, model_, read, events, "events");
  std::vector<int64_t> step;
  lab::Generate(model_, TokenText(prompt, ends), how, [&](int64_t event) {
    if (event == kBound) return false;
    if (event == kStep) {
      roll.push_back(std::exchange(step, {}));
    } else {
      step.push_back(event);
    }
    return proceed();
  });
  if (!step.empty()) roll.push_back(step);
  return roll;
}

void MusicLearner::Generate(const Output& output) {
  const MusicGenerationOptions& options = task_.generation();
  const PianoRoll roll =
      Continue(ParseSteps(options.prompt), options.sampling, options.tokens, output.proceed);
  WriteFileAtomically(output.path, {MidiFile(roll, options.steps_per_quarter, options.tempo)});
  output.print(StrCat(Counted(std::ssize(roll), "step"), ", ", output.path, "\n"));
}

// Draws a piano roll, (height, width, 3) bytes, with one row per pitch (the highest at the top) and
// one column per step. The rows of C and the first column of each bar are darker. The first `given`
// steps are blue.
torch::Tensor PaintRoll(const PianoRoll& roll, int64_t given, int64_t steps_of_bar) {
  int64_t lowest = kPitches;
  int64_t highest = -1;
  for (const std::vector<int64_t>& step : roll) {
    for (const int64_t pitch : step) {
      lowest = std::min(lowest, pitch);
      highest = std::max(highest, pitch);
    }
  }
  if (highest < lowest) return {};
  lowest = std::max<int64_t>(lowest - 2, 0);
  highest = std::min<int64_t>(highest + 2, kPitches - 1);
  const int64_t steps = std::ssize(roll);
  const torch::Tensor grey = torch::tensor({225, 225, 225}, torch::kByte);
  const torch::Tensor black = torch::tensor({30, 30, 30}, torch::kByte);
  const torch::Tensor blue = torch::tensor({60, 110, 200}, torch::kByte);
  torch::Tensor pixels = torch::full({highest - lowest + 1, steps, 3}, 255, torch::kByte);
  for (int64_t pitch = lowest; pitch <= highest; ++pitch) {
    if (pitch % 12 == 0) pixels[highest - pitch].copy_(grey);
  }
  for (int64_t step = 0; step < steps; step += steps_of_bar) pixels.select(1, step).copy_(grey);
  for (int64_t step = 0; step < steps; ++step) {
    for (const int64_t pitch : roll[step]) {
      pixels[highest - pitch][step].copy_(step < given ? blue : black);
    }
  }
  return pixels;
}

std::optional<Picture> MusicLearner::Draw(const std::function<bool()>& proceed) {
  constexpr int64_t kBar = 16;
  constexpr int64_t kEvents = 512;
  // The picture continues an existing piece, because a barely trained model may end a new piece
  // immediately.
  PianoRoll first(1);
  const torch::Tensor events = task_.measured().events[0].to(torch::kLong);
  const int64_t most = model_->max_length().value_or(kEvents);
  for (int64_t n = 1; n < std::min(events.numel(), most / 2); ++n) {
    const auto event = events[n].item<int64_t>();
    if (event == kBound || (event == kStep && std::ssize(first) == kBar)) break;
    if (event == kStep) {
      first.emplace_back();
    } else {
      first.back().push_back(event);
    }
  }
  const auto given = std::ssize(first);
  int64_t read = 1;
  for (const std::vector<int64_t>& step : first) read += std::ssize(step) + 1;
  if (read >= most) return std::nullopt;
  const PianoRoll roll = Continue(first, SamplingOptions(), most - read, proceed);
  const torch::Tensor pixels = PaintRoll(roll, given, kBar);
  if (!proceed() || !pixels.defined()) return std::nullopt;
  return Picture{.title =
                     "The first steps of a piece (blue) and their continuation. Rows are pitches, "
                     "with each C in grey; columns are steps, with every 16th in grey.",
                 .png = EncodePng(Enlarged(pixels, 5))};
}

}  // namespace
}  // namespace music
}  // namespace gnomon::lab
