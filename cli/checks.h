// What can be wrong is found before the first step.
#ifndef GNOMON_CLI_CHECKS_H_
#define GNOMON_CLI_CHECKS_H_

#include <memory>
#include <string>

#include "training/checkpoint.h"
#include "training/task.h"
#include "training/training_options.h"

namespace gnomon::cli {

// The task's Complete(), with Error for every mistake. The data are read.
models::Terms CompleteTerms(const models::Task& task, const models::Terms& terms);

// Builds a model and runs it on a small input, so that a wrong option or specification is known
// before any work; throws Error with the operator's own words. Returns its learner.
std::unique_ptr<models::Learner> CheckTerms(models::Task& task, const models::Terms& terms,
                                            const models::TrainingOptions& training,
                                            models::Command command,
                                            torch::Device device = torch::kCPU);

// The checkpoint at `path` on a device, whose model runs there: throws Error where the file is not
// sound, or has what the kernels of the device do not compute.
models::Checkpoint LoadModel(const std::string& path, models::Task& task, torch::Device device);

}  // namespace gnomon::cli

#endif  // GNOMON_CLI_CHECKS_H_
