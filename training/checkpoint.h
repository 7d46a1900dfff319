// Checkpoints of a task's model, with its training or without, that resume bitwise.
#ifndef GNOMON_TRAINING_CHECKPOINT_H_
#define GNOMON_TRAINING_CHECKPOINT_H_

#include <torch/torch.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "training/task.h"
#include "training/trainer.h"
#include "training/training_options.h"

namespace gnomon::models {

// What a training run needs to go on, beside its model.
struct TrainingState {
  TrainingOptions options;
  RunOptions run;
  int64_t step = 0;
  std::map<std::string, torch::Tensor> optimizer;
  LearnerState learner;
  // Absolute; empty where the task reads none.
  std::string data_path;
  std::string data_sha256;
};

struct Checkpoint {
  Terms terms;
  std::unique_ptr<Learner> learner;
  std::optional<TrainingState> training;  // none where the file holds a model alone
};

// Weights, optimizer, the learner's state, the task's options and assets, and the name of the data
// in one safetensors file, which any number of processes can go on from. Of a model alone, a file
// has the weights, assets and the options that the model is built from. A collective; process 0
// writes.
void SaveCheckpoint(const std::filesystem::path& path, Trainer& trainer, Task& task,
                    const Terms& terms, const RunOptions& run, const std::string& data_path);

// Sets the options of the task and its assets to what the file holds; the learner refers to the
// task, and is on that device, whichever one the file was written on. Throws Error where the file
// is not a sound checkpoint of this task.
Checkpoint LoadCheckpoint(const std::filesystem::path& path, Task& task,
                          torch::Device device = torch::kCPU);

inline constexpr const char* kCheckpointName = "checkpoint.safetensors";

// The checkpoint at `path`, which is the file itself or the folder of a run. Throws Error where
// there is none.
std::filesystem::path CheckpointFile(const std::string& path);

// The name of the task that a checkpoint is of; none where there is no sound one.
std::optional<std::string> TaskOfCheckpoint(const std::filesystem::path& path);

}  // namespace gnomon::models

#endif  // GNOMON_TRAINING_CHECKPOINT_H_
