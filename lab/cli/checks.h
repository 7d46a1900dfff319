// Checks that run before the first step.
#ifndef GNOMON_CLI_CHECKS_H_
#define GNOMON_CLI_CHECKS_H_

#include <memory>
#include <string>

#include "training/checkpoint.h"
#include "training/task.h"
#include "training/training_options.h"

namespace gnomon::cli {

// The task's Complete(); throws Error if a term is invalid. The data has been read.
lab::Terms CompleteTerms(const lab::Task& task, const lab::Terms& terms);

// Builds a model and runs it on a small input, so that invalid options or specifications are
// reported before any work; throws Error with the operator's message. Returns the learner.
std::unique_ptr<lab::Learner> CheckTerms(lab::Task& task, const lab::Terms& terms,
                                         const lab::TrainingOptions& training, lab::Command command,
                                         torch::Device device = torch::kCPU);

// The checkpoint at `path` on a device, after a test run there: throws Error if the file is invalid
// or the device does not support the model.
lab::Checkpoint LoadModel(const std::string& path, lab::Task& task, torch::Device device);

}  // namespace gnomon::cli

#endif  // GNOMON_CLI_CHECKS_H_
