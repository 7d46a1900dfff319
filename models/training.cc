#include "models/training.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <utility>

#include "gnomon/attention.h"
#include "models/strings.h"

namespace gnomon::models {
namespace {

using nlohmann::json;

// The key of the configuration in a checkpoint's metadata, and the version of its layout.
constexpr const char* kConfigKey = "gnomon";
constexpr int64_t kCheckpointFormat = 1;
constexpr const char* kModelPrefix = "model.";
constexpr const char* kOptimizerPrefix = "optimizer.";
constexpr const char* kFirstMoment = "exp_avg.";
constexpr const char* kSecondMoment = "exp_avg_sq.";

// What the configuration of a training run has beside that of a model.
constexpr const char* kTrainingFields[] = {"step", "training", "memory_tokens", "data"};

constexpr double kBeta1 = 0.9;
constexpr double kBeta2 = 0.95;
constexpr double kEpsilon = 1e-8;

constexpr const char* kMemoryPrefix = "memory.layers.";
constexpr const char* kMemoryEmbeddings = "memory.embeddings";
constexpr const char* kVocabulary = "tokens.vocabulary";

// Evaluation batches hold about this many tokens, whatever their length, and at most this many
// logits.
constexpr int64_t kEvaluationBatch = 8192;
constexpr int64_t kEvaluationLogits = int64_t{1} << 25;
// And what they remember, in numbers, is at most this much, unless one row alone has more.
constexpr int64_t kEvaluationMemory = int64_t{1} << 28;

// Rows `starts` of `length` + 1 tokens, as int64.
torch::Tensor Windows(const TokenText& text, const int64_t* starts, int64_t count, int64_t length) {
  torch::Tensor rows = torch::empty({count, length + 1}, torch::kLong);
  auto* out = rows.mutable_data_ptr<int64_t>();
  for (int64_t row = 0; row < count; ++row) {
    for (int64_t n = 0; n <= length; ++n) *out++ = text[starts[row] + n];
  }
  return rows;
}

// Losses (B, L) of predicting each window's tokens from those before.
torch::Tensor Losses(LanguageModel& model, const torch::Tensor& windows,
                     LanguageModelMemory* memory = nullptr,
                     const std::optional<BatchRows>& rows = std::nullopt) {
  const int64_t length = windows.size(1) - 1;
  const torch::Tensor logits = model->forward(windows.narrow(1, 0, length), nullptr, memory, rows);
  const torch::Tensor targets = windows.narrow(1, 1, length).reshape({-1});
  return torch::nn::functional::cross_entropy(
             logits.reshape({-1, logits.size(2)}), targets,
             torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kNone))
      .view({-1, length});
}

template <class T>
T Field(const json& object, const char* name) {
  const auto found = object.is_object() ? object.find(name) : object.end();
  if (!object.is_object() || found == object.end()) {
    throw Error(StrCat("the field '", name, "' is missing"));
  }
  const bool right = std::is_same_v<T, std::string> ? found->is_string()
                     : std::is_integral_v<T>        ? found->is_number_integer()
                                                    : found->is_number();
  if (!right) throw Error(StrCat("the field '", name, "' has the wrong type"));
  return found->get<T>();
}

void CheckRange(const char* name, double value, double lowest, double highest) {
  if (!(value >= lowest && value <= highest)) {
    throw Error(StrCat("training: ", name, " is ", value, ", expected ", lowest, " to ", highest));
  }
}

// A tensor that a checkpoint must hold.
torch::Tensor Take(const SafeTensors& file, const std::string& name, torch::IntArrayRef shape,
                   torch::ScalarType type) {
  const auto found = file.tensors.find(name);
  if (found == file.tensors.end()) throw Error(StrCat("the tensor '", name, "' is missing"));
  const torch::Tensor& tensor = found->second;
  if (tensor.sizes() != shape || tensor.scalar_type() != type) {
    throw Error(StrCat("the tensor '", name, "' is ", tensor.scalar_type(), " ", tensor.sizes(),
                       ", expected ", type, " ", shape));
  }
  return tensor;
}

// Sizes are compared with tensors that the file does hold before a model of them is built.
void CheckSizes(const SafeTensors& file, const LanguageModelOptions& options) {
  Take(file, "model.embedding.weight", {options.vocabulary, options.dim}, torch::kFloat);
  Take(file, "model.blocks.0.mlp_in.weight", {options.mlp, options.dim}, torch::kFloat);
  if (options.depth > static_cast<int64_t>(file.tensors.size())) {
    throw Error(StrCat("it holds fewer tensors than ", options.depth, " layers"));
  }
}

// Sums over the windows of one length.
class WindowSums {
 public:
  WindowSums(const TokenText& text, int64_t length)
      : text_(text), length_(length), tail_(std::min(length, kLastTokens)) {}

