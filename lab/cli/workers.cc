#include "cli/workers.h"

#include <optional>
#include <sstream>

#include "cli/flags.h"
#include "cli/interrupts.h"
#include "gnomon/attention.h"
#include "training/strings.h"

namespace gnomon::lab::cli {
namespace {

constexpr const char* kWorkersModule = "gnomon.lab._workers";
constexpr int64_t kMostWorkers = 4096;

std::vector<std::string> ChildWords(const WorkerFlags& flags, const std::filesystem::path& folder,
                                    const std::vector<std::string>& words) {
  std::vector<std::string> all = {folder.string()};
  if (flags.count > 0) all.insert(all.end(), {"--workers", std::to_string(flags.count)});
  if (!flags.cluster.empty()) all.insert(all.end(), {"--cluster", flags.cluster});
  all.emplace_back("--");
  all.insert(all.end(), words.begin(), words.end());
  return all;
}

}  // namespace

void WorkerFlags::Add(CLI::App* command) {
  AddNumber(command, "--workers", &count, 1, kMostWorkers,
            "Number of runs at once, each in a separate process. They share the cores; with "
            "--device cuda, they take turns on the visible GPUs")
      ->default_str("");
  command->add_option("--cluster", cluster,
                      "Train on the workers of the Dask scheduler at this address, such as "
                      "tcp://HOST:8786. All workers need access to the output folder and the data");
}

void WorkerFlags::Check(const CLI::App& command) const {
  if (count > 0 && !cluster.empty()) {
    throw Error("--workers cannot be combined with --cluster, which has its own workers");
  }
  if (cluster.empty()) return;
  try {
    AskPython(kWorkersModule, {"--check"});
  } catch (const Error& error) {
    throw Error(StrCat(command.get_name(), ": --cluster: ", error.what()));
  }
}

Workers::Workers(const WorkerFlags& flags, const std::filesystem::path& folder,
                 const std::vector<std::string>& words)
    : child_(kWorkersModule, ChildWords(flags, folder, words)) {}

bool Workers::Run(const std::vector<std::pair<int64_t, int64_t>>& runs,
                  const std::function<void(int64_t, int64_t)>& done,
                  const std::function<void()>& waiting) {
  for (const auto& [combination, seed] : runs) {
    child_.Write(StrCat("run ", combination, " ", seed));
  }
  auto left = static_cast<int64_t>(runs.size());
  bool stopping = false;
  std::optional<std::string> fault;
  const auto stop = [&] {
    if (!stopping) child_.Write("stop");
    stopping = true;
  };
  constexpr double kSeconds = 0.5;
  while (left > 0 && !child_.ended()) {
    if (Interrupted()) stop();
    waiting();
    const std::optional<std::string> line = child_.Read(kSeconds);
    if (!line) continue;
    std::istringstream words(*line);
    std::string what;
    int64_t combination = 0;
    int64_t seed = 0;
    words >> what >> combination >> seed;
    if (what == "done") {
      done(combination, seed);
      --left;
    } else if (what == "failed") {
      std::string text;
      std::getline(words >> std::ws, text);
      if (!fault) fault = text;
      stop();
    }
  }
  if (fault) throw Error(*fault);
  if (left > 0 && !stopping)
    throw Error("the process that manages the workers has ended; resume with --resume");
  return left == 0;
}

}  // namespace gnomon::lab::cli
