#include "tasks/text.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <utility>

#include "gnomon/attention.h"
#include "gnomon/sha256.h"
#include "models/evaluation.h"
#include "models/language_model_size.h"
#include "models/transformer.h"
#include "models/windows.h"
#include "training/processes.h"
#include "training/strings.h"

namespace gnomon::lab {
namespace text {
namespace {

using nlohmann::json;

constexpr const char* kMemoryTokens = "memory_tokens";
constexpr const char* kMemoryLayers = "memory.layers.";
constexpr const char* kMemoryEmbeddings = "memory.embeddings";

const RegisterTask<TextTask> registered;

std::string DescribeMemory(int64_t memory) {
  return memory > 0 ? StrCat(" with a memory of ", memory) : "";
}

const torch::Tensor& TakeTensor(const LearnerState& state, const std::string& name,
                                torch::IntArrayRef shape) {
  const auto found = state.tensors.find(name);
  if (found == state.tensors.end()) throw Error(StrCat("the tensor '", name, "' is missing"));
  const torch::Tensor& tensor = found->second;
  if (tensor.sizes() != shape || tensor.scalar_type() != torch::kFloat) {
    throw Error(StrCat("the tensor '", name, "' is ", tensor.scalar_type(), " ", tensor.sizes(),
                       "; expected Float ", shape));
  }
  return tensor;
}

}  // namespace

int64_t NeededTokens(const WindowOptions& window, int64_t batch) {
  if (window.memory == 0) return window.length + 1;
  const int64_t windows = batch + 1;
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  return window.length > kMost / windows ? kMost : window.length * windows;
}

TrainingOptions TextTask::DefaultTraining(Command command) const {
  TrainingOptions training;
  if (command == Command::kCompare) training.steps = 700;
  return training;
}

OptionList TextTask::Options(Command command) {
  if (command == Command::kEval) return evaluation_.Options();
  if (command == Command::kCompare) {
    // Each run of a comparison sets its own terms. The training length is the first of --lengths.
    return comparison_.Options() + Renamed(options_.tokens.Options(), "kind", "tokens") +
           InSection("model", WithoutFlags(options_.model.Options(), {"similarity", "position"})) +
           InSection("training", WithoutFlags(options_.window.Options(), {"length"}));
  }
  return InSection("run", run_.Options()) + InSection("tokens", options_.tokens.Options()) +
         InSection("model", Without(options_.model.Options(), {"similarity", "position"})) +
         InSection("training", options_.window.Options());
}

void TextTask::Settle(Command command, bool is_resumed, const TrainingOptions* training) {
  CheckTokenOptions(options_.tokens);
  WindowOptions& window = options_.window;
  is_trained_ = command != Command::kEval;
  if (command == Command::kTrain) {
    CheckRanges(window.Options(), "training");
    if (!is_resumed) options_.model.max_length = window.length;
    evaluated_ = {{window.length}, run_.evaluation_bytes, window.memory};
  } else if (command == Command::kCompare) {
    CheckLengths(comparison_.lengths);
    CheckRanges(comparison_.Options(), "");
    window.length = comparison_.lengths[0];
    options_.model.max_length = window.length;
    std::optional<int64_t>& memory = comparison_.evaluation_memory;
    if (!memory) memory = window.memory;
    evaluated_ = {comparison_.lengths, comparison_.evaluation_bytes, *memory};
  } else {
    // Without training state, the training length is the model's max_length.
    const int64_t trained = training != nullptr ? window.length : options_.model.max_length;
    if (evaluation_.lengths.empty()) evaluation_.lengths = {trained, 2 * trained, 4 * trained};
    CheckLengths(evaluation_.lengths);
    const int64_t memory = training != nullptr ? window.memory : 0;
    evaluated_ = {evaluation_.lengths, evaluation_.bytes, evaluation_.memory.value_or(memory)};
  }
}

std::string TextTask::StepFlags(Command command, const TrainingOptions& training) const {
  return StrCat("--batch ", training.batch, " and ",
                command == Command::kCompare ? "--lengths " : "--length ", options_.window.length);
}

std::string TextTask::EvaluationFlags(Command command) const {
  if (command == Command::kTrain) return "--length and --memory";
  return command == Command::kEval ? "--lengths and --memory" : "--lengths and --evaluation-memory";
}

void TextTask::CheckModelFits() const { CheckWeightsFit(options_.model); }

void TextTask::CheckFits(const TrainingOptions& training, int64_t processes) const {
  CheckStepFits(options_.model, CountRows(training.batch, 0, processes), options_.window.length,
                StepFlags(Command::kTrain, training));
}

void TextTask::SetText(TextData data) {
  data_ = std::move(data);
  has_data_ = true;
  Encode();
}

void TextTask::ReadData(const std::string& path) { SetText(ReadText(path)); }

std::string TextTask::HoldOut() {
  constexpr size_t kMost = size_t{1} << 20;
  const size_t bytes = std::min(data_.train.size() / 10, kMost);
  const size_t cut = data_.train.size() - bytes;
  held_out_ = data_.train.substr(cut);
  data_.train.resize(cut);
  Encode();
  return StrCat("the last ", bytes, " bytes of the training split");
}

json TextTask::DescribeData() const {
  const Tokenizer& tokenizer = *tokens_.tokenizer;
  const std::string vocabulary = tokenizer.vocabulary();
  Sha256 hash;
  hash.Update(vocabulary);
  const std::optional<int64_t> unknown = tokenizer.unknown();
  const std::filesystem::path path = std::filesystem::absolute(data_.path).lexically_normal();
  return {{"data",
           {{"path", path.string()},
            {"files", data_.files},
            {"train_bytes", data_.train.size()},
            {"valid_bytes", data_.valid.size()},
            {"sha256", data_.sha256}}},
          {"tokens",
           {{"kind", tokenizer.kind()},
            {"size", tokenizer.size()},
            {"sha256", vocabulary.empty() ? json() : json(hash.Hex())},
            {"train_tokens", tokens_.train.size()},
            {"valid_tokens", tokens_.valid.size()},
            {"valid_unknown", unknown ? json(tokens_.valid.Count(*unknown)) : json()}}}};
}

std::string TextTask::DescribeSize() const { return StrCat(tokens_.train.size(), " ", kind()); }

void TextTask::SetTokenizer(TokenizerPtr tokenizer) {
  options_.model.vocabulary = tokenizer->size();
  tokens_.tokenizer = std::move(tokenizer);
  Encode();
}

void TextTask::Encode() {
  if (!has_data_ || tokens_.tokenizer == nullptr) return;
  tokens_ = Tokenize(tokens_.tokenizer, data_);
  held_out_tokens_ = tokens_.tokenizer->Encode(held_out_);
}

void TextTask::Prepare() { SetTokenizer(BuildTokenizer(options_.tokens, data_.train)); }

std::vector<Asset> TextTask::Assets() const {
  return {{.name = "vocabulary",
           .tensor = "tokens.vocabulary",
           .file = VocabularyFile(kind()),
           .sha256_at = "/tokens/sha256",
           .bytes = tokens_.tokenizer == nullptr ? "" : tokens_.tokenizer->vocabulary()}};
}

void TextTask::TakeAssets(const std::vector<std::string>& bytes, bool is_stored) {
  const auto size = is_stored ? std::optional(options_.model.vocabulary) : std::nullopt;
  SetTokenizer(RestoreTokenizer(kind(), bytes[0], size));
}

void TextTask::CheckData(const TrainingOptions* training) const {
  CheckCutoffs(options_.model.adaptive, options_.model.vocabulary);
  const auto check = [&](const char* part, const TokenText& text, int64_t needed) {
    if (text.size() < needed) {
      throw Error(StrCat("the text is too short: the ", part, " split of ", data_.path, " has ",
                         text.size(), " ", kind(), ", but the windows need ", needed));
    }
  };
  if (training != nullptr) {
    check("training", tokens_.train, NeededTokens(options_.window, training->batch));
  }
  const std::vector<int64_t>& lengths = evaluated_.lengths;
  if (!held_out_.empty()) check("held-out", held_out_tokens_, lengths[0] + 1);
  check("validation", tokens_.valid, *std::max_element(lengths.begin(), lengths.end()) + 1);
}

std::unique_ptr<Learner> TextTask::MakeLearner(const Terms& terms,
                                               const TrainingOptions& training) {
  LanguageModelOptions model = options_.model;
  model.similarity = terms.similarity;
  model.position = terms.position;
  // Without a tokenizer, the model is built only to check its options. Its vocabulary is then made
  // large enough for all cutoffs.
  if (tokens_.tokenizer == nullptr && !model.adaptive.empty()) {
    const auto& cutoffs = model.adaptive;
    model.vocabulary =
        std::max(model.vocabulary, *std::max_element(cutoffs.begin(), cutoffs.end()) + 1);
  }
  return std::make_unique<TextLearner>(*this, LanguageModel(model), training);
}

void TextTask::CheckSizes(const StoredSizes& file) const { CheckStoredSizes(options_.model, file); }

std::vector<std::string> TextTask::state_fields() const { return {kMemoryTokens}; }

std::vector<Metric> TextTask::metrics() const {
  return {{.key = "loss", .title = "loss, " + description().loss_unit, .column = "loss"},
          {.key = "last",
           .title = StrCat("last ", kLastTokens, " ", kind()),
           .column = StrCat("last ", kLastTokens)},
          // For bytes, this is the loss in a different unit.
          {.key = "bits_per_byte",
           .title = "bits per byte",
           .column = "bits per byte",
           .is_compared = kind() != "bytes"}};
}

Conditions TextTask::conditions() const {
  Conditions conditions = {.key = "length", .title = "evaluation length, " + kind()};
  for (const int64_t length : evaluated_.lengths) conditions.values.emplace_back(length);
  if (is_trained_) conditions.trained = 0;
  return conditions;
}

json TextTask::DescribeEvaluation() const { return {{"memory", evaluated_.memory}}; }

std::string TextTask::TrainedAs(const TrainingOptions& training) const {
  const WindowOptions& window = options_.window;
  std::string text =
      StrCat("trained at length ", window.length, DescribeMemory(window.memory), " for ",
             training.steps, " steps of ", training.batch * window.length, " ", kind());
  if (evaluated_.memory != window.memory) {
    text += StrCat(", evaluated with a memory of ", evaluated_.memory);
  }
  return text + StrCat("; \"last ", kLastTokens, "\": loss over the last ", kLastTokens, " ",
                       kind(), " of each window");
}

TextLearner::TextLearner(const TextTask& task, LanguageModel model, const TrainingOptions& training)
    : task_(task), model_(std::move(model)), training_(training) {
  memory_.max_length = task.options().window.memory;
}

torch::Tensor TextLearner::Probe() {
  const LanguageModelOptions& options = model_->options();
  const std::optional<int64_t> most = model_->max_length();
  CheckReaches(most, options.max_length, StrCat("the training length is ", options.max_length));
  CheckMemory(model_, std::max(memory_.max_length, task_.evaluated().memory));
  const int64_t length = ProbeLength(most, options.max_length);
  return model_->forward(torch::arange(length).remainder(options.vocabulary).unsqueeze(0));
}

void TextLearner::CheckTraining() const {
  const WindowOptions& window = task_.options().window;
  CheckMemory(model_, window.memory);
  const int64_t needed = NeededTokens(window, training_.batch);
  const int64_t tokens = task_.tokens().train.size();
  if (tokens < needed) {
    throw Error(
        StrCat("training: the text has ", tokens, " tokens, but training needs at least ", needed));
  }
}

torch::Tensor TextLearner::Loss(const Batch& batch) {
  const TokenText& text = task_.tokens().train;
  const WindowOptions& window = task_.options().window;
  const auto seed = static_cast<uint64_t>(training_.seed);
  next_ = memory_;
  std::vector<int64_t> starts;
  if (window.memory == 0) {
    starts = TrainingStarts(text.size(), window.length, seed, batch.step, batch.total);
  } else {
    const StreamStep stream =
        TrainingStream(text.size(), window.length, seed, batch.step, batch.total);
    starts = stream.starts;
    if (stream.begins) next_.reset();
  }
  const torch::Tensor losses =
      Losses(model_, Windows(text, starts.data() + batch.first, batch.count, window.length),
             /*cache=*/nullptr, window.memory == 0 ? nullptr : &next_, batch.rows());
  return losses.sum() / static_cast<double>(batch.total * window.length);
}

void TextLearner::Keep() { memory_ = std::move(next_); }

std::vector<Measurement> TextLearner::Evaluate(const std::function<bool()>& proceed) {
  TextTask::Evaluated how = task_.evaluated();
  const bool is_held_out = task_.evaluates_held_out();
  const TokenText& text = is_held_out ? task_.held_out() : task_.tokens().valid;
  if (is_held_out) {
    how.lengths.resize(1);
    how.bytes = std::max<int64_t>(how.bytes / 4, 1);  // held-out data is evaluated often
  }
  std::vector<Measurement> measured;
  for (const LengthLoss& at : lab::Evaluate(model_, text, how.lengths,
                                            TokensOfBytes(text, how.bytes), how.memory, proceed)) {
    measured.push_back({at.length, {at.loss, at.last, at.bits_per_byte}, at.windows});
  }
  return measured;
}

void TextLearner::Generate(const Output& output) {
  const TextGenerationOptions& options = task_.generation();
  if (options.prompt.empty()) throw Error("generate: --prompt is empty");
  const Tokenizer& tokenizer = *task_.tokens().tokenizer;
  const TokenText prompt = tokenizer.Encode(options.prompt);
  if (prompt.size() == 0) throw Error(StrCat("generate: --prompt contains no ", tokenizer.kind()));
  const GenerationOptions how =
      ToGeneration(options.sampling, model_, prompt.size(), options.tokens, tokenizer.kind());
  output.print(options.prompt);
  int64_t before = prompt[prompt.size() - 1];
  lab::Generate(model_, prompt, how, [&](int64_t token) {
    output.print(tokenizer.Text(token, before));
    before = token;
    return output.proceed();
  });
  output.print("\n");
}

LearnerState TextLearner::State(const Gather& gather) const {
  LearnerState state;
  for (size_t layer = 0; layer < memory_.layers.size(); ++layer) {
    state.tensors[kMemoryLayers + std::to_string(layer)] = gather(memory_.layers[layer]);
  }
  const torch::Tensor& embeddings = memory_.tokens.embeddings;
  if (embeddings.defined()) state.tensors[kMemoryEmbeddings] = gather(embeddings);
  state.fields[kMemoryTokens] = memory_.tokens.tokens;
  return state;
}

// The state is the model's memory of earlier segments. It is empty before the first segment and
// without a memory.
size_t TextLearner::CheckState(const LearnerState& state) const {
  const auto tokens = Field<int64_t>(state.fields, kMemoryTokens);
  if (tokens < 0) throw Error(StrCat("the field '", kMemoryTokens, "' is negative"));
  if (tokens == 0) return 0;
  const LanguageModelOptions& options = model_->options();
  const int64_t length = std::min(tokens, memory_.max_length);
  for (int64_t layer = 0; layer < options.depth; ++layer) {
    TakeTensor(state, kMemoryLayers + std::to_string(layer),
               {training_.batch, length, options.dim});
  }
  const auto embeddings = state.tensors.find(kMemoryEmbeddings);
  if (embeddings == state.tensors.end()) return static_cast<size_t>(options.depth);
  const int64_t read = embeddings->second.dim() == 3 ? embeddings->second.size(1) : 0;
  TakeTensor(state, kMemoryEmbeddings, {training_.batch, read, options.dim});
  return static_cast<size_t>(options.depth) + 1;
}

void TextLearner::Restore(const LearnerState& state, int64_t first, int64_t count) {
  memory_.reset();
  const int64_t tokens = state.fields.value(kMemoryTokens, int64_t{0});
  if (tokens == 0) return;
  const auto take = [&](const std::string& name) {
    return state.tensors.at(name).narrow(0, first, count).contiguous();
  };
  memory_.tokens.tokens = tokens;
  for (int64_t layer = 0; layer < model_->options().depth; ++layer) {
    memory_.layers.push_back(take(kMemoryLayers + std::to_string(layer)));
  }
  if (state.tensors.contains(kMemoryEmbeddings)) {
    memory_.tokens.embeddings = take(kMemoryEmbeddings);
  }
}

}  // namespace text
}  // namespace gnomon::lab