  int64_t length() const { return length_; }

  void Read(LanguageModel& model, const int64_t* starts, int64_t count,
            LanguageModelMemory* memory) {
    const torch::Tensor losses =
        Losses(model, Windows(text_, starts, count, length_), memory).to(torch::kDouble);
    loss_ += losses.sum().item<double>();
    last_ += losses.narrow(1, length_ - tail_, tail_).sum().item<double>();
    windows_ += count;
    for (int64_t n = 0; n < count; ++n) {
      bytes_ += text_.CountBytes(starts[n] + 1, starts[n] + 1 + length_);
    }
  }

  LengthLoss Means() const {
    LengthLoss means;
    means.length = length_;
    means.windows = windows_;
    means.loss = loss_ / static_cast<double>(windows_ * length_);
    means.last = last_ / static_cast<double>(windows_ * tail_);
    means.bits_per_byte = loss_ / (std::numbers::ln2 * static_cast<double>(bytes_));
    return means;
  }

 private:
  const TokenText& text_;
  int64_t length_;
  int64_t tail_;
  int64_t windows_ = 0;
  int64_t bytes_ = 0;
  double loss_ = 0;
  double last_ = 0;
};

// Windows on their own. False: `proceed` said no.
bool AddWindows(LanguageModel& model, const std::vector<int64_t>& starts, int64_t batch,
                const std::function<bool()>& proceed, WindowSums* sums) {
  const auto windows = static_cast<int64_t>(starts.size());
  for (int64_t at = 0; at < windows; at += batch) {
    if (proceed != nullptr && !proceed()) return false;
    sums->Read(model, &starts[at], std::min(batch, windows - at), nullptr);
  }
  return true;
}

// The memory of rows one after the other.
LanguageModelMemory Join(std::vector<LanguageModelMemory> parts) {
  LanguageModelMemory whole = parts[0];
  if (parts.size() == 1) return whole;
  const auto join = [&](const auto& of) {
    std::vector<torch::Tensor> tensors;
    for (const LanguageModelMemory& part : parts) tensors.push_back(of(part));
    return torch::cat(tensors);
  };
  for (size_t layer = 0; layer < whole.layers.size(); ++layer) {
    whole.layers[layer] = join([&](const LanguageModelMemory& part) { return part.layers[layer]; });
    // There is no room for all layers twice.
    for (LanguageModelMemory& part : parts) part.layers[layer].reset();
  }
  if (whole.tokens.embeddings.defined()) {
    whole.tokens.embeddings =
        join([](const LanguageModelMemory& part) { return part.tokens.embeddings; });
  }
  return whole;
}

// The memory that `windows` windows before each of `stretches` leave, read one after the other from
// an empty one. All but the last of them fit into it, so that each token sees all before it, and
// many windows can be read at once. None: `proceed` said no.
std::optional<LanguageModelMemory> FillMemory(LanguageModel& model, const TokenText& text,
                                              const std::vector<int64_t>& stretches,
                                              int64_t windows, int64_t length, int64_t memory,
                                              const std::function<bool()>& proceed) {
  const int64_t batch = std::max<int64_t>(kEvaluationBatch / length, 1);
  const auto total = static_cast<int64_t>(stretches.size());
  const int64_t rows = std::clamp<int64_t>(batch / std::max<int64_t>(windows, 1), 1, total);
  std::vector<LanguageModelMemory> parts;
  for (int64_t at = 0; at < total; at += rows) {
    const int64_t count = std::min(rows, total - at);
    LanguageModelMemory& part = parts.emplace_back();
    part.max_length = memory;
    for (int64_t window = 0; window < windows;) {
      if (proceed != nullptr && !proceed()) return std::nullopt;
      const int64_t at_once = std::clamp<int64_t>(batch / count, 1, windows - window);
      std::vector<int64_t> starts(stretches.begin() + at, stretches.begin() + at + count);
      for (int64_t& start : starts) start -= (windows - window) * length;
      const int64_t read = at_once * length;
      model->read(Windows(text, starts.data(), count, read).narrow(1, 0, read), &part);
      window += at_once;
    }
  }
  return Join(std::move(parts));
}

// Windows one after the other in each stretch, with a memory of those before. False: `proceed` said
// no.
bool AddStretches(LanguageModel& model, const TokenText& text,
                  const std::vector<int64_t>& stretches, int64_t stretch, int64_t batch,
                  int64_t memory, const std::function<bool()>& proceed, WindowSums* sums) {
  const int64_t length = sums->length();
  const LanguageModelOptions& options = model->options();
  batch = std::clamp<int64_t>(kEvaluationMemory / options.dim / options.depth / memory, 1, batch);
  // Windows before a stretch that fill the memory, as far as the text goes back.
  const auto before = [&](int64_t start) {
    return std::min((memory + length - 1) / length, start / length);
  };
  const auto total = static_cast<int64_t>(stretches.size());
  for (int64_t at = 0, count = 0; at < total; at += count) {
    const int64_t filling = before(stretches[at]);
    count = 1;
    while (count < batch && at + count < total && before(stretches[at + count]) == filling) ++count;
    std::vector<int64_t> starts(stretches.begin() + at, stretches.begin() + at + count);
    std::optional<LanguageModelMemory> remembered =
        FillMemory(model, text, starts, filling, length, memory, proceed);
    if (!remembered) return false;
    for (int64_t window = 0; window < stretch / length; ++window) {
      if (proceed != nullptr && !proceed()) return false;
      sums->Read(model, starts.data(), count, &*remembered);
      for (int64_t& start : starts) start += length;
    }
  }
  return true;
}

TokenizerPtr TakeTokenizer(const SafeTensors& file, const std::string& kind) {
  const auto found = file.tensors.find(kVocabulary);
  std::string_view vocabulary;
  if (found != file.tensors.end()) {
    const torch::Tensor& bytes = found->second;
    Take(file, kVocabulary, {bytes.numel()}, torch::kByte);
    vocabulary = {reinterpret_cast<const char*>(bytes.const_data_ptr<uint8_t>()),
                  static_cast<size_t>(bytes.numel())};
  } else if (kind != "bytes") {
    throw Error(StrCat("the tensor '", kVocabulary, "' is missing"));
  }
  return ReadTokenizer(kind, vocabulary);
}

// Where the streams of the text are: none before the first segment and without a memory.
LanguageModelMemory TakeMemory(const SafeTensors& file, const TrainingOptions& training,
                               const LanguageModelOptions& model, int64_t tokens) {
  LanguageModelMemory memory;
  memory.max_length = training.memory;
  if (tokens == 0) return memory;
  memory.tokens.tokens = tokens;
  const int64_t length = std::min(tokens, training.memory);
  for (int64_t layer = 0; layer < model.depth; ++layer) {
    memory.layers.push_back(Take(file, kMemoryPrefix + std::to_string(layer),
                                 {training.batch, length, model.dim}, torch::kFloat));
  }
  const auto embeddings = file.tensors.find(kMemoryEmbeddings);
  if (embeddings != file.tensors.end()) {
    const int64_t read = embeddings->second.dim() == 3 ? embeddings->second.size(1) : 0;
    memory.tokens.embeddings =
        Take(file, kMemoryEmbeddings, {training.batch, read, model.dim}, torch::kFloat);
  }
  return memory;
}

// Whether a configuration has any part that a training run alone has.
bool HoldsTraining(const json& object) {
  return std::any_of(std::begin(kTrainingFields), std::end(kTrainingFields),
                     [&](const char* field) { return object.contains(field); });
}

// Of a file that does not have them, the defaults.
RunOptions TakeRun(const json& object) {
  RunOptions run;
  const auto found = object.find("run");
  if (found == object.end()) return run;
  run.checkpoint_every = Field<int64_t>(*found, "checkpoint_every");
  run.evaluation_bytes = Field<int64_t>(*found, "evaluation_bytes");
  if (run.checkpoint_every < 1) throw Error("the field 'checkpoint_every' is below 1");
  if (run.evaluation_bytes < 1) throw Error("the field 'evaluation_bytes' is below 1");
  return run;
}

// All of a training run but its moments, which the parameters name.
TrainingState TakeTraining(const SafeTensors& file, const json& object,
                           const LanguageModelOptions& model) {
  TrainingState training;
  training.step = Field<int64_t>(object, "step");
  if (training.step < 0) throw Error("the field 'step' is negative");
  training.options = TrainingFromJson(object.value("training", json()));
  training.run = TakeRun(object);
  const json data = object.value("data", json());
  training.data_path = Field<std::string>(data, "path");
  training.data_sha256 = Field<std::string>(data, "sha256");
  const auto remembered = Field<int64_t>(object, "memory_tokens");
  if (remembered < 0) throw Error("the field 'memory_tokens' is negative");
  training.memory = TakeMemory(file, training.options, model, remembered);
  return training;
}

Checkpoint BuildCheckpoint(const SafeTensors& file) {
  const auto config = file.metadata.find(kConfigKey);
  if (config == file.metadata.end()) throw Error("it has no configuration of gnomon");
  const json object = json::parse(config->second, nullptr, /*allow_exceptions=*/false);
  if (object.is_discarded()) throw Error("its configuration is not JSON");
  const auto format = Field<int64_t>(object, "format");
  if (format != kCheckpointFormat) throw Error(StrCat("its format is ", format, ", expected 1"));
  Checkpoint checkpoint;
  const LanguageModelOptions options = ModelFromJson(object.value("model", json()));
  CheckSizes(file, options);
  checkpoint.tokenizer =
      TakeTokenizer(file, Field<std::string>(object.value("tokens", json()), "kind"));
  if (checkpoint.tokenizer->size() != options.vocabulary) {
    throw Error(StrCat("its vocabulary has ", checkpoint.tokenizer->size(), " tokens, its model ",
                       options.vocabulary));
  }
  size_t used = file.tensors.count(kVocabulary);
  if (HoldsTraining(object)) {
    const TrainingState& training =
        checkpoint.training.emplace(TakeTraining(file, object, options));
    const LanguageModelMemory& memory = training.memory;
    used += memory.layers.size() + (memory.tokens.embeddings.defined() ? 1 : 0);
  }
  checkpoint.model = NewModel(options, checkpoint.training ? checkpoint.training->options.seed : 0);

  const torch::NoGradGuard no_grad;
  const auto restore = [&](const std::string& name, torch::Tensor tensor) {
    tensor.copy_(Take(file, kModelPrefix + name, tensor.sizes(), tensor.scalar_type()));
    ++used;
  };
  for (const auto& entry : checkpoint.model->named_buffers()) restore(entry.key(), entry.value());
  for (const auto& entry : checkpoint.model->named_parameters()) {
    restore(entry.key(), entry.value());
    if (!checkpoint.training) continue;
    for (const char* moment : {kFirstMoment, kSecondMoment}) {
      const std::string name = moment + entry.key();
      if (!file.tensors.contains(kOptimizerPrefix + name)) continue;
      checkpoint.training->optimizer[name] =
          Take(file, kOptimizerPrefix + name, entry.value().sizes(), entry.value().scalar_type());
      ++used;
    }
  }
  if (used != file.tensors.size()) {
    throw Error(
        StrCat("it holds ", file.tensors.size(), " tensors, of which its model has ", used));
  }
  return checkpoint;
}

}  // namespace

