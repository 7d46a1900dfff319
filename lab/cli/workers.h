// Processes for the runs of a comparison: several at once on this machine, or on the workers of a
// Dask cluster (python/gnomon/lab/_workers.py).
#ifndef GNOMON_CLI_WORKERS_H_
#define GNOMON_CLI_WORKERS_H_

#include <CLI/CLI.hpp>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "cli/python.h"

namespace gnomon::lab::cli {

struct WorkerFlags {
  int64_t count = 0;
  std::string cluster;

  bool any() const { return count > 0 || !cluster.empty(); }
  void Add(CLI::App* command);
  // Throws Error if the flags contradict each other, or if Dask is needed but not installed.
  void Check(const CLI::App& command) const;
};

class Workers {
 public:
  // Each worker executes a run as `gnomon compare --resume FOLDER WORDS --only COMBINATION,SEED`.
  Workers(const WorkerFlags& flags, const std::filesystem::path& folder,
          const std::vector<std::string>& words);

  // Executes runs, given as (combination, seed). Calls `done` after each run, in any order, and
  // `waiting` at least twice a second. After Ctrl-C, waits until all runs have saved a checkpoint
  // and returns false. Throws Error if a run fails.
  bool Run(const std::vector<std::pair<int64_t, int64_t>>& runs,
           const std::function<void(int64_t combination, int64_t seed)>& done,
           const std::function<void()>& waiting);

 private:
  PythonChild child_;
};

}  // namespace gnomon::lab::cli

#endif  // GNOMON_CLI_WORKERS_H_
