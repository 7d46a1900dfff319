// What a language model is measured by: its loss at several lengths.
#ifndef GNOMON_MODELS_EVALUATION_H_
#define GNOMON_MODELS_EVALUATION_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "models/language_model.h"
#include "text/tokens.h"

namespace gnomon::models {

struct LengthLoss {
  int64_t length = 0;
  std::optional<double> loss;  // nats a token, over every token; none where a position is undefined
  std::optional<double> last;  // the same over the last `kLastTokens` of each window
  // All of that loss in bits, over the bytes that the tokens stand for: the same measure whatever
  // the tokens are.
  std::optional<double> bits_per_byte;
  int64_t windows = 0;
};

inline constexpr int64_t kLastTokens = 32;

// The loss at each of `lengths` on about `budget` tokens of `text`, which must be longer than the
// longest of them. With a memory the windows of each stretch (EvaluationStarts) follow each other,
// and the tokens before the stretch, as many as the memory keeps, are read first and not counted:
// the same tokens are predicted as without it. Where it costs less, the text is read on from the
// stretch before instead of filling the memory anew, and where nothing is forgotten, once for all
// lengths. `proceed` is asked between batches; an empty
// result means that it said no.
std::vector<LengthLoss> Evaluate(LanguageModel& model, const TokenText& text,
                                 const std::vector<int64_t>& lengths, int64_t budget,
                                 int64_t memory = 0,
                                 const std::function<bool()>& proceed = nullptr);

}  // namespace gnomon::models

#endif  // GNOMON_MODELS_EVALUATION_H_
