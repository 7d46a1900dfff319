// Evaluation of language models: the loss at several lengths.
#ifndef GNOMON_MODELS_EVALUATION_H_
#define GNOMON_MODELS_EVALUATION_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "models/language_model.h"
#include "text/tokens.h"

namespace gnomon::lab {

struct LengthLoss {
  int64_t length = 0;
  std::optional<double> loss;  // nats per token; none if a position is undefined
  std::optional<double> last;  // over the last `kLastTokens` of each window only
  // The total loss in bits divided by the number of bytes that the tokens represent, which is
  // comparable between tokenizers.
  std::optional<double> bits_per_byte;
  int64_t windows = 0;
};

inline constexpr int64_t kLastTokens = 32;

// Returns the loss at each of `lengths`, evaluated on about `budget` tokens of `text`. The text
// must have more tokens than the longest length. `proceed` is called between batches; the result is
// empty if it returned false. With a memory, the windows of each stretch (EvaluationStarts) are
// consecutive. The tokens before the stretch fill the memory but are not evaluated, so the losses
// cover the same tokens as without a memory. Where that is faster, the memory of the previous
// stretch is reused or, if the memory holds the entire text, one pass covers all lengths.
std::vector<LengthLoss> Evaluate(LanguageModel& model, const TokenText& text,
                                 const std::vector<int64_t>& lengths, int64_t budget,
                                 int64_t memory = 0,
                                 const std::function<bool()>& proceed = nullptr);

}  // namespace gnomon::lab

#endif  // GNOMON_MODELS_EVALUATION_H_
