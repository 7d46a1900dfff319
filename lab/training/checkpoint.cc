#include "training/checkpoint.h"

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>
#include <vector>

#include "gnomon/attention.h"
#include "training/safetensors.h"
#include "training/strings.h"

namespace gnomon::lab {
namespace {

using nlohmann::json;

// The key of the configuration in a checkpoint's metadata, and the version of the format.
constexpr const char* kConfigKey = "gnomon";
constexpr int64_t kCheckpointFormat = 1;
constexpr const char* kModelPrefix = "model.";
constexpr const char* kOptimizerPrefix = "optimizer.";

// Configuration fields that only training runs have, in addition to the task's state fields.
constexpr const char* kTrainingFields[] = {"step", "training", "data"};

// Returns a tensor of the file; throws Error if it is missing or its shape or type is wrong.
torch::Tensor Take(const SafeTensors& file, const std::string& name, torch::IntArrayRef shape,
                   torch::ScalarType type) {
  const auto found = file.tensors.find(name);
  if (found == file.tensors.end()) throw Error(StrCat("the tensor '", name, "' is missing"));
  const torch::Tensor& tensor = found->second;
  if (tensor.sizes() != shape || tensor.scalar_type() != type) {
    throw Error(StrCat("the tensor '", name, "' is ", tensor.scalar_type(), " ", tensor.sizes(),
                       "; expected ", type, " ", shape));
  }
  return tensor;
}

bool IsOfTraining(const Option& option) {
  return option.section == "training" || option.section == "run";
}

// All stored options. OfModel() selects those of the model, and OfTraining() those of its training.
OptionList StoredOptions(TaskOptions& task, Terms* terms) {
  return InSection("model", terms->Options()) + task.Options(Command::kTrain);
}

OptionList OfModel(OptionList list) {
  std::erase_if(list, IsOfTraining);
  return list;
}

OptionList OfTraining(OptionList list) {
  std::erase_if(list, [](const Option& option) { return !IsOfTraining(option); });
  return list;
}

OptionList TrainingSections(TrainingOptions* training, RunOptions* run) {
  return InSection("training", training->Options()) + InSection("run", run->Options());
}

// Passes the file's assets to the task and returns the number of their tensors.
size_t TakeAssets(const SafeTensors& file, TaskData& task) {
  std::vector<std::string> assets;
  size_t used = 0;
  for (const Asset& asset : task.Assets()) {
    std::string& bytes = assets.emplace_back();
    const auto found = file.tensors.find(asset.tensor);
    if (found == file.tensors.end()) continue;
    const torch::Tensor& tensor = found->second;
    Take(file, asset.tensor, {tensor.numel()}, torch::kByte);
    bytes.assign(reinterpret_cast<const char*>(tensor.const_data_ptr<uint8_t>()),
                 static_cast<size_t>(tensor.numel()));
    ++used;
  }
  task.TakeAssets(assets, /*is_stored=*/true);
  return used;
}

// Whether a configuration contains any field that only training runs have.
bool HoldsTraining(const json& object, const TaskModels& task) {
  std::vector<std::string> fields = task.state_fields();
  fields.insert(fields.end(), std::begin(kTrainingFields), std::end(kTrainingFields));
  return std::any_of(fields.begin(), fields.end(),
                     [&](const std::string& field) { return object.contains(field); });
}

// The tensors that do not belong to the model, the optimizer or the assets.
std::map<std::string, torch::Tensor> OtherTensors(const SafeTensors& file, const TaskData& task) {
  std::map<std::string, torch::Tensor> others = file.tensors;
  for (const Asset& asset : task.Assets()) others.erase(asset.tensor);
  std::erase_if(others, [](const auto& entry) {
    return entry.first.starts_with(kModelPrefix) || entry.first.starts_with(kOptimizerPrefix);
  });
  return others;
}

// Reads the state of a training run, except the optimizer's moments (which are named after the
// parameters) and the learner's state.
TrainingState TakeTraining(const json& object, const OptionList& options) {
  TrainingState training;
  training.step = Field<int64_t>(object, "step");
  if (training.step < 0) throw Error("the field 'step' is negative");
  const OptionList all = TrainingSections(&training.options, &training.run) + OfTraining(options);
  FromJson(object, all);
  for (const Option& option : all) CheckRanges({option}, option.section);
  CheckTrainingOptions(training.options);
  const json data = object.value("data", json());
  training.data_path = Field<std::string>(data, "path");
  training.data_sha256 = Field<std::string>(data, "sha256");
  return training;
}

std::string TaskOf(const json& object) {
  return object.contains("task") ? Field<std::string>(object, "task") : kTextTask;
}

json ReadConfig(const std::map<std::string, std::string>& metadata) {
  const auto config = metadata.find(kConfigKey);
  if (config == metadata.end()) throw Error("it contains no gnomon configuration");
  json object = json::parse(config->second, nullptr, /*allow_exceptions=*/false);
  if (object.is_discarded()) throw Error("its configuration is not valid JSON");
  const auto format = Field<int64_t>(object, "format");
  if (format != kCheckpointFormat) throw Error(StrCat("its format is ", format, "; expected 1"));
  return object;
}

Checkpoint BuildCheckpoint(const SafeTensors& file, Task& task, torch::Device device) {
  const json object = ReadConfig(file.metadata);
  if (TaskOf(object) != task.name()) {
    throw Error(
        StrCat("it belongs to the task '", TaskOf(object), "'; expected '", task.name(), "'"));
  }
  Checkpoint checkpoint;
  const OptionList options = StoredOptions(task, &checkpoint.terms);
  FromJson(object, OfModel(options));
  task.CheckSizes(StoredSizes(file.tensors, kModelPrefix));
  for (const Option& option : OfModel(options)) CheckRanges({option}, option.section);
  size_t used = TakeAssets(file, task);
  if (HoldsTraining(object, task)) {
    checkpoint.training.emplace(TakeTraining(object, options));
  }
  const TrainingOptions training =
      checkpoint.training ? checkpoint.training->options : TrainingOptions();
  checkpoint.learner = NewLearner(task, checkpoint.terms, training, device);
  if (checkpoint.training) {
    LearnerState& state = checkpoint.training->learner;
    state = {OtherTensors(file, task), object};
    used += checkpoint.learner->CheckState(state);
  }

  const torch::NoGradGuard no_grad;
  const auto restore = [&](const std::string& name, torch::Tensor tensor) {
    tensor.copy_(Take(file, kModelPrefix + name, tensor.sizes(), tensor.scalar_type()));
    ++used;
  };
  const torch::nn::Module& module = checkpoint.learner->module();
  for (const auto& entry : module.named_buffers()) restore(entry.key(), entry.value());
  for (const auto& entry : module.named_parameters()) {
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
    throw Error(StrCat("it contains ", file.tensors.size(), " tensors, but its model has ", used));
  }
  return checkpoint;
}

}  // namespace

void SaveCheckpoint(const std::filesystem::path& path, Trainer& trainer, Task& task,
                    const Terms& terms, const RunOptions& run, const std::string& data_path) {
  const LearnerState state = trainer.GatherState();
  if (trainer.processes().rank() != 0) return;
  SafeTensors file;
  const torch::nn::Module& module = trainer.learner().module();
  for (const auto& entry : module.named_parameters()) {
    file.tensors[kModelPrefix + entry.key()] = entry.value();
  }
  for (const auto& entry : module.named_buffers()) {
    file.tensors[kModelPrefix + entry.key()] = entry.value();
  }
  for (const auto& [name, tensor] : trainer.OptimizerState()) {
    file.tensors[kOptimizerPrefix + name] = tensor;
  }
  for (const auto& [name, tensor] : state.tensors) file.tensors[name] = tensor.contiguous();
  for (Asset& asset : task.Assets()) {
    if (asset.bytes.empty()) continue;
    const auto bytes = static_cast<int64_t>(asset.bytes.size());
    file.tensors[asset.tensor] =
        torch::from_blob(asset.bytes.data(), {bytes}, torch::kByte).clone();
  }
  for (auto& [name, tensor] : file.tensors) tensor = tensor.cpu();
  Terms named = terms;
  TrainingOptions training = trainer.options();
  RunOptions beside = run;
  json config = ToJson(StoredOptions(task, &named) + TrainingSections(&training, &beside));
  config.update(state.fields);
  config["format"] = kCheckpointFormat;
  config["task"] = task.name();
  config["step"] = trainer.step();
  config["data"] = {
      {"path", data_path.empty() ? "" : std::filesystem::absolute(data_path).string()},
      {"sha256", task.data_sha256()}};
  file.metadata["format"] = "pt";
  file.metadata[kConfigKey] = config.dump();
  WriteSafeTensors(path, file);
}

Checkpoint LoadCheckpoint(const std::filesystem::path& path, Task& task, torch::Device device) {
  const SafeTensors file = ReadSafeTensors(path);
  const auto fail = [&](const std::string& fault) {
    throw Error(StrCat(path.string(), " is not a valid checkpoint: ", fault));
  };
  Checkpoint checkpoint;
  try {
    checkpoint = BuildCheckpoint(file, task, device);
  } catch (const Error& error) {
    fail(error.what());
  } catch (const c10::Error& error) {
    fail(error.what_without_backtrace());
  }
  return checkpoint;
}

std::optional<std::string> TaskOfCheckpoint(const std::filesystem::path& path) {
  try {
    return TaskOf(ReadConfig(ReadSafeTensorsMetadata(path)));
  } catch (const Error&) {
    return std::nullopt;
  }
}

std::filesystem::path CheckpointFile(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) {
    throw Error(StrCat("no such checkpoint file or run folder: ", path));
  }
  if (!std::filesystem::is_directory(path, error)) return path;
  const std::filesystem::path file = std::filesystem::path(path) / kCheckpointName;
  if (!std::filesystem::exists(file, error)) {
    throw Error(StrCat("the folder ", path, " contains no ", kCheckpointName));
  }
  return file;
}

}  // namespace gnomon::lab
