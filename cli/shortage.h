// Memory that there is not: found before the work where it can be, and told in words of the
// options.
#ifndef GNOMON_CLI_SHORTAGE_H_
#define GNOMON_CLI_SHORTAGE_H_

#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <string>

#include "models/language_model.h"
#include "training/training_options.h"

namespace gnomon::cli {

// ": it would allocate 512 bytes", or nothing more, if an exception is that of an allocator; none
// if it is another one.
std::optional<std::string> DescribeShortage(const std::exception& error);

// Does work whose need of memory `options` set ("--batch 9 and --length 8"); where there is not
// enough, throws an Error that names them.
void NamingOptions(const std::string& options, const std::function<void()>& work);

// Throws Error unless the machine can hold the weights of a model.
void CheckModelFits(const models::LanguageModelOptions& model);

// Throws Error unless the machine can hold what training takes at the least: weights, gradients and
// moments, and what the windows of a step, shared out over `processes`, keep for its backward pass.
void CheckTrainingFits(const models::LanguageModelOptions& model,
                       const models::TrainingOptions& training, int64_t processes = 1);

}  // namespace gnomon::cli

#endif  // GNOMON_CLI_SHORTAGE_H_
