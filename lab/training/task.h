// A task is a file in tasks/ that defines the data, model, loss, metrics and evaluation conditions.
// The trainer, checkpoints, command line and report work with every task.
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

namespace gnomon::lab {

// The command for which a task's options and data are used.
enum class Command { kTrain, kEval, kCompare };

// An evaluation metric.
struct Metric {
  std::string key;     // in files: "accuracy"
  std::string title;   // "loss, nats per byte"
  std::string column;  // in short: "loss"
  bool higher_is_better = false;
  // Whether comparison tables show this metric; files and `gnomon eval` contain all metrics.
  bool is_compared = true;
};

// The evaluation conditions: lengths, sizes or splits.
struct Conditions {
  std::string key;                               // in files: "length"
  std::string title;                             // of an axis: "evaluation length, bytes"
  std::vector<nlohmann::json> values = {};       // numbers, or texts
  std::optional<size_t> trained = std::nullopt;  // the training condition
};

// The results under one condition.
struct Measurement {
  nlohmann::json condition;
  // One entry per metric of the task; it is empty if the position is undefined for this condition
  // or the value is not finite.
  std::vector<std::optional<double>> values;
  int64_t examples = 0;
};

// The rows of a training step's batch that this process computes.
struct Batch {
  int64_t step = 0;
  int64_t first = 0;
  int64_t count = 0;
  int64_t total = 0;     // number of rows in the whole batch
  bool is_last = false;  // whether this is the last training step

  // The rows for which dropout and encodings draw random numbers; none if this process computes the
  // whole batch.
  std::optional<BatchRows> rows() const {
    return count < total ? std::optional(BatchRows{first, total}) : std::nullopt;
  }
};

// The destination of generated output.
struct Output {
  std::string path;                             // path, if the task writes a file
  std::function<void(std::string_view)> print;  // text, as it is generated
  std::function<bool()> proceed;                // polled repeatedly
};

// A picture of a model's behaviour.
struct Picture {
  std::string title;  // a sentence
  std::string png;    // the bytes of the file
};

// State that a model keeps between steps in addition to its parameters.
struct LearnerState {
  std::map<std::string, torch::Tensor> tensors;
  nlohmann::json fields = nlohmann::json::object();
};

// One model of a task. Data is on the CPU, but the module may be on a different device; models move
// their inputs to that device.
class Learner {
 public:
  // Gathers the rows of the whole batch from all processes; this is a collective operation.
  using Gather = std::function<torch::Tensor(const torch::Tensor&)>;

  virtual ~Learner() = default;

  virtual torch::nn::Module& module() = 0;

  // Returns the model's output for a small built-in input. The output must be finite. Throws Error
  // if the terms do not fit the task. Needs no data.
  virtual torch::Tensor Probe() = 0;

  // Throws Error if the data is insufficient.
  virtual void CheckTraining() const {}

  // Returns the contribution of these rows to the mean loss of their batch; the contributions of
  // all processes add up to the mean. The result depends only on the parameters, the data, the step
  // and the state.
  virtual torch::Tensor Loss(const Batch& batch) = 0;

  // Makes the state that the latest Loss() computed the current state. Called after the optimizer
  // step.
  virtual void Keep() {}

  // Evaluates the model under each condition, on data that is not used for training. After
  // EvaluateHeldOut(true), evaluates the model only under the training condition, on the held-out
  // data, and may omit metrics other than DecidingMetric(). `proceed` is polled between batches; if
  // it returns false, the result is empty.
  virtual std::vector<Measurement> Evaluate(const std::function<bool()>& proceed) = 0;

  // Generates output according to the options in the task's generation(); stops early if `proceed`
  // returns false.
  virtual void Generate(const Output& /*output*/) {}

  // Draws a picture for a comparison report; this takes a few seconds at most. Returns nothing if
  // the task has no picture or `proceed` returned false. Does not use PyTorch's default generator.
  virtual std::optional<Picture> Draw(const std::function<bool()>& /*proceed*/) {
    return std::nullopt;
  }

