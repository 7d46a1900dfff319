#include "training/training_options.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "gnomon/attention.h"
#include "training/strings.h"

namespace gnomon::models {

void CheckTrainingOptions(const TrainingOptions& options, int64_t processes) {
  TrainingOptions checked = options;
  CheckRanges(checked.Options(), "training");
  if (options.batch < processes) {
    throw Error(StrCat("training: batch is ", options.batch,
                       "; expected at least one for each of the ", processes, " processes"));
  }
  if (options.warmup > options.steps) {
    throw Error(StrCat("training: warmup is ", options.warmup, "; expected at most the ",
                       options.steps, " steps"));
  }
}

double LearningRate(const TrainingOptions& options, int64_t step) {
  if (step < options.warmup) {
    return options.learning_rate * static_cast<double>(step + 1) /
           static_cast<double>(options.warmup);
  }
  const auto rest = static_cast<double>(std::max<int64_t>(options.steps - options.warmup, 1));
  const double done = std::min(static_cast<double>(step - options.warmup) / rest, 1.0);
  const double cosine = (1 + std::cos(std::numbers::pi * done)) / 2;
  return options.learning_rate * (options.final_fraction + (1 - options.final_fraction) * cosine);
}

}  // namespace gnomon::models
