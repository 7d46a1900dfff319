#include "cli/one_run.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "cli/interrupts.h"
#include "cli/measure.h"
#include "cli/progress.h"
#include "cli/shortage.h"
#include "cli/tuning.h"
#include "gnomon/attention.h"
#include "training/files.h"
#include "training/safetensors.h"
#include "training/strings.h"
#include "training/trainer.h"

namespace gnomon::lab::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// Number of points in a training curve.
constexpr int64_t kCurvePoints = 100;
constexpr const char* kCheckpointName = "checkpoint.safetensors";
constexpr const char* kStateKey = "gnomon-run";
constexpr const char* kModelPrefix = "model.";
constexpr const char* kOptimizerPrefix = "optimizer.";
constexpr const char* kLearnerPrefix = "learner.";
constexpr const char* kTimes = "times.elapsed";
constexpr const char* kProcessorTimes = "times.processor";
constexpr const char* kCurve = "curve";
constexpr const char* kHeldOut = "held_out";
// The interval between held-out measurements is the maximum number of steps divided by this.
constexpr int64_t kHeldOutPoints = 50;

// Measurements of a run's training so far.
struct Measured {
  std::vector<double> milliseconds;
  std::vector<double> processor_milliseconds;
  std::vector<int64_t> curve_steps;
  std::vector<double> curve_losses;
  // Sum and number of the losses since the last point of the curve.
  double sum = 0;
  int64_t summed = 0;
  double seconds = 0;  // including earlier sessions
  bool is_flat = false;
  std::vector<int64_t> held_out_steps;
  std::vector<double> held_out_values;
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

void Save(const fs::path& path, Trainer& trainer, const Measured& measured, double seconds) {
  SafeTensors file;
  const auto put = [&](const std::string& name, const torch::Tensor& tensor) {
    file.tensors[name] = tensor.detach().to(torch::kCPU).contiguous();
  };
  for (const auto& [name, tensor] : StateOf(trainer.learner().module())) {
    put(kModelPrefix + name, tensor);
  }
  for (const auto& [name, tensor] : trainer.OptimizerState()) put(kOptimizerPrefix + name, tensor);
  const LearnerState state = trainer.GatherState();
  for (const auto& [name, tensor] : state.tensors) put(kLearnerPrefix + name, tensor);
  put(kTimes, ToTensor(measured.milliseconds));
  put(kProcessorTimes, ToTensor(measured.processor_milliseconds));
  put(kCurve, ToTensor(measured.curve_losses));
  put(kHeldOut, ToTensor(measured.held_out_values));
  const json fields = {{"step", trainer.step()},
                       {"curve_steps", measured.curve_steps},
                       {"sum", measured.sum},
                       {"summed", measured.summed},
                       {"seconds", seconds},
                       {"learner", state.fields},
                       {"end", trainer.end()},
                       {"is_flat", measured.is_flat},
                       {"held_out_steps", measured.held_out_steps}};
  file.metadata[kStateKey] = fields.dump();
  WriteSafeTensors(path, file);
}

Measured Restore(const fs::path& path, Trainer* trainer) {
  Measured measured;
  try {
    const SafeTensors file = ReadSafeTensors(path);
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
    measured.is_flat = fields.at("is_flat").get<bool>();
    measured.held_out_steps = fields.at("held_out_steps").get<std::vector<int64_t>>();
    measured.held_out_values = ToVector(file.tensors.at(kHeldOut));
    trainer->EndAt(fields.at("end").get<int64_t>());
  } catch (const std::exception& error) {
    throw Error(StrCat(path.string(), " is not a checkpoint of this run (", error.what(),
                       "); remove this file to restart the run"));
  }
  return measured;
}

// The deciding metric on the held-out data; infinite or NaN if the model has diverged.
double MeasureHeldOut(Task& task, Learner& learner) {
  const size_t place = DecidingMetric(task);
  task.EvaluateHeldOut(true);
  std::vector<Measurement> measured;
  NamingOptions(task.EvaluationFlags(Command::kCompare), [&] {
    // Ctrl-C does not stop this evaluation: without its value, a resumed run would continue
    // differently.
    measured = learner.Evaluate([] { return true; });
  });
  task.EvaluateHeldOut(false);
  return measured.at(0).values.at(place).value_or(std::numeric_limits<double>::quiet_NaN());
}

}  // namespace