void CheckTrainingOptions(const TrainingOptions& options, int64_t processes) {
  constexpr double kMany = 1e12;
  CheckRange("length", static_cast<double>(options.length), 1, kMany);
  CheckRange("batch", static_cast<double>(options.batch), 1, kMany);
  if (options.batch < processes) {
    throw Error(StrCat("training: batch is ", options.batch,
                       ", expected a window at least for each of the ", processes, " processes"));
  }
  CheckRange("steps", static_cast<double>(options.steps), 1, kMany);
  CheckRange("warmup", static_cast<double>(options.warmup), 0, kMany);
  if (options.warmup > options.steps) {
    throw Error(StrCat("training: warmup is ", options.warmup, ", expected at most the ",
                       options.steps, " steps"));
  }
  CheckRange("learning_rate", options.learning_rate, 0, 1e3);
  CheckRange("final_fraction", options.final_fraction, 0, 1);
  CheckRange("weight_decay", options.weight_decay, 0, 1e3);
  CheckRange("clip", options.clip, 1e-12, kMany);
  CheckRange("seed", static_cast<double>(options.seed), 0, 0x1p53);
  CheckRange("memory", static_cast<double>(options.memory), 0, kMany);
}

int64_t NeededTokens(const TrainingOptions& options) {
  if (options.memory == 0) return options.length + 1;
  const int64_t windows = options.batch + 1;
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  return options.length > kMost / windows ? kMost : options.length * windows;
}

