// A task: what models are trained to do. One file of tasks/ has its data, model, loss, metrics and
// the conditions that it is measured under; the trainer, checkpoints, the command line and the
// report serve every task.
#ifndef GNOMON_TRAINING_TASK_H_
#define GNOMON_TRAINING_TASK_H_

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "training/batch_rows.h"
#include "training/options.h"
#include "training/terms.h"
#include "training/training_options.h"

namespace gnomon::models {

// What a task's options and data are for.
enum class Command { kTrain, kEval, kCompare };

// A number that models are measured by.
struct Metric {
  std::string key;     // in files: "accuracy"
  std::string title;   // "loss, nats per byte"
  std::string column;  // in short: "loss"
  bool higher_is_better = false;
  // Whether the tables of comparisons show it; files and `gnomon eval` have all.
  bool is_compared = true;
};

// What models are measured under: at lengths, at sizes, on splits.
struct Conditions {
  std::string key;                               // in files: "length"
  std::string title;                             // of an axis: "evaluation length, bytes"
  std::vector<nlohmann::json> values = {};       // numbers, or texts
  std::optional<size_t> trained = std::nullopt;  // the one that models are trained under
};

// What came out under one condition.
struct Measurement {
  nlohmann::json condition;
  // One for each metric of the task; none where the position is not defined, or not finite.
  std::vector<std::optional<double>> values;
  int64_t examples = 0;
};

// The rows of a training step that are this process's.
struct Batch {
  int64_t step = 0;
  int64_t first = 0;
  int64_t count = 0;
  int64_t total = 0;  // of all processes together

  // What dropout and encodings draw by; none where these are all rows.
  std::optional<BatchRows> rows() const {
    return count < total ? std::optional(BatchRows{first, total}) : std::nullopt;
  }
};

// Where what a model makes goes.
struct Output {
  std::string path;                             // of a file, where the task makes one
  std::function<void(std::string_view)> print;  // text, as it comes
  std::function<bool()> proceed;                // asked again and again
};

// What shows a model at work.
struct Picture {
  std::string title;  // a sentence
  std::string png;    // the bytes of the file
};

// What a model keeps from step to step beside its parameters.
struct LearnerState {
  std::map<std::string, torch::Tensor> tensors;
  nlohmann::json fields = nlohmann::json::object();
};

// One model of a task. Data are on the CPU, and its module may be on another device: models take
// what they are given to where they are.
class Learner {
 public:
  // The rows of the whole batch, from those of each process; a collective.
  using Gather = std::function<torch::Tensor(const torch::Tensor&)>;

  virtual ~Learner() = default;

  virtual torch::nn::Module& module() = 0;

  // What the model makes of a small input of its own, finite where all is well. Throws Error where
  // the terms do not go with the task. Needs no data.
  virtual torch::Tensor Probe() = 0;

  // Throws Error where the data do not suffice.
  virtual void CheckTraining() const {}

  // The share of these rows in the mean loss of their batch: those of all processes sum to it. A
  // function of the parameters, the data, the step and the state alone.
  virtual torch::Tensor Loss(const Batch& batch) = 0;

  // The step that Loss() was asked for is taken: its state becomes this one's.
  virtual void Keep() {}

  // Under each condition, on data that it was not trained on. `proceed` is asked between batches;
  // an empty result means that it said no.
  virtual std::vector<Measurement> Evaluate(const std::function<bool()>& proceed) = 0;

  // Makes something new, as the task's GenerationOptions() say; as far as it is when `proceed` says
  // no.
  virtual void Generate(const Output& /*output*/) {}

  // For the report of a comparison, in seconds; none where the task has nothing to show, or
  // `proceed` said no. Torch's default generator is not drawn from.
  virtual std::optional<Picture> Draw(const std::function<bool()>& /*proceed*/) {
    return std::nullopt;
  }

  // The state of the whole batch.
  virtual LearnerState State(const Gather& /*gather*/) const { return {}; }
  // How many tensors of a file's are the state; throws Error where they are not a sound one.
  virtual size_t CheckState(const LearnerState& /*state*/) const { return 0; }
  // Takes rows first to first + count - 1 of a sound state.
  virtual void Restore(const LearnerState& /*state*/, int64_t /*first*/, int64_t /*count*/) {}
};

// What a task learns from its training data before any model is trained, as a vocabulary: it goes
// into checkpoints and the folder of a comparison.
struct Asset {
  std::string name;    // for messages: "vocabulary"
  std::string tensor;  // in checkpoints
  std::string file;    // in folders; empty: it is not kept there
  // Where DescribeData() has the sha256 of the bytes, a JSON pointer.
  std::string sha256_at;
  std::string bytes;
};

// The tensors of a checkpoint, before any memory is taken by its word.
class StoredSizes {
 public:
  StoredSizes(const std::map<std::string, torch::Tensor>& tensors, std::string prefix)
      : tensors_(tensors), prefix_(std::move(prefix)) {}

  // Throws Error unless the file has that parameter or buffer of the model in that shape.
  void Expect(const std::string& name, const std::vector<int64_t>& shape) const;
  // Throws Error where there are fewer tensors than layers.
  void ExpectLayers(int64_t depth) const;

 private:
  const std::map<std::string, torch::Tensor>& tensors_;
  std::string prefix_;
};

// Options, data, and how models of it are made. Called in this order: Options() and Settle(); then
// ReadData() and Prepare(), or ReadData() and TakeAssets() in either order; then the rest. Learners
// refer to the task: it must outlive them.
class Task {
 public:
  virtual ~Task() = default;

