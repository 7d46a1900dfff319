// Checkpoints of the language model, with its training or without, that resume bitwise.
#ifndef GNOMON_MODELS_CHECKPOINT_H_
#define GNOMON_MODELS_CHECKPOINT_H_

#include <torch/torch.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include "models/language_model.h"
#include "models/trainer.h"
#include "text/text_data.h"
#include "text/tokens.h"
#include "training/training_options.h"

namespace gnomon::models {

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

// Weights, optimizer, memory, vocabulary, configuration and the name of the data in one safetensors
// file, which any number of processes can go on from. Of a model alone, a file has the weights and
// vocabulary, and in its configuration `format`, `model` and `tokens`. A collective; process 0
// writes.
void SaveCheckpoint(const std::filesystem::path& path, Trainer& trainer, const TextData& data,
                    const Tokenizer& tokenizer, const RunOptions& run = {});

// Throws Error where the file is not a sound checkpoint.
Checkpoint LoadCheckpoint(const std::filesystem::path& path);

}  // namespace gnomon::models

#endif  // GNOMON_MODELS_CHECKPOINT_H_
