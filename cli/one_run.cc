#include "cli/one_run.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "cli/interrupts.h"
#include "cli/measure.h"
#include "cli/progress.h"
#include "cli/shortage.h"
#include "gnomon/attention.h"
#include "training/files.h"
#include "training/safetensors.h"
#include "training/strings.h"
#include "training/trainer.h"

namespace gnomon::cli {
namespace {

namespace fs = std::filesystem;
using models::Command;
using models::StrCat;
using nlohmann::json;

// Number of points of a training curve.
constexpr int64_t kCurvePoints = 100;
constexpr const char* kCheckpointName = "checkpoint.safetensors";
constexpr const char* kStateKey = "gnomon-run";
constexpr const char* kModelPrefix = "model.";
constexpr const char* kOptimizerPrefix = "optimizer.";
constexpr const char* kLearnerPrefix = "learner.";
constexpr const char* kTimes = "times.elapsed";
constexpr const char* kProcessorTimes = "times.processor";
constexpr const char* kCurve = "curve";

// Measurements of a run's training so far.
struct Measured {
  std::vector<double> milliseconds;
  std::vector<double> processor_milliseconds;
  std::vector<int64_t> curve_steps;
  std::vector<double> curve_losses;
  // Since the last point of the curve.
  double sum = 0;
  int64_t summed = 0;
  double seconds = 0;  // including earlier sessions
};

torch::Tensor ToTensor(const std::vector<double>& values) {
  return torch::tensor(values, torch::kDouble);
}

std::vector<double> ToVector(const torch::Tensor& values) {
  const torch::Tensor all = values.contiguous();
  const double* const data = all.const_data_ptr<double>();
  return {data, data + all.numel()};
}

// Parameters and buffers by name.
std::map<std::string, torch::Tensor> StateOf(const torch::nn::Module& module) {
  std::map<std::string, torch::Tensor> state;
  for (const auto& entry : module.named_parameters()) state[entry.key()] = entry.value();
  for (const auto& entry : module.named_buffers()) state[entry.key()] = entry.value();
  return state;
}

void Save(const fs::path& path, models::Trainer& trainer, const Measured& measured,
          double seconds) {
  models::SafeTensors file;
  const auto put = [&](const std::string& name, const torch::Tensor& tensor) {
    file.tensors[name] = tensor.detach().to(torch::kCPU).contiguous();
  };
  for (const auto& [name, tensor] : StateOf(trainer.learner().module())) {
    put(kModelPrefix + name, tensor);
  }
  for (const auto& [name, tensor] : trainer.OptimizerState()) put(kOptimizerPrefix + name, tensor);
  const models::LearnerState state = trainer.GatherState();
  for (const auto& [name, tensor] : state.tensors) put(kLearnerPrefix + name, tensor);
  put(kTimes, ToTensor(measured.milliseconds));
  put(kProcessorTimes, ToTensor(measured.processor_milliseconds));
  put(kCurve, ToTensor(measured.curve_losses));
  const json fields = {{"step", trainer.step()}, {"curve_steps", measured.curve_steps},
                       {"sum", measured.sum},    {"summed", measured.summed},
                       {"seconds", seconds},     {"learner", state.fields}};
  file.metadata[kStateKey] = fields.dump();
  models::WriteSafeTensors(path, file);
}

Measured Restore(const fs::path& path, models::Trainer* trainer) {
  Measured measured;
  try {
    const models::SafeTensors file = models::ReadSafeTensors(path);
    const auto part = [&](const std::string& prefix) {
      std::map<std::string, torch::Tensor> found;
      for (const auto& [name, tensor] : file.tensors) {
        if (name.starts_with(prefix)) found[name.substr(prefix.size())] = tensor;
      }
      return found;
    };
    const json fields = json::parse(file.metadata.at(kStateKey));
    const torch::NoGradGuard no_grad;
    const auto stored = part(kModelPrefix);
    for (auto& [name, tensor] : StateOf(trainer->learner().module())) {
      if (tensor.sizes() != stored.at(name).sizes()) throw Error(StrCat("the shape of ", name));
      tensor.copy_(stored.at(name));
    }
    trainer->Restore(part(kOptimizerPrefix), fields.at("step").get<int64_t>(),
                     {part(kLearnerPrefix), fields.at("learner")});
    measured.milliseconds = ToVector(file.tensors.at(kTimes));
    measured.processor_milliseconds = ToVector(file.tensors.at(kProcessorTimes));
    measured.curve_losses = ToVector(file.tensors.at(kCurve));
    measured.curve_steps = fields.at("curve_steps").get<std::vector<int64_t>>();
    measured.sum = fields.at("sum").get<double>();
    measured.summed = fields.at("summed").get<int64_t>();
    measured.seconds = fields.at("seconds").get<double>();
  } catch (const std::exception& error) {
    throw Error(StrCat(path.string(), " is not a checkpoint of this run (", error.what(),
                       "); remove it to start the run again"));
  }
  return measured;
}

}  // namespace

fs::path UnfinishedRuns(const fs::path& folder) { return folder / "unfinished"; }

fs::path OneRun::own_folder() const {
  return UnfinishedRuns(folder) / StrCat(combination, "-", seed);
}

fs::path OneRun::result_file() const { return own_folder() / "result.json"; }

std::optional<RunResult> Execute(const OneRun& run, const RunEvents& events) {
  const CompareSettings& settings = run.settings;
  const Stopwatch clock;
  models::TrainingOptions training = settings.training;
  training.seed = run.seed;
  models::Trainer trainer(
      models::NewLearner(run.task, settings.combinations[run.combination], training, run.device),
      training);
  RunResult result;
  result.combination = run.combination;
  result.seed = run.seed;
  result.parameters = models::CountParameters(trainer.learner().module());
  Measured measured;
  const fs::path checkpoint = run.own_folder() / kCheckpointName;
  models::RemoveUnfinished(checkpoint);
  if (fs::exists(checkpoint)) measured = Restore(checkpoint, &trainer);
  const auto save = [&] {
    fs::create_directories(run.own_folder());
    Save(checkpoint, trainer, measured, measured.seconds + clock.seconds());
  };
  events.started(trainer.step());
  const OtherPrograms others;
  const int64_t stride = std::max<int64_t>(training.steps / kCurvePoints, 1);
  while (trainer.step() < training.steps) {
    if (Interrupted()) {
      if (trainer.step() > 0) save();
      return std::nullopt;
    }
    const Stopwatch step_clock;
    const double processor_before = ProcessorSeconds();
    double loss = 0;
    NamingOptions(run.task.StepFlags(Command::kCompare, training), [&] { loss = trainer.Step(); });
    measured.milliseconds.push_back(step_clock.seconds() * 1e3);
    measured.processor_milliseconds.push_back((ProcessorSeconds() - processor_before) * 1e3);
    if (!std::isfinite(loss)) {
      result.diverged = true;
      break;
    }
    measured.sum += loss;
    ++measured.summed;
    const double mean = measured.sum / static_cast<double>(measured.summed);
    if (trainer.step() % stride == 0 || trainer.step() == training.steps) {
      measured.curve_steps.push_back(trainer.step());
      measured.curve_losses.push_back(mean);
      events.point(trainer.step(), mean);
      measured.sum = 0;
      measured.summed = 0;
    }
    events.step(trainer.step(), mean);
    if (trainer.step() % run.checkpoint_every == 0) save();
  }
  result.curve_steps = measured.curve_steps;
  result.curve_losses = measured.curve_losses;
  result.ms_per_step = Median(measured.milliseconds);
  result.ms_quartiles = {Quantile(measured.milliseconds, 0.25),
                         Quantile(measured.milliseconds, 0.75)};
  result.processor_ms_per_step = Median(measured.processor_milliseconds);
  result.others = others.Share();
  if (!result.diverged) {
    events.evaluating();
    const auto proceed = [] { return !Interrupted(); };
    NamingOptions(run.task.EvaluationFlags(Command::kCompare),
                  [&] { result.measurements = trainer.learner().Evaluate(proceed); });
    std::optional<models::Picture> picture;
    if (!result.measurements.empty() && run.seed == settings.seeds[0]) {
      picture = trainer.learner().Draw(proceed);
    }
    if (result.measurements.empty() || Interrupted()) {
      save();
      return std::nullopt;
    }
    if (picture) {
      const std::string file = StrCat("picture-", run.combination, ".png");
      models::WriteFileAtomically(run.folder / file, {picture->png});
      result.picture = {picture->title, file};
    }
  }
  result.seconds = measured.seconds + clock.seconds();
  return result;
}

}  // namespace gnomon::cli
