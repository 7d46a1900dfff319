// Lower bounds on the memory that a language model needs.
#ifndef GNOMON_MODELS_LANGUAGE_MODEL_SIZE_H_
#define GNOMON_MODELS_LANGUAGE_MODEL_SIZE_H_

#include <cstdint>
#include <string>

#include "models/language_model.h"
#include "training/task.h"

namespace gnomon::lab {

// Throws an Error that names the model's flags if the machine's memory cannot hold the weights.
void CheckWeightsFit(const LanguageModelOptions& model);

// Throws an Error that names `flags` if memory is too small for a training step on `rows` rows of
// `length` tokens.
void CheckStepFits(const LanguageModelOptions& model, int64_t rows, int64_t length,
                   const std::string& flags);

// Checks that the tensors of a file have the sizes given by the options.
void CheckStoredSizes(const LanguageModelOptions& model, const StoredSizes& file);

}  // namespace gnomon::lab

#endif  // GNOMON_MODELS_LANGUAGE_MODEL_SIZE_H_
