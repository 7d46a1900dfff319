// Windows of a text, and the loss of each token given the previous ones.
#ifndef GNOMON_MODELS_WINDOWS_H_
#define GNOMON_MODELS_WINDOWS_H_

#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "models/language_model.h"
#include "text/tokens.h"

namespace gnomon::lab {

// Throws Error if the option --lengths is empty or contains a length twice.
void CheckLengths(const std::vector<int64_t>& lengths);

// Returns int64 windows (count, length + 1) of the text that begin at the tokens `starts`.
torch::Tensor Windows(const TokenText& text, const int64_t* starts, int64_t count, int64_t length);

// Returns the losses (B, L) in nats of all tokens of `windows` (B, L + 1) except the first.
torch::Tensor Losses(LanguageModel& model, const torch::Tensor& windows,
                     LanguageModelCache* cache = nullptr, LanguageModelMemory* memory = nullptr,
                     const std::optional<BatchRows>& rows = std::nullopt);

}  // namespace gnomon::lab

#endif  // GNOMON_MODELS_WINDOWS_H_