void CheckMemory(const LanguageModel& model, int64_t memory) {
  const std::optional<int64_t> longest = model->max_length();
  if (memory == 0 || !longest) return;
  throw Error(StrCat("memory is ", memory,
                     ", and with one the positions run on through the text; '",
                     model->options().position, "' ends at ", *longest));
}

double LearningRate(const TrainingOptions& options, int64_t step) {
  if (step < options.warmup) {
    return options.learning_rate * static_cast<double>(step + 1) /
           static_cast<double>(options.warmup);
  }
  const auto rest = static_cast<double>(std::max<int64_t>(options.steps - options.warmup, 1));
  const double done = std::min(static_cast<double>(step - options.warmup) / rest, 1.0);
  const double cosine = (1 + std::cos(std::numbers::pi * done)) / 2;
  return options.learning_rate * (options.final_fraction + (1 - options.final_fraction) * cosine);
}

LanguageModel NewModel(const LanguageModelOptions& options, int64_t seed) {
  torch::manual_seed(static_cast<uint64_t>(seed));
  return LanguageModel(options);
}

bool Decays(std::string_view name, const torch::Tensor& parameter) {
  return parameter.dim() >= 2 && name.ends_with(".weight");
}

Trainer::Trainer(LanguageModel model, TokenText text, const TrainingOptions& options,
                 ProcessesPtr processes)
    : model_(std::move(model)),
      text_(std::move(text)),
      options_(options),
      processes_(std::move(processes)) {
  CheckTrainingOptions(options_, processes_->size());
  CheckMemory(model_, options_.memory);
  const int64_t needed = NeededTokens(options_);
  if (text_.size() < needed) {
    throw Error(StrCat("training: the text has ", text_.size(), " tokens, and needs ", needed));
  }
  memory_.max_length = options_.memory;
  std::vector<torch::Tensor> decayed;
  std::vector<torch::Tensor> free;
  for (const auto& entry : model_->named_parameters()) {
    (Decays(entry.key(), entry.value()) ? decayed : free).push_back(entry.value());
  }
  const auto with_decay = [&](double decay) {
    return std::make_unique<torch::optim::AdamWOptions>(
        torch::optim::AdamWOptions(options_.learning_rate)
            .betas({kBeta1, kBeta2})
            .eps(kEpsilon)
            .weight_decay(decay));
  };
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(decayed, with_decay(options_.weight_decay));
  groups.emplace_back(free, with_decay(0));
  optimizer_ = std::make_unique<torch::optim::AdamW>(groups);
  // Processors of different kinds may have drawn different weights.
  if (processes_->size() > 1) {
    const torch::NoGradGuard no_grad;
    std::vector<torch::Tensor> tensors = model_->parameters();
    for (const torch::Tensor& buffer : model_->buffers()) tensors.push_back(buffer);
    for (const torch::Tensor& tensor : tensors) {
      const torch::Tensor first = tensor.contiguous();
      processes_->Broadcast(first);
      tensor.copy_(first);
    }
  }
}

