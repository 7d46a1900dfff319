#include "cli/checks.h"

#include <exception>
#include <optional>
#include <string>

#include "cli/shortage.h"
#include "gnomon/attention.h"
#include "training/strings.h"

namespace gnomon::cli {

using models::StrCat;

std::unique_ptr<models::Learner> CheckTerms(models::Task& task, const models::Terms& terms,
                                            const models::TrainingOptions& training,
                                            models::Command command) {
  const auto name = [&] {
    return StrCat("similarity '", terms.similarity, "', position '", terms.position, "': ");
  };
  task.CheckModelFits();
  try {
    std::unique_ptr<models::Learner> learner = models::NewLearner(task, terms, training);
    const torch::NoGradGuard no_grad;
    if (!torch::isfinite(learner->Probe()).all().item<bool>()) {
      throw Error("gives numbers that are not finite");
    }
    return learner;
  } catch (const Error& error) {
    throw Error(name() + error.what());
  } catch (const std::exception& error) {
    if (const std::optional<std::string> shortage = DescribeShortage(error)) {
      throw Error(
          StrCat(name(), "not enough memory at ", task.StepFlags(command, training), *shortage));
    }
    const auto* const torch_error = dynamic_cast<const c10::Error*>(&error);
    throw Error(name() + (torch_error == nullptr ? StrCat("cannot be built: ", error.what())
                                                 : torch_error->what_without_backtrace()));
  }
}

}  // namespace gnomon::cli
