// Compares the CUDA kernels, run in the emulator, with the double-precision reference.
#include <algorithm>
#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "cuda_problem.h"
#include "gnomon/table_layout.h"
#include "gtest/gtest.h"

namespace gnomon::testing {
namespace {

struct Case {
  const char* name;
  ProblemOptions options;
};

const OffsetLayout kClipped(7, 3, OffsetLayout::Far::kClip);
const GridLayout kGrid({5, 9}, 1, GridLayout::Kind::kTable);
const GridLayout kAxes({5, 9}, 1, GridLayout::Kind::kAxes);

const OffsetLayout kShaw(20, 6, OffsetLayout::Far::kClip);
const OffsetLayout kPast(12, 0, OffsetLayout::Far::kZero);
const KeyLayout kByKey(70);
const OffsetLayout kWide(120, 120, OffsetLayout::Far::kClip);

// Positions of `batch` elements: n times `step`, modulo `size`, after `first`.
std::vector<int64_t> Positions(int64_t batch, int64_t count, int64_t step, int64_t size,
                               int64_t first = 0) {
  std::vector<int64_t> positions;
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t n = 0; n < count; ++n) positions.push_back(first + (n + b) * step % size);
  }
  return positions;
}

std::vector<Case> Cases() {
  constexpr auto kShared = ProblemOptions::kSharedBias;
  constexpr auto kEach = ProblemOptions::kBiasForEachBatch;
  return {
      {"OneOfEach", {.shape = {1, 1, 1, 1, 1, 1, 1}}},
      {"Full", {.shape = {1, 2, 1, 70, 90, 16, 24}}},
      {"Odd", {.shape = {2, 3, 3, 17, 19, 3, 17}, .padded = true}},
      {"Causal", {.shape = {1, 1, 1, 130, 130, 32, 16}, .right = 0}},
      {"CausalBiasGqa",
       {.shape = {2, 4, 2, 35, 35, 17, 3}, .right = 0, .bias = kShared, .padded = true}},
      // With 32 rows per warp, the first block has 128 queries, of which all see the first tiles.
      {"LongCausal", {.shape = {1, 1, 1, 230, 300, 16, 16}, .right = 0, .query_offset = 69}},
      {"Window", {.shape = {1, 2, 1, 90, 90, 8, 40}, .left = 30, .right = 5, .bias = kShared}},
      {"LengthsAndStarts",
       {.shape = {3, 2, 1, 20, 100, 16, 16},
        .key_starts = {0, 70, 30},
        .key_lengths = {100, 65, 90},
        .bias = kEach}},
      // Some tiles are visible to all rows of a block, and some only to its first or last row.
      {"WindowOfWholeBlocks", {.shape = {1, 2, 1, 140, 150, 16, 16}, .left = 50, .right = 20}},
      {"NegativeOffset",
       {.shape = {1, 2, 1, 90, 30, 8, 8}, .right = 0, .query_offset = -50, .bias = kShared}},
      {"NoKeys", {.shape = {2, 2, 1, 5, 0, 8, 8}, .bias = kShared}},
      {"NoQueries", {.shape = {2, 2, 1, 0, 5, 8, 8}, .bias = kShared}},
      {"NoBatch", {.shape = {0, 2, 2, 4, 5, 8, 8}, .bias = kShared}},
      {"NoHeads", {.shape = {2, 0, 0, 4, 5, 8, 8}}},
      {"NoValueColumns", {.shape = {1, 2, 2, 20, 30, 16, 0}, .right = 0}},
      {"Documents",
       {.shape = {2, 2, 1, 90, 90, 16, 16},
        .right = 0,
        .query_segments = Documents(2, 90, 33),
        .key_segments = Documents(2, 90, 33)}},
      {"OffsetsOfBatches",
       {.shape = {3, 2, 1, 25, 80, 8, 8},
        .left = 30,
        .right = 0,
        .query_offsets = {0, 55, -10},
        .bias = kEach}},
      {"Chunks", {.shape = {1, 2, 1, 100, 100, 8, 8}, .right = 0, .chunks = {23, 1, 0}}},
      {"KeyBiasWithBase",
       {.shape = {2, 4, 2, 30, 70, 16, 8}, .right = 40, .key_bias = true, .key_bias_base = true}},
      {"TemperatureOfBiases",
       {.shape = {2, 4, 2, 30, 50, 16, 16},
        .bias = kEach,
        .key_bias = true,
        .temperature = true,
        .pair_bias = {true, false, true},
        .pair_mask = {true, true, false}}},
      {"PairBias",
       {.shape = {2, 2, 1, 30, 70, 8, 8}, .right = 50, .pair_bias = {true, true, false}}},
      {"PairBiasOfAll", {.shape = {2, 2, 2, 20, 20, 8, 8}, .pair_bias = {true, true, true}}},
      {"Dropout", {.shape = {2, 2, 1, 40, 70, 16, 16}, .right = 30, .dropout = 0.25, .seed = 5}},
      {"Decode",
       {.shape = {2, 4, 2, 1, 600, 16, 16},
        .right = 0,
        .key_starts = {5, 0},
        .query_offset = 599,
        .bias = kShared}},
      // Query heads that share keys are packed.
      {"DecodeOfGroups",
       {.shape = {2, 6, 2, 1, 300, 16, 24},
        .left = 250,
        .right = 0,
        .key_starts = {5, 0},
        .query_offsets = {299, 280},
        .temperature = true,
        .padded = true}},
      {"Layout",
       {.shape = {2, 2, 1, 30, 46, 8, 8}, .query_offset = 9, .bias = kShared, .layout = &kClipped}},
      {"GridTable", {.shape = {2, 2, 1, 46, 46, 8, 8}, .bias = kEach, .layout = &kGrid}},
      {"Relative",
       {.shape = {2, 4, 2, 37, 70, 16, 24},
        .right = 40,
        .query_offset = 3,
        .bias = kShared,
        .relative = &kShaw}},
      {"RelativeOfHeads",
       {.shape = {2, 2, 1, 33, 70, 8, 17},
        .query_offset = 30,
        .temperature = true,
        .relative = &kPast,
        .relative_dim = 16,
        .relative_heads = true,
        .dropout = 0.25,
        .padded = true,
        .seed = 3}},
      {"AbsoluteKeys",
       {.shape = {1, 2, 2, 20, 70, 8, 8}, .relative = &kByKey, .relative_values = false}},
      {"RelativeOnGrid",
       {.shape = {1, 2, 1, 46, 46, 8, 8}, .relative = &kAxes, .relative_heads = true}},
      {"RelativeValuesOnGrid",
       {.shape = {2, 2, 2, 46, 46, 8, 16}, .relative = &kGrid, .relative_dim = 0}},
      {"RelativeDecode",
       {.shape = {1, 2, 1, 1, 600, 8, 8}, .query_offset = 599, .relative = &kShaw}},
      // In most rows, one key outweighs all others.
      {"RelativeOfFewKeys",
       {.shape = {1, 2, 2, 7, 7, 8, 8}, .right = 0, .relative = &kShaw, .relative_heads = true}},
      {"RelativeWithoutKeys", {.shape = {2, 2, 1, 5, 0, 8, 8}, .relative = &kShaw}},
      {"RelativeWithoutQueries", {.shape = {2, 2, 1, 0, 5, 8, 8}, .relative = &kShaw}},
      // Ascending positions with gaps, which start anywhere.
      {"PositionsCausal",
       {.shape = {2, 2, 1, 40, 70, 16, 8},
        .right = 0,
        .query_positions = Positions(2, 40, 3, 1000, int64_t{1} << 40),
        .key_positions = Positions(2, 70, 2, 1000, int64_t{1} << 40),
        .bias = kShared,
        .layout = &kWide}},
      // Documents whose positions restart, and hidden keys.
      {"PositionsOfDocuments",
       {.shape = {2, 2, 1, 90, 90, 8, 16},
        .left = 20,
        .right = 0,
        .key_lengths = {80, 90},
        .query_positions = Positions(2, 90, 1, 33),
        .key_positions = Positions(2, 90, 1, 33),
        .query_segments = Documents(2, 90, 33),
        .key_segments = Documents(2, 90, 33),
        .key_bias = true,
        .relative = &kShaw}},
      // Positions in no order, many of which are equal; some queries see no key.
      {"PositionsInNoOrder",
       {.shape = {2, 4, 2, 37, 70, 16, 24},
        .left = 9,
        .right = -2,
        .key_starts = {0, 4},
        .query_positions = Positions(2, 37, 17, 53),
        .key_positions = Positions(2, 70, 11, 37, 9),
        .bias = kEach,
        .layout = &kClipped,
        .dropout = 0.25,
        .padded = true,
        .seed = 3}},
      {"PositionsInChunks",
       {.shape = {1, 2, 1, 50, 70, 8, 8},
        .chunks = {13, 1, 0},
        .query_positions = Positions(1, 50, 7, 90, -40),
        .key_positions = Positions(1, 70, 11, 13, -6),
        .relative = &kPast}},
      // The visible keys descend.
      {"PositionsDescending",
       {.shape = {1, 2, 1, 70, 90, 8, 8},
        .right = 0,
        .query_positions = Positions(1, 70, 99, 100),
        .key_positions = Positions(1, 90, 1, 100)}},
      {"PositionsOnGrid",
       {.shape = {1, 2, 1, 30, 20, 8, 8},
        .query_positions = Positions(1, 30, 7, 46),
        .key_positions = Positions(1, 20, 11, 46),
        .bias = kShared,
        .layout = &kAxes,
        .relative = &kByKey,
        .relative_values = false}},
      {"PositionsWithoutQueries",
       {.shape = {2, 2, 1, 0, 5, 8, 8}, .right = 0, .key_positions = Positions(2, 5, 1, 9)}},
      {"GridAxes", {.shape = {1, 2, 1, 46, 46, 8, 8}, .bias = kShared, .layout = &kAxes}},
      {"SoftcapOfBiases",
       {.shape = {2, 4, 2, 30, 50, 16, 16},
        .right = 20,
        .bias = kEach,
        .key_bias = true,
        .temperature = true,
        .softcap = 1.5}},
      {"PositionToContent",
       {.shape = {2, 4, 2, 37, 70, 16, 24},
        .right = 40,
        .query_offset = 3,
        .bias = kShared,
        .relative = &kShaw,
        .relative_key_dim = 7}},
      {"PositionToContentOfHeads",
       {.shape = {2, 4, 2, 33, 70, 8, 17},
        .query_offset = 30,
        .temperature = true,
        .relative = &kPast,
        .relative_dim = 0,
        .relative_values = false,
        .relative_key_dim = 16,
        .relative_heads = true,
        .dropout = 0.25,
        .padded = true,
        .seed = 3}},
      {"PositionToContentAtPositions",
       {.shape = {2, 2, 1, 37, 70, 8, 8},
        .left = 9,
        .right = 2,
        .query_positions = Positions(2, 37, 17, 53),
        .key_positions = Positions(2, 70, 11, 37, 9),
        .bias = kShared,
        .layout = &kClipped,
        .relative = &kShaw,
        .relative_dim = 0,
        .relative_key_dim = 5}},
      {"PositionToContentWithoutKeys",
       {.shape = {2, 2, 1, 5, 0, 8, 8}, .relative = &kShaw, .relative_key_dim = 3}},
      {"PositionToContentWithoutQueries",
       {.shape = {2, 2, 1, 0, 5, 8, 8}, .relative = &kShaw, .relative_key_dim = 3}},
  };
}

