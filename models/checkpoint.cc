#include "models/checkpoint.h"

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>
#include <utility>

#include "gnomon/attention.h"
#include "training/safetensors.h"
#include "training/strings.h"

namespace gnomon::models {
namespace {

using nlohmann::json;

// The key of the configuration in a checkpoint's metadata, and the version of its layout.
constexpr const char* kConfigKey = "gnomon";
constexpr int64_t kCheckpointFormat = 1;
constexpr const char* kModelPrefix = "model.";
constexpr const char* kOptimizerPrefix = "optimizer.";
constexpr const char* kMemoryPrefix = "memory.layers.";
constexpr const char* kMemoryEmbeddings = "memory.embeddings";
constexpr const char* kVocabulary = "tokens.vocabulary";

// What the configuration of a training run has beside that of a model.
constexpr const char* kTrainingFields[] = {"step", "training", "memory_tokens", "data"};

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
  FromJson(*found, run.Options());
  CheckRanges(run.Options(), "run");
  return run;
}

// All of a training run but its moments, which the parameters name.
TrainingState TakeTraining(const SafeTensors& file, const json& object,
                           const LanguageModelOptions& model) {
  TrainingState training;
  training.step = Field<int64_t>(object, "step");
  if (training.step < 0) throw Error("the field 'step' is negative");
  FromJson(object.value("training", json()), training.options.Options());
  CheckTrainingOptions(training.options);
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
  LanguageModelOptions options;
  FromJson(object.value("model", json()), options.Options());
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
    for (const std::string& name : MomentsOf(entry.key())) {
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
      {"model", OptionsToJson(trainer.model()->options())},
      {"training", OptionsToJson(trainer.options())},
      {"run", OptionsToJson(run)},
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
