#include "cli/scalars.h"

#include "gnomon/attention.h"
#include "training/strings.h"

namespace gnomon::lab::cli {
namespace {

using nlohmann::json;

constexpr const char* kTensorboardModule = "gnomon.lab._tensorboard";

}  // namespace

void CheckScalars(const CLI::App& command) {
  try {
    AskPython(kTensorboardModule, {"--check"});
  } catch (const Error& error) {
    throw Error(StrCat(command.get_name(), ": --tensorboard: ", error.what()));
  }
}

Scalars::Scalars(bool is_wanted, const TaskResults& task, const CompareSettings& settings,
                 const std::filesystem::path& folder)
    : task_(task), settings_(settings) {
  if (!is_wanted) return;
  child_ = std::make_unique<PythonChild>(
      kTensorboardModule, std::vector<std::string>{(folder / "tensorboard").string()});
}

void Scalars::Write(int64_t combination, int64_t seed, int64_t step, const json& scalars) {
  const std::string run =
      StrCat(combination, " ", settings_.combinations[combination].label(), " seed ", seed);
  child_->Write(json{{"run", run}, {"step", step}, {"scalars", scalars}}.dump());
}

void Scalars::Loss(int64_t combination, int64_t seed, int64_t step, double loss) {
  if (child_ != nullptr) Write(combination, seed, step, {{"training/loss", loss}});
}

void Scalars::Result(const RunResult& result) {
  if (child_ == nullptr) return;
  const std::vector<Metric> metrics = task_.metrics();
  const std::string key = task_.conditions().key;
  json scalars = json::object();
  for (const Measurement& at : result.measurements) {
    for (size_t n = 0; n < metrics.size(); ++n) {
      if (!at.values[n]) continue;
      const std::string place = StrCat(key, " ", FormatCondition(at.condition));
      scalars[StrCat(metrics[n].key, "/", place)] = *at.values[n];
    }
  }
  const int64_t step = result.ended ? result.ended->step : settings_.training.steps;
  Write(result.combination, result.seed, step, scalars);
}

}  // namespace gnomon::lab::cli