  // Returns the state of the whole batch.
  virtual LearnerState State(const Gather& /*gather*/) const { return {}; }
  // Returns the number of tensors in a file that belong to the state; throws Error if the state is
  // invalid.
  virtual size_t CheckState(const LearnerState& /*state*/) const { return 0; }
  // Restores rows first to first + count - 1 of a valid state.
  virtual void Restore(const LearnerState& /*state*/, int64_t /*first*/, int64_t /*count*/) {}
};

// Data that a task learns before training, such as a vocabulary. Assets are stored in checkpoints
// and in the folder of a comparison.
struct Asset {
  std::string name;    // for messages: "vocabulary"
  std::string tensor;  // name in checkpoints
  std::string file;    // file name in the comparison's folder; empty if not stored there
  // JSON pointer into DescribeData() to the sha256 of `bytes`.
  std::string sha256_at;
  std::string bytes;
};

// The tensor sizes in a checkpoint, which are checked before any memory is allocated.
class StoredSizes {
 public:
  StoredSizes(const std::map<std::string, torch::Tensor>& tensors, std::string prefix)
      : tensors_(tensors), prefix_(std::move(prefix)) {}

  // Throws Error unless the file contains this parameter or buffer with this shape.
  void Expect(const std::string& name, const std::vector<int64_t>& shape) const;
  // Throws Error if there are fewer tensors than layers.
  void ExpectLayers(int64_t depth) const;

 private:
  const std::map<std::string, torch::Tensor>& tensors_;
  std::string prefix_;
};

// The texts that describe a task in help, messages and reports.
struct TaskDescription {
  std::string summary;                // one line, for --help
  std::string data_help = {};         // help of --data; empty if the data is generated from a seed
  std::string data_noun = "data";     // the noun for the data in messages
  std::string loss_unit;              // unit of the training loss, such as "nats per byte"
  std::string examples = "examples";  // the unit of Measurement::examples

  bool takes_data() const { return !data_help.empty(); }
};

// The command `gnomon generate` for a task.
struct Generation {
  std::string help;       // one line
  std::string file = {};  // the output file; empty if the output is text on standard output
  OptionList options = {};
  std::string memory_flags = {};  // the flags that determine the memory that generation needs
};

// The options of a task.
class TaskOptions {
 public:
  virtual ~TaskOptions() = default;

  // Default training options.
  virtual TrainingOptions DefaultTraining(Command /*command*/) const { return {}; }
  // Default positions of a comparison.
  virtual std::vector<std::string> DefaultPositions() const;
  // All options in flags and files except terms and training options, with the command's defaults.
  // Checkpoints store the options of kTrain; models are built from all sections except "training"
  // and "run".
  virtual OptionList Options(Command command) = 0;
  // Called once all options are set, from flags or, if `is_resumed`, from a file. `training` is
  // null for a model without training state. Throws Error if options contradict each other.
  virtual void Settle(Command /*command*/, bool /*is_resumed*/,
                      const TrainingOptions* /*training*/) {}
  // The flags that determine the memory that a training step or an evaluation needs.
  virtual std::string StepFlags(Command command, const TrainingOptions& training) const;
  virtual std::string EvaluationFlags(Command /*command*/) const { return "the evaluation"; }
  // Throws Error if the machine lacks the minimum memory for a model or its training.
  virtual void CheckModelFits() const {}
  virtual void CheckFits(const TrainingOptions& /*training*/, int64_t /*processes*/) const {}
};

// The data of a task.
class TaskData {
 public:
  virtual ~TaskData() = default;

  // Throws an Error that names the invalid file and the location of the fault.
  virtual void ReadData(const std::string& path) = 0;
  // Hash of everything that was read; empty if nothing was read.
  virtual std::string data_sha256() const { return ""; }
  // The object `data` in records, with `path` and `sha256` if the task reads files.
  virtual nlohmann::json DescribeData() const = 0;
  // Throws Error if a comparison with this recorded `data` cannot be resumed with the data that was
  // read, although the sha256 is the same.
  virtual void CheckResumes(const nlohmann::json& /*data*/) const {}
  // Holds out a subset of the training data, the same for every run. Its loss is used to tune
  // options or to end a run; neither training nor the reported evaluation uses it. Called between
  // ReadData() and Prepare(). Returns its size, such as "1000 images of the training split". Throws
  // Error if there is too little data, or if the task does not support holding out data.
  virtual std::string HoldOut() = 0;
  // Sets whether Learner::Evaluate() uses the held-out data.
  void EvaluateHeldOut(bool is_held_out) { evaluates_held_out_ = is_held_out; }
  bool evaluates_held_out() const { return evaluates_held_out_; }
  // The amount of training data, such as "60000 images".
  virtual std::string DescribeSize() const = 0;
  // Learns the assets; only one of several processes calls it.
  virtual void Prepare() {}
  virtual std::vector<Asset> Assets() const { return {}; }
  // Sets the bytes of Assets(), in order; an empty string means that the asset is not stored.
  // Throws Error if the bytes are invalid or, with `is_stored`, do not match the options that were
  // stored with them.
  virtual void TakeAssets(const std::vector<std::string>& /*bytes*/, bool /*is_stored*/) {}
  // Throws Error if the data and the options do not fit together. `training` is null if there will
  // be no training.
  virtual void CheckData(const TrainingOptions* /*training*/) const {}

