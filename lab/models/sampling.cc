#include "models/sampling.h"

#include <optional>

#include "gnomon/attention.h"
#include "training/strings.h"

namespace gnomon::lab {

GenerationOptions ToGeneration(const SamplingOptions& sampling, const LanguageModel& model,
                               int64_t prompt, int64_t tokens, const std::string& kind) {
  if (sampling.temperature == 0 && sampling.top_k != 0) {
    throw Error(
        "generate: --temperature 0 always picks the most likely token and cannot be combined with "
        "--top-k");
  }
  const LanguageModelOptions& options = model->options();
  if (sampling.top_k > options.vocabulary) {
    throw Error(StrCat("generate: --top-k is ", sampling.top_k, ", but the vocabulary has only ",
                       options.vocabulary, " ", kind));
  }
  // The model never reads the last generated token.
  const int64_t needed = prompt + tokens - 1;
  const std::optional<int64_t> longest = model->max_length();
  if (longest && needed > *longest) {
    throw Error(StrCat("generate: the position '", options.position, "' is defined for only ",
                       *longest, " ", kind, ", but --prompt and --tokens need ", needed));
  }
  return {.tokens = tokens,
          .temperature = sampling.temperature,
          .top_k = sampling.top_k,
          .seed = static_cast<uint64_t>(sampling.seed),
          .use_cache = !sampling.no_cache};
}

}  // namespace gnomon::lab
