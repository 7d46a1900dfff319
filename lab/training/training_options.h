// Training options: AdamW with learning-rate warm-up and decay.
#ifndef GNOMON_TRAINING_TRAINING_OPTIONS_H_
#define GNOMON_TRAINING_TRAINING_OPTIONS_H_

#include <cstdint>

#include "training/options.h"

namespace gnomon::lab {

#define GNOMON_TRAINING_OPTIONS(OPTION)                                                           \
  OPTION(int64_t, batch, 16,                                                                      \
         .help = "Total number of examples (windows, for text) per step across all processes",    \
         .lowest = 1)                                                                             \
  OPTION(int64_t, steps, 1000, .help = "Number of optimizer steps", .lowest = 1)                  \
  OPTION(int64_t, warmup, 100,                                                                    \
         .help =                                                                                  \
             "Number of linear learning-rate warm-up steps; default: a tenth of the steps, at "   \
             "most 100",                                                                          \
         .shows_default = false)                                                                  \
  OPTION(double, learning_rate, 2e-3,                                                             \
         .help = "Peak learning rate; the rate decays to a tenth of it", .highest = 1e3)          \
  OPTION(                                                                                         \
      std::string, schedule, "cosine",                                                            \
      .help =                                                                                     \
          "Learning-rate schedule after the warm-up: cosine (decays along a cosine) or constant " \
          "(stays at the peak, then decays linearly over the last fifth of the steps)",           \
      .may_lack = true, .choices = {"cosine", "constant"})                                        \
  OPTION(double, final_fraction, 0.1, .help = "Final learning rate as a fraction of the peak",    \
         .highest = 1, .has_flag = false)                                                         \
  OPTION(double, weight_decay, 0.1,                                                               \
         .help = "AdamW weight decay; applied only to weight matrices and embeddings",            \
         .highest = 1e3)                                                                          \
  OPTION(double, clip, 1,                                                                         \
         .help = "Maximum norm of the gradient; a larger gradient is scaled down",                \
         .lowest = 1e-12)                                                                         \
  OPTION(int64_t, seed, 0, .help = "Random seed for weights, data order and dropout",             \
         .highest = static_cast<double>(kLargestSeed))

struct TrainingOptions {
  GNOMON_OPTIONS(GNOMON_TRAINING_OPTIONS)
};

// Throws an Error that names a field that is out of range. A batch must have at least one example
// per process.
void CheckTrainingOptions(const TrainingOptions& options, int64_t processes = 1);

// Returns the learning rate of step `step` (the first is 0) in a training run that ends after `end`
// steps.
double LearningRate(const TrainingOptions& options, int64_t step, int64_t end);

// For the constant schedule: the first step of the decay, and the end of a training run whose
// decay begins at step `begin`.
int64_t DecayBegin(int64_t end);
int64_t EndOfDecay(int64_t begin);

#define GNOMON_RUN_OPTIONS(OPTION)                                                      \
  OPTION(int64_t, checkpoint_every, 500, .help = "Number of steps between checkpoints", \
         .lowest = 1, .may_lack = true, .may_change = true)

// Run options other than training options.
struct RunOptions {
  GNOMON_OPTIONS(GNOMON_RUN_OPTIONS)
};

}  // namespace gnomon::lab

#endif  // GNOMON_TRAINING_TRAINING_OPTIONS_H_