 private:
  bool evaluates_held_out_ = false;
};

// The models of a task.
class TaskModels {
 public:
  virtual ~TaskModels() = default;

  // Completes the terms with values from the data, such as the shape of a grid; called after
  // ReadData(). The result is used for the run and stored in records. Throws Error or c10::Error if
  // a term is invalid.
  virtual Terms Complete(const Terms& terms) const { return terms; }
  // Creates a learner on the CPU, with weights from PyTorch's default generator. NewLearner() below
  // calls it.
  virtual std::unique_ptr<Learner> MakeLearner(const Terms& terms,
                                               const TrainingOptions& training) = 0;
  // Checks the options against the tensor sizes in a file, so that wrong options cannot create a
  // model that is larger than the file.
  virtual void CheckSizes(const StoredSizes& file) const = 0;
  // The names of the fields in LearnerState::fields, which only training runs have.
  virtual std::vector<std::string> state_fields() const { return {}; }
};

// The results of a task, and the texts that describe it.
class TaskResults {
 public:
  virtual ~TaskResults() = default;

  virtual TaskDescription description() const = 0;
  // The first metric represents a run in tables and plots.
  virtual std::vector<Metric> metrics() const = 0;
  virtual Conditions conditions() const = 0;
  // Additional fields of `gnomon eval --json`.
  virtual nlohmann::json DescribeEvaluation() const { return nlohmann::json::object(); }
  // The note below a table, such as "trained at length 128 for 700 steps of 2048 bytes".
  virtual std::string TrainedAs(const TrainingOptions& training) const;
};

// A task. Call Options() and Settle() first; then ReadData() and Prepare(), or ReadData() and
// TakeAssets() in either order; then the rest. Learners refer to the task, which must outlive them.
class Task : public TaskOptions, public TaskData, public TaskModels, public TaskResults {
 public:
  virtual const char* name() const = 0;  // --task NAME
  std::string HoldOut() override;
  // None if the task does not support generation.
  virtual std::optional<Generation> generation() { return std::nullopt; }
};

// The index in metrics() of the metric that is measured on held-out data: the loss or, if there is
// none, the first metric.
size_t DecidingMetric(const TaskResults& task);

// The rows of the training data that HoldOut() holds out: a tenth, at most 1000, drawn with a fixed
// seed. All other rows remain for training. Both lists are sorted. Throws an Error with the noun
// for the rows, such as "images", if there are fewer than two.
struct HeldOutRows {
  std::vector<int64_t> training;
  std::vector<int64_t> held_out;
};
HeldOutRows ChooseHeldOut(int64_t rows, const std::string& noun);

// Creates the task with this name; if there is none, throws an Error that lists all tasks.
std::unique_ptr<Task> NewTask(const std::string& name);
// Returns one instance of each task, sorted by name.
std::vector<std::unique_ptr<Task>> AllTasks();
inline constexpr const char* kTextTask = "text";

void AddMaker(std::unique_ptr<Task> (*make)());

// Registers a task, in its file and in a namespace with the file's name:
// const RegisterTask<ImagesTask> registered;
template <class T>
class RegisterTask {
 public:
  RegisterTask() {
    AddMaker([]() -> std::unique_ptr<Task> { return std::make_unique<T>(); });
  }
};

// Creates a learner with the initial weights for training.seed, which are the same on all devices.
std::unique_ptr<Learner> NewLearner(TaskModels& task, const Terms& terms,
                                    const TrainingOptions& training,
                                    torch::Device device = torch::kCPU);

int64_t CountParameters(const torch::nn::Module& module);

// Throws an Error that names `flags` if the machine has less memory than `bytes`.
void CheckMemoryHolds(const std::string& flags, double bytes);
// Throws an Error that names `model_flags` if memory is too small for the weights, their gradients
// and Adam's two moments, or `step_flags` if it is too small for `numbers` floats in addition.
void CheckTrainingFits(const std::string& model_flags, double weight_bytes,
                       const std::string& step_flags, double numbers);

}  // namespace gnomon::lab

#endif  // GNOMON_TRAINING_TASK_H_
