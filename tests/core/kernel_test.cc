// Compares the fused kernels of every instruction set with the double-precision reference.
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "core/random_problem.h"
#include "gnomon/attention.h"
#include "gtest/gtest.h"

namespace gnomon::testing {
namespace {

class PairFunctionTest : public ::testing::TestWithParam<const PairFunction*> {
 protected:
  const PairFunction& function() const { return *GetParam(); }
};

INSTANTIATE_TEST_SUITE_P(All, PairFunctionTest, ::testing::ValuesIn(PairFunctions()),
                         [](const auto& test) { return std::string(test.param->name); });

// Each pair function is tested with all column counts, lengths and kinds of masks, but not with all
// their combinations.
struct KernelCase {
  const char* name;
  ProblemOptions options;
};

void PrintTo(const KernelCase& c, std::ostream* out) { *out << c.options; }

std::vector<int32_t> Modulo(std::vector<int32_t> segments, int32_t divisor) {
  for (int32_t& segment : segments) segment %= divisor;
  return segments;
}

std::vector<KernelCase> AccuracyCases() {
  constexpr auto kShared = ProblemOptions::kSharedBias;
  constexpr auto kEach = ProblemOptions::kBiasForEachBatch;
  return {
      {"OneOfEach", {.shape = {1, 1, 1, 1, 1, 1, 1}}},
      {"Odd", {.shape = {2, 3, 3, 47, 49, 3, 17}, .padded = true}},
      {"Causal", {.shape = {1, 2, 2, 257, 257, 64, 64}, .right = 0}},
      {"CausalBiasGqa",
       {.shape = {2, 4, 2, 49, 49, 17, 3}, .right = 0, .bias = kShared, .padded = true}},
      {"Window", {.shape = {1, 2, 1, 257, 257, 3, 80}, .left = 30, .right = 5, .bias = kShared}},
      {"WindowOneSide", {.shape = {2, 2, 2, 49, 257, 80, 1}, .left = 100, .query_offset = 208}},
      {"WindowAhead", {.shape = {1, 2, 2, 49, 257, 1, 3}, .left = -2, .right = 60}},
      {"LengthsAndStarts",
       {.shape = {4, 2, 1, 47, 257, 17, 17},
        .key_starts = {0, 3, 70, 200},
        .key_lengths = {257, 65, 0, 100},
        .bias = kEach}},
      {"CausalLengthsDecode",
       {.shape = {2, 6, 2, 1, 257, 64, 64},
        .right = 0,
        .key_starts = {5, 0},
        .key_lengths = {257, 200},
        .query_offset = 256}},
      {"NegativeOffset",
       {.shape = {2, 2, 1, 257, 47, 3, 3}, .right = 0, .query_offset = -50, .bias = kShared}},
      {"BeyondTheKeys",
       {.shape = {1, 1, 1, 49, 47, 17, 80}, .left = 20, .query_offset = 40, .padded = true}},
      {"Wide", {.shape = {1, 2, 1, 49, 47, 129, 512}, .bias = kEach, .padded = true}},
      {"WideCausal", {.shape = {1, 1, 1, 47, 257, 512, 129}, .right = 0, .query_offset = 210}},
      {"OneQuery", {.shape = {3, 1, 1, 1, 49, 80, 64}, .bias = kEach}},
      {"OneKey", {.shape = {1, 4, 2, 257, 1, 64, 80}, .left = 100}},
      {"NoKeys", {.shape = {2, 2, 1, 47, 0, 17, 3}, .bias = kShared}},
      {"NoQueries", {.shape = {2, 2, 1, 0, 49, 3, 17}, .bias = kShared}},
      {"NoBatch", {.shape = {0, 2, 2, 47, 49, 64, 17}, .bias = kShared}},
      {"NoHeads", {.shape = {2, 0, 0, 47, 49, 64, 17}}},
      {"Documents",
       {.shape = {2, 2, 1, 700, 700, 17, 17},
        .right = 0,
        .query_segments = Documents(2, 700, 130),
        .key_segments = Documents(2, 700, 130),
        .bias = kShared}},
      // Segment numbers recur, and some queries belong to a segment without keys.
      {"MixedSegments",
       {.shape = {2, 4, 2, 97, 300, 17, 3},
        .left = 200,
        .query_offset = 150,
        .query_segments = Modulo(Documents(2, 97, 5, -1), 4),
        .key_segments = Modulo(Documents(2, 300, 7), 3),
        .padded = true}},
      {"SegmentsAndLengths",
       {.shape = {2, 2, 2, 49, 257, 3, 17},
        .key_starts = {0, 70},
        .key_lengths = {150, 257},
        .query_segments = Documents(2, 49, 10),
        .key_segments = Documents(2, 257, 52),
        .bias = kEach}},
      {"OffsetsOfBatches",
       {.shape = {3, 2, 1, 49, 257, 17, 17},
        .left = 90,
        .right = 0,
        .query_offsets = {0, 208, -30},
        .bias = kEach}},
      {"Chunks",
       {.shape = {2, 2, 1, 300, 300, 17, 17},
        .right = 0,
        .chunks = {70, 1, 0},
        .bias = kShared,
        .padded = true}},
      {"ChunksAhead",
       {.shape = {2, 4, 2, 97, 300, 3, 17},
        .left = 100,
        .chunks = {33, 2, 1},
        .key_starts = {0, 70},
        .query_offsets = {150, -40}}},
      {"NoValueColumns", {.shape = {1, 2, 2, 47, 49, 17, 0}, .right = 0}},
      {"KeyBiasWithBase",
       {.shape = {2, 4, 2, 97, 300, 17, 17},
        .right = 203,
        .key_bias = true,
        .key_bias_base = true}},
      {"Temperature", {.shape = {2, 4, 2, 130, 150, 17, 17}, .right = 0, .temperature = true}},
      {"TemperatureOfBiases",
       {.shape = {2, 4, 2, 130, 150, 17, 17},
        .bias = kEach,
        .key_bias = true,
        .key_bias_base = true,
        .temperature = true,
        .pair_bias = {true, false, true},
        .pair_mask = {true, true, false}}},
      {"Softcap", {.shape = {2, 4, 2, 130, 150, 17, 17}, .right = 0, .softcap = 1.5}},
      {"SoftcapOfBiases",
       {.shape = {2, 4, 2, 97, 300, 17, 17},
        .right = 203,
        .bias = kEach,
        .key_bias = true,
        .temperature = true,
        .softcap = 2,
        .pair_bias = {true, false, true},
        .pair_mask = {true, true, false}}},
      {"SoftcapFewRows",
       {.shape = {2, 6, 2, 2, 1100, 17, 3}, .bias = kShared, .softcap = 1, .dropout = 0.3}},
      {"TemperatureDecode",
       {.shape = {2, 6, 2, 2, 1100, 17, 3}, .bias = kShared, .temperature = true}},
      {"PairBias",
       {.shape = {2, 4, 2, 97, 300, 17, 3}, .right = 150, .pair_bias = {true, false, false}}},
      {"PairBiasOfHeads",
       {.shape = {2, 4, 2, 97, 300, 3, 17}, .pair_bias = {true, false, true}, .padded = true}},
      {"PairMask",
       {.shape = {2, 4, 2, 300, 700, 17, 17}, .bias = kEach, .pair_mask = {true, true, false}}},
      {"PairMaskDecode", {.shape = {2, 6, 2, 3, 900, 17, 3}, .pair_mask = {true, false, false}}},
      {"PairBiasAndMaskOfAll",
       {.shape = {2, 2, 1, 130, 257, 17, 17},
        .left = 100,
        .pair_bias = {true, true, true},
        .pair_mask = {true, true, true}}},
  };
}

class AccuracyTest : public ::testing::TestWithParam<std::tuple<const PairFunction*, KernelCase>> {
};

TEST_P(AccuracyTest, KernelsMatchReference) {
  const auto& [function, test_case] = GetParam();
  ExpectKernelsMatchReference(RandomProblem(*function, test_case.options));
}

INSTANTIATE_TEST_SUITE_P(All, AccuracyTest,
                         ::testing::ValuesIn(WithFunctions(PairFunctions(), AccuracyCases())),
                         [](const auto& test) {
                           return std::string(std::get<0>(test.param)->name) +
                                  std::get<1>(test.param).name;
                         });

// If the processor multiplies bfloat16 natively, weights are rounded to bfloat16, but nothing else
// is.
TEST_P(PairFunctionTest, TokensMayBeOfBfloat16) {
  const ProblemOptions problems[] = {
      {.shape = {1, 2, 1, 130, 300, 17, 19},
       .type = TokenType::kBFloat16,
       .value_type = TokenType::kBFloat16},
      {.shape = {1, 2, 1, 300, 300, 64, 64},
       .right = 0,
       .type = TokenType::kBFloat16,
       .value_type = TokenType::kBFloat16},
      {.shape = {2, 8, 2, 1, 700, 33, 16},
       .key_starts = {0, 33},
       .type = TokenType::kBFloat16,
       .value_type = TokenType::kBFloat16},
      {.shape = {2, 4, 2, 300, 270, 16, 48},
       .left = 37,
       .key_starts = {3, 0},
       .key_lengths = {270, 101},
       .bias = ProblemOptions::kSharedBias,
       .type = TokenType::kBFloat16,
       .value_type = TokenType::kBFloat16,
       .padded = true},
      {.shape = {2, 2, 2, 130, 130, 8, 8},
       .query_segments = Documents(2, 130, 50),
       .key_segments = Documents(2, 130, 50),
       .dropout = 0.3,
       .type = TokenType::kBFloat16,
       .value_type = TokenType::kBFloat16},
  };
  for (const ProblemOptions& options : problems) {
    SCOPED_TRACE(::testing::PrintToString(options));
    const Problem<float> p = RandomProblem(*GetParam(), options);
    const Results<double> expected = p.InDouble().Forward();
    double largest = 0;
    for (const float value : p.v.Elements()) largest = std::max<double>(largest, std::abs(value));
    OnEveryTarget([&] {
      const Results<float> actual = p.Forward();
      EXPECT_LE(Difference(actual.at("lse"), expected.at("lse")), 5e-5);
      // Each weight has a relative error of at most 2^-9.
      EXPECT_LE(Difference(actual.at("o"), expected.at("o"), largest),
                1.0 / 512 / (1 - options.dropout) + 5e-5);
    });
  }
}

// 16-bit tokens give bitwise the same results as the same values in float32. The exception is calls
// in which all tokens are bfloat16, which may use native products.
TEST_P(PairFunctionTest, TokensOf16BitsAreWidened) {
  using enum TokenType;
  const std::pair<TokenType, TokenType> types[] = {
      {kFloat16, kFloat16},  {kFloat16, kFloat32},  {kFloat32, kFloat16}, {kBFloat16, kFloat32},
      {kBFloat16, kFloat16}, {kFloat32, kBFloat16}, {kFloat16, kBFloat16}};
  const ProblemOptions problems[] = {
      {.shape = {1, 2, 1, 130, 300, 17, 19}},
      {.shape = {1, 2, 2, 300, 300, 64, 64},
       .right = 0,
       .bias = ProblemOptions::kSharedBias,
       .on_grid = false},
      {.shape = {2, 8, 2, 1, 700, 33, 16}, .key_starts = {0, 33}, .padded = true},
      {.shape = {1, 4, 1, 5, 300, 130, 65}, .right = 0, .query_offset = 290},
      {.shape = {2, 2, 2, 9, 3, 2, 1}, .key_lengths = {3, 1}, .padded = true},
  };
  size_t n = 0;
  for (ProblemOptions options : problems) {
    for (const auto& [type, value_type] : types) {
      if (!RunsWith(function(), n++)) continue;
      options.type = type;
      options.value_type = value_type;
      SCOPED_TRACE(::testing::PrintToString(options));
      Problem<float> p = RandomProblem(function(), options);
      if (options.padded && type != kFloat32) {
        // Some keys nearly coincide with queries.
        for (Array<float>* tokens : {&p.x, &p.y}) {
          tokens->ForEach([type = type](float& number) {
            number = FromBits(ToBits(3 + number / 128, type), type);
          });
        }
      }
      Problem<float> wide = p;
      wide.options.type = wide.options.value_type = kFloat32;
      OnEveryTarget([&] {
        ExpectSame(p.Forward(), wide.Forward());
        ExpectSame(p.Run(), wide.Run());
      });
    }
  }
}

// Tests all bit patterns, including the largest and smallest numbers, NaN and infinity.
TEST(TokenTypeTest, EveryNumberOf16BitsIsWidened) {
  constexpr int64_t kColumns = 16;
  for (const TokenType type : {TokenType::kBFloat16, TokenType::kFloat16}) {
    ProblemOptions options{.shape = {1, 1, 1, 1, 1, 1, kColumns}};
    Problem<float> p = RandomProblem(FindPairFunction("dot"), options);
    std::vector<uint16_t> values(kColumns);
    OnEveryTarget([&] {
      for (int64_t first = 0; first < 1 << 16; first += kColumns) {
        for (int64_t n = 0; n < kColumns; ++n) {
          values[static_cast<size_t>(n)] = static_cast<uint16_t>(first + n);
        }
        AttentionInput<float> in = p.Input();
        in.v = {values.data(), {0, 0, kColumns}, type};
        std::vector<float> o(kColumns);
        float lse = 0;
        const AttentionOutput<float> out{{o.data(), {0, 0, kColumns}}, &lse};
        AttentionForward(p.function, in, out);
        for (int64_t n = 0; n < kColumns; ++n) {
          const float expected = FromBits(values[static_cast<size_t>(n)], type);
          const float actual = o[static_cast<size_t>(n)];
          // The single key has weight 1, so o is its value, except that zeros may lose their sign
          // in the sum.
          EXPECT_TRUE(actual == expected || (std::isnan(actual) && std::isnan(expected)))
              << values[static_cast<size_t>(n)] << ": " << actual << "; expected " << expected;
        }
      }
    });
  }
}

TEST(TokenTypeTest, XAndYAreOfOne) {
  const Problem<float> p = RandomProblem(
      FindPairFunction("dot"), {.shape = {1, 1, 1, 2, 3, 4, 5}, .type = TokenType::kFloat16});
  AttentionInput<float> in = p.Input();
  in.y = p.y.view();
  std::vector<float> o(10);
  std::vector<float> lse(2);
  const AttentionOutput<float> out{{o.data(), {10, 10, 5}}, lse.data()};
  std::string message;
  try {
    AttentionForward(p.function, in, out);
  } catch (const Error& error) {
    message = error.what();
  }
  EXPECT_EQ(message, "attention: y has a different type than x; expected the same type");
}

TEST_P(PairFunctionTest, InfiniteBiasesMask) {
  for (const auto kind : {ProblemOptions::kSharedBias, ProblemOptions::kBiasForEachBatch}) {
    Problem<float> p =
        RandomProblem(function(), {.shape = {2, 3, 1, 49, 130, 17, 17}, .bias = kind});
    const int64_t tables = kind == ProblemOptions::kSharedBias ? 1 : 2;
    for (int64_t b = 0; b < tables; ++b) {
      // Row i reads entries 48 - i to 177 - i, so only the last rows read entries below 20, for
      // their first keys.
      for (int64_t entry = 0; entry < 20; ++entry) p.bias_at(b, 0, entry) = -kInfinity;
      p.bias_at(b, 0, 100) = -kInfinity;
      for (int64_t entry = 0; entry < p.bias_size(); ++entry) p.bias_at(b, 1, entry) = -kInfinity;
      for (int64_t entry = 3; entry < p.bias_size(); ++entry) p.bias_at(b, 2, entry) = -kInfinity;
    }
    ExpectKernelsMatchReference(p);
    const Results<float> r = p.Run();
    // In head 1, no key is visible. In head 2, the first visible key is visible only to the last
    // rows.
    for (const int64_t i : {0, 48}) {
      EXPECT_EQ(r.at("lse")[static_cast<size_t>(49 + i)], -kInfinity);
      EXPECT_EQ(r.at("o")[static_cast<size_t>((49 + i) * 17)], 0);
    }
    EXPECT_EQ(r.at("lse")[2 * 49], -kInfinity);
    EXPECT_TRUE(std::isfinite(r.at("lse")[2 * 49 + 48]));
    EXPECT_EQ(r.at("d_factor")[1], 0);
  }
}

TEST_P(PairFunctionTest, RowsWithoutKeysAreZero) {
  // All queries are before the first key, or all keys are outside the windows.
  for (const int64_t offset : {-100, 300}) {
    const Problem<float> p = RandomProblem(
        function(),
        {.shape = {1, 2, 2, 49, 47, 17, 17}, .left = 10, .right = 0, .query_offset = offset});
    OnEveryTarget([&] {
      for (const auto& [name, values] : p.Run()) {
        const float expected = name == "lse" ? -kInfinity : 0.0f;
        for (const float value : values) ASSERT_EQ(value, expected) << name;
      }
    });
  }
}

TEST_P(PairFunctionTest, FactorsMayBeZeroOrOfEitherSign) {
  Problem<float> p = RandomProblem(function(), {.shape = {2, 6, 2, 49, 130, 17, 17}, .right = 80});
  p.factor = {0, 1.5f, -1.5f, -0.5f, 0, 0.5f};
  ExpectKernelsMatchReference(p);
}

// With logits of several hundred, the largest weight is nearly 1.
TEST_P(PairFunctionTest, LogitsMayBeLarge) {
  Problem<float> p = RandomProblem(function(), {.shape = {1, 2, 2, 49, 300, 17, 17}});
  for (float& factor : p.factor) factor *= 512;
  ExpectKernelsMatchReference(p, 2e-3);
}

// Tokens nearly coincide far from the origin, where their squared distance would lose all digits if
// it were computed from norms and inner products.
class DistanceTest : public ::testing::TestWithParam<const PairFunction*> {};

TEST_P(DistanceTest, OfNearTokensIsExact) {
  Problem<float> p =
      RandomProblem(*GetParam(), {.shape = {1, 2, 2, 49, 130, 17, 17}, .on_grid = false});
  for (auto* tokens : {&p.x, &p.y}) tokens->ForEach([](float& x) { x = 3 + x / 128; });
  for (auto* heights : {&p.row, &p.column}) std::fill(heights->begin(), heights->end(), 0.5f);
  for (float& factor : p.factor) factor *= 256;
  const Results<double> forward = p.InDouble().Forward();
  const Results<double> all = p.InDouble().Run();
  OnEveryTarget([&] {
    EXPECT_LE(Difference(p.Forward().at("o"), forward.at("o")), 1e-4);
    // Gradients are sums of products with tokens, in which the tokens' common digits cancel.
    ExpectClose(p.Run(), all, 2e-3);
  });
}

std::vector<const PairFunction*> Distances() {
  std::vector<const PairFunction*> distances = PairFunctions();
  std::erase_if(distances,
                [](const PairFunction* f) { return f->input != PairInput::kSquaredDistance; });
  return distances;
}

INSTANTIATE_TEST_SUITE_P(All, DistanceTest, ::testing::ValuesIn(Distances()),
                         [](const auto& test) { return std::string(test.param->name); });

// Tests tokens at decreasing distances, with keys packed as floats, packed as 16-bit pairs, or read
// in place. The larger the scores, the larger the distances that count as near.
TEST(NearTokensTest, HaveTheDigitsOfTheirDifferences) {
  const ProblemOptions packed = {.shape = {1, 2, 1, 60, 150, 24, 17}};
  const ProblemOptions in_place = {.shape = {1, 2, 1, 3, 150, 70, 17}};
  const ProblemOptions odd = {.shape = {1, 2, 2, 50, 61, 3, 5}};
  // With this window, the tiles of most rows do not start at the first key.
  const ProblemOptions window = {.shape = {1, 2, 1, 90, 210, 5, 6}, .left = 11, .right = 0};
  const auto expect = [](const char* name, const ProblemOptions& options, int fraction,
                         float scores) {
    SCOPED_TRACE(name + std::string(" spread 1/") + std::to_string(fraction));
    const bool widened = options.type != TokenType::kFloat32;
    Problem<float> p = NearTokensProblem(FindPairFunction(name), options, fraction);
    for (float& factor : p.factor) factor *= scores;
    for (auto* tokens : {&p.x, &p.y}) {
      tokens->ForEach([&](float& x) {
        if (widened) x = FromBits(ToBits(x, options.type), options.type);
      });
    }
    const Results<double> forward = p.InDouble().Forward();
    const Results<double> all = p.InDouble().Run();
    OnEveryTarget([&] {
      // AVX3 targets may round weights to bfloat16, which changes o.
      const bool rounds = widened && CurrentTarget().starts_with("AVX3");
      for (const auto& [result, values] : p.Forward()) {
        EXPECT_LE(Difference(values, forward.at(result)), rounds && result == "o" ? 5e-3 : 7e-6)
            << result;
      }
      ExpectClose(p.Run(), all, rounds ? 5e-3 : 1e-5);
    });
  };
  for (const char* name : {"laplacian", "gaussian"}) {
    for (ProblemOptions options : {packed, in_place, odd, window}) {
      for (int fraction = 1; fraction <= 4096; fraction *= 2) expect(name, options, fraction, 1);
      expect(name, options, 1, 10);
      options.type = options.value_type = TokenType::kBFloat16;
      // With larger fractions, tokens would coincide in bfloat16.
      for (int fraction = 1; fraction <= 32; fraction *= 2) expect(name, options, fraction, 1);
    }
  }
}

// A query of 0 coincides with the zeros that pad the packed keys. Neither padding nor hidden keys
// may count as near keys.
TEST(NearTokensTest, AreKeysThatThereAre) {
  for (const char* name : {"laplacian", "gaussian", "umbral", "penumbral"}) {
    for (const int64_t queries : {3, 60}) {
      Problem<float> p = RandomProblem(
          FindPairFunction(name),
          {.shape = {1, 2, 1, queries, 9, 24, 17}, .key_starts = {2}, .key_lengths = {6}});
      for (int64_t e = 0; e < 24; ++e) p.x.at(0, 1, 1, e) = 0;
      const Results<double> expected = p.InDouble().Run();
      for (const int64_t hidden : {0, 1, 6, 7, 8}) {
        for (int64_t e = 0; e < 24; ++e) p.y.at(0, 0, hidden, e) = kNan;
      }
      OnEveryTarget([&] { ExpectClose(p.Run(), expected, 2e-5); });
    }
  }
}

// Two pages, the second of which must not be accessed.
class GuardedPage {
 public:
  GuardedPage()
      : size_(static_cast<size_t>(sysconf(_SC_PAGESIZE))),
        pages_(
            mmap(nullptr, 2 * size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    EXPECT_NE(pages_, MAP_FAILED);
    EXPECT_EQ(mprotect(static_cast<char*>(pages_) + size_, size_, PROT_NONE), 0);
  }
  ~GuardedPage() { munmap(pages_, 2 * size_); }
  GuardedPage(const GuardedPage&) = delete;
  GuardedPage& operator=(const GuardedPage&) = delete;

  // Copies bytes to the end of the first page.
  void* End(const void* from, size_t bytes) {
    EXPECT_LE(bytes, size_);
    return std::memcpy(static_cast<char*>(pages_) + size_ - bytes, from, bytes);
  }

 private:
  size_t size_;
  void* pages_;
};

// The first query is near every key, infinitely far from every key, or NaN.
TEST(NearTokensTest, ReadNothingBehindTheLastKey) {
  GuardedPage page;
  for (const char* name : {"laplacian", "gaussian"}) {
    for (const TokenType type : {TokenType::kFloat32, TokenType::kBFloat16}) {
      for (const int64_t queries : {1, 30}) {
        for (const float first : {0.0f, kNan, kInfinity, 2e19f}) {
          const int64_t keys = 5;
          const int64_t dim = 70;
          Problem<float> p = RandomProblem(
              FindPairFunction(name),
              {.shape = {1, 1, 1, queries, keys, dim, 4}, .type = type, .value_type = type});
          for (int64_t e = 0; e < dim; ++e) p.x.at(0, 0, 0, e) = e == 0 ? first : 0;
          OnEveryTarget([&] {
            AttentionInput<float> in = p.Input();
            const size_t bytes =
                static_cast<size_t>(keys * dim) * (type == TokenType::kFloat32 ? 4 : 2);
            in.y.data = page.End(in.y.data, bytes);
            Array<float> o(p.d_o.size(), false, kNan);
            std::vector<float> lse(p.d_lse.size(), kNan);
            AttentionForward(p.function, in, {o.view(), lse.data()}, SerialExecutor());
            if (first == 0.0f) {
              EXPECT_TRUE(std::isfinite(lse[0]));
            }
          });
        }
      }
    }
  }
}

// A key whose squared norm overflows is infinitely far away and has no weight.
TEST(NearTokensTest, MayHaveNormsThatOverflow) {
  for (const char* name : {"laplacian", "gaussian"}) {
    for (const int64_t queries : {3, 60}) {
      Problem<float> p = RandomProblem(
          FindPairFunction(name), {.shape = {1, 2, 1, queries, 90, 24, 17}, .key_lengths = {89}});
      OnEveryTarget([&] {
        p.options.key_lengths = {89};
        const Results<float> without = p.Run();
        p.options.key_lengths = {90};
        for (int64_t e = 0; e < 24; ++e) p.y.at(0, 0, 89, e) = e % 2 == 0 ? 1e19f : -3e19f;
        for (const auto& [result, values] : p.Run()) {
          // The gradient of the factor is correctly minus infinity.
          if (result == "d_factor") continue;
          EXPECT_LE(Difference(values, without.at(result)), 1e-6) << result;
        }
        // The distances of an infinite query are undefined, so its lse is NaN.
        Problem<float> infinite = p;
        infinite.x.at(0, 1, 1, 3) = kInfinity;
        EXPECT_TRUE(std::isnan(infinite.Forward().at("lse")[static_cast<size_t>(queries + 1)]));
      });
    }
  }
}

// A gradient requested alone equals the same gradient requested with all others.
TEST_P(PairFunctionTest, GradientsMayBeLeftOut) {
  const Problem<float> p = RandomProblem(function(), {.shape = {2, 2, 1, 49, 200, 17, 17},
                                                      .right = 0,
                                                      .query_offset = 151,
                                                      .bias = ProblemOptions::kSharedBias});
  const Results<float> all = p.Run();
  for (const auto& [name, values] : all) {
    if (name.starts_with("d_")) ExpectSame(p.Run(SerialExecutor(), name), all);
  }
}

TEST_P(PairFunctionTest, GradientOfLseIsOptional) {
  Problem<float> p = RandomProblem(function(), {.shape = {2, 2, 1, 49, 60, 17, 17}});
  std::fill(p.d_lse.begin(), p.d_lse.end(), 0.0f);
  const Results<float> with_zeros = p.Run();
  p.pass_d_lse = false;
  ExpectSame(p.Run(), with_zeros);
}

TEST_P(PairFunctionTest, ResultsAreTheSameForAnyNumberOfWorkers) {
  const ProblemOptions problems[] = {
      // The first problem has one head, whose keys are divided among workers. The second has many
      // heads, and in the third, all heads share one key head.
      {.shape = {1, 1, 1, 300, 900, 17, 17}, .bias = ProblemOptions::kSharedBias},
      {.shape = {3, 4, 4, 100, 100, 17, 17}, .right = 0, .bias = ProblemOptions::kSharedBias},
      {.shape = {1, 4, 1, 50, 500, 3, 80}, .left = 200, .query_offset = 400},
  };
  for (const ProblemOptions& options : problems) {
    const Problem<float> problem = RandomProblem(function(), options);
    ExpectSameForAnyNumberOfWorkers(problem);
    Problem<double> doubles = problem.InDouble();
    doubles.is_fused = true;
    ExpectSameForAnyNumberOfWorkers(doubles);
  }
}

// Pair functions that only the tests define.
class DefinitionKernelTest : public ::testing::TestWithParam<const PairFunction*> {};

TEST_P(DefinitionKernelTest, MatchesReference) {
  const ProblemOptions problems[] = {
      {.shape = {2, 3, 3, 47, 49, 9, 17}, .padded = true},
      // Query heads of a group have separate factors and head scalars.
      {.shape = {2, 6, 2, 49, 130, 16, 16}, .right = 0, .query_offset = 81},
      {.shape = {3, 2, 1, 60, 200, 40, 3},
       .left = 100,
       .right = 20,
       .key_starts = {0, 20, 60},
       .key_lengths = {200, 199, 20},
       .bias = ProblemOptions::kSharedBias},
      {.shape = {2, 2, 1, 0, 49, 9, 9}},
  };
  for (const ProblemOptions& options : problems) {
    SCOPED_TRACE(::testing::PrintToString(options));
    ExpectKernelsMatchReference(RandomProblem(*GetParam(), options));
  }
}

TEST_P(DefinitionKernelTest, IsTheSameForAnyNumberOfWorkers) {
  const Problem<float> p = RandomProblem(
      *GetParam(),
      {.shape = {2, 4, 2, 100, 700, 16, 16}, .left = 300, .bias = ProblemOptions::kSharedBias});
  const Results<float> serial = p.Run();
  ExpectSame(p.Run(ThreadExecutor(3)), serial);
}

INSTANTIATE_TEST_SUITE_P(All, DefinitionKernelTest, ::testing::ValuesIn(TestPairFunctions()),
                         [](const auto& test) { return std::string(test.param->name); });

// The tests' definitions exist to cover this case.
TEST(DefinitionKernelTest, CoverAnInnerProductWithScalars) {
  const auto goes_with_scalars = [](const PairFunction* f) {
    return f->input == PairInput::kInnerProduct && f->row_scalars == 2 && f->column_scalars == 1;
  };
  const auto all = TestPairFunctions();
  EXPECT_TRUE(std::any_of(all.begin(), all.end(), goes_with_scalars));
}

// NaN and infinities.

// The rows of o.
std::vector<std::vector<float>> Rows(const Problem<float>& p) {
  const Results<float> r = p.Forward();
  const int64_t columns = p.options.shape.value_dim;
  std::vector<std::vector<float>> rows;
  for (auto o = r.at("o").begin(); o != r.at("o").end(); o += columns) {
    rows.emplace_back(o, o + columns);
  }
  return rows;
}

bool IsFinite(const std::vector<float>& row) {
  return std::all_of(row.begin(), row.end(), [](float x) { return std::isfinite(x); });
}

// A non-finite token affects only the rows that see it; all other rows are bitwise unchanged.
class PoisonTest : public ::testing::TestWithParam<std::tuple<const PairFunction*, float>> {
 protected:
  // Checks that spoil(problem, key), which poisons a key of key head 0 in the last batch element,
  // changes only the rows that see the key.
  template <class Spoil>
  void ExpectOnlySeeingRowsChange(const Spoil& spoil) {
    const AttentionShape shape = {2, 4, 2, 130, 130, 17, 17};
    const ProblemOptions all[] = {
        {.shape = shape, .right = 0},
        {.shape = shape, .left = 20, .right = 10},
        {.shape = shape, .left = 20, .padded = true},
        {.shape = shape, .chunks = {40, 1, 0}},
        {.shape = shape,
         .right = 0,
         .type = TokenType::kBFloat16,
         .value_type = TokenType::kBFloat16},
        {.shape = shape, .bias = ProblemOptions::kSharedBias},
        {.shape = shape, .right = 0, .bias = ProblemOptions::kSharedBias},
        {.shape = shape, .bias = ProblemOptions::kBiasForEachBatch},
        {.shape = shape, .key_bias = true},
        {.shape = shape, .pair_mask = {true, false, false}},
        {.shape = shape, .right = 50, .pair_mask = {true, true, true}},
        {.shape = shape, .pair_bias = {true, false, false}},
        {.shape = shape, .key_bias = true, .key_bias_base = true, .temperature = true},
        {.shape = shape,
         .query_segments = Documents(2, 130, 50),
         .key_segments = Documents(2, 130, 50)},
        {.shape = shape},
    };
    // Each kind of poison runs with other options.
    size_t n = std::isnan(poison()) ? 0 : poison() > 0 ? 1 : 2;
    for (const ProblemOptions& options : all) {
      if (RunsWith(function(), n++)) Expect(options, 70, spoil);
    }
    // The key is in the first or the last panel, and in the first, a later or the last tile. There
    // are many or few queries.
    if (&function() != &FindPairFunction("dot") || !std::isnan(poison())) return;
    for (const int64_t key : {0, 63, 64, 129, 255, 256, 299}) {
      for (ProblemOptions options : all) {
        if (!options.query_segments.empty()) {
          options.query_segments = options.key_segments = Documents(2, 300, 50);
        }
        options.shape.queries = options.shape.keys = 300;
        Expect(options, key, spoil);
      }
      Expect({.shape = {2, 4, 2, 3, 300, 17, 17}, .right = 0, .query_offset = key - 1}, key, spoil);
      Expect({.shape = {1, 4, 2, 3, 1300, 16, 16}, .right = 0, .query_offset = key + 999},
             key + 1000, spoil);
      Expect({.shape = {1, 4, 2, 3, 1300, 16, 16}, .pair_mask = {true, false, false}}, key + 1000,
             spoil);
      // These problems have too many queries for keys to be read in place.
      Expect({.shape = {1, 4, 2, 20, 1300, 17, 17}, .right = 0, .query_offset = key + 990},
             key + 1000, spoil);
      Expect({.shape = {1, 4, 2, 20, 1300, 16, 16}, .pair_mask = {true, false, false}}, key + 1000,
             spoil);
      Expect({.shape = {1, 4, 2, 2, 300, 17, 17},
              .right = 0,
              .query_offset = key - 1,
              .type = TokenType::kBFloat16,
              .value_type = TokenType::kBFloat16},
             key, spoil);
      Expect({.shape = {1, 4, 2, 2, 300, 17, 17},
              .key_bias = true,
              .type = TokenType::kFloat16,
              .value_type = TokenType::kBFloat16},
             key, spoil);
    }
  }

