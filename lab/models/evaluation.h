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
  std::optional<double> last;  // the same over the last `kLastTokens` of each window
  // The total loss in bits divided by the number of bytes that the tokens represent, which is
  // comparable between tokenizers.
  std::optional<double> bits_per_byte;
  int64_t windows = 0;
};

inline constexpr int64_t kLastTokens = 32;

// The loss at each of `lengths` on about `budget` tokens of `text`, which must be longer than the
// longest of them. With a memory, the windows of each stretch (EvaluationStarts) are consecutive.
// The tokens before the stretch, as many as the memory keeps, are read first and not counted, so
// the same tokens are predicted as without a memory. If it costs less, reading continues from the
// previous stretch instead of refilling the memory; if nothing is forgotten, one pass covers all
// lengths. `proceed` is called between batches; the result is empty if it returned false.
std::vector<LengthLoss> Evaluate(LanguageModel& model, const TokenText& text,
                                 const std::vector<int64_t>& lengths, int64_t budget,
                                 int64_t memory = 0,
                                 const std::function<bool()>& proceed = nullptr);

}  // namespace gnomon::lab

#endif  // GNOMON_MODELS_EVALUATION_H_
