// Training of a task's model, over one process or several.
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

namespace gnomon::models {

// Whether weight decay applies: to matrices and embeddings, not to biases, norms, or parameters of
// a similarity or position.
bool Decays(std::string_view name, const torch::Tensor& parameter);

// The names of a parameter's moments in the state of the optimizer.
std::array<std::string, 2> MomentsOf(const std::string& parameter);

// Processes share out the rows of each batch, and sum the gradients: but for the order in which
// numbers are summed, they do what one does. All of them construct it from the same learner and
// options, and make the same calls in the same order.
class Trainer {
 public:
  // Throws Error, in all processes, before any collective, where options or data do not do.
  Trainer(std::unique_ptr<Learner> learner, const TrainingOptions& options,
          ProcessesPtr processes = std::make_shared<Processes>());

  // One step; returns the mean loss of its batch. Where that is not a finite number the parameters
  // and the learner's state are left as they were.
  double Step();

  int64_t step() const { return step_; }
  Learner& learner() { return *learner_; }
  const TrainingOptions& options() const { return options_; }
  const Processes& processes() const { return *processes_; }

  // The learner's, of the whole batch; a collective.
  LearnerState GatherState() const;

  // Moments of AdamW by parameter, for a checkpoint, and back, with the state of the whole batch;
  // Restore throws Error where a tensor is missing or has another shape.
  std::map<std::string, torch::Tensor> OptimizerState() const;
  void Restore(const std::map<std::string, torch::Tensor>& state, int64_t step,
               const LearnerState& learner_state);

 private:
  // Rows of the batch, the first and how many, that a process has.
  int64_t FirstRowOf(int64_t rank) const;
  int64_t CountRowsOf(int64_t rank) const;
  // Those of the whole batch, from those of each process.
  torch::Tensor GatherRows(const torch::Tensor& rows) const;
  // Sums the loss and its gradients over the processes; returns the loss.
  double SumGradients(const torch::Tensor& loss);

  std::unique_ptr<Learner> learner_;
  torch::nn::Module& module_;
  TrainingOptions options_;
  ProcessesPtr processes_;
  std::unique_ptr<torch::optim::AdamW> optimizer_;
  int64_t step_ = 0;
};

}  // namespace gnomon::models

#endif  // GNOMON_TRAINING_TRAINER_H_