int64_t Trainer::FirstRowOf(int64_t rank) const {
  return FirstRow(options_.batch, rank, processes_->size());
}

int64_t Trainer::CountRowsOf(int64_t rank) const {
  return CountRows(options_.batch, rank, processes_->size());
}

torch::Tensor Trainer::GatherRows(const torch::Tensor& rows) const {
  const int64_t size = processes_->size();
  std::vector<int64_t> shape = rows.sizes().vec();
  shape[0] = (options_.batch + size - 1) / size;
  torch::Tensor padded = torch::zeros(shape, rows.options());
  padded.narrow(0, 0, rows.size(0)).copy_(rows);
  const torch::Tensor all = processes_->AllGather(padded);
  std::vector<torch::Tensor> parts;
  for (int64_t rank = 0; rank < size; ++rank) {
    parts.push_back(all[rank].narrow(0, 0, CountRowsOf(rank)));
  }
  return torch::cat(parts);
}

LanguageModelMemory Trainer::GatherMemory() const {
  LanguageModelMemory whole = memory_;
  if (processes_->size() == 1) return whole;
  for (torch::Tensor& layer : whole.layers) layer = GatherRows(layer);
  torch::Tensor& embeddings = whole.tokens.embeddings;
  if (embeddings.defined()) embeddings = GatherRows(embeddings);
  return whole;
}

