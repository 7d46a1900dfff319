#include "text/tokens.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

#include "gnomon/attention.h"

namespace gnomon::lab {
namespace {

namespace fs = std::filesystem;

std::vector<int64_t> Ids(const TokenText& text) {
  std::vector<int64_t> ids;
  for (int64_t n = 0; n < text.size(); ++n) ids.push_back(text[n]);
  return ids;
}

// The concatenated text of the tokens.
std::string Spell(const Tokenizer& tokenizer, const TokenText& text) {
  std::string spelled;
  std::optional<int64_t> before;
  for (int64_t n = 0; n < text.size(); ++n) {
    spelled += tokenizer.Text(text[n], before);
    before = text[n];
  }
  return spelled;
}

std::string ErrorOf(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(BytesTest, EveryByteIsItself) {
  const TokenizerPtr tokenizer = BuildTokenizer({}, "");
  EXPECT_EQ(tokenizer->size(), 256);
  EXPECT_EQ(tokenizer->unknown(), std::nullopt);
  const std::string text = {'a', '\0', '\xff'};
  const TokenText tokens = tokenizer->Encode(text);
  EXPECT_EQ(Ids(tokens), (std::vector<int64_t>{97, 0, 255}));
  EXPECT_EQ(tokens.CountBytes(1, 3), 2);
  EXPECT_EQ(Spell(*tokenizer, tokens), text);
  EXPECT_EQ(TokensOfBytes(tokens, 2), 2);
  EXPECT_EQ(ReadTokenizer("bytes", "")->size(), 256);
}

TEST(WordsTest, AreSplitAtSpacesWithAnEndOfEachLine) {
  const std::string text = " b a  b\n\nc\tb a\r\n";
  const TokenizerPtr tokenizer = BuildTokenizer({"words"}, text);
  // <unk>, <eos>, then b (3 times), a (2), c.
  EXPECT_EQ(tokenizer->vocabulary(), "<unk>\n<eos>\nb\na\nc\n");
  const TokenText tokens = tokenizer->Encode(text);
  EXPECT_EQ(Ids(tokens), (std::vector<int64_t>{2, 3, 2, 1, 1, 4, 2, 3, 1}));
  EXPECT_EQ(Spell(*tokenizer, tokens), "b a b\n\nc b a\n");
  // Every byte belongs to one token: a word includes the preceding spaces.
  const std::vector<int64_t> bytes = {2, 2, 3, 1, 1, 1, 2, 2, 2};
  for (int64_t n = 0; n < tokens.size(); ++n) EXPECT_EQ(tokens.CountBytes(n, n + 1), bytes[n]) << n;
  EXPECT_EQ(tokens.CountBytes(0, tokens.size()), static_cast<int64_t>(text.size()));
}

TEST(WordsTest, OthersAreUnknownAndALastLineNeedsNoEnd) {
  const TokenizerPtr tokenizer = BuildTokenizer({"words"}, "the cat <unk> the\n");
  const TokenText tokens = tokenizer->Encode("the dog\nsat on  ");
  EXPECT_EQ(Ids(tokens), (std::vector<int64_t>{2, 0, 1, 0, 0}));
  EXPECT_EQ(tokens.Count(*tokenizer->unknown()), 3);
  EXPECT_EQ(tokens.CountBytes(0, 5), 14);  // trailing spaces belong to no token
  EXPECT_EQ(Spell(*tokenizer, tokens), "the <unk>\n<unk> <unk>");
  EXPECT_EQ(tokenizer->Encode(" \t ").size(), 0);
}

TEST(WordsTest, AVocabularyKeepsTheMostFrequent) {
  const TokenizerPtr tokenizer = BuildTokenizer({"words", 4}, "d c b a b a\n");
  EXPECT_EQ(tokenizer->vocabulary(), "<unk>\n<eos>\nb\na\n");
  EXPECT_EQ(Ids(tokenizer->Encode("a b c")), (std::vector<int64_t>{3, 2, 0}));
}

TEST(WordsTest, AVocabularyReadsBackAndDamagedOnesAreErrors) {
  const std::string text = "one two\nthree\n";
  const TokenizerPtr tokenizer = BuildTokenizer({"words"}, text);
  const TokenizerPtr again = ReadTokenizer("words", tokenizer->vocabulary());
  EXPECT_EQ(Ids(again->Encode(text)), Ids(tokenizer->Encode(text)));
  const auto error = [](const std::string& file) {
    return ErrorOf([&] { ReadTokenizer("words", file); });
  };
  EXPECT_EQ(error("<unk>\n<eos>\na\n"), "no error");
  EXPECT_NE(error("").find("does not begin with"), std::string::npos);
  EXPECT_NE(error("<unk>\n<eos>\n").find("does not begin with"), std::string::npos);
  EXPECT_NE(error("<eos>\n<unk>\na\n").find("does not begin with"), std::string::npos);
  EXPECT_NE(error("<unk>\n<eos>\na\n\n").find("line 4 is not a single word"), std::string::npos);
  EXPECT_NE(error("<unk>\n<eos>\na b\n").find("line 3 is not a single word"), std::string::npos);
  EXPECT_NE(error("<unk>\n<eos>\na\na\n").find("line 4 appears twice"), std::string::npos);
  EXPECT_NE(error("<unk>\n<eos>\na").find("line 3 does not end with a line break"),
            std::string::npos);
}

TEST(WordsTest, WikiText2HasItsPublishedCounts) {
  const fs::path folder = fs::path(GNOMON_SOURCE_DIR) / "../shared/data/wikitext-2";
  if (!fs::exists(folder)) GTEST_SKIP() << "there is no ../shared/data/wikitext-2";
  const auto read = [&](const char* name) {
    std::ifstream in(folder / name, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  const std::string train = read("train.txt");
  const TokenizerPtr tokenizer = BuildTokenizer({"words"}, train);
  EXPECT_EQ(tokenizer->size(), 33278);
  EXPECT_EQ(tokenizer->Encode(train).size(), 2088628);
  EXPECT_EQ(tokenizer->Encode(read("valid.txt")).size(), 217646);
  EXPECT_EQ(tokenizer->Encode(read("test.txt")).size(), 245569);
}

TEST(TokenOptionsTest, MistakesAreErrors) {
  const auto error = [](const TokenOptions& options) {
    return ErrorOf([&] { BuildTokenizer(options, "a"); });
  };
  EXPECT_NE(error({"letters"}).find("'letters'; expected one of bytes, words, subwords"),
            std::string::npos);
  EXPECT_NE(error({"bytes", 100}).find("applies only to --tokens words"), std::string::npos);
  EXPECT_NE(error({"words", 2}).find("is 2; expected 3 to"), std::string::npos);
  EXPECT_NE(error({"words", -1}).find("is -1"), std::string::npos);
  EXPECT_NE(error({"subwords", 100}).find("is 100; expected 258 to"), std::string::npos);
  EXPECT_NE(ErrorOf([] { BuildTokenizer({"words"}, " \n"); }).find("contains no words"),
            std::string::npos);
  EXPECT_NE(ErrorOf([] { ReadTokenizer("bytes", "a"); }).find("byte tokens have none"),
            std::string::npos);
}

// If the program was built without SentencePiece, the error says what to install.
class SubwordsTest : public testing::Test {
 protected:
  void SetUp() override {
    for (int n = 0; n < 300; ++n) {
      text_ += "  the quick brown fox " + std::to_string(n) + " jumps over the lazy dog\n\n";
    }
    try {
      tokenizer_ = BuildTokenizer({"subwords", 350}, text_);
    } catch (const Error& error) {
      ASSERT_NE(std::string(error.what()).find("libsentencepiece-dev"), std::string::npos)
          << error.what();
      GTEST_SKIP() << error.what();
    }
  }

  std::string text_;
  TokenizerPtr tokenizer_;
};

TEST_F(SubwordsTest, KeepEveryByte) {
  EXPECT_EQ(tokenizer_->size(), 350);
  EXPECT_EQ(tokenizer_->unknown(), std::nullopt);
  for (const std::string& text :
       {text_, std::string(" leading, double  and trailing  \n"), std::string("no end of line"),
        std::string("\n\n \n"),
        std::string("caf\xc3\xa9 \xe6\x97\xa5\xe6\x9c\xac \xf0\x9f\xa6\x8a"),
        std::string("tab\tand\rreturn")}) {
    const TokenText tokens = tokenizer_->Encode(text);
    EXPECT_EQ(Spell(*tokenizer_, tokens), text);
    for (int64_t n = 0; n < tokens.size(); ++n) {
      const auto size = static_cast<int64_t>(tokenizer_->Text(tokens[n], std::nullopt).size());
      EXPECT_EQ(tokens.CountBytes(n, n + 1), size) << text << " " << n;
    }
  }
  EXPECT_LT(tokenizer_->Encode(text_).size(), static_cast<int64_t>(text_.size() / 2));
}

TEST_F(SubwordsTest, CountTheBytesOfWhatCannotBeSpelled) {
  // These texts contain SentencePiece's symbol for a space, and invalid UTF-8.
  for (const std::string& text :
       {std::string("a\xe2\x96\x81 b\nfox\n"), std::string("a\xff\xfe b\nfox\n")}) {
    const TokenText tokens = tokenizer_->Encode(text);
    EXPECT_EQ(tokens.CountBytes(0, tokens.size()), static_cast<int64_t>(text.size()));
    for (int64_t n = 0; n < tokens.size(); ++n) EXPECT_GE(tokens.CountBytes(n, n + 1), 0);
  }
}

TEST_F(SubwordsTest, AreTheSameEachTimeAndReadBack) {
  EXPECT_EQ(BuildTokenizer({"subwords", 350}, text_)->vocabulary(), tokenizer_->vocabulary());
  const TokenizerPtr again = ReadTokenizer("subwords", tokenizer_->vocabulary());
  EXPECT_EQ(Ids(again->Encode(text_)), Ids(tokenizer_->Encode(text_)));
}

TEST_F(SubwordsTest, WrongVocabulariesAreErrors) {
  for (const std::string& file :
       {std::string(), std::string("not a model"), tokenizer_->vocabulary().substr(0, 100)}) {
    EXPECT_NE(ErrorOf([&] { ReadTokenizer("subwords", file); }).find("SentencePiece"),
              std::string::npos);
  }
  const std::string message = ErrorOf([&] { BuildTokenizer({"subwords", 50000}, text_); });
  EXPECT_NE(message.find("SentencePiece training failed"), std::string::npos) << message;
}

}  // namespace
}  // namespace gnomon::lab
