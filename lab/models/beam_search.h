// Beam search for the most likely translations of an encoder-decoder model.
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

namespace gnomon::lab {

struct BeamOptions {
  int64_t beam = 4;             // number of hypotheses; 1 means greedy decoding
  double length_penalty = 0.6;  // alpha; 0 means no penalty
};

struct Hypothesis {
  std::vector<int64_t> tokens;  // without the end token
  double score = 0;             // sum of log-probabilities / penalty
};

// Returns the best translation of each of B sentences, found by beam search. Each step considers
// the 2 * beam most likely continuations of the current hypotheses. Those among the first `beam`
// that end the sentence become finished hypotheses; the first `beam` that do not end it become the
// current hypotheses of the next step. The search for a sentence stops when `beam` hypotheses are
// finished. The score of a hypothesis with n tokens, including the end, is its log-probability
// divided by ((5 + n) / 6)^alpha (Wu et al. 2016, equation 14, without coverage). A hypothesis has
// at most kExtraTokens more tokens than the source (Vaswani et al. 2017, section 6.1), and at most
// as many as the model has positions; it is finished when it reaches this limit.
//
// The model must be in evaluation mode. `end` is the token that ends sentences and starts the
// decoder. `proceed` is called before each step; the result is empty if it returned false.
std::optional<std::vector<Hypothesis>> BeamSearch(Seq2Seq& model, const PaddedTokens& source,
                                                  int64_t end, const BeamOptions& options,
                                                  const std::function<bool()>& proceed = nullptr);

inline constexpr int64_t kExtraTokens = 50;

// Translates sentences (each including its end token) in batches of similar lengths, and returns
// the translations in the order of the sentences. `proceed` is called before each token of a batch;
// the result is empty if it returned false.
std::optional<std::vector<std::string>> Translate(Seq2Seq& model, const Tokenizer& tokenizer,
                                                  const std::vector<Sentence>& sentences,
                                                  const BeamOptions& options,
                                                  const std::function<bool()>& proceed = nullptr);

}  // namespace gnomon::lab

#endif  // GNOMON_MODELS_BEAM_SEARCH_H_
