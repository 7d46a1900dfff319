#include "cli/checks.h"

#include <exception>
#include <optional>
#include <string>
#include <string_view>

#include "cli/shortage.h"
#include "gnomon/attention.h"
#include "training/strings.h"

namespace gnomon::lab::cli {

namespace {

// The prefix of messages about terms.
std::string Named(const Terms& terms) {
  return StrCat("similarity '", terms.similarity, "', position '", terms.position, "': ");
}

// The error message of an operator, without the "gnomon: " prefix, which the program adds to every
// message.
std::string Said(const c10::Error& error) {
  constexpr std::string_view kProgram = "gnomon: ";
  const std::string text = error.what_without_backtrace();
  return text.starts_with(kProgram) ? text.substr(kProgram.size()) : text;
}

}  // namespace

Terms CompleteTerms(const TaskModels& task, const Terms& terms) {
  try {
    return task.Complete(terms);
  } catch (const c10::Error& error) {
    throw Error(Named(terms) + Said(error));
  }
}

std::unique_ptr<Learner> CheckTerms(Task& task, const Terms& terms, const TrainingOptions& training,
                                    Command command, torch::Device device) {
  task.CheckModelFits();
  try {
    std::unique_ptr<Learner> learner = NewLearner(task, terms, training, device);
    const torch::NoGradGuard no_grad;
    if (!torch::isfinite(learner->Probe()).all().item<bool>()) {
      throw Error("the model produces non-finite values");
    }
    return learner;
  } catch (const Error& error) {
    throw Error(Named(terms) + error.what());
  } catch (const std::exception& error) {
    if (const std::optional<std::string> shortage = DescribeShortage(error)) {
      throw Error(StrCat(Named(terms), "not enough memory for ", task.StepFlags(command, training),
                         *shortage));
    }
    const auto* const torch_error = dynamic_cast<const c10::Error*>(&error);
    throw Error(Named(terms) + (torch_error == nullptr
                                    ? StrCat("the model cannot be built: ", error.what())
                                    : Said(*torch_error)));
  }
}

Checkpoint LoadModel(const std::string& path, Task& task, torch::Device device) {
  Checkpoint checkpoint = LoadCheckpoint(CheckpointFile(path), task, device);
  if (device.is_cpu()) return checkpoint;
  // The model may have been trained on a different device.
  try {
    const torch::NoGradGuard no_grad;
    checkpoint.learner->Probe();
  } catch (const c10::NotImplementedError& error) {
    throw Error(StrCat(path, " on ", device.str(), ": ", error.what_without_backtrace()));
  }
  return checkpoint;
}

}  // namespace gnomon::lab::cli