double Trainer::SumGradients(const torch::Tensor& loss) {
  if (processes_->size() == 1) return loss.item<double>();
  // In one buffer: many small sums would wait for each other.
  std::vector<torch::Tensor> parts;
  for (const torch::Tensor& parameter : model_->parameters()) {
    if (parameter.grad().defined()) parts.push_back(parameter.grad().reshape({-1}));
  }
  parts.push_back(loss.detach().reshape({1}));
  const torch::Tensor sums = torch::cat(parts);
  processes_->AllReduce(sums);
  int64_t at = 0;
  for (const torch::Tensor& parameter : model_->parameters()) {
    if (!parameter.grad().defined()) continue;
    parameter.mutable_grad().copy_(sums.narrow(0, at, parameter.numel()).view(parameter.sizes()));
    at += parameter.numel();
  }
  return sums[at].item<double>();
}

double Trainer::Step() {
  model_->train();
  // Dropout's own stream for each step, so that a resumed run draws what the whole one drew.
  torch::manual_seed(static_cast<uint64_t>(options_.seed) * 0x9e3779b97f4a7c15 +
                     static_cast<uint64_t>(step_));
  const auto seed = static_cast<uint64_t>(options_.seed);
  LanguageModelMemory memory = memory_;
  std::vector<int64_t> starts;
  if (options_.memory == 0) {
    starts = TrainingStarts(text_.size(), options_.length, seed, step_, options_.batch);
  } else {
    const StreamStep stream =
        TrainingStream(text_.size(), options_.length, seed, step_, options_.batch);
    starts = stream.starts;
    if (stream.begins) memory.reset();
  }
  const int64_t first = FirstRowOf(processes_->rank());
  const int64_t count = CountRowsOf(processes_->rank());
  std::optional<BatchRows> rows;
  if (count < options_.batch) rows = BatchRows{first, options_.batch};
  const torch::Tensor losses =
      Losses(model_, Windows(text_, starts.data() + first, count, options_.length),
             options_.memory == 0 ? nullptr : &memory, rows);
  // The share of these rows in the mean.
  const torch::Tensor loss = losses.sum() / static_cast<double>(options_.batch * options_.length);
  optimizer_->zero_grad();
  loss.backward();
  const double value = SumGradients(loss);
  if (!std::isfinite(value)) return value;
  const double norm = torch::nn::utils::clip_grad_norm_(model_->parameters(), options_.clip);
  if (!std::isfinite(norm)) return norm;
  for (auto& group : optimizer_->param_groups()) {
    group.options().set_lr(LearningRate(options_, step_));
  }
  optimizer_->step();
  memory_ = std::move(memory);
  ++step_;
  return value;
}

