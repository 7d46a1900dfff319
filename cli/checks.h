// What can be wrong is found before the first step.
#ifndef GNOMON_CLI_CHECKS_H_
#define GNOMON_CLI_CHECKS_H_

#include <cstdint>
#include <vector>

#include "models/language_model.h"
#include "text/text_data.h"
#include "text/tokens.h"

namespace gnomon::cli {

// Throws Error unless the parts of the text hold that many tokens.
void CheckTextHolds(const models::TextData& data, const models::TokenData& tokens,
                    int64_t training_needs, int64_t validation_needs);

// Builds the model and runs it on a few tokens, so that a wrong option or specification is known
// before any work; throws Error with the operator's own words. The memory is the longest one that
// the model is used with.
models::LanguageModel BuildModel(const models::LanguageModelOptions& options, int64_t seed,
                                 int64_t memory);

// Throws Error unless every length is one that a text can have and none comes twice.
void CheckLengths(const std::vector<int64_t>& lengths);

}  // namespace gnomon::cli

#endif  // GNOMON_CLI_CHECKS_H_
