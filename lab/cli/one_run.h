// A single run of a comparison, which trains and evaluates one combination with one seed.
#ifndef GNOMON_CLI_ONE_RUN_H_
#define GNOMON_CLI_ONE_RUN_H_

#include <torch/torch.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>

#include "cli/results.h"
#include "training/task.h"

namespace gnomon::lab::cli {

struct OneRun {
  const CompareSettings& settings;
  Task& task;
  torch::Device device = torch::kCPU;
  std::filesystem::path folder;  // folder of the comparison
  int64_t combination = 0;
  int64_t seed = 0;
  int64_t checkpoint_every = 0;  // steps
  const Trial* trial = nullptr;  // if set, this is a tuning trial, whose seed is Tuning::seed

  // The folder of the unfinished run, with its checkpoint and, on a worker, its result.
  std::filesystem::path own_folder() const;
  std::filesystem::path result_file() const;
};

// The parent of the folders of all unfinished runs.
std::filesystem::path UnfinishedRuns(const std::filesystem::path& folder);

// Callbacks for the progress of a run.
struct RunEvents {
  std::function<void(int64_t step)> started = [](int64_t) {};  // the run resumes if step > 0
  std::function<void(int64_t step, double loss)> step = [](int64_t, double) {};
  // Receives a point of the loss curve.
  std::function<void(int64_t step, double loss)> point = [](int64_t, double) {};
  std::function<void()> evaluating = [] {};
};

// Trains and evaluates a run, resuming from its checkpoint if there is one. After Ctrl-C, writes a
// checkpoint and returns nothing. The caller removes the checkpoint of a finished run. A trial
// stops at step Trial::steps, is measured only on the held-out data, and leaves a checkpoint from
// which it can continue.
std::optional<RunResult> Execute(const OneRun& run, const RunEvents& events);

}  // namespace gnomon::lab::cli

#endif  // GNOMON_CLI_ONE_RUN_H_
