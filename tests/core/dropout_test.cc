// Tests the dropout hash: its fixed values, on which saved seeds rely, and its dependence on every
// index of a pair and every bit of the seed.
#include "base/dropout.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "core/random_problem.h"

namespace gnomon::testing {
namespace {

struct Place {
  uint64_t seed;
  int64_t b;
  int64_t h;
  int64_t i;
};

std::string Text(const Place& p) {
  return "seed " + std::to_string(p.seed) + " batch " + std::to_string(p.b) + " head " +
         std::to_string(p.h) + " row " + std::to_string(p.i);
}

constexpr uint64_t kSeed = 0x123456789abcdef0;

// The values were computed independently: the mixer of splitmix64 for the seed, batch, head and
// row, and that of lowbias32 for the column, combined with the halves of the row's hash.
TEST(DropoutHashTest, HasGoldenValues) {
  struct Golden {
    Place place;
    std::array<uint32_t, 2> row;
    std::array<uint32_t, 3> columns;  // for columns 0, 1 and 4000000000
  };
  const std::vector<Golden> all = {
      {{0, 0, 0, 0}, {0xaac80268, 0x2130748a}, {0x9a7d0d1f, 0xf53f01c2, 0x1f87979e}},
      {{1, 0, 0, 0}, {0xd9ee4956, 0xe28195dd}, {0xd67e58ff, 0x7ae49b91, 0x981d5575}},
      {{0, 1, 0, 0}, {0xa2edda0c, 0x68ac638d}, {0x8f8be3b1, 0x9f2747e4, 0x97fb647e}},
      {{0, 0, 1, 0}, {0x00425025, 0x97693bfc}, {0x1ebcd910, 0x515bff51, 0xe86100bf}},
      {{0, 0, 0, 1}, {0x79ce5090, 0x0cc78fb9}, {0x3ea899dd, 0x2af48a12, 0x402fd2cb}},
      {{0x100000000, 0, 0, 0}, {0x7314e167, 0x28e21096}, {0x8da9dd5b, 0x97c9a501, 0xce9afea0}},
      {{0x8000000000000000, 0, 0, 0},
       {0xf596fb5c, 0x5e5f4446},
       {0x2ad4f5ec, 0x557e4a3a, 0x437bf81e}},
      {{kSeed, 2, 3, 5}, {0x6bee6a62, 0x368afea8}, {0x515a1d59, 0xa9ebaf14, 0x06f0cf87}},
      {{~uint64_t{0}, 1000, 31, 1048576},
       {0xbb8bc9a3, 0x58a859ba},
       {0x1538a41c, 0xaf625d8a, 0x1296fbe8}},
  };
  for (const Golden& golden : all) {
    const Place& p = golden.place;
    const DropoutRow row = HashRow(p.seed, p.b, p.h, p.i);
    EXPECT_EQ(row.first, golden.row[0]) << Text(p);
    EXPECT_EQ(row.second, golden.row[1]) << Text(p);
    const std::array<uint32_t, 3> columns = {HashColumn(row, 0), HashColumn(row, 1),
                                             HashColumn(row, 4000000000u)};
    EXPECT_EQ(columns, golden.columns) << Text(p);
  }
}

// Returns places that are similar to {kSeed, 2, 3, 5}; most differ in a single index or seed bit.
std::vector<Place> Neighbours() {
  std::vector<Place> places = {{kSeed, 0, 3, 5}, {kSeed, 3, 3, 5}, {kSeed, 2 + (1l << 40), 3, 5},
                               {kSeed, 2, 0, 5}, {kSeed, 2, 2, 5}, {kSeed, 2, 3 + (1l << 40), 5},
                               {kSeed, 2, 3, 0}, {kSeed, 2, 3, 4}, {kSeed, 2, 3, 5 + (1l << 40)},
                               {kSeed, 3, 2, 5}, {kSeed, 2, 5, 3}, {kSeed + 1, 1, 3, 5}};
  for (int bit = 0; bit < 64; ++bit) places.push_back({kSeed ^ (uint64_t{1} << bit), 2, 3, 5});
  return places;
}

// The masks of neighbouring places agree only as often as expected by chance.
TEST(DropoutHashTest, HangsOnAllOfThePlaceAndOfTheSeed) {
  constexpr uint32_t kColumns = 10000;
  const uint32_t threshold = DropoutThreshold({.rate = 0.5});
  const DropoutRow row = HashRow(kSeed, 2, 3, 5);
  for (const Place& place : Neighbours()) {
    const DropoutRow other = HashRow(place.seed, place.b, place.h, place.i);
    int same = 0;
    for (uint32_t j = 0; j < kColumns; ++j) {
      same += (HashColumn(row, j) < threshold) == (HashColumn(other, j) < threshold);
    }
    EXPECT_NEAR(same, 0.5 * kColumns, 5 * 0.5 * std::sqrt(kColumns)) << Text(place);
  }
}

// The kernels and the reference must keep the weights that the hash selects. Values are unit
// vectors, so the outputs are the weights.
class DropoutMaskTest : public ::testing::Test {
 protected:
  static constexpr int64_t kTokens = 70;

