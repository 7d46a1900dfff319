// Translations that an encoder-decoder model finds likely.
#ifndef GNOMON_MODELS_BEAM_SEARCH_H_
#define GNOMON_MODELS_BEAM_SEARCH_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "models/seq2seq.h"
#include "text/parallel_text.h"
#include "text/tokens.h"

namespace gnomon::models {

struct BeamOptions {
  int64_t beam = 4;             // hypotheses that are followed; 1: the likeliest token each time
  double length_penalty = 0.6;  // alpha; 0: none
};

struct Hypothesis {
  std::vector<int64_t> tokens;  // without that of the end
  double score = 0;             // the sum of the tokens' log-probabilities over the penalty
};

// The best translation of each of B sentences, found by a beam search. In each step the 2 beam
// likeliest continuations of what is followed are looked at: those of the first `beam` that end the
// sentence are finished, and the first `beam` that do not are followed. A sentence is done when
// `beam` hypotheses are finished. A hypothesis of n tokens, its end among them, scores its
// log-probability over ((5 + n) / 6)^alpha (Wu et al. 2016, equation 14, without the coverage). It
// may have as many tokens as the source and kExtraTokens more (Vaswani et al. 2017, section 6.1),
// and no more than the model's positions; what does not end there is finished as it is.
//
// The model must be in evaluation. `end` is the token that ends sentences, and that the decoder
// begins with. `proceed` is asked before each step; none: it said no.
std::optional<std::vector<Hypothesis>> BeamSearch(Seq2Seq& model, const PaddedTokens& source,
                                                  int64_t end, const BeamOptions& options,
                                                  const std::function<bool()>& proceed = nullptr);

inline constexpr int64_t kExtraTokens = 50;

// The translations of sentences, each with its end, in their order, translated in batches of like
// lengths. `proceed` is asked before each token of a batch; none: it said no.
std::optional<std::vector<std::string>> Translate(Seq2Seq& model, const Tokenizer& tokenizer,
                                                  const std::vector<Sentence>& sentences,
                                                  const BeamOptions& options,
                                                  const std::function<bool()>& proceed = nullptr);

}  // namespace gnomon::models

#endif  // GNOMON_MODELS_BEAM_SEARCH_H_
