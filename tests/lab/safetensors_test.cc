#include "training/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "gnomon/attention.h"

namespace gnomon::lab {
namespace {

namespace fs = std::filesystem;

class SafeTensorsTest : public testing::Test {
 protected:
  SafeTensorsTest()
      : path_(fs::path(testing::TempDir()) /
              (std::string("gnomon_") +
               testing::UnitTest::GetInstance()->current_test_info()->name() + ".safetensors")) {}
  ~SafeTensorsTest() override { fs::remove(path_); }

  // Writes a file with this header, followed by `data` bytes of tensors.
  void Write(const std::string& header, size_t data) {
    const uint64_t length = header.size();
    std::string bytes(reinterpret_cast<const char*>(&length), 8);
    WriteBytes(bytes + header + std::string(data, '\1'));
  }

  void WriteBytes(const std::string& bytes) {
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << bytes;
  }

  std::string ReadBytes() {
    std::ifstream in(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  }

  std::string ErrorOfReading() {
    try {
      ReadSafeTensors(path_);
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  }

  void ExpectError(const std::string& header, size_t data, const std::string& part) {
    Write(header, data);
    const std::string message = ErrorOfReading();
    EXPECT_NE(message.find(part), std::string::npos) << header << "\n" << message;
    EXPECT_NE(message.find(path_.string()), std::string::npos) << message;
  }

  fs::path path_;
};

TEST_F(SafeTensorsTest, RoundTrip) {
  torch::manual_seed(0);
  SafeTensors written;
  written.metadata = {{"a key", "a \"value\" ü"}};
  for (const auto type : {torch::kDouble, torch::kFloat, torch::kHalf, torch::kBFloat16,
                          torch::kLong, torch::kInt, torch::kShort, torch::kChar, torch::kByte}) {
    written.tensors[c10::toString(type)] = (torch::randn({3, 5}) * 10).to(type);
  }
  written.tensors["bool"] = torch::randn({7}) > 0;
  written.tensors["scalar"] = torch::tensor(2.5);
  written.tensors["empty"] = torch::empty({4, 0, 3});
  written.tensors["strided"] = torch::randn({4, 6}).t();
  WriteSafeTensors(path_, written);
  const SafeTensors read = ReadSafeTensors(path_);
  EXPECT_EQ(read.metadata, written.metadata);
  ASSERT_EQ(read.tensors.size(), written.tensors.size());
  for (const auto& [name, tensor] : written.tensors) {
    ASSERT_TRUE(read.tensors.contains(name));
    EXPECT_EQ(read.tensors.at(name).scalar_type(), tensor.scalar_type());
    EXPECT_TRUE(torch::equal(read.tensors.at(name), tensor)) << name;
  }
  const std::string bytes = ReadBytes();
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  EXPECT_EQ(length % 8, 0u);
  EXPECT_EQ(bytes[8], '{');
}

TEST_F(SafeTensorsTest, ReadsAFileWrittenByHand) {
  Write(R"({"x":{"dtype":"U8","shape":[2,2],"data_offsets":[0,4]}} )", 4);
  const SafeTensors read = ReadSafeTensors(path_);
  EXPECT_TRUE(torch::equal(read.tensors.at("x"), torch::ones({2, 2}, torch::kByte)));
}

TEST_F(SafeTensorsTest, UnsignedNumbersGetASign) {
  Write(R"({"x":{"dtype":"U64","shape":[1],"data_offsets":[0,8]},)"
        R"("y":{"dtype":"U32","shape":[1],"data_offsets":[8,12]},)"
        R"("z":{"dtype":"U16","shape":[2],"data_offsets":[12,16]}})",
        16);
  const SafeTensors read = ReadSafeTensors(path_);
  EXPECT_TRUE(torch::equal(read.tensors.at("x"), torch::tensor({0x0101010101010101})));
  EXPECT_TRUE(torch::equal(read.tensors.at("y"), torch::tensor({0x01010101}, torch::kLong)));
  EXPECT_TRUE(torch::equal(read.tensors.at("z"), torch::tensor({257, 257}, torch::kInt)));
  // The largest number of each type, which would be negative if its top bit were read as a sign.
  const std::string header = R"({"y":{"dtype":"U32","shape":[1],"data_offsets":[0,4]},)"
                             R"("z":{"dtype":"U16","shape":[2],"data_offsets":[4,8]}})";
  const uint64_t length = header.size();
  WriteBytes(std::string(reinterpret_cast<const char*>(&length), 8) + header +
             std::string(8, '\xff'));
  const SafeTensors largest = ReadSafeTensors(path_);
  EXPECT_TRUE(torch::equal(largest.tensors.at("y"), torch::tensor({0xffffffffL})));
  EXPECT_TRUE(torch::equal(largest.tensors.at("z"), torch::tensor({65535, 65535}, torch::kInt)));
  const std::string beyond = R"({"x":{"dtype":"U64","shape":[1],"data_offsets":[0,8]}} )";
  const uint64_t size = beyond.size();
  WriteBytes(std::string(reinterpret_cast<const char*>(&size), 8) + beyond +
             std::string(8, '\xff'));
  EXPECT_NE(ErrorOfReading().find("'x' contains values above 2^63 - 1"), std::string::npos);
}

TEST_F(SafeTensorsTest, HostileHeaders) {
  const auto tensor = [](const std::string& dtype, const std::string& shape,
                         const std::string& offsets) {
    return R"({"x":{"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets +
           "}}";
  };
  ExpectError(
      tensor("\"F32\"", "[2]", "[0,8]"), 4,
      "it is truncated: the tensor 'x' occupies bytes 0 to 8, but the file contains 4 bytes");
  ExpectError(tensor("\"F32\"", "[2]", "[8,0]"), 8,
              "has data_offsets from 8 to 0; expected non-decreasing offsets");
  ExpectError(tensor("\"F32\"", "[3]", "[0,8]"), 8, "requires 12");
  ExpectError(tensor("\"F32\"", "[1]", "[4,8]"), 8, "do not belong to any tensor");
  ExpectError(tensor("\"F32\"", "[1]", "[0,4]"), 8, "the file contains 8");
  ExpectError(tensor("\"Q4\"", "[1]", "[0,4]"), 4, "unknown dtype \"Q4\"");
  ExpectError(tensor("7", "[1]", "[0,4]"), 4, "unknown dtype 7");
  ExpectError(tensor("\"F32\"", "[-1]", "[0,4]"), 4, "not a list of non-negative integers");
  ExpectError(tensor("\"F32\"", "3", "[0,4]"), 4, "not a list of non-negative integers");
  ExpectError(tensor("\"F32\"", "[1]", "[0]"), 4, "not two non-negative integers");
  ExpectError(tensor("\"F32\"", "[1]", "[0,4.5]"), 4, "not two non-negative integers");
  ExpectError(tensor("\"F32\"", "[4294967296,4294967296]", "[0,0]"), 0,
              "has a shape that is too large; expected at most 2^63 - 1 bytes");
  ExpectError(tensor("\"F32\"", "[0,9223372036854775807]", "[0,0]"), 0,
              "has a shape that is too large; expected at most 2^63 - 1 bytes");
  ExpectError(tensor("\"F32\"", "[18446744073709551615]", "[0,4]"), 4,
              "has a shape that is too large; expected at most 2^63 - 1 bytes");
  ExpectError(R"({"x":{"dtype":"F32","shape":[1]}})", 4, "lacks dtype, shape or data_offsets");
  ExpectError(R"({"x":[]})", 0, "lacks dtype, shape or data_offsets");
  ExpectError(R"({"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
              R"("y":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
              3, "overlap");
  ExpectError(R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
              R"("x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
              1, "'x' appears twice");
  ExpectError(R"({"__metadata__":{"a":1}})", 0, "the metadata value of 'a' is not a string");
  ExpectError(R"({"__metadata__":"a"})", 0, "not an object");
  ExpectError("[1, 2]", 0, "not a JSON object");
  ExpectError("{\"x\":", 0, "not a JSON object");
  ExpectError("\xff\xfe\xfd", 0, "not a JSON object");
}

TEST_F(SafeTensorsTest, TruncatedFiles) {
  WriteBytes("");
  EXPECT_NE(ErrorOfReading().find("it is empty"), std::string::npos);
  WriteBytes("1234567");
  EXPECT_NE(ErrorOfReading().find("it has 7 bytes; expected at least 8"), std::string::npos);
  WriteBytes(std::string("\x10\0\0\0\0\0\0\0{}", 10));
  EXPECT_NE(ErrorOfReading().find("truncated: its header has 16 bytes, but only 2 are present"),
            std::string::npos);
  WriteBytes(std::string(8, '\xff') + "{}");
  EXPECT_NE(ErrorOfReading().find("it has no header"), std::string::npos);
  fs::remove(path_);
  EXPECT_NE(ErrorOfReading().find("cannot read"), std::string::npos);
}

// All proper prefixes of a file must be rejected with an Error. Files with changed bytes must
// either be read or rejected with an Error.
TEST_F(SafeTensorsTest, DamagedFilesNeverCrash) {
  WriteSafeTensors(
      path_, {{{"a", torch::ones({3, 2})}, {"b", torch::ones({4}, torch::kByte)}}, {{"k", "v"}}});
  const std::string whole = ReadBytes();
  for (size_t size = 0; size < whole.size(); ++size) {
    WriteBytes(whole.substr(0, size));
    EXPECT_NE(ErrorOfReading(), "no error") << size;
  }
  std::mt19937 generator(1);
  for (int n = 0; n < 2000; ++n) {
    std::string damaged = whole;
    for (int change = 0; change < 3; ++change) {
      damaged[generator() % damaged.size()] = static_cast<char>(generator());
    }
    WriteBytes(damaged);
    ErrorOfReading();  // any exception other than Error fails the test
  }
}

TEST_F(SafeTensorsTest, UnwritablePlace) {
  EXPECT_THROW(WriteSafeTensors("/nonexistent/folder/file", {}), Error);
  EXPECT_THROW(WriteSafeTensors(path_, {{{"c", torch::ones({1}, torch::kComplexFloat)}}, {}}),
               Error);
}

}  // namespace
}  // namespace gnomon::lab