fs::path UnfinishedRuns(const fs::path& folder) { return folder / "unfinished"; }

fs::path OneRun::own_folder() const {
  return UnfinishedRuns(folder) / (trial != nullptr ? StrCat(combination, "-trial-", trial->number)
                                                    : StrCat(combination, "-", seed));
}

fs::path OneRun::result_file() const { return own_folder() / "result.json"; }

std::optional<RunResult> Execute(const OneRun& run, const RunEvents& events) {
  const CompareSettings& settings = run.settings;
  const Stopwatch clock;
  const Trial* const trial = run.trial;
  json values;
  if (trial != nullptr) {
    values = trial->values;
  } else if (settings.tuning) {
    values = settings.tuning->chosen.at(run.combination);
  }
  const TunedModel model(run.task, settings.training, settings.combinations[run.combination],
                         values);
  TrainingOptions training = model.training;
  training.seed = trial != nullptr ? settings.tuning->seed : run.seed;
  Trainer trainer(NewLearner(run.task, model.terms, training, run.device), training);
  RunResult result;
  result.combination = run.combination;
  result.seed = run.seed;
  result.parameters = CountParameters(trainer.learner().module());
  Measured measured;
  const fs::path checkpoint = run.own_folder() / kCheckpointName;
  RemoveUnfinished(checkpoint);
  if (fs::exists(checkpoint)) measured = Restore(checkpoint, &trainer);
  const auto save = [&] {
    fs::create_directories(run.own_folder());
    Save(checkpoint, trainer, measured, measured.seconds + clock.seconds());
  };
  events.started(trainer.step());
  const OtherPrograms others;
  const int64_t stride = std::max<int64_t>(training.steps / kCurvePoints, 1);
  const int64_t held_out_stride = std::max<int64_t>(training.steps / kHeldOutPoints, 1);
  const bool higher_is_better = run.task.metrics()[DecidingMetric(run.task)].higher_is_better;
  const auto end = [&] { return trial != nullptr ? trial->steps : trainer.end(); };
  while (trainer.step() < end()) {
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
    if (settings.until_flat && trial == nullptr && !measured.is_flat &&
        trainer.step() % held_out_stride == 0 && trainer.step() < DecayBegin(training.steps)) {
      const double value = MeasureHeldOut(run.task, trainer.learner());
      if (!std::isfinite(value)) {
        result.diverged = true;
        break;
      }
      measured.held_out_steps.push_back(trainer.step());
      measured.held_out_values.push_back(value);
      measured.is_flat = IsFlat(*settings.until_flat, measured.held_out_steps,
                                measured.held_out_values, training.steps, higher_is_better);
      // Start the final decay, whose length depends on the number of steps so far.
      if (measured.is_flat) trainer.EndAt(EndOfDecay(trainer.step()));
    }
    if (trainer.step() % stride == 0 || trainer.step() == trainer.end()) {
      measured.curve_steps.push_back(trainer.step());
      measured.curve_losses.push_back(mean);
      events.point(trainer.step(), mean);
      measured.sum = 0;
      measured.summed = 0;
    }
    events.step(trainer.step(), mean);
    if (trainer.step() % run.checkpoint_every == 0) save();
  }
  if (trial != nullptr) {
    if (!result.diverged) {
      events.evaluating();
      const double value = MeasureHeldOut(run.task, trainer.learner());
      if (std::isfinite(value)) result.tried = value;
      save();
    }
    result.seconds = measured.seconds + clock.seconds();
    return result;
  }
  result.curve_steps = measured.curve_steps;
  result.curve_losses = measured.curve_losses;
  if (settings.until_flat) {
    result.ended = {trainer.step(), measured.is_flat, measured.held_out_steps,
                    measured.held_out_values};
  }
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
    std::optional<Picture> picture;
    if (!result.measurements.empty() && run.seed == settings.seeds[0]) {
      picture = trainer.learner().Draw(proceed);
    }
    if (result.measurements.empty() || Interrupted()) {
      save();
      return std::nullopt;
    }
    if (picture) {
      const std::string file = StrCat("picture-", run.combination, ".png");
      WriteFileAtomically(run.folder / file, {picture->png});
      result.picture = {picture->title, file};
    }
  }
  result.seconds = measured.seconds + clock.seconds();
  return result;
}

}  // namespace gnomon::lab::cli
