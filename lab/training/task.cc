#include "training/task.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string_view>

#include "gnomon/attention.h"
#include "gnomon/specification.h"
#include "training/strings.h"

namespace gnomon::lab {
namespace {

std::vector<std::unique_ptr<Task> (*)()>& Makers() {
  static std::vector<std::unique_ptr<Task> (*)()> makers;
  return makers;
}

// The machine's memory, or the memory limit of this process's control group if that is lower.
double MemoryBytes() {
  const double pages = static_cast<double>(::sysconf(_SC_PHYS_PAGES));
  double bytes = pages * static_cast<double>(::sysconf(_SC_PAGE_SIZE));
  for (const char* file :
       {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    double limit = 0;
    if (std::ifstream(file) >> limit && limit > 0) bytes = std::min(bytes, limit);
  }
  return bytes;
}

// Formats a size, such as "12.5 GiB".
std::string Gibibytes(double bytes) {
  constexpr double kGibibyte = int64_t{1} << 30;
  std::ostringstream text;
  text.precision(3);
  text << bytes / kGibibyte << " GiB";
  return text.str();
}

}  // namespace

void StoredSizes::Expect(const std::string& name, const std::vector<int64_t>& shape) const {
  const auto found = tensors_.find(prefix_ + name);
  if (found == tensors_.end()) throw Error(StrCat("the tensor '", prefix_, name, "' is missing"));
  if (found->second.sizes() == torch::IntArrayRef(shape)) return;
  throw Error(StrCat("the tensor '", prefix_, name, "' is ", found->second.sizes(), "; expected ",
                     torch::IntArrayRef(shape)));
}

void StoredSizes::ExpectLayers(int64_t depth) const {
  if (depth <= static_cast<int64_t>(tensors_.size())) return;
  throw Error(StrCat("it contains fewer tensors than ", depth, " layers need"));
}

std::vector<std::string> TaskOptions::DefaultPositions() const {
  return {"none", "sinusoidal", "rope", "alibi", "t5", "hype:tau=learned", "rope+hype:tau=learned"};
}

std::string Task::HoldOut() {
  throw Error(
      StrCat("the task '", name(), "' has no held-out data, which --tune and --until-flat need"));
}

std::string TaskOptions::StepFlags(Command /*command*/, const TrainingOptions& training) const {
  return StrCat("--batch ", training.batch);
}

std::string TaskResults::TrainedAs(const TrainingOptions& training) const {
  return StrCat("trained for ", training.steps, " steps of ", training.batch, " examples");
}

void AddMaker(std::unique_ptr<Task> (*make)()) { Makers().push_back(make); }

std::vector<std::unique_ptr<Task>> AllTasks() {
  std::vector<std::unique_ptr<Task>> tasks;
  for (const auto& make : Makers()) tasks.push_back(make());
  std::sort(tasks.begin(), tasks.end(), [](const auto& a, const auto& b) {
    return std::string_view(a->name()) < std::string_view(b->name());
  });
  return tasks;
}

std::unique_ptr<Task> NewTask(const std::string& name) {
  std::vector<std::string> names;
  for (std::unique_ptr<Task>& task : AllTasks()) {
    if (task->name() == name) return std::move(task);
    names.emplace_back(task->name());
  }
  const std::string near = DidYouMean(name, names);
  throw Error(StrCat("--task is '", name, "'; ", near.empty() ? "expected " : near + " Expected ",
                     Join(names, ", ")));
}

std::unique_ptr<Learner> NewLearner(TaskModels& task, const Terms& terms,
                                    const TrainingOptions& training, torch::Device device) {
  torch::manual_seed(static_cast<uint64_t>(training.seed));
  std::unique_ptr<Learner> learner = task.MakeLearner(terms, training);
  learner->module().to(device);
  return learner;
}

size_t DecidingMetric(const TaskResults& task) {
  const std::vector<Metric> metrics = task.metrics();
  const auto loss = std::find_if(metrics.begin(), metrics.end(),
                                 [](const Metric& metric) { return metric.key == "loss"; });
  return loss == metrics.end() ? 0 : static_cast<size_t>(loss - metrics.begin());
}

HeldOutRows ChooseHeldOut(int64_t rows, const std::string& noun) {
  if (rows < 2) {
    throw Error(StrCat("the training data has ", rows, " ", noun,
                       "; expected at least 2, because some are held out"));
  }
  constexpr uint64_t kSeed = 20190710;
  constexpr int64_t kMost = 1000;
  at::Generator generator = at::detail::createCPUGenerator(kSeed);
  const torch::Tensor order = torch::randperm(rows, generator, torch::kLong);
  const int64_t count = std::clamp<int64_t>(rows / 10, 1, kMost);
  const auto sorted = [&](int64_t first, int64_t number) {
    const torch::Tensor part = std::get<0>(order.narrow(0, first, number).sort());
    const auto* begin = part.const_data_ptr<int64_t>();
    return std::vector<int64_t>(begin, begin + number);
  };
  return {.training = sorted(count, rows - count), .held_out = sorted(0, count)};
}

int64_t CountParameters(const torch::nn::Module& module) {
  int64_t count = 0;
  for (const torch::Tensor& parameter : module.parameters()) count += parameter.numel();
  return count;
}

void CheckMemoryHolds(const std::string& flags, double bytes) {
  const double most = MemoryBytes();
  if (bytes <= most) return;
  throw Error(StrCat("not enough memory for ", flags, ": requires at least ", Gibibytes(bytes),
                     ", but the machine has ", Gibibytes(most)));
}

void CheckTrainingFits(const std::string& model_flags, double weight_bytes,
                       const std::string& step_flags, double numbers) {
  const double fixed = 4 * weight_bytes;
  CheckMemoryHolds(model_flags, fixed);
  CheckMemoryHolds(step_flags, fixed + sizeof(float) * numbers);
}

}  // namespace gnomon::lab
