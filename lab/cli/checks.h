// Checks that run before the first training step.
#ifndef GNOMON_CLI_CHECKS_H_
#define GNOMON_CLI_CHECKS_H_

#include <memory>
#include <string>

#include "training/checkpoint.h"
#include "training/task.h"
#include "training/training_options.h"

namespace gnomon::lab::cli {

// Calls the task's Complete(); throws Error if a term is invalid. The data must have been read.
Terms CompleteTerms(const TaskModels& task, const Terms& terms);

// Builds a model and runs it on a small input, to report invalid options or specifications before
// any work starts. Throws Error with the operator's message. Returns the learner.
std::unique_ptr<Learner> CheckTerms(Task& task, const Terms& terms, const TrainingOptions& training,
                                    Command command, torch::Device device = torch::kCPU);

// Loads the checkpoint at `path` onto a device and checks that the model runs there. Throws Error
// if the file is invalid or the device does not support the model.
Checkpoint LoadModel(const std::string& path, Task& task, torch::Device device);

}  // namespace gnomon::lab::cli

#endif  // GNOMON_CLI_CHECKS_H_
