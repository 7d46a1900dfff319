// Trains a task's model, with one or several processes.
#ifndef GNOMON_TRAINING_TRAINER_H_
#define GNOMON_TRAINING_TRAINER_H_

#include <torch/torch.h>

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "training/processes.h"
#include "training/task.h"
#include "training/training_options.h"

namespace gnomon::lab {

// Whether weight decay applies to a parameter. It applies to matrices and embeddings, but not to
// biases, norms, or parameters of a similarity or position.
bool Decays(std::string_view name, const torch::Tensor& parameter);

// The names of a parameter's moments in the optimizer's state.
std::array<std::string, 2> MomentsOf(const std::string& parameter);

// The processes divide the rows of each batch and sum the gradients. Apart from the order of
// summation, the result equals that of a single process. All processes must construct the trainer
// from the same learner and options, and make the same calls in the same order.
class Trainer {
 public:
  // Throws Error in all processes, before any collective operation, if options or data are invalid.
  Trainer(std::unique_ptr<Learner> learner, const TrainingOptions& options,
          ProcessesPtr processes = std::make_shared<Processes>());

  // Performs one step and returns the mean loss of its batch. If the loss is not finite, the
  // parameters and the learner's state do not change.
  double Step();

  int64_t step() const { return step_; }
  // The number of steps: options().steps, unless EndAt() has set an earlier end.
  int64_t end() const { return end_; }
  void EndAt(int64_t end) { end_ = end; }
  Learner& learner() { return *learner_; }
  const TrainingOptions& options() const { return options_; }
  const Processes& processes() const { return *processes_; }

  // Gathers the learner's state for the whole batch; this is a collective operation.
  LearnerState GatherState() const;

  // OptimizerState() returns AdamW's moments by parameter, for checkpoints. Restore() restores the
  // moments and the learner's state for the whole batch; it throws Error if a tensor is missing or
  // has the wrong shape.
  std::map<std::string, torch::Tensor> OptimizerState() const;
  void Restore(const std::map<std::string, torch::Tensor>& state, int64_t step,
               const LearnerState& learner_state);

 private:
  // The first row of a process, and its number of rows.
  int64_t FirstRowOf(int64_t rank) const;
  int64_t CountRowsOf(int64_t rank) const;
  // Gathers the rows of the whole batch from all processes.
  torch::Tensor GatherRows(const torch::Tensor& rows) const;
  // Sums the loss and its gradients over the processes; returns the loss.
  double SumGradients(const torch::Tensor& loss);

  std::unique_ptr<Learner> learner_;
  torch::nn::Module& module_;
  TrainingOptions options_;
  ProcessesPtr processes_;
  std::unique_ptr<torch::optim::AdamW> optimizer_;
  int64_t step_ = 0;
  int64_t end_;
};

}  // namespace gnomon::lab

#endif  // GNOMON_TRAINING_TRAINER_H_