  virtual const char* name() const = 0;     // --task NAME
  virtual const char* summary() const = 0;  // a line of --help

  // ---- Options

  // How it is trained unless flags say otherwise.
  virtual TrainingOptions DefaultTraining(Command /*command*/) const { return {}; }
  // The positions that a comparison is of unless flags say otherwise.
  virtual std::vector<std::string> DefaultPositions() const;
  // What flags set and files hold, beside terms and training; at their defaults for a command.
  // Those of kTrain are stored in checkpoints: what a model of them is built from in sections other
  // than "training" and "run".
  virtual OptionList Options(Command command) = 0;
  // All options are set, by flags or (`is_resumed`) by a file. `training` is null of a model
  // without its training. Throws Error where they contradict each other.
  virtual void Settle(Command /*command*/, bool /*is_resumed*/,
                      const TrainingOptions* /*training*/) {}
  // The flags that the memory of a training step, or of an evaluation, depends on.
  virtual std::string StepFlags(Command command, const TrainingOptions& training) const;
  virtual std::string EvaluationFlags(Command /*command*/) const { return "the evaluation"; }
  // Throws Error where the machine cannot hold a model, or what training takes, at the least.
  virtual void CheckModelFits() const {}
  virtual void CheckFits(const TrainingOptions& /*training*/, int64_t /*processes*/) const {}

  // ---- Data

  // What --data takes; null: the task makes its data from a seed.
  virtual const char* data_help() const { return nullptr; }
  // How messages call them.
  virtual const char* data_noun() const { return "data"; }
  // Throws Error naming the file, and the place in it, that is wrong.
  virtual void ReadData(const std::string& path) = 0;
  // Of all that was read; empty where nothing is.
  virtual std::string data_sha256() const { return ""; }
  // For records: the object `data`, with `path` and `sha256` where there are files, and more.
  virtual nlohmann::json DescribeData() const = 0;
  // Throws Error where a comparison that recorded this `data`, whose sha256 is the same, must not
  // go on with what was read.
  virtual void CheckResumes(const nlohmann::json& /*data*/) const {}
  // How much there is to train on: "60000 images".
  virtual std::string DescribeSize() const = 0;
  // Learns the assets. Of several processes one does.
  virtual void Prepare() {}
  virtual std::vector<Asset> Assets() const { return {}; }
  // Takes the bytes of Assets(), in their order; empty: a file has none. Throws Error where they
  // are not sound, or where `is_stored` and they are not what the options of their file tell.
  virtual void TakeAssets(const std::vector<std::string>& /*bytes*/, bool /*is_stored*/) {}
  // Throws Error where data and options do not go together. `training` is null where none follows.
  virtual void CheckData(const TrainingOptions* /*training*/) const {}

  // ---- Models

  // The terms with what the data tell filled in, as the shape of a grid; called after ReadData().
  // What comes back is what is run and what records keep. Throws Error or c10::Error for a mistake.
  virtual Terms Complete(const Terms& terms) const { return terms; }
  // On the CPU, with weights from Torch's default generator. See NewLearner() below.
  virtual std::unique_ptr<Learner> MakeLearner(const Terms& terms,
                                               const TrainingOptions& training) = 0;
  // Compares the options with tensors that a file does hold, so that none of them makes a model
  // larger than its file.
  virtual void CheckSizes(const StoredSizes& file) const = 0;
  // The fields of LearnerState that a training run alone has.
  virtual std::vector<std::string> state_fields() const { return {}; }

  // ---- Generation

  // What `gnomon generate` makes with a model, of one line of --help; null: nothing.
  virtual const char* generation_help() const { return nullptr; }
  // What the file that it writes is; null: it prints text.
  virtual const char* generated_file() const { return nullptr; }
  virtual OptionList GenerationOptions() { return {}; }
  // The flags that its memory depends on.
  virtual std::string GenerationFlags() const { return "the generation"; }

  // ---- Results

  // The first is what a run is told by.
  virtual std::vector<Metric> metrics() const = 0;
  virtual Conditions conditions() const = 0;
  // Of the training loss: "nats per byte".
  virtual std::string loss_unit() const = 0;
  // What Measurement::examples counts.
  virtual const char* examples() const { return "examples"; }
  // More fields of what `gnomon eval --json` prints.
  virtual nlohmann::json DescribeEvaluation() const { return nlohmann::json::object(); }
  // For the note below a table: "trained at length 128 for 700 steps of 2048 bytes".
  virtual std::string TrainedAs(const TrainingOptions& training) const;
};

// A task of that name; throws Error that lists all where there is none.
std::unique_ptr<Task> NewTask(const std::string& name);
// One of each, by name.
std::vector<std::unique_ptr<Task>> AllTasks();
inline constexpr const char* kTextTask = "text";

void AddMaker(std::unique_ptr<Task> (*make)());

// In the file of a task: const RegisterTask<ImageTask> registered;
template <class T>
class RegisterTask {
 public:
  RegisterTask() {
    AddMaker([]() -> std::unique_ptr<Task> { return std::make_unique<T>(); });
  }
};

// The learner that training.seed begins with, the same on each device.
std::unique_ptr<Learner> NewLearner(Task& task, const Terms& terms, const TrainingOptions& training,
                                    torch::Device device = torch::kCPU);

int64_t CountParameters(const torch::nn::Module& module);

// Throws Error, naming `flags`, unless the machine has that many bytes of memory.
void CheckMemoryHolds(const std::string& flags, double bytes);

}  // namespace gnomon::models

#endif  // GNOMON_TRAINING_TASK_H_
