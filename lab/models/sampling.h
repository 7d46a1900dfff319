// Options for sampling tokens from a language model.
#ifndef GNOMON_MODELS_SAMPLING_H_
#define GNOMON_MODELS_SAMPLING_H_

#include <cstdint>
#include <string>

#include "models/language_model.h"
#include "training/options.h"

namespace gnomon::lab {

#define GNOMON_SAMPLING_OPTIONS(OPTION)                                                        \
  OPTION(double, temperature, 0.8,                                                             \
         .help = "Sampling temperature; 0 always picks the most likely token", .highest = 1e6) \
  OPTION(int64_t, top_k, 0,                                                                    \
         .help = "Number of most likely tokens to sample from; 0 means all tokens")            \
  OPTION(int64_t, seed, 0, .help = "Random seed for sampling",                                 \
         .highest = static_cast<double>(kLargestSeed))                                         \
  OPTION(bool, no_cache, false,                                                                \
         .help = "Reprocess the entire text for each token instead of caching keys and values")

struct SamplingOptions {
  GNOMON_OPTIONS(GNOMON_SAMPLING_OPTIONS)
};

// Returns the options for generating `tokens` tokens after a prompt of `prompt` tokens. Throws
// Error if they contradict each other or exceed the model's limits; messages call the tokens
// `kind`, such as "words".
GenerationOptions ToGeneration(const SamplingOptions& sampling, const LanguageModel& model,
                               int64_t prompt, int64_t tokens, const std::string& kind);

}  // namespace gnomon::lab

#endif  // GNOMON_MODELS_SAMPLING_H_
