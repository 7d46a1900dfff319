// Checkpoints of a task's model, with or without training state. A resumed run is bitwise identical
// to an uninterrupted one.
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
  // An absolute path; empty if the task reads no data.
  std::string data_path;
  std::string data_sha256;
};

struct Checkpoint {
  Terms terms;
  std::unique_ptr<Learner> learner;
  std::optional<TrainingState> training;  // none if the file contains only a model
};

// Writes a safetensors file from which any number of processes can resume training. It contains the
// weights, the optimizer's and the learner's state, the task's options and assets, and the path of
// the data. (A checkpoint without training state contains only the weights, the assets and the
// model options.) This is a collective operation; process 0 writes.
void SaveCheckpoint(const std::filesystem::path& path, Trainer& trainer, Task& task,
                    const Terms& terms, const RunOptions& run, const std::string& data_path);

// Sets the options and assets of the task from the file. The returned learner refers to the task
// and is on `device`, which may differ from the device on which the file was written. Throws Error
// if the file is not a valid checkpoint of this task.
Checkpoint LoadCheckpoint(const std::filesystem::path& path, Task& task,
                          torch::Device device = torch::kCPU);

inline constexpr const char* kCheckpointName = "checkpoint.safetensors";

// Returns the path of the checkpoint at `path`, which is the file itself or a run folder. Throws
// Error if there is none.
std::filesystem::path CheckpointFile(const std::string& path);

// Returns the name of a checkpoint's task; none if the checkpoint is invalid.
std::optional<std::string> TaskOfCheckpoint(const std::filesystem::path& path);

}  // namespace gnomon::lab

#endif  // GNOMON_TRAINING_CHECKPOINT_H_