std::map<std::string, torch::Tensor> Trainer::OptimizerState() const {
  std::map<std::string, torch::Tensor> state;
  for (const auto& entry : model_->named_parameters()) {
    const auto found = optimizer_->state().find(entry.value().unsafeGetTensorImpl());
    if (found == optimizer_->state().end()) continue;
    const auto& moments = static_cast<const torch::optim::AdamWParamState&>(*found->second);
    state[kFirstMoment + entry.key()] = moments.exp_avg();
    state[kSecondMoment + entry.key()] = moments.exp_avg_sq();
  }
  return state;
}

void Trainer::Restore(const std::map<std::string, torch::Tensor>& state, int64_t step,
                      const LanguageModelMemory& memory) {
  const auto take = [&](const std::string& name, const torch::Tensor& parameter) {
    const auto found = state.find(name);
    if (found == state.end()) {
      throw Error(StrCat("the optimizer's tensor '", name, "' is missing"));
    }
    if (found->second.sizes() != parameter.sizes()) {
      throw Error(StrCat("the optimizer's tensor '", name, "' is ", found->second.sizes(),
                         ", expected ", parameter.sizes()));
    }
    return found->second.clone();
  };
  if (step > 0) {
    for (const auto& entry : model_->named_parameters()) {
      auto moments = std::make_unique<torch::optim::AdamWParamState>();
      moments->step(step);
      moments->exp_avg(take(kFirstMoment + entry.key(), entry.value()));
      moments->exp_avg_sq(take(kSecondMoment + entry.key(), entry.value()));
      optimizer_->state()[entry.value().unsafeGetTensorImpl()] = std::move(moments);
    }
  }
  step_ = step;
  memory_ = memory;
  memory_.max_length = options_.memory;
  const auto take_rows = [&](const torch::Tensor& all) {
    return all.narrow(0, FirstRowOf(processes_->rank()), CountRowsOf(processes_->rank()))
        .contiguous();
  };
  for (torch::Tensor& layer : memory_.layers) layer = take_rows(layer);
  torch::Tensor& embeddings = memory_.tokens.embeddings;
  if (embeddings.defined()) embeddings = take_rows(embeddings);
}

std::vector<LengthLoss> Evaluate(LanguageModel& model, const TokenText& text,
                                 const std::vector<int64_t>& lengths, int64_t budget,
                                 int64_t memory, const std::function<bool()>& proceed) {
  const torch::NoGradGuard no_grad;
  model->eval();
  CheckMemory(model, memory);
  const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  const int64_t tokens = text.size();
  if (tokens <= longest) {
    throw Error(StrCat("evaluation: the text has ", tokens, " tokens, windows of ", longest,
                       " need ", longest + 1));
  }
  // There is no more to remember than the text.
  memory = std::min(memory, tokens);
  const int64_t batch_tokens =
      std::min(kEvaluationBatch, kEvaluationLogits / model->options().vocabulary);
  std::vector<LengthLoss> results;
  for (const int64_t length : lengths) {
    LengthLoss result;
    result.length = length;
    results.push_back(result);
    if (model->max_length() && *model->max_length() < length) continue;
    WindowSums sums(text, length);
    const int64_t batch = std::max<int64_t>(batch_tokens / length, 1);
    const bool whole =
        memory == 0 ? AddWindows(model, EvaluationStarts(tokens, length, longest, budget), batch,
                                 proceed, &sums)
                    : AddStretches(model, text, EvaluationStarts(tokens, longest, longest, budget),
                                   longest, batch, memory, proceed, &sums);
    if (!whole) return {};
    results.back() = sums.Means();
  }
  return results;
}

json ToJson(const LanguageModelOptions& options) {
  return {{"vocabulary", options.vocabulary},
          {"dim", options.dim},
          {"depth", options.depth},
          {"heads", options.heads},
          {"mlp", options.mlp},
          {"similarity", options.similarity},
          {"position", options.position},
          {"dropout", options.dropout},
          {"max_length", options.max_length}};
}

