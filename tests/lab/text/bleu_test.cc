// Edge cases of BLEU. tests/python/test_task_translation.py compares scores with sacrebleu's.
#include "text/bleu.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace gnomon::lab {
namespace {

using ::testing::ElementsAre;

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
}  // namespace gnomon::lab
