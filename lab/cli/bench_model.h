// Times training steps of the language model with several similarities and positions.
#ifndef GNOMON_CLI_BENCH_MODEL_H_
#define GNOMON_CLI_BENCH_MODEL_H_

#include <cstdint>
#include <string>
#include <vector>

#include "tasks/text.h"
#include "training/training_options.h"

namespace gnomon::lab::cli {

// The defaults are those of `gnomon train`.
struct ModelBench {
  std::vector<std::string> models;  // SIMILARITY/POSITION
  text::TextOptions text;           // similarity and position are taken from `models`
  TrainingOptions training;
  torch::Device device = torch::kCPU;
  int64_t repeats = 1;
  bool as_json = false;
};

// Times training steps of the models in turn. Prints each model's median time and its ratio to that
// of the first model. Returns the exit code.
int BenchModels(const ModelBench& bench);

}  // namespace gnomon::lab::cli

#endif  // GNOMON_CLI_BENCH_MODEL_H_
