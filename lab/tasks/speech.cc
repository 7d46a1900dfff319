#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <set>
#include <utility>

#include "gnomon/attention.h"
#include "models/speech_model.h"
#include "models/transformer.h"
#include "training/arrays.h"
#include "training/processes.h"
#include "training/strings.h"
#include "training/task.h"

namespace gnomon::lab {
namespace speech {
namespace {

using nlohmann::json;

// The largest label, which is the largest Unicode code point.
constexpr int64_t kHighestLabel = 0x10FFFF;
// The approximate number of tokens in an evaluation batch, including padding; a single row may be
// longer.
constexpr int64_t kEvaluationTokens = 4096;

#define GNOMON_SPEECH_SEQUENCE_OPTIONS(OPTION)                                                    \
  OPTION(std::vector<int64_t>, utterances, std::vector<int64_t>({3, 6, 12, 24}),                  \
         .help =                                                                                  \
             "Numbers of utterances per sequence, comma-separated: training sequences have from " \
             "1 to the first number of utterances; all numbers are evaluated",                    \
         .lowest = 1, .highest = 10'000)

struct SpeechSequenceOptions {
  GNOMON_OPTIONS(GNOMON_SPEECH_SEQUENCE_OPTIONS)
};

#define GNOMON_SPEECH_RUN_OPTIONS(OPTION)                                                        \
  OPTION(int64_t, evaluation_utterances, 1200,                                                   \
         .help = "Number of utterances to evaluate for each entry of --utterances", .lowest = 1, \
         .highest = 1e8, .may_lack = true, .may_change = true)

struct SpeechRunOptions {
  GNOMON_OPTIONS(GNOMON_SPEECH_RUN_OPTIONS)
};

// A split of the data: utterances, their labels and speakers.
struct SpeechPart {
  std::string name;  // "train"
  int64_t rate = 0;
  std::vector<torch::Tensor> audio;          // (S,) per utterance
  std::vector<std::vector<int64_t>> labels;  // per utterance
  // The utterances of each speaker (one list if the speakers are unknown), and the speaker of each
  // utterance.
  std::vector<std::vector<int64_t>> by_speaker;
  std::vector<int64_t> speaker_of;

  int64_t size() const { return static_cast<int64_t>(audio.size()); }
};

std::vector<int64_t> ToVector(const torch::Tensor& numbers) {
  const torch::Tensor row = numbers.to(torch::kLong).contiguous();
  const auto* first = row.const_data_ptr<int64_t>();
  return {first, first + row.numel()};
}

// Reads a list of integers per utterance, from a ragged array or from an array of one or two axes.
std::vector<std::vector<int64_t>> ReadLists(const Arrays& arrays, const std::string& name,
                                            int64_t highest) {
  const bool is_ragged = arrays.Has(name + "_lengths");
  const int64_t axes = is_ragged || arrays.CountAxes(name) != 2 ? 1 : 2;
  const torch::Tensor numbers = arrays.Integers(name, axes, 0, highest);
  std::vector<std::vector<int64_t>> lists;
  if (is_ragged || axes == 2) {
    for (const torch::Tensor& row : arrays.Rows(name, 1)) lists.push_back(ToVector(row));
  } else {
    for (const int64_t number : ToVector(numbers)) lists.push_back({number});
  }
  return lists;
}

void CheckSameRows(const Arrays& arrays, const std::string& name, size_t rows,
                   const std::string& other, size_t others) {
  if (rows == others) return;
  throw Error(StrCat(arrays.path(), ": the array '", other, "' has ", others, " rows, but '", name,
                     "' has ", rows, "; expected the same number"));
}

SpeechPart ReadPart(const Arrays& arrays, const std::string& part, int64_t highest_label) {
  SpeechPart read;
  read.name = part;
  const std::string audio = part + ".audio";
  const std::string labels = part + ".labels";
  const std::string speakers = part + ".speakers";
  // Rows() checks the lengths, and Numbers() checks the sample values.
  const int64_t axes = arrays.Has(audio + "_lengths") || arrays.CountAxes(audio) != 2 ? 1 : 2;
  const torch::Tensor samples = arrays.Numbers(audio, axes).reshape({-1});
  int64_t at = 0;
  for (const torch::Tensor& row : arrays.Rows(audio, 1)) {
    read.audio.push_back(samples.narrow(0, at, row.numel()));
    at += row.numel();
  }
  const torch::Tensor rate = arrays.Integers(audio + "_rate", 1, kLowestRate, kHighestRate);
  read.rate = rate[0].item<int64_t>();
  read.labels = ReadLists(arrays, labels, highest_label);
  CheckSameRows(arrays, audio, read.audio.size(), labels, read.labels.size());
  std::vector<std::vector<int64_t>> names(read.audio.size());
  if (arrays.Has(speakers)) {
    names = ReadLists(arrays, speakers, kMany);
    CheckSameRows(arrays, audio, read.audio.size(), speakers, names.size());
  }
  std::map<std::vector<int64_t>, int64_t> known;
  for (const std::vector<int64_t>& name : names) {
    const auto speaker = known.try_emplace(name, static_cast<int64_t>(known.size())).first->second;
    read.by_speaker.resize(known.size());
    read.by_speaker[speaker].push_back(static_cast<int64_t>(read.speaker_of.size()));
    read.speaker_of.push_back(speaker);
  }
  return read;
}

// Selects rows of a split.
SpeechPart Select(const SpeechPart& part, const std::vector<int64_t>& rows) {
  SpeechPart selected;
  selected.name = part.name;
  selected.rate = part.rate;
  std::map<int64_t, int64_t> known;
  for (const int64_t row : rows) {
    const int64_t speaker =
        known.try_emplace(part.speaker_of[row], static_cast<int64_t>(known.size())).first->second;
    selected.by_speaker.resize(known.size());
    selected.by_speaker[speaker].push_back(selected.size());
    selected.speaker_of.push_back(speaker);
    selected.labels.push_back(part.labels[row]);
    selected.audio.push_back(part.audio[row]);
  }
  return selected;
}

// The indices of utterances that are concatenated.
using Sequence = std::vector<int64_t>;

int64_t CountSamples(const SpeechPart& part, const Sequence& sequence) {
  int64_t samples = 0;
  for (const int64_t utterance : sequence) samples += part.audio[utterance].numel();
  return samples;
}

torch::Tensor Sound(const SpeechPart& part, const Sequence& sequence) {
  std::vector<torch::Tensor> audio;
  for (const int64_t utterance : sequence) audio.push_back(part.audio[utterance]);
  return torch::cat(audio);
}

std::vector<int64_t> Labels(const SpeechPart& part, const Sequence& sequence) {
  std::vector<int64_t> labels;
  for (const int64_t utterance : sequence) {
    const std::vector<int64_t>& more = part.labels[utterance];
    labels.insert(labels.end(), more.begin(), more.end());
  }
  return labels;
}

// Draws the sequences of a training step. Each has 1 to `most` utterances (uniformly distributed)
// of a single speaker. The first utterance is drawn from all utterances and determines the speaker.
std::vector<Sequence> DrawSequences(const SpeechPart& part, int64_t total, int64_t most) {
  const torch::Tensor draws = torch::rand({total, most + 1}, torch::kDouble);
  const auto entries = draws.accessor<double, 2>();
  const auto choose = [](double draw, int64_t count) {
    return std::min(static_cast<int64_t>(draw * static_cast<double>(count)), count - 1);
  };
  std::vector<Sequence> sequences(total);
  for (int64_t row = 0; row < total; ++row) {
    const int64_t first = choose(entries[row][1], part.size());
    const std::vector<int64_t>& others = part.by_speaker[part.speaker_of[first]];
    sequences[row] = {first};
    for (int64_t n = choose(entries[row][0], most); n > 0; --n) {
      sequences[row].push_back(
          others[choose(entries[row][n + 1], static_cast<int64_t>(others.size()))]);
    }
  }
  return sequences;
}

// Draws sequences of `count` utterances, at least `utterances` in total, and cycles through the
// speakers. A speaker's utterances are in random order and repeat only after all have been used.
// Every call returns the same sequences.
std::vector<Sequence> EvaluationSequences(const SpeechPart& part, int64_t count,
                                          int64_t utterances) {
  at::Generator generator = at::detail::createCPUGenerator(/*seed=*/0);
  std::vector<std::vector<int64_t>> left(part.by_speaker.size());
  std::vector<Sequence> sequences((utterances + count - 1) / count);
  for (size_t row = 0; row < sequences.size(); ++row) {
    const size_t speaker = row % left.size();
    const std::vector<int64_t>& all = part.by_speaker[speaker];
    for (int64_t n = 0; n < count; ++n) {
      if (left[speaker].empty()) {
        const torch::Tensor order =
            torch::randperm(static_cast<int64_t>(all.size()), generator, torch::kLong);
        for (const int64_t at : ToVector(order)) left[speaker].push_back(all[at]);
      }
      sequences[row].push_back(left[speaker].back());
      left[speaker].pop_back();
    }
  }
  return sequences;
}

// -log p(labels | sound) of each row, where p is the sum over all alignments of labels to tokens.
torch::Tensor CtcLosses(const SpeechOutput& output,
                        const std::vector<std::vector<int64_t>>& labels) {
  std::vector<int64_t> targets;
  std::vector<int64_t> lengths;
  for (const std::vector<int64_t>& row : labels) {
    for (const int64_t label : row) targets.push_back(label + 1);
    lengths.push_back(static_cast<int64_t>(row.size()));
  }
  return torch::ctc_loss(output.log_probabilities.transpose(0, 1),
                         torch::tensor(targets, torch::kLong).to(output.lengths.device()),
                         output.lengths, torch::tensor(lengths, torch::kLong), /*blank=*/0,
                         at::Reduction::None);
}

class SpeechTask;

class SpeechLearner final : public Learner {
 public:
  SpeechLearner(const SpeechTask& task, SpeechModel model)
      : task_(task), model_(std::move(model)) {}

  torch::nn::Module& module() override { return *model_; }
  torch::Tensor Probe() override;
  torch::Tensor Loss(const Batch& batch) override;
  std::vector<Measurement> Evaluate(const std::function<bool()>& proceed) override;

 private:
  const SpeechTask& task_;
  SpeechModel model_;
};

class SpeechTask final : public Task {
 public:
  const SpeechPart& train() const { return train_; }
  const SpeechPart& evaluated() const { return evaluates_held_out() ? held_out_ : valid_; }
  const std::vector<int64_t>& utterances() const { return sequences_.utterances; }
  int64_t evaluation_utterances() const {
    const int64_t most = run_.evaluation_utterances;
    return evaluates_held_out() ? std::min(most, held_out_.size()) : most;
  }

  const char* name() const override { return "speech"; }
  TaskDescription description() const override {
    return {
        .summary = "speech recognition with CTC; label error rate on sequences of several lengths",
        .data_help =
            "A file with the arrays train.audio, train.audio_rate, train.labels and, if known, "
            "train.speakers, and the same arrays for valid, made by `gnomon data`",
        .loss_unit = "nats per label",
        .examples = "sequences"};
  }

  TrainingOptions DefaultTraining(Command command) const override {
    TrainingOptions training;
    training.steps = command == Command::kCompare ? 600 : 1000;
    return training;
  }

  std::vector<std::string> DefaultPositions() const override {
    return {"none", "sinusoidal", "cape", "conv", "rope", "alibi", "hype:tau=learned", "relative"};
  }

  OptionList Options(Command command) override {
    if (command == Command::kTrain) {
      return InSection("run", run_.Options()) + InSection("model", model_.Options()) +
             InSection("training", sequences_.Options());
    }
    const OptionList evaluated = sequences_.Options() + run_.Options();
    if (command == Command::kEval) return evaluated;
    return evaluated + InSection("model", model_.Options());
  }

  void Settle(Command command, bool /*is_resumed*/, const TrainingOptions* /*training*/) override {
    is_trained_ = command != Command::kEval;
    const std::vector<int64_t>& utterances = sequences_.utterances;
    if (utterances.empty())
      throw Error("--utterances: the list is empty; expected at least one number");
    std::set<int64_t> seen;
    for (const int64_t count : utterances) {
      if (!seen.insert(count).second)
        throw Error(StrCat("--utterances: ", count, " is given twice"));
    }
  }

  std::string StepFlags(Command /*command*/, const TrainingOptions& training) const override {
    return StrCat("--batch ", training.batch, " and --utterances ", utterances()[0]);
  }
  std::string EvaluationFlags(Command /*command*/) const override { return "--utterances"; }

  void CheckModelFits() const override { CheckMemoryHolds(ModelFlags(model_), WeightBytes()); }

  void CheckFits(const TrainingOptions& training, int64_t processes) const override {
    const double numbers = static_cast<double>(model_.depth) * LayerNumbers(model_);
    // Estimate a common case: sequences with half the maximum number of utterances.
    const double tokens = static_cast<double>(CountRows(training.batch, 0, processes)) *
                          MeanTokens() * static_cast<double>(utterances()[0] + 1) / 2;
    CheckTrainingFits(ModelFlags(model_), WeightBytes(), StepFlags(Command::kTrain, training),
                      tokens * numbers);
  }

  void ReadData(const std::string& path) override {
    const Arrays arrays(path);
    // A new model gets its sampling rate and its number of symbols from the training data.
    const bool is_new = model_.rate == 0;
    if (is_new || arrays.Has("train.audio")) {
      train_ = ReadPart(arrays, "train", is_new ? kHighestLabel : model_.symbols - 1);
    }
    if (is_new) {
      model_.rate = train_.rate;
      for (const std::vector<int64_t>& labels : train_.labels) {
        for (const int64_t label : labels) model_.symbols = std::max(model_.symbols, label + 1);
      }
    }
    valid_ = ReadPart(arrays, "valid", model_.symbols - 1);
    CheckPart(arrays.path(), train_);
    CheckPart(arrays.path(), valid_);
    if (is_new) {
      // The longest utterance may occur several times in a sequence.
      int64_t longest = 0;
      for (const torch::Tensor& audio : train_.audio) longest = std::max(longest, audio.numel());
      model_.max_length = CountTokens(CountFrames(model_, longest * utterances()[0]));
    }
    path_ = path;
    sha256_ = arrays.sha256();
  }

  std::string HoldOut() override {
    const HeldOutRows rows = ChooseHeldOut(train_.size(), "utterances");
    held_out_ = Select(train_, rows.held_out);
    train_ = Select(train_, rows.training);
    return StrCat(held_out_.size(), " utterances of the training split");
  }

  std::string data_sha256() const override { return sha256_; }

  json DescribeData() const override {
    const auto seconds = [](const SpeechPart& part) {
      double samples = 0;
      for (const torch::Tensor& audio : part.audio) samples += static_cast<double>(audio.numel());
      return part.rate == 0 ? 0 : samples / static_cast<double>(part.rate);
    };
    return {{"data",
             {{"path", std::filesystem::absolute(path_).lexically_normal().string()},
              {"sha256", sha256_},
              {"rate", model_.rate},
              {"symbols", model_.symbols},
              {"train_utterances", train_.size()},
              {"train_speakers", train_.by_speaker.size()},
              {"train_seconds", seconds(train_)},
              {"valid_utterances", valid_.size()},
              {"valid_speakers", valid_.by_speaker.size()},
              {"valid_seconds", seconds(valid_)}}}};
  }

  std::string DescribeSize() const override { return StrCat(train_.size(), " utterances"); }

  void CheckData(const TrainingOptions* training) const override {
    if (training != nullptr && train_.size() == 0) {
      throw Error(StrCat(path_, ": the array 'train.audio' is missing"));
    }
  }

  std::unique_ptr<Learner> MakeLearner(const Terms& terms,
                                       const TrainingOptions& /*training*/) override {
    return std::make_unique<SpeechLearner>(*this, SpeechModel(model_, terms));
  }

  void CheckSizes(const StoredSizes& file) const override {
    file.Expect("head.weight", {model_.symbols + 1, model_.dim});
    file.Expect("front_in.weight", {model_.dim, model_.mels, 3});
    file.Expect("encoder.blocks.0.mlp_in.weight", {HiddenUnits(model_), model_.dim});
    file.ExpectLayers(model_.depth);
  }

  std::vector<Metric> metrics() const override {
    return {{.key = "error", .title = "label error rate, %", .column = "error, %,"},
            {.key = "loss", .title = "loss, " + description().loss_unit, .column = "loss"}};
  }

  Conditions conditions() const override {
    Conditions conditions = {.key = "length", .title = "utterances per sequence"};
    for (const int64_t count : utterances()) conditions.values.emplace_back(count);
    if (is_trained_) conditions.trained = 0;
    return conditions;
  }

  std::string TrainedAs(const TrainingOptions& training) const override {
    return StrCat("trained on sequences of 1 to ", utterances()[0], " utterances for ",
                  training.steps, " steps of ", training.batch, " sequences");
  }

 private:
  double WeightBytes() const {
    const auto dim = static_cast<double>(model_.dim);
    const double ends = dim * static_cast<double>(model_.symbols + 3 * (model_.mels + model_.dim));
    return sizeof(float) * (ends + static_cast<double>(model_.depth) * LayerWeights(model_));
  }

  // The mean number of tokens per utterance.
  double MeanTokens() const {
    if (train_.size() == 0) return 0;
    double tokens = 0;
    for (const torch::Tensor& audio : train_.audio) {
      tokens += static_cast<double>(CountTokens(CountFrames(model_, audio.numel())));
    }
    return tokens / static_cast<double>(train_.size());
  }

  // Checks that the audio has the model's sample rate and enough tokens for its labels.
  void CheckPart(const std::string& path, const SpeechPart& part) const {
    if (part.size() == 0) return;
    if (part.rate != model_.rate) {
      throw Error(StrCat(path, ": the array '", part.name, ".audio_rate' contains ", part.rate,
                         ", but the model expects ", model_.rate, " samples per second"));
    }
    // A sequence has at least one token for every `samples` samples of each utterance.
    const int64_t samples = SamplesPerToken(model_);
    for (int64_t row = 0; row < part.size(); ++row) {
      const std::vector<int64_t>& labels = part.labels[row];
      if (labels.empty()) {
        throw Error(StrCat(path, ": row ", row, " of the array '", part.name, ".labels' is empty"));
      }
      // CTC needs a blank between equal labels, and the last label may recur at the start of the
      // next utterance.
      auto needed = static_cast<int64_t>(labels.size()) + 1;
      for (size_t n = 1; n < labels.size(); ++n) needed += labels[n] == labels[n - 1] ? 1 : 0;
      const int64_t has = part.audio[row].numel();
      if (has >= needed * samples) continue;
      throw Error(StrCat(path, ": row ", row, " of the array '", part.name, ".audio' has ", has,
                         " samples, which is too few for its ", labels.size(), " labels; expected ",
                         needed * samples, " for ", needed, " tokens"));
    }
  }

  SpeechModelOptions model_;
  SpeechSequenceOptions sequences_;
  SpeechRunOptions run_;
  bool is_trained_ = false;
  SpeechPart train_;
  SpeechPart valid_;
  SpeechPart held_out_;
  std::string path_;
  std::string sha256_;
};

const RegisterTask<SpeechTask> registered;

torch::Tensor SpeechLearner::Probe() {
  const SpeechModelOptions& options = model_->options();
  CheckReaches(model_->max_length(), options.max_length,
               StrCat("training sequences can have up to ", options.max_length, " tokens"));
  // The probe runs sequences of different lengths, in a batch and separately.
  const auto sound = [&](int64_t tokens) {
    const torch::Tensor times = torch::arange(SamplesPerToken(options) * tokens, torch::kFloat);
    return torch::sin(times.square() * 1e-3);
  };
  const std::vector<torch::Tensor> sounds = {sound(2), sound(3)};
  model_->forward({sounds[0]});
  return model_->forward(sounds).log_probabilities;
}

torch::Tensor SpeechLearner::Loss(const Batch& batch) {
  const SpeechPart& part = task_.train();
  const std::vector<Sequence> all = DrawSequences(part, batch.total, task_.utterances()[0]);
  // Dropout is drawn for the whole batch, so all processes pad to the batch's longest row.
  int64_t frames = 0;
  int64_t count = 0;
  for (const Sequence& sequence : all) {
    frames = std::max(frames, CountFrames(model_->options(), CountSamples(part, sequence)));
    count += static_cast<int64_t>(Labels(part, sequence).size());
  }
  std::vector<torch::Tensor> sounds;
  std::vector<std::vector<int64_t>> labels;
  for (int64_t row = batch.first; row < batch.first + batch.count; ++row) {
    sounds.push_back(Sound(part, all[row]));
    labels.push_back(Labels(part, all[row]));
  }
  const SpeechOutput output = model_->forward(sounds, frames, batch.rows());
  return CtcLosses(output, labels).sum() / static_cast<double>(count);
}

std::vector<Measurement> SpeechLearner::Evaluate(const std::function<bool()>& proceed) {
  const torch::NoGradGuard no_grad;
  model_->eval();
  const SpeechPart& part = task_.evaluated();
  std::vector<int64_t> counts = task_.utterances();
  if (task_.evaluates_held_out()) counts.resize(1);
  std::vector<Measurement> measured;
  for (const int64_t count : counts) {
    const std::vector<Sequence> sequences =
        EvaluationSequences(part, count, task_.evaluation_utterances());
    const auto total = static_cast<int64_t>(sequences.size());
    const auto tokens = [&](int64_t row) {
      return CountTokens(CountFrames(model_->options(), CountSamples(part, sequences[row])));
    };
    int64_t longest = 0;
    for (int64_t row = 0; row < total; ++row) longest = std::max(longest, tokens(row));
    Measurement& at =
        measured.emplace_back(Measurement{count, {std::nullopt, std::nullopt}, total});
    if (model_->max_length() && *model_->max_length() < longest) continue;
    double loss = 0;
    int64_t edits = 0;
    int64_t spoken = 0;
    for (int64_t first = 0, rows = 0; first < total; first += rows) {
      if (!proceed()) return {};
      int64_t widest = 0;
      std::vector<torch::Tensor> sounds;
      std::vector<std::vector<int64_t>> labels;
      for (rows = 0; first + rows < total; ++rows) {
        widest = std::max(widest, tokens(first + rows));
        if (rows > 0 && (rows + 1) * widest > kEvaluationTokens) break;
        sounds.push_back(Sound(part, sequences[first + rows]));
        labels.push_back(Labels(part, sequences[first + rows]));
      }
      const SpeechOutput output = model_->forward(sounds);
      loss += CtcLosses(output, labels).sum(torch::kDouble).item<double>();
      const std::vector<std::vector<int64_t>> heard = DecodeGreedily(output);
      for (int64_t row = 0; row < rows; ++row) {
        edits += EditDistance(heard[row], labels[row]);
        spoken += static_cast<int64_t>(labels[row].size());
      }
    }
    at.values = {100 * static_cast<double>(edits) / static_cast<double>(spoken),
                 loss / static_cast<double>(spoken)};
  }
  return measured;
}

}  // namespace
}  // namespace speech
}  // namespace gnomon::lab
