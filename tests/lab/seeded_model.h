// Language models for the tests.
#ifndef GNOMON_TESTS_LAB_SEEDED_MODEL_H_
#define GNOMON_TESTS_LAB_SEEDED_MODEL_H_

#include <torch/torch.h>

#include <cstdint>

#include "models/language_model.h"

namespace gnomon::lab {

// Creates a model that is initialised from a seed.
inline LanguageModel NewModel(const LanguageModelOptions& options, uint64_t seed) {
  torch::manual_seed(seed);
  return LanguageModel(options);
}

}  // namespace gnomon::lab

#endif  // GNOMON_TESTS_LAB_SEEDED_MODEL_H_