class EmulatedTest : public ::testing::TestWithParam<std::tuple<const PairFunction*, Element>> {};

TEST_P(EmulatedTest, MatchesTheReference) {
  const auto& [function, element] = GetParam();
  // Starts at a different number for each function, so that orders and options differ too.
  const std::vector<const PairFunction*> functions = EmulatedPairFunctions();
  size_t n = static_cast<size_t>(element);
  n += std::find(functions.begin(), functions.end(), function) - functions.begin();
  for (const Case& c : Cases()) {
    ++n;
    // Each type has a different third of the cases, so all pairs of function and case occur.
    if (!TestsAllForms() && !RunsWith(*function, n)) continue;
    SCOPED_TRACE(c.name);
    const Problem<float> p = ProblemOf(*function, c.options, element);
    CudaOptions how;
    how.element = element;
    how.order = Order(n);
    how.keeps_exact_o = n % 4 != 0;
    how.keeps_statistics = n % 5 != 0;
    how.precise = n / 2 % 2 == 0;
    how.fills = n % 2 != 0;
    try {
      ExpectCloseTo(RunCuda(p, how), p.InDouble().Run(), element, c.options.dropout);
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
    if (HasFailure() && GTEST_FLAG_GET(fail_fast)) return;
  }
}

INSTANTIATE_TEST_SUITE_P(All, EmulatedTest,
                         ::testing::Combine(::testing::ValuesIn(EmulatedPairFunctions()),
                                            ::testing::ValuesIn(kElements)),
                         [](const auto& test) {
                           return std::string(std::get<0>(test.param)->name) +
                                  NameOf(std::get<1>(test.param));
                         });

// Tests head dimensions of all sizes, because they determine tiles and register use. No block may
// request more shared memory than the smallest GPU has.
TEST(WideHeadsTest, MatchTheReference) {
  const std::pair<int64_t, int64_t> dims[] = {{32, 64},   {64, 32},  {72, 128},
                                              {128, 104}, {256, 96}, {40, 250}};
  size_t n = 0;
  for (const char* name : {"dot", "penumbral"}) {
    for (const auto& [dim, value_dim] : dims) {
      for (const Element element : kElements) {
        ++n;
        SCOPED_TRACE(name + std::string(" ") + std::to_string(dim) + " " + NameOf(element));
        // Half of the kernels have no terms.
        const bool plain = n / std::size(kElements) % 2 != 0;
        const Problem<float> p =
            ProblemOf(EmulatedPairFunction(name),
                      {.shape = {1, 2, 1, 67, 66, dim, value_dim},
                       .right = 40,
                       .bias = plain ? ProblemOptions::kNoBias : ProblemOptions::kSharedBias},
                      element);
        CudaOptions how;
        how.element = element;
        how.order = Order(n);
        EmulatedBackend backend(how.order, plain ? 1 : 264);
        try {
          ExpectCloseTo(RunCuda(p, how, &backend), p.InDouble().Run(), element);
        } catch (const std::exception& error) {
          ADD_FAILURE() << error.what();
        }
        EXPECT_LE(backend.largest_shared(), 99 * 1024);
      }
    }
  }
}

}  // namespace
}  // namespace gnomon::testing
