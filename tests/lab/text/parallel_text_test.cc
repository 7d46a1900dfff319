#include "text/parallel_text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "text/utf8.h"

namespace gnomon::lab {
namespace {

// Returns the source and target lengths of 103 sentence pairs.
std::pair<std::vector<int64_t>, std::vector<int64_t>> Lengths() {
  std::pair<std::vector<int64_t>, std::vector<int64_t>> lengths;
  for (int64_t n = 0; n < 103; ++n) {
    lengths.first.push_back(2 + n * 7 % 11);
    lengths.second.push_back(2 + n * 5 % 17);
  }
  return lengths;
}

TEST(SentenceBatchesTest, APassHasEachPairOnce) {
  const auto [source, target] = Lengths();
  SentenceBatches batches(source, target, /*seed=*/3, /*batch=*/10);
  std::set<int64_t> left_out;
  for (int64_t pass = 0; pass < 20; ++pass) {
    std::set<int64_t> seen;
    for (int64_t step = 10 * pass; step < 10 * (pass + 1); ++step) {
      const std::vector<int64_t> pairs = batches.Pairs(step);
      ASSERT_EQ(pairs.size(), 10u);
      seen.insert(pairs.begin(), pairs.end());
    }
    EXPECT_EQ(seen.size(), 100u);
    for (int64_t pair = 0; pair < 103; ++pair) {
      if (!seen.contains(pair)) left_out.insert(pair);
    }
  }
  // Different passes leave out different pairs.
  EXPECT_GT(left_out.size(), 3u);
}

TEST(SentenceBatchesTest, ABatchIsOfLikeLengths) {
  const auto [source, target] = Lengths();
  SentenceBatches batches(source, target, /*seed=*/3, /*batch=*/10);
  int64_t longest = 0;
  int64_t total = 0;
  bool is_in_order = true;
  int64_t before = 0;
  for (int64_t step = 0; step < 10; ++step) {
    int64_t most = 0;
    for (const int64_t pair : batches.Pairs(step)) {
      most = std::max(most, target[pair]);
      total += target[pair];
    }
    longest += 10 * most;
    is_in_order = is_in_order && most >= before;
    before = most;
  }
  // There are 17 lengths in 10 batches, so a batch has at most two or three different lengths.
  EXPECT_LT(longest, total + 10 * 10 * 2);
  EXPECT_FALSE(is_in_order);
}

TEST(SentenceBatchesTest, AreAFunctionOfTheStepAlone) {
  const auto [source, target] = Lengths();
  SentenceBatches forward(source, target, /*seed=*/5, /*batch=*/4);
  SentenceBatches backward(source, target, /*seed=*/5, /*batch=*/4);
  SentenceBatches other(source, target, /*seed=*/6, /*batch=*/4);
  std::vector<std::vector<int64_t>> there;
  for (int64_t step = 0; step < 60; ++step) there.push_back(forward.Pairs(step));
  int64_t same = 0;
  for (int64_t step = 59; step >= 0; --step) {
    EXPECT_EQ(backward.Pairs(step), there[step]);
    same += other.Pairs(step) == there[step] ? 1 : 0;
  }
  EXPECT_LT(same, 3);
  // Each pass has a different order.
  EXPECT_NE(there[0], there[25]);
}

TEST(SentenceTest, IsItsLineAndAnEnd) {
  const TokenizerPtr words = BuildTokenizer({.kind = "words"}, "a b c\n");
  const int64_t end = EndOfSentence(*words);
  EXPECT_EQ(EncodeSentence(*words, " b  a").size(), 3u);
  EXPECT_EQ(EncodeSentence(*words, "b a").back(), end);
  EXPECT_EQ(DecodeSentence(*words, {2, 3, 4}), "a b c");
  const TokenizerPtr bytes = BuildTokenizer({.kind = "bytes"}, "");
  EXPECT_EQ(EndOfSentence(*bytes), '\n');
  // The output of a byte model need not be valid UTF-8.
  EXPECT_EQ(DecodeSentence(*bytes, {'a', 0xc3, 0xa9, 0xc3, 'b'}),
            "a\xc3\xa9\xef\xbf\xbd"
            "b");
}

TEST(ParallelTextTest, SrcAndTgtPrecedeSourceAndTarget) {
  namespace fs = std::filesystem;
  const fs::path folder = fs::path(testing::TempDir()) / "parallel_text_test";
  fs::remove_all(folder);
  fs::create_directory(folder);
  for (const char* language : {"src", "tgt", "source", "target"}) {
    std::ofstream(folder / (std::string("train.") + language)) << "a b\n";
    std::ofstream(folder / (std::string("valid.") + language)) << "b\n";
  }
  const ParallelText text = ReadParallelText(folder, "", "");
  EXPECT_EQ(text.source_language, "src");
  EXPECT_EQ(text.target_language, "tgt");
  fs::remove_all(folder);
}

TEST(Utf8Test, IsThatOfTheStandard) {
  for (const char* text : {"", "a", "\xc3\xa9", "\xe2\x82\xac", "\xf0\x9f\x99\x82", "\xed\x9f\xbf",
                           "\xee\x80\x80", "\xf4\x8f\xbf\xbf"}) {
    EXPECT_TRUE(IsUtf8(text)) << text;
    EXPECT_EQ(ToUtf8(text), text);
  }
  for (const char* text : {"\x80", "\xc3", "\xc0\xaf", "\xc1\xbf", "\xe0\x80\xaf", "\xed\xa0\x80",
                           "\xf0\x80\x80\xaf", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff",
                           "\xe2\x82", "\xe2\x28\xa1", "\xf0\x9f\x99"}) {
    EXPECT_FALSE(IsUtf8(text)) << text;
    EXPECT_TRUE(IsUtf8(ToUtf8(text)));
    EXPECT_FALSE(IsUtf8(std::string("before ") + text));
  }
  EXPECT_EQ(CodePointAt("\xf0\x9f\x99\x82", 0).value, 0x1f642u);
  EXPECT_EQ(CodePointAt("x\xe2\x82\xac", 1).value, 0x20acu);
}

}  // namespace
}  // namespace gnomon::lab
