// Reads a JSON list of corpora, {"hypotheses": [...], "references": [...]}, from standard input and
// writes the list of their BLEU scores.
#include <cstddef>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

#include "text/bleu.h"

int main() {
  using gnomon::lab::Bleu;
  using gnomon::lab::BleuScore;
  nlohmann::json scores = nlohmann::json::array();
  for (const nlohmann::json& corpus : nlohmann::json::parse(std::cin)) {
    Bleu bleu;
    for (size_t n = 0; n < corpus["references"].size(); ++n) {
      bleu.Add(corpus["hypotheses"][n].get<std::string>(),
               corpus["references"][n].get<std::string>());
    }
    const BleuScore score = bleu.Score();
    scores.push_back({{"score", score.score},
                      {"brevity_penalty", score.brevity_penalty},
                      {"precisions", score.precisions}});
  }
  std::cout << scores;
}
