// Writes training curves and results for TensorBoard (python/gnomon/lab/_tensorboard.py).
#ifndef GNOMON_CLI_SCALARS_H_
#define GNOMON_CLI_SCALARS_H_

#include <CLI/CLI.hpp>
#include <cstdint>
#include <filesystem>
#include <memory>

#include "cli/python.h"
#include "cli/results.h"
#include "training/task.h"

namespace gnomon::lab::cli {

// Throws Error if TensorBoard is not installed.
void CheckScalars(const CLI::App& command);

// Writes events to FOLDER/tensorboard, with one folder per run. Does nothing unless `is_wanted`.
class Scalars {
 public:
  Scalars(bool is_wanted, const TaskResults& task, const CompareSettings& settings,
          const std::filesystem::path& folder);

  void Loss(int64_t combination, int64_t seed, int64_t step, double loss);
  // Writes the final metrics of the run.
  void Result(const RunResult& result);

 private:
  void Write(int64_t combination, int64_t seed, int64_t step, const nlohmann::json& scalars);

  const TaskResults& task_;
  const CompareSettings& settings_;
  std::unique_ptr<PythonChild> child_;
};

}  // namespace gnomon::lab::cli

#endif  // GNOMON_CLI_SCALARS_H_
