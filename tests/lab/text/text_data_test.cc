#include "text/text_data.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <string>

#include "gnomon/attention.h"
#include "gnomon/sha256.h"

namespace gnomon::lab {
namespace {

namespace fs = std::filesystem;

class TextDataTest : public testing::Test {
 protected:
  TextDataTest()
      : folder_(fs::path(testing::TempDir()) /
                (std::string("gnomon_text_") +
                 testing::UnitTest::GetInstance()->current_test_info()->name())) {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  ~TextDataTest() override { fs::remove_all(folder_); }

  fs::path Write(const std::string& name, const std::string& bytes) {
    const fs::path path = folder_ / name;
    fs::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }

  std::string ErrorOf(const fs::path& path) {
    try {
      ReadText(path);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }

  fs::path folder_;
};

TEST_F(TextDataTest, LastTenthOfAFileIsForValidation) {
  std::string text;
  for (int n = 0; n < 105; ++n) text += static_cast<char>('!' + n % 90);
  const TextData data = ReadText(Write("a.txt", text));
  EXPECT_EQ(data.valid.size(), 10u);
  EXPECT_EQ(data.train + data.valid, text);
  EXPECT_EQ(data.files, 1);
}

TEST_F(TextDataTest, AByteOrderMarkIsNoText) {
  const TextData data = ReadText(Write("a.txt", "\xEF\xBB\xBFthe first word"));
  EXPECT_EQ(data.train + data.valid, "the first word");
  Write("parts/train.txt", "\xEF\xBB\xBFtrain\xEF\xBB\xBF");
  Write("parts/valid.txt", "valid");
  EXPECT_EQ(ReadText(folder_ / "parts").train, "train\xEF\xBB\xBF");
}

TEST_F(TextDataTest, FolderIsReadInTheOrderOfPathsWithoutBinariesAndHiddenFiles) {
  Write("b/inner.py", "BBBBBBBBBB");
  Write("a.txt", "AAAAAAAAAA");
  Write("c.txt", "CCCCCCCCCC");
  Write("binary.dat", std::string("x\0y", 3));
  Write(".git/config", "hidden");
  Write(".hidden", "hidden");
  const TextData data = ReadText(folder_);
  EXPECT_EQ(data.train + data.valid, "AAAAAAAAAABBBBBBBBBBCCCCCCCCCC");
  EXPECT_EQ(data.valid, "CCC");
  EXPECT_EQ(data.files, 3);
}

TEST_F(TextDataTest, NamedPartsAreTheParts) {
  Write("train/1.txt", "one ");
  Write("train/2.txt", "two ");
  Write("valid/1.txt", "three");
  Write("test/1.txt", "never read");
  const TextData folders = ReadText(folder_);
  EXPECT_EQ(folders.train, "one two ");
  EXPECT_EQ(folders.valid, "three");

  const fs::path other = folder_ / "test" / "nested";
  Write("test/nested/train.txt", "a");
  Write("test/nested/val.txt", "b");
  Write("test/nested/test.txt", "c");
  const TextData files = ReadText(other);
  EXPECT_EQ(files.train, "a");
  EXPECT_EQ(files.valid, "b");
}

TEST_F(TextDataTest, MistakesNameThePath) {
  EXPECT_NE(ErrorOf(folder_ / "absent").find("no such data file or folder"), std::string::npos);
  EXPECT_NE(ErrorOf(Write("empty.txt", "")).find("empty.txt is empty"), std::string::npos);
  fs::create_directories(folder_ / "bare");
  EXPECT_NE(ErrorOf(folder_ / "bare").find("contains no text"), std::string::npos);
  Write("two/train.txt", "a");
  Write("two/train/b.txt", "b");
  Write("two/valid.txt", "c");
  EXPECT_NE(ErrorOf(folder_ / "two").find("contains both"), std::string::npos);
}

TEST(Sha256Test, KnownDigests) {
  // The examples of FIPS 180-4, including the one with a million letters.
  const auto digest = [](const std::string& text) {
    Sha256 hash;
    for (size_t at = 0; at < text.size(); at += 77) hash.Update(text.substr(at, 77));
    return hash.Hex();
  };
  EXPECT_EQ(digest(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(digest("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(digest("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(digest(std::string(1000000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(TrainingStartsTest, DependOnSeedStepAndRowAlone) {
  const std::vector<int64_t> starts = TrainingStarts(1000, 64, 3, 17, 8);
  EXPECT_EQ(TrainingStarts(1000, 64, 3, 17, 8), starts);
  EXPECT_NE(TrainingStarts(1000, 64, 4, 17, 8), starts);
  EXPECT_NE(TrainingStarts(1000, 64, 3, 18, 8), starts);
  const std::vector<int64_t> fewer = TrainingStarts(1000, 64, 3, 17, 4);
  EXPECT_TRUE(std::equal(fewer.begin(), fewer.end(), starts.begin()));
}

TEST(TrainingStartsTest, ReachEveryWindowAndNoOther) {
  std::set<int64_t> seen;
  for (int64_t step = 0; step < 100; ++step) {
    for (const int64_t start : TrainingStarts(20, 10, 0, step, 8)) seen.insert(start);
  }
  EXPECT_EQ(*seen.begin(), 0);
  EXPECT_EQ(*seen.rbegin(), 9);
  EXPECT_EQ(seen.size(), 10u);
}

TEST(TrainingStreamTest, RowsReadTheirPartsInOrder) {
  constexpr int64_t kTokens = 103, kLength = 7, kBatch = 3;
  const int64_t segments = StreamSegments(kTokens, kLength, kBatch);
  EXPECT_EQ(segments, 4);
  std::set<int64_t> shifts;
  for (int64_t step = 0; step < 40 * segments; ++step) {
    const StreamStep stream = TrainingStream(kTokens, kLength, 5, step, kBatch);
    ASSERT_EQ(stream.starts.size(), 3u);
    EXPECT_EQ(stream.begins, step % segments == 0);
    EXPECT_EQ(stream.starts[1] - stream.starts[0], 32);
    EXPECT_EQ(stream.starts[2] - stream.starts[1], 32);
    // The token after the window is also read.
    EXPECT_LT(stream.starts[2] + kLength, kTokens);
    if (stream.begins) {
      shifts.insert(stream.starts[0]);
    } else {
      const StreamStep before = TrainingStream(kTokens, kLength, 5, step - 1, kBatch);
      EXPECT_EQ(stream.starts[0], before.starts[0] + kLength);
    }
  }
  EXPECT_EQ(shifts, (std::set<int64_t>{0, 1, 2, 3, 4, 5, 6}));
}

TEST(TrainingStreamTest, NeedsAWindowForEachRowAndOneMore) {
  EXPECT_EQ(StreamSegments(28, 7, 3), 1);
  EXPECT_EQ(StreamSegments(27, 7, 3), 0);
  EXPECT_EQ(StreamSegments(3, 7, 3), 0);
}

// The positions of the bytes that the windows predict: start + 1 to start + length.
std::multiset<int64_t> Predicted(int64_t bytes, int64_t length, int64_t longest, int64_t budget) {
  std::multiset<int64_t> all;
  for (const int64_t start : EvaluationStarts(bytes, length, longest, budget)) {
    for (int64_t n = 1; n <= length; ++n) all.insert(start + n);
  }
  return all;
}

TEST(EvaluationStartsTest, EveryLengthPredictsTheSameBytes) {
  const std::multiset<int64_t> at_512 = Predicted(10000, 512, 512, 4096);
  EXPECT_EQ(at_512.size(), 4096u);
  EXPECT_EQ(Predicted(10000, 128, 512, 4096), at_512);
  EXPECT_EQ(Predicted(10000, 256, 512, 4096), at_512);
  EXPECT_EQ(*at_512.begin(), 1);
  EXPECT_EQ(*at_512.rbegin(), 9999);
  EXPECT_EQ(std::set<int64_t>(at_512.begin(), at_512.end()).size(), at_512.size());
}

TEST(EvaluationStartsTest, ShortTextsGiveOneStretch) {
  EXPECT_EQ(EvaluationStarts(65, 64, 64, 1), std::vector<int64_t>{0});
  EXPECT_EQ(EvaluationStarts(65, 16, 64, 1000), (std::vector<int64_t>{0, 16, 32, 48}));
}

}  // namespace
}  // namespace gnomon::lab
