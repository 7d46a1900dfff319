// Checkpoints of a task's model, with or without training state, that resume bitwise identically.
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

namespace gnomon::lab {

// The state that a training run needs to resume, in addition to its model.
struct TrainingState {
  TrainingOptions options;
  RunOptions run;
  int64_t step = 0;
  std::map<std::string, torch::Tensor> optimizer;
  LearnerState learner;
  // Absolute; empty if the task reads no data.
  std::string data_path;
  std::string data_sha256;
};

struct Checkpoint {
  Terms terms;
  std::unique_ptr<Learner> learner;
  std::optional<TrainingState> training;  // none if the file contains only a model
};

// Weights, optimizer, the learner's state, the task's options and assets, and the name of the data
// in one safetensors file, which any number of processes can resume. Without training state, the
// file contains the weights, the assets and the options that the model is built from. A collective;
// process 0 writes.
void SaveCheckpoint(const std::filesystem::path& path, Trainer& trainer, Task& task,
                    const Terms& terms, const RunOptions& run, const std::string& data_path);

// Sets the options and assets of the task from the file. The learner refers to the task and is on
// the given device, whatever device the file was written on. Throws Error if the file is not a
// valid checkpoint of this task.
Checkpoint LoadCheckpoint(const std::filesystem::path& path, Task& task,
                          torch::Device device = torch::kCPU);

inline constexpr const char* kCheckpointName = "checkpoint.safetensors";

// The checkpoint at `path`, which is the file itself or a run folder. Throws Error if there is
// none.
std::filesystem::path CheckpointFile(const std::string& path);

// The name of a checkpoint's task; none if the checkpoint is invalid.
std::optional<std::string> TaskOfCheckpoint(const std::filesystem::path& path);

}  // namespace gnomon::lab

#endif  // GNOMON_TRAINING_CHECKPOINT_H_
