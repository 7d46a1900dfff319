#include "cli/checks.h"

#include <exception>
#include <optional>
#include <string>

#include "cli/shortage.h"
#include "gnomon/attention.h"
#include "training/strings.h"

namespace gnomon::cli {

using models::StrCat;

namespace {

// What messages on terms begin with.
std::string Named(const models::Terms& terms) {
  return StrCat("similarity '", terms.similarity, "', position '", terms.position, "': ");
}

}  // namespace

models::Terms CompleteTerms(const models::Task& task, const models::Terms& terms) {
  try {
    return task.Complete(terms);
  } catch (const c10::Error& error) {
    throw Error(Named(terms) + error.what_without_backtrace());
  }
}

std::unique_ptr<models::Learner> CheckTerms(models::Task& task, const models::Terms& terms,
                                            const models::TrainingOptions& training,
                                            models::Command command) {
  task.CheckModelFits();
  try {
    std::unique_ptr<models::Learner> learner = models::NewLearner(task, terms, training);
    const torch::NoGradGuard no_grad;
    if (!torch::isfinite(learner->Probe()).all().item<bool>()) {
      throw Error("gives numbers that are not finite");
    }
    return learner;
  } catch (const Error& error) {
    throw Error(Named(terms) + error.what());
  } catch (const std::exception& error) {
    if (const std::optional<std::string> shortage = DescribeShortage(error)) {
      throw Error(StrCat(Named(terms), "not enough memory at ", task.StepFlags(command, training),
                         *shortage));
    }
    const auto* const torch_error = dynamic_cast<const c10::Error*>(&error);
    throw Error(Named(terms) + (torch_error == nullptr ? StrCat("cannot be built: ", error.what())
                                                       : torch_error->what_without_backtrace()));
  }
}

}  // namespace gnomon::cli
