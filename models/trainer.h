// Training of the language model, over one process or several.
#ifndef GNOMON_MODELS_TRAINER_H_
#define GNOMON_MODELS_TRAINER_H_

#include <torch/torch.h>

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "models/language_model.h"
#include "text/tokens.h"
#include "training/processes.h"
#include "training/training_options.h"

namespace gnomon::models {

// The fewest tokens that a training text must hold: a window and the token after it, and with a
// memory a window for each row and one more.
int64_t NeededTokens(const TrainingOptions& options);

// Whether weight decay applies: to matrices and embeddings, not to biases, norms, or parameters of
// a similarity or position.
bool Decays(std::string_view name, const torch::Tensor& parameter);

// The names of a parameter's moments in the state of the optimizer.
std::array<std::string, 2> MomentsOf(const std::string& parameter);

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

}  // namespace gnomon::models

#endif  // GNOMON_MODELS_TRAINER_H_
