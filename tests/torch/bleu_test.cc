// BLEU against what sacrebleu made of the same lines, bleu_cases.json; that the file is what
// sacrebleu makes of them is tested in tests/python/test_task_translation.py, which writes it.
#include "text/bleu.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace gnomon::models {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;

TEST(BleuTest, IsThatOfSacrebleu) {
  std::ifstream in(std::filesystem::path(GNOMON_SOURCE_DIR) / "tests/torch/bleu_cases.json");
  const json cases = json::parse(in);
  ASSERT_GE(cases.size(), 300u);
  int64_t positive = 0;
  for (const json& one : cases) {
    Bleu bleu;
    for (size_t n = 0; n < one["references"].size(); ++n) {
      bleu.Add(one["hypotheses"][n].get<std::string>(), one["references"][n].get<std::string>());
    }
    const BleuScore score = bleu.Score();
    EXPECT_NEAR(score.score, one["score"], 1e-9) << one;
    EXPECT_NEAR(score.brevity_penalty, one["brevity_penalty"], 1e-12) << one;
    for (size_t n = 0; n < kBleuOrder; ++n) {
      EXPECT_NEAR(score.precisions[n], one["precisions"][n], 1e-9) << one;
    }
    positive += score.score > 0 ? 1 : 0;
  }
  EXPECT_GE(positive, 100);
}

TEST(BleuTest, SplitsAsMteval13a) {
  EXPECT_THAT(Tokenize13a("It's 1,000.5 km, or so."),
              ElementsAre("It's", "1,000.5", "km", ",", "or", "so", "."));
  EXPECT_THAT(Tokenize13a("a well-known 5-year plan&quot;"),
              ElementsAre("a", "well-known", "5", "-", "year", "plan", "\""));
  EXPECT_THAT(Tokenize13a(" \xe3\x80\x80 "), ElementsAre());
}

TEST(BleuTest, OfNothingIsZero) {
  EXPECT_EQ(Bleu().Score().score, 0);
  Bleu bleu;
  bleu.Add("", "a reference");
  EXPECT_EQ(bleu.Score().score, 0);
  EXPECT_EQ(bleu.Score().brevity_penalty, 0);
}

}  // namespace
}  // namespace gnomon::models