  template <class Spoil>
  void Expect(const ProblemOptions& options, int64_t poisoned, const Spoil& spoil) {
    std::ostringstream description;
    description << options << " poisoned " << poisoned;
    SCOPED_TRACE(description.str());
    const AttentionShape& shape = options.shape;
    Problem<float> p = RandomProblem(function(), options);
    // The offset bias hides keys 1, 2 and 3 positions after the query, and the poisoned key from
    // row 0. The key bias hides the poisoned key from head 0. The pair bias hides it from every
    // third row of head 1. With per-batch biases, those of the first batch element hide nothing.
    const int64_t zero = shape.queries - 1;
    const int64_t last = shape.batch - 1;
    const bool shared = options.bias == ProblemOptions::kSharedBias;
    if (!p.bias.empty()) {
      for (const int64_t offset : {int64_t{-1}, int64_t{-2}, int64_t{-3}, poisoned}) {
        for (int64_t h = 0; h < shape.heads; ++h) {
          p.bias_at(shared ? 0 : last, h, zero + offset) = -kInfinity;
        }
      }
    }
    if (options.key_bias) {
      const int64_t row = last * shape.heads;
      p.key_bias[static_cast<size_t>(row * shape.keys + poisoned)] = -kInfinity;
    }
    const auto pair_hides = [&](int64_t h, int64_t i) {
      return options.pair_bias.exists && h == 1 && i % 3 == 0;
    };
    for (int64_t i = 0; i < shape.queries; ++i) {
      if (pair_hides(1, i)) p.pair_bias.at(last, 1, i, poisoned) = -kInfinity;
    }
    const auto sees = [&](int64_t b, int64_t h, int64_t i) {
      return b == last && h < 2 && testing::Sees(options, b, i, poisoned) &&
             p.SeesPair(b, h, i, poisoned) && !pair_hides(h, i) &&
             (p.bias.empty() || p.bias_at(b, h, zero + poisoned - i) != -kInfinity) &&
             (!options.key_bias || h != 0);
    };
    OnEveryTarget([&] {
      const auto clean = Rows(p);
      Problem<float> spoiled = p;
      spoil(spoiled, poisoned);
      const auto rows = Rows(spoiled);
      for (int64_t b = 0; b < shape.batch; ++b) {
        for (int64_t h = 0; h < shape.heads; ++h) {
          for (int64_t i = 0; i < shape.queries; ++i) {
            const auto row = static_cast<size_t>((b * shape.heads + h) * shape.queries + i);
            if (sees(b, h, i)) {
              ASSERT_FALSE(IsFinite(rows[row])) << "query " << i << " of head " << h;
            } else {
              ASSERT_EQ(rows[row], clean[row]) << "query " << i << " of head " << h;
            }
          }
        }
      }
    });
  }