json ToJson(const TrainingOptions& options) {
  return {{"length", options.length},
          {"batch", options.batch},
          {"steps", options.steps},
          {"warmup", options.warmup},
          {"learning_rate", options.learning_rate},
          {"final_fraction", options.final_fraction},
          {"weight_decay", options.weight_decay},
          {"clip", options.clip},
          {"seed", options.seed},
          {"memory", options.memory}};
}

LanguageModelOptions ModelFromJson(const json& object) {
  LanguageModelOptions options;
  options.vocabulary = Field<int64_t>(object, "vocabulary");
  options.dim = Field<int64_t>(object, "dim");
  options.depth = Field<int64_t>(object, "depth");
  options.heads = Field<int64_t>(object, "heads");
  options.mlp = Field<int64_t>(object, "mlp");
  options.similarity = Field<std::string>(object, "similarity");
  options.position = Field<std::string>(object, "position");
  options.dropout = Field<double>(object, "dropout");
  options.max_length = Field<int64_t>(object, "max_length");
  return options;
}

TrainingOptions TrainingFromJson(const json& object) {
  TrainingOptions options;
  options.length = Field<int64_t>(object, "length");
  options.batch = Field<int64_t>(object, "batch");
  options.steps = Field<int64_t>(object, "steps");
  options.warmup = Field<int64_t>(object, "warmup");
  options.learning_rate = Field<double>(object, "learning_rate");
  options.final_fraction = Field<double>(object, "final_fraction");
  options.weight_decay = Field<double>(object, "weight_decay");
  options.clip = Field<double>(object, "clip");
  options.seed = Field<int64_t>(object, "seed");
  options.memory = Field<int64_t>(object, "memory");
  CheckTrainingOptions(options);
  return options;
}

void SaveCheckpoint(const std::filesystem::path& path, Trainer& trainer, const TextData& data,
                    const Tokenizer& tokenizer, const RunOptions& run) {
  const LanguageModelMemory memory = trainer.GatherMemory();
  if (trainer.processes().rank() != 0) return;
  SafeTensors file;
  for (const auto& entry : trainer.model()->named_parameters()) {
    file.tensors[kModelPrefix + entry.key()] = entry.value();
  }
  for (const auto& entry : trainer.model()->named_buffers()) {
    file.tensors[kModelPrefix + entry.key()] = entry.value();
  }
  for (const auto& [name, tensor] : trainer.OptimizerState()) {
    file.tensors[kOptimizerPrefix + name] = tensor;
  }
  for (size_t layer = 0; layer < memory.layers.size(); ++layer) {
    file.tensors[kMemoryPrefix + std::to_string(layer)] = memory.layers[layer];
  }
  if (memory.tokens.embeddings.defined()) {
    file.tensors[kMemoryEmbeddings] = memory.tokens.embeddings.contiguous();
  }
  std::string vocabulary = tokenizer.vocabulary();
  if (!vocabulary.empty()) {
    const auto bytes = static_cast<int64_t>(vocabulary.size());
    file.tensors[kVocabulary] = torch::from_blob(vocabulary.data(), {bytes}, torch::kByte).clone();
  }
  file.metadata["format"] = "pt";
  file.metadata[kConfigKey] = json{
      {"format", kCheckpointFormat},
      {"step", trainer.step()},
      {"tokens", {{"kind", tokenizer.kind()}}},
      {"memory_tokens", memory.tokens.tokens},
      {"model", ToJson(trainer.model()->options())},
      {"training", ToJson(trainer.options())},
      {"run",
       {{"checkpoint_every", run.checkpoint_every}, {"evaluation_bytes", run.evaluation_bytes}}},
      {"data",
       {{"path", std::filesystem::absolute(data.path).string()},
        {"sha256", data.sha256}}}}.dump();
  WriteSafeTensors(path, file);
}

Checkpoint LoadCheckpoint(const std::filesystem::path& path) {
  const SafeTensors file = ReadSafeTensors(path);
  try {
    return BuildCheckpoint(file);
  } catch (const Error& error) {
    throw Error(StrCat(path.string(), " is not a valid checkpoint: ", error.what()));
  } catch (const c10::Error& error) {
    throw Error(
        StrCat(path.string(), " is not a valid checkpoint: ", error.what_without_backtrace()));
  }
}

}  // namespace gnomon::models