  DropoutMaskTest()
      : problem_(
            RandomProblem(FindPairFunction("dot"),
                          {.shape = {2, 4, 2, kTokens, kTokens, 4, kTokens}, .dropout = 0.5})) {
    int64_t n = 0;
    problem_.v.ForEach([&](float& element) {
      element = n / kTokens % kTokens == n % kTokens ? 1.0f : 0.0f;
      ++n;
    });
  }

  // Returns whether each weight is kept, with shape (B, H, Lq, Lk).
  template <class T>
  static std::vector<bool> Kept(const Problem<T>& problem, uint64_t seed) {
    AttentionInput<T> in = problem.Input();
    in.dropout.seed = seed;
    Array<T> o(problem.d_o.size(), false, T(0));
    std::vector<T> lse(problem.d_lse.size());
    AttentionForward(problem.function, in, {o.view(), lse.data()});
    std::vector<bool> kept;
    for (const T weight : o.Elements()) kept.push_back(weight != 0);
    return kept;
  }

  static std::vector<bool> Expected(uint64_t seed) {
    std::vector<bool> kept;
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t h = 0; h < 4; ++h) {
        for (int64_t i = 0; i < kTokens; ++i) {
          const DropoutRow row = HashRow(seed, b, h, i);
          for (uint32_t j = 0; j < kTokens; ++j) kept.push_back(HashColumn(row, j) >= 0x80000000u);
        }
      }
    }
    return kept;
  }

  Problem<float> problem_;
};

TEST_F(DropoutMaskTest, IsThatOfTheHash) {
  for (const uint64_t seed : {uint64_t{0}, uint64_t{7}, uint64_t{7} << 32, ~uint64_t{0}}) {
    const std::vector<bool> expected = Expected(seed);
    EXPECT_EQ(Kept(problem_.InDouble(), seed), expected) << seed;
    OnEveryTarget([&] { EXPECT_EQ(Kept(problem_, seed), expected) << seed; });
  }
}

TEST_F(DropoutMaskTest, IsAnotherInEachBatchAndHead) {
  constexpr auto kSize = static_cast<size_t>(kTokens * kTokens);
  const std::vector<bool> kept = Kept(problem_, 11);
  for (size_t one = 0; one < 8; ++one) {
    for (size_t other = 0; other < one; ++other) {
      int same = 0;
      for (size_t n = 0; n < kSize; ++n) same += kept[one * kSize + n] == kept[other * kSize + n];
      EXPECT_NEAR(same, 0.5 * kSize, 5 * 0.5 * std::sqrt(kSize)) << one << " " << other;
    }
  }
}

}  // namespace
}  // namespace gnomon::testing
