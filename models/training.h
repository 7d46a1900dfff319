// Training of the language model: AdamW with warm-up and cosine decay, over one process or several,
// evaluation at several lengths, and checkpoints that resume bitwise.
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
#include "models/processes.h"
#include "models/safetensors.h"
#include "models/text_data.h"
#include "models/tokens.h"

namespace gnomon::models {

struct TrainingOptions {
  int64_t length = 128;  // tokens a window
  int64_t batch = 16;    // windows a step, of all processes together
  int64_t steps = 1000;
  int64_t warmup = 100;         // steps of linear growth of the learning rate
  double learning_rate = 2e-3;  // the highest
  double final_fraction = 0.1;  // of it that is left at the end
  double weight_decay = 0.1;    // of weight matrices and embeddings, decoupled
  double clip = 1;              // largest norm of all gradients together
  int64_t seed = 0;             // of the weights, the data order and dropout
  // Tokens of the segments before that the model remembers; then the windows of a row follow each
  // other in the text, and without it (0) they are drawn at random.
  int64_t memory = 0;
};

// Throws Error naming the field that is out of its range; a batch has a window at least for each of
// `processes`.
void CheckTrainingOptions(const TrainingOptions& options, int64_t processes = 1);

// The fewest tokens that a training text must hold: a window and the token after it, and with a
// memory a window for each row and one more.
int64_t NeededTokens(const TrainingOptions& options);

// Throws Error where the position of the model ends at a length: a memory carries it beyond any.
void CheckMemory(const LanguageModel& model, int64_t memory);

// The learning rate of a step, counted from 0.
double LearningRate(const TrainingOptions& options, int64_t step);

// The model that a seed begins with.
LanguageModel NewModel(const LanguageModelOptions& options, int64_t seed);

// Whether weight decay applies: to matrices and embeddings, not to biases, norms, or parameters of
// a similarity or position.
bool Decays(std::string_view name, const torch::Tensor& parameter);

// Processes share out the rows of each batch, and sum the gradients: but for the order in which
// numbers are summed, they do what one does. All of them construct it from the same model, text and
// options, and make the same calls in the same order.
class Trainer {
 public:
  // `text` must be longer than options.length, and with a memory hold a segment for each row. Its
  // bytes must outlive the trainer. Throws Error, in all processes, before any collective.
  Trainer(LanguageModel model, TokenText text, const TrainingOptions& options,
          ProcessesPtr processes = std::make_shared<Processes>());

  // One step; returns the mean loss of its batch in nats a token. Where that is not a finite number
  // the parameters and the memory are left as they were.
  double Step();

  int64_t step() const { return step_; }
  LanguageModel& model() { return model_; }
  const TrainingOptions& options() const { return options_; }
  const Processes& processes() const { return *processes_; }

  // What the model remembers after the last step of the rows that are this process's.
  const LanguageModelMemory& memory() const { return memory_; }
  // And of the whole batch; a collective.
  LanguageModelMemory GatherMemory() const;

  // Moments of AdamW by parameter, for a checkpoint, and back, with the memory of the whole batch;
  // Restore throws Error where a tensor is missing or has another shape.
  std::map<std::string, torch::Tensor> OptimizerState() const;
  void Restore(const std::map<std::string, torch::Tensor>& state, int64_t step,
               const LanguageModelMemory& memory = {});

 private:
  // Rows of the batch, the first and how many, that a process has.
  int64_t FirstRowOf(int64_t rank) const;
  int64_t CountRowsOf(int64_t rank) const;
  // Those of the whole batch, from those of each process.
  torch::Tensor GatherRows(const torch::Tensor& rows) const;
  // Sums the loss and its gradients over the processes; returns the loss.
  double SumGradients(const torch::Tensor& loss);

  LanguageModel model_;
  TokenText text_;
  TrainingOptions options_;
  ProcessesPtr processes_;
  std::unique_ptr<torch::optim::AdamW> optimizer_;
  LanguageModelMemory memory_;
  int64_t step_ = 0;
};

struct LengthLoss {
  int64_t length = 0;
  std::optional<double> loss;  // nats a token, over every token; none where a position is undefined
  std::optional<double> last;  // the same over the last `kLastTokens` of each window
  // All of that loss in bits, over the bytes that the tokens stand for: the same measure whatever
  // the tokens are.
  std::optional<double> bits_per_byte;
  int64_t windows = 0;
};

inline constexpr int64_t kLastTokens = 32;

// The loss at each of `lengths` on about `budget` tokens of `text`, which must be longer than the
// longest of them. With a memory the windows of each stretch (EvaluationStarts) follow each other,
// and the tokens before the stretch, as many as the memory keeps, are read first and not counted:
// the same tokens are predicted as without it. `proceed` is asked between batches; an empty result
// means that it said no.
std::vector<LengthLoss> Evaluate(LanguageModel& model, const TokenText& text,
                                 const std::vector<int64_t>& lengths, int64_t budget,
                                 int64_t memory = 0,
                                 const std::function<bool()>& proceed = nullptr);

// What a run does beside training.
struct RunOptions {
  int64_t checkpoint_every = 500;     // steps between two checkpoints
  int64_t evaluation_bytes = 131072;  // of validation text that the final loss is measured on
};

// What a training run needs to go on, beside its model.
struct TrainingState {
  TrainingOptions options;
  RunOptions run;
  int64_t step = 0;
  std::map<std::string, torch::Tensor> optimizer;
  LanguageModelMemory memory;
  std::string data_path;  // absolute
  std::string data_sha256;
};

struct Checkpoint {
  LanguageModel model{nullptr};
  TokenizerPtr tokenizer;
  std::optional<TrainingState> training;  // none where the file holds a model alone
};

// Options as JSON objects with the names of their fields, and back; the latter throw Error where a
// field is missing, of the wrong type or out of its range.
nlohmann::json ToJson(const LanguageModelOptions& options);
nlohmann::json ToJson(const TrainingOptions& options);
LanguageModelOptions ModelFromJson(const nlohmann::json& object);
TrainingOptions TrainingFromJson(const nlohmann::json& object);

// Weights, optimizer, memory, vocabulary, configuration and the name of the data in one safetensors
// file, which any number of processes can go on from. Of a model alone, a file has the weights and
// vocabulary, and in its configuration `format`, `model` and `tokens`. A collective; process 0
// writes.
void SaveCheckpoint(const std::filesystem::path& path, Trainer& trainer, const TextData& data,
                    const Tokenizer& tokenizer, const RunOptions& run = {});

// Throws Error where the file is not a sound checkpoint.
Checkpoint LoadCheckpoint(const std::filesystem::path& path);

}  // namespace gnomon::models

#endif  // GNOMON_MODELS_TRAINING_H_
