#include "models/beam_search.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <utility>

namespace gnomon::lab {
namespace {

// Maximum numbers of logits and of sentences in a batch.
constexpr int64_t kMostLogits = int64_t{1} << 22;
constexpr int64_t kMostSentences = 64;

// A sentence being translated.
struct Search {
  int64_t sentence = 0;
  int64_t limit = 0;                              // maximum tokens, including the end
  std::vector<std::vector<int64_t>> followed;     // tokens of each hypothesis so far
  std::optional<Hypothesis> best = std::nullopt;  // best finished hypothesis
  int64_t finished = 0;

  void Finish(std::vector<int64_t> tokens, double score) {
    ++finished;
    if (!best || score > best->score) best = {std::move(tokens), score};
  }
};

double LengthPenalty(int64_t tokens, double alpha) {
  return std::pow((5 + static_cast<double>(tokens)) / 6, alpha);
}

// The input of the next step: for each hypothesis, its row in the previous step, its last token and
// its score.
struct Next {
  std::vector<int64_t> rows;
  std::vector<int64_t> tokens;
  std::vector<float> scores;
};

// Adds the most likely continuations of one sentence to `search` and `next`. They are given, best
// first, by `values` (scores) and `places` (hypothesis * vocabulary + token). `first` is the row of
// the sentence's first hypothesis.
void Advance(const torch::Tensor& values, const torch::Tensor& places, int64_t vocabulary,
             int64_t end, int64_t length, int64_t first, const BeamOptions& options, Search* search,
             Next* next) {
  const auto value = values.accessor<float, 1>();
  const auto place = places.accessor<int64_t, 1>();
  std::vector<std::vector<int64_t>> followed;
  Next own;
  for (int64_t rank = 0; rank < values.size(0); ++rank) {
    const int64_t hypothesis = place[rank] / vocabulary;
    const int64_t token = place[rank] % vocabulary;
    if (token == end || length == search->limit) {
      if (rank >= options.beam) continue;
      std::vector<int64_t> tokens = search->followed[hypothesis];
      if (token != end) tokens.push_back(token);
      search->Finish(std::move(tokens),
                     value[rank] / LengthPenalty(length, options.length_penalty));
    } else if (std::ssize(followed) < options.beam) {
      followed.push_back(search->followed[hypothesis]);
      followed.back().push_back(token);
      own.rows.push_back(first + hypothesis);
      own.tokens.push_back(token);
      own.scores.push_back(value[rank]);
    }
  }
  search->followed = std::move(followed);
  if (search->finished >= options.beam || search->followed.empty()) {
    search->followed.clear();
    return;
  }
  next->rows.insert(next->rows.end(), own.rows.begin(), own.rows.end());
  next->tokens.insert(next->tokens.end(), own.tokens.begin(), own.tokens.end());
  next->scores.insert(next->scores.end(), own.scores.begin(), own.scores.end());
}

}  // namespace

std::optional<std::vector<Hypothesis>> BeamSearch(Seq2Seq& model, const PaddedTokens& source,
                                                  int64_t end, const BeamOptions& options,
                                                  const std::function<bool()>& proceed) {
  const torch::NoGradGuard no_grad;
  const int64_t vocabulary = model->options().vocabulary;
  torch::Tensor encoded = model->encode(source);
  torch::Tensor lengths = source.lengths;
  Seq2SeqCache cache(model->options().depth);
  std::vector<Hypothesis> translations(lengths.size(0));
  std::vector<Search> searches;
  for (int64_t n = 0; n < lengths.size(0); ++n) {
    const int64_t limit = lengths[n].item<int64_t>() + kExtraTokens;
    searches.push_back({.sentence = n,
                        .limit = std::min(limit, model->max_length().value_or(limit)),
                        .followed = std::vector<std::vector<int64_t>>(1)});
  }
  torch::Tensor tokens = torch::full({lengths.size(0), 1}, end, torch::kLong);
  torch::Tensor scores = torch::zeros({lengths.size(0), 1});
  for (int64_t length = 1; !searches.empty(); ++length) {
    if (proceed != nullptr && !proceed()) return std::nullopt;
    // The number of hypotheses, which is the same for all sentences: one at first, then up to
    // `beam`.
    const auto count = static_cast<int64_t>(searches.size());
    const int64_t followed = std::ssize(searches[0].followed);
    const torch::Tensor logits = model->decode(tokens, encoded, lengths, &cache).select(1, 0);
    const torch::Tensor before = scores.view({-1, 1}).to(logits.device());
    const torch::Tensor sums =
        (torch::log_softmax(logits, -1) + before).view({count, followed * vocabulary});
    const int64_t likeliest = std::min(2 * options.beam, followed * vocabulary);
    const auto likely = sums.topk(likeliest, /*dim=*/1);
    const torch::Tensor values = std::get<0>(likely).cpu();
    const torch::Tensor places = std::get<1>(likely).cpu();
    Next next;
    for (int64_t n = 0; n < count; ++n) {
      Advance(values[n], places[n], vocabulary, end, length, n * followed, options, &searches[n],
              &next);
    }
    for (Search& search : searches) {
      if (search.followed.empty()) translations[search.sentence] = *std::move(search.best);
    }
    std::erase_if(searches, [](const Search& search) { return search.followed.empty(); });
    if (searches.empty()) break;
    const torch::Tensor selected = torch::tensor(next.rows, torch::kLong);
    // All hypotheses of a sentence have the same source.
    const bool is_same_source =
        std::ssize(searches) == count && std::ssize(searches[0].followed) == followed;
    const torch::Tensor rows = selected.to(encoded.device());
    cache.Select(rows, is_same_source);
    if (!is_same_source) {
      encoded = encoded.index_select(0, rows);
      lengths = lengths.index_select(0, selected);
    }
    tokens = torch::tensor(next.tokens, torch::kLong).unsqueeze(1);
    scores = torch::tensor(next.scores);
  }
  return translations;
}

std::optional<std::vector<std::string>> Translate(Seq2Seq& model, const Tokenizer& tokenizer,
                                                  const std::vector<Sentence>& sentences,
                                                  const BeamOptions& options,
                                                  const std::function<bool()>& proceed) {
  model->eval();
  const int64_t end = EndOfSentence(tokenizer);
  const int64_t rows = kMostLogits / model->options().vocabulary / options.beam;
  const int64_t batch = std::clamp<int64_t>(rows, 1, kMostSentences);
  std::vector<int64_t> order(sentences.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return sentences[a].size() < sentences[b].size(); });
  std::vector<std::string> translations(sentences.size());
  for (int64_t at = 0; at < std::ssize(order); at += batch) {
    const int64_t count = std::min(batch, std::ssize(order) - at);
    std::vector<Sentence> together;
    for (int64_t n = 0; n < count; ++n) together.push_back(sentences[order[at + n]]);
    const std::optional<std::vector<Hypothesis>> best =
        BeamSearch(model, PadTokens(together, end), end, options, proceed);
    if (!best) return std::nullopt;
    for (int64_t n = 0; n < count; ++n) {
      translations[order[at + n]] = DecodeSentence(tokenizer, (*best)[n].tokens);
    }
  }
  return translations;
}

}  // namespace gnomon::lab
