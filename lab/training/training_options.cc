#include "training/training_options.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "gnomon/attention.h"
#include "training/strings.h"

namespace gnomon::lab {

void CheckTrainingOptions(const TrainingOptions& options, int64_t processes) {
  TrainingOptions checked = options;
  CheckRanges(checked.Options(), "training");
  if (options.batch < processes) {
    throw Error(StrCat("training: batch is ", options.batch,
                       "; expected at least one example for each of the ", processes,
                       " processes"));
  }
  if (options.warmup > options.steps) {
    throw Error(StrCat("training: warmup is ", options.warmup, "; expected at most ", options.steps,
                       ", the number of steps"));
  }
}

namespace {

// The constant schedule decays the learning rate in the last 1 / kDecayPart of the training run.
constexpr int64_t kDecayPart = 5;

}  // namespace

int64_t DecayBegin(int64_t end) { return end - std::max<int64_t>(end / kDecayPart, 1); }

int64_t EndOfDecay(int64_t begin) { return begin + std::max<int64_t>(begin / (kDecayPart - 1), 1); }

double LearningRate(const TrainingOptions& options, int64_t step, int64_t end) {
  if (step < options.warmup) {
    return options.learning_rate * static_cast<double>(step + 1) /
           static_cast<double>(options.warmup);
  }
  const bool is_cosine = options.schedule == "cosine";
  const int64_t begin = is_cosine ? options.warmup : std::max(options.warmup, DecayBegin(end));
  const auto rest = static_cast<double>(std::max<int64_t>(end - begin, 1));
  const double done = std::clamp(static_cast<double>(step - begin) / rest, 0.0, 1.0);
  const double left = is_cosine ? (1 + std::cos(std::numbers::pi * done)) / 2 : 1 - done;
  return options.learning_rate * (options.final_fraction + (1 - options.final_fraction) * left);
}

}  // namespace gnomon::lab