  const PairFunction& function() const { return *std::get<0>(GetParam()); }
  float poison() const { return std::get<1>(GetParam()); }
};

TEST_P(PoisonTest, InAValueReachesTheRowsThatSeeIt) {
  ExpectOnlySeeingRowsChange([&](Problem<float>& p, int64_t key) {
    const AttentionShape& n = p.options.shape;
    p.v.at(n.batch - 1, 0, key, n.value_dim - 1) = poison();
  });
}

// Keys are poisoned only with NaN, because keys at infinite distance may have weight 0. For pair
// functions without tokens, the key's scalars are poisoned.
class PoisonedKeyTest : public PoisonTest {};

TEST_P(PoisonedKeyTest, ReachesTheRowsThatSeeIt) {
  ExpectOnlySeeingRowsChange([&](Problem<float>& p, int64_t key) {
    const int64_t last = p.options.shape.batch - 1;
    if (p.function.input == PairInput::kNone) {
      p.column_at(0, last, 0, key) = poison();
    } else {
      p.y.at(last, 0, key, 3) = poison();
    }
  });
}

std::string PoisonName(const ::testing::TestParamInfo<PoisonTest::ParamType>& test) {
  const float poison = std::get<1>(test.param);
  return std::string(std::get<0>(test.param)->name) + (std::isnan(poison) ? "Nan"
                                                       : poison > 0       ? "Infinity"
                                                                          : "MinusInfinity");
}

INSTANTIATE_TEST_SUITE_P(All, PoisonTest,
                         ::testing::Combine(::testing::ValuesIn(PairFunctions()),
                                            ::testing::Values(kNan, kInfinity, -kInfinity)),
                         PoisonName);
INSTANTIATE_TEST_SUITE_P(All, PoisonedKeyTest,
                         ::testing::Combine(::testing::ValuesIn(PairFunctions()),
                                            ::testing::Values(kNan)),
                         PoisonName);

// Keys outside key_starts and key_lengths are never read.
TEST_P(PairFunctionTest, HiddenColumnsMayHoldAnything) {
  for (const bool padded : {false, true}) {
    // Tokens with 64 columns are read in place, those with 17 from padded copies; with few queries,
    // both are read in place.
    for (const auto& [queries, columns] : {std::pair{60, 17}, {60, 64}, {3, 17}, {3, 64}}) {
      const AttentionShape shape = {3, 2, 1, queries, 150, columns, columns};
      const Problem<float> clean = RandomProblem(function(), {.shape = shape,
                                                              .right = 90,
                                                              .key_starts = {0, 5, 80},
                                                              .key_lengths = {150, 130, 70},
                                                              .bias = ProblemOptions::kSharedBias,
                                                              .padded = padded});
      Problem<float> p = clean;
      for (int64_t b = 0; b < shape.batch; ++b) {
        for (int64_t j = 0; j < shape.keys; ++j) {
          const auto batch = static_cast<size_t>(b);
          if (j >= p.options.key_starts[batch] && j < p.options.key_lengths[batch]) continue;
          for (int64_t d = 0; d < p.y.size()[3]; ++d) p.y.at(b, 0, j, d) = kNan;
          for (int64_t d = 0; d < columns; ++d) p.v.at(b, 0, j, d) = kNan;
          for (int s = 0; s < function().column_scalars; ++s) p.column_at(s, b, 0, j) = kNan;
        }
      }
      OnEveryTarget([&] { ExpectSame(p.Run(), clean.Run()); });
    }
  }
}

// Memory.

// The peak memory of the process in bytes.
int64_t PeakMemory() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{1024} * usage.ru_maxrss;
}

TEST(MemoryTest, GrowsWithLengthAndNotWithItsSquare) {
  constexpr int64_t kLength = 8192;
  for (const auto kind : {ProblemOptions::kNoBias, ProblemOptions::kSharedBias}) {
    const Problem<float> p = RandomProblem(
        FindPairFunction("umbral"),
        {.shape = {1, 1, 1, kLength, kLength, 4, 4}, .right = kLength - 2, .bias = kind});
    const int64_t before = PeakMemory();
    p.Run(ThreadExecutor(3));
    // One byte per pair would take 64 MiB.
    EXPECT_LE(PeakMemory() - before, kLength * 4096);
  }
}

}  // namespace
}  // namespace gnomon::testing
