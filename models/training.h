// Training of the language model: AdamW with warm-up and cosine decay, evaluation at several
// lengths, and checkpoints that resume bitwise.
#ifndef GNOMON_MODELS_TRAINING_H_
#define GNOMON_MODELS_TRAINING_H_

#include <torch/torch.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "models/language_model.h"
#include "models/safetensors.h"
#include "models/text_data.h"

namespace gnomon::models {

struct TrainingOptions {
  int64_t length = 128;  // bytes a window
  int64_t batch = 16;    // windows a step
  int64_t steps = 1000;
  int64_t warmup = 100;         // steps of linear growth of the learning rate
  double learning_rate = 2e-3;  // the highest
  double final_fraction = 0.1;  // of it that is left at the end
  double weight_decay = 0.1;    // of weight matrices and embeddings, decoupled
  double clip = 1;              // largest norm of all gradients together
  int64_t seed = 0;             // of the weights, the data order and dropout
};

// Throws Error naming the field that is out of its range.
void CheckTrainingOptions(const TrainingOptions& options);

// The learning rate of a step, counted from 0.
double LearningRate(const TrainingOptions& options, int64_t step);

// The model that a seed begins with.
LanguageModel NewModel(const LanguageModelOptions& options, int64_t seed);

// Whether weight decay applies: to matrices and embeddings, not to biases, norms, or parameters of
// a similarity or position.
bool Decays(std::string_view name, const torch::Tensor& parameter);

class Trainer {
 public:
  // `text` must outlive the trainer and be longer than options.length.
  Trainer(LanguageModel model, std::string_view text, const TrainingOptions& options);

  // One step; returns the mean loss of its batch in nats a byte. Where that is not a finite number
  // the parameters are left as they were.
  double Step();

  int64_t step() const { return step_; }
  LanguageModel& model() { return model_; }
  const TrainingOptions& options() const { return options_; }

  // Moments of AdamW by parameter, for a checkpoint, and back; Restore throws Error where a tensor
  // is missing or has another shape.
  std::map<std::string, torch::Tensor> OptimizerState() const;
  void Restore(const std::map<std::string, torch::Tensor>& state, int64_t step);

 private:
  LanguageModel model_;
  std::string_view text_;
  TrainingOptions options_;
  std::unique_ptr<torch::optim::AdamW> optimizer_;
  int64_t step_ = 0;
};

struct LengthLoss {
  int64_t length = 0;
  std::optional<double> loss;  // nats a byte, over every byte; none where a position is undefined
  std::optional<double> last;  // the same over the last `kLastBytes` of each window
  int64_t windows = 0;
};

inline constexpr int64_t kLastBytes = 32;

// The loss at each of `lengths` on about `budget` bytes of `text`, which must be longer than the
// longest of them. `proceed` is asked between batches; an empty result means that it said no.
std::vector<LengthLoss> Evaluate(LanguageModel& model, std::string_view text,
                                 const std::vector<int64_t>& lengths, int64_t budget,
                                 const std::function<bool()>& proceed = nullptr);

struct Checkpoint {
  LanguageModel model{nullptr};
  TrainingOptions training;
  int64_t step = 0;
  std::map<std::string, torch::Tensor> optimizer;
  std::string data_path;  // absolute
  std::string data_sha256;
};

// Options as JSON objects with the names of their fields, and back; the latter throw Error where a
// field is missing, of the wrong type or out of its range.
nlohmann::json ToJson(const LanguageModelOptions& options);
nlohmann::json ToJson(const TrainingOptions& options);
LanguageModelOptions ModelFromJson(const nlohmann::json& object);
TrainingOptions TrainingFromJson(const nlohmann::json& object);

// Weights, optimizer, configuration and the name of the data in one safetensors file.
void SaveCheckpoint(const std::filesystem::path& path, Trainer& trainer, const TextData& data);

// Throws Error where the file is not a sound checkpoint.
Checkpoint LoadCheckpoint(const std::filesystem::path& path);

}  // namespace gnomon::models

#endif  // GNOMON_MODELS_TRAINING_H_
