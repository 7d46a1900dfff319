// What memory a language model takes, at the least.
#ifndef GNOMON_MODELS_LANGUAGE_MODEL_SIZE_H_
#define GNOMON_MODELS_LANGUAGE_MODEL_SIZE_H_

#include <cstdint>
#include <string>

#include "models/language_model.h"
#include "training/task.h"

namespace gnomon::models {

// Throws Error, naming the flags, where the machine cannot hold the weights.
void CheckWeightsFit(const LanguageModelOptions& model);

// The same of a training step on `rows` rows of `length` tokens, which `flags` set.
void CheckStepFits(const LanguageModelOptions& model, int64_t rows, int64_t length,
                   const std::string& flags);

// That a file's tensors are of the sizes of the options.
void CheckStoredSizes(const LanguageModelOptions& model, const StoredSizes& file);

}  // namespace gnomon::models

#endif  // GNOMON_MODELS_LANGUAGE_MODEL_SIZE_H_
