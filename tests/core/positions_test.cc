// Tests explicit positions: packed documents, trees and random positions.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "core/random_problem.h"
#include "gnomon/attention.h"
#include "gnomon/table_layout.h"
#include "gtest/gtest.h"

namespace gnomon::testing {
namespace {

using Far = OffsetLayout::Far;

// Returns `count` sorted random positions from [first, first + limit) for each of `batch` elements.
std::vector<int64_t> Drawn(int64_t batch, int64_t count, int64_t limit, int64_t first = 0) {
  std::mt19937 engine(7);
  std::vector<int64_t> positions;
  for (int64_t b = 0; b < batch; ++b) {
    std::vector<int64_t> all(static_cast<size_t>(limit));
    std::iota(all.begin(), all.end(), first);
    std::shuffle(all.begin(), all.end(), engine);
    all.resize(static_cast<size_t>(count));
    std::sort(all.begin(), all.end());
    positions.insert(positions.end(), all.begin(), all.end());
  }
  return positions;
}

// Returns the positions of documents with `length` tokens each; positions restart at 0 in every
// document.
std::vector<int64_t> Restarts(int64_t batch, int64_t count, int64_t length) {
  std::vector<int64_t> positions;
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t t = 0; t < count; ++t) positions.push_back((t + b) % length);
  }
  return positions;
}

std::vector<int64_t> Shuffled(std::vector<int64_t> positions) {
  std::mt19937 engine(3);
  std::shuffle(positions.begin(), positions.end(), engine);
  return positions;
}

struct PositionsCase {
  const char* name;
  ProblemOptions options;
};

void PrintTo(const PositionsCase& c, std::ostream* out) { *out << c.options; }

std::vector<PositionsCase> PositionsCases() {
  static const OffsetLayout wide(3000, 3000, Far::kClip);
  static const OffsetLayout shaw(16, 16, Far::kClip);
  static const OffsetLayout near(90, 40, Far::kZero);
  static const OffsetLayout past(400, 0, Far::kZero);
  static const KeyLayout keys(900);
  static const GridLayout plane({9, 14}, 1, GridLayout::Kind::kAxes);
  static const GridLayout table({5, 6, 7}, 2, GridLayout::Kind::kTable);
  constexpr auto kShared = ProblemOptions::kSharedBias;
  constexpr auto kEach = ProblemOptions::kBiasForEachBatch;
  return {
      {"DrawnCausal",
       {.shape = {2, 4, 2, 300, 300, 17, 19},
        .right = 0,
        .query_positions = Drawn(2, 300, 900),
        .key_positions = Drawn(2, 300, 900),
        .bias = kShared,
        .layout = &wide}},
      {"DrawnWindowCross",
       {.shape = {2, 2, 1, 130, 300, 17, 3},
        .left = 200,
        .right = 100,
        .query_positions = Drawn(2, 130, 900, -100),
        .key_positions = Drawn(2, 300, 900, -300),
        .bias = kEach,
        .layout = &wide,
        .padded = true}},
      {"RestartsInSegments",
       {.shape = {2, 2, 1, 700, 700, 17, 17},
        .right = 0,
        .query_positions = Restarts(2, 700, 130),
        .key_positions = Restarts(2, 700, 130),
        .query_segments = Documents(2, 700, 130),
        .key_segments = Documents(2, 700, 130),
        .bias = kShared,
        .layout = &wide}},
      {"RestartsThatSeeEachOther",
       {.shape = {2, 2, 2, 300, 300, 16, 16},
        .left = 40,
        .right = 0,
        .query_positions = Restarts(2, 300, 97),
        .key_positions = Restarts(2, 300, 97),
        .bias = kShared,
        .layout = &wide,
        .relative = &shaw}},
      {"ShuffledCausal",
       {.shape = {2, 4, 2, 200, 300, 17, 19},
        .right = 0,
        .query_positions = Shuffled(Drawn(2, 200, 600)),
        .key_positions = Shuffled(Drawn(2, 300, 600)),
        .bias = kEach,
        .layout = &wide,
        .key_bias = true,
        .temperature = true}},
      {"ShuffledChunks",
       {.shape = {2, 2, 2, 150, 257, 3, 17},
        .chunks = {33, 2, 1},
        .key_starts = {0, 70},
        .key_lengths = {257, 200},
        .query_positions = Shuffled(Drawn(2, 150, 400, -200)),
        .key_positions = Shuffled(Drawn(2, 257, 400, -200))}},
      {"RelativeZero",
       {.shape = {2, 4, 2, 130, 300, 17, 19},
        .query_positions = Shuffled(Drawn(2, 130, 400)),
        .key_positions = Drawn(2, 300, 400),
        .relative = &near,
        .relative_heads = true}},
      {"RelativePastDropout",
       {.shape = {2, 2, 1, 200, 200, 8, 8},
        .right = 0,
        .query_positions = Drawn(2, 200, 390),
        .key_positions = Drawn(2, 200, 390),
        .relative = &past,
        .dropout = 0.3}},
      {"KeysOfPositions",
       {.shape = {2, 2, 1, 61, 300, 8, 24},
        .query_positions = Drawn(2, 61, 900),
        .key_positions = Shuffled(Drawn(2, 300, 900)),
        .relative = &keys,
        .relative_dim = 33}},
      {"PlacesOfAGrid",
       {.shape = {2, 2, 1, 60, 100, 8, 16},
        .query_positions = Drawn(2, 60, 127),
        .key_positions = Shuffled(Drawn(2, 100, 127)),
        .relative = &plane,
        .relative_dim = 64}},
      {"PlacesOfATable",
       {.shape = {2, 2, 1, 80, 200, 8, 16},
        .query_positions = Shuffled(Drawn(2, 80, 212)),
        .key_positions = Drawn(2, 200, 212),
        .bias = kShared,
        .layout = &table}},
      {"Decode",
       {.shape = {2, 6, 2, 1, 900, 17, 17},
        .right = 0,
        .query_positions = {500, -3},
        .key_positions = Shuffled(Drawn(2, 900, 1000, -20)),
        .bias = kShared,
        .layout = &wide,
        .relative = &shaw}},
      {"DecodeOfATree",
       {.shape = {2, 8, 2, 5, 700, 17, 17},
        .right = 0,
        .query_positions = {695, 696, 696, 697, 697, 10, 11, 12, 12, 13},
        .key_positions = Restarts(2, 700, 350),
        .bias = kEach,
        .layout = &wide,
        .pair_mask = {true, false, true}}},
      {"Bfloat16",
       {.shape = {1, 2, 1, 300, 300, 64, 64},
        .right = 0,
        .query_positions = Shuffled(Drawn(1, 300, 500)),
        .key_positions = Shuffled(Drawn(1, 300, 500)),
        .bias = kShared,
        .layout = &wide}},
      {"FarFromZero",
       {.shape = {2, 2, 1, 97, 130, 17, 17},
        .right = 5,
        .query_positions = Drawn(2, 97, 300, int64_t{1} << 50),
        .key_positions = Shuffled(Drawn(2, 130, 300, int64_t{1} << 50)),
        .bias = kShared,
        .layout = &wide}},
      {"OneQueryOneKey",
       {.shape = {2, 1, 1, 1, 1, 3, 3},
        .right = 0,
        .query_positions = {4, -9},
        .key_positions = {4, -8},
        .bias = kShared,
        .layout = &wide}},
  };
}

class PositionsTest
    : public ::testing::TestWithParam<std::tuple<const PairFunction*, PositionsCase>> {};

TEST_P(PositionsTest, KernelsMatchReference) {
  const auto& [function, test_case] = GetParam();
  ExpectKernelsMatchReference(RandomProblem(*function, test_case.options), 5e-5);
}

// Results are bitwise equal for any number of workers.
TEST_P(PositionsTest, WorkersChangeNoBit) {
  const auto& [function, test_case] = GetParam();
  const Problem<float> p = RandomProblem(*function, test_case.options);
  const Results<float> expected = p.Run();
  for (const int workers : {2, 3}) ExpectSame(p.Run(ThreadExecutor(workers)), expected);
}

INSTANTIATE_TEST_SUITE_P(All, PositionsTest,
                         ::testing::ValuesIn(WithFunctions(PairFunctions(), PositionsCases())),
                         [](const auto& test) {
                           return std::string(std::get<0>(test.param)->name) +
                                  std::get<1>(test.param).name;
                         });

// Consecutive positions give bitwise the same results as a query offset.
TEST(Positions, InOrderAreTheOffset) {
  const int64_t queries = 150;
  const int64_t keys = 300;
  const OffsetLayout offsets(queries + 99, keys - 101, Far::kClip);
  for (const PairFunction* function : PairFunctions()) {
    SCOPED_TRACE(function->name);
    ProblemOptions options = {.shape = {2, 4, 2, queries, keys, 17, 19},
                              .left = 120,
                              .right = 0,
                              .query_offset = 100,
                              .bias = ProblemOptions::kSharedBias};
    Problem<float> p = RandomProblem(*function, options);
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t i = 0; i < queries; ++i) p.options.query_positions.push_back(100 + i);
      for (int64_t j = 0; j < keys; ++j) p.options.key_positions.push_back(j);
    }
    p.options.layout = &offsets;
    ASSERT_EQ(offsets.size(), queries + keys - 1);
    const Results<float> placed = p.Run();
    p.options.query_positions.clear();
    p.options.layout = nullptr;
    ExpectSame(p.Run(), placed);
  }
}

// Permuting the keys together with their positions changes results only by rounding.
TEST(Positions, OrderOfKeysDoesNotMatter) {
  const OffsetLayout wide(700, 700, Far::kClip);
  for (const PairFunction* function : PairFunctions()) {
    SCOPED_TRACE(function->name);
    ProblemOptions options = {.shape = {1, 2, 1, 130, 200, 17, 19},
                              .right = 0,
                              .query_positions = Drawn(1, 130, 600),
                              .key_positions = Drawn(1, 200, 600),
                              .bias = ProblemOptions::kSharedBias,
                              .layout = &wide};
    Problem<float> p = RandomProblem(*function, options);
    const Results<float> sorted = p.Run();
    std::vector<int64_t> order(200);
    std::iota(order.begin(), order.end(), 0);
    order = Shuffled(order);
    Problem<float> q = p;
    for (int64_t j = 0; j < 200; ++j) {
      const int64_t from = order[static_cast<size_t>(j)];
      q.options.key_positions[static_cast<size_t>(j)] =
          p.options.key_positions[static_cast<size_t>(from)];
      for (int64_t d = 0; d < q.options.shape.dim; ++d) q.y.at(0, 0, j, d) = p.y.at(0, 0, from, d);
      for (int64_t d = 0; d < 19; ++d) q.v.at(0, 0, j, d) = p.v.at(0, 0, from, d);
      for (int s = 0; s < function->column_scalars; ++s) {
        q.column_at(s, 0, 0, j) = p.column_at(s, 0, 0, from);
      }
    }
    const Results<float> shuffled = q.Run();
    for (const char* name : {"o", "lse", "d_x", "d_bias", "d_factor"}) {
      const std::vector<double> expected(sorted.at(name).begin(), sorted.at(name).end());
      EXPECT_LE(Difference(shuffled.at(name), expected, 1), 5e-5) << name;
    }
  }
}

// Tokens, scalars and positions of keys outside key_starts and key_lengths do not affect the
// results.
TEST(Positions, HiddenKeysMayBeAnything) {
  const OffsetLayout wide(700, 700, Far::kClip);
  const OffsetLayout shaw(16, 16, Far::kZero);
  for (const PairFunction* function : PairFunctions()) {
    SCOPED_TRACE(function->name);
    Problem<float> p = RandomProblem(*function, {.shape = {2, 2, 1, 97, 200, 17, 19},
                                                 .right = 0,
                                                 .key_starts = {0, 37},
                                                 .key_lengths = {150, 190},
                                                 .query_positions = Drawn(2, 97, 600),
                                                 .key_positions = Drawn(2, 200, 600),
                                                 .bias = ProblemOptions::kSharedBias,
                                                 .layout = &wide,
                                                 .relative = &shaw});
    const Results<float> expected = p.Run();
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t j = 0; j < 200; ++j) {
        const auto batch = static_cast<size_t>(b);
        if (j >= p.options.key_starts[batch] && j < p.options.key_lengths[batch]) continue;
        p.options.key_positions[static_cast<size_t>(b * 200 + j)] =
            j % 2 == 0 ? std::numeric_limits<int64_t>::min() : int64_t{1} << 60;
        for (int64_t d = 0; d < p.options.shape.dim; ++d) p.y.at(b, 0, j, d) = kNan;
        for (int64_t d = 0; d < 19; ++d) p.v.at(b, 0, j, d) = kNan;
        for (int s = 0; s < function->column_scalars; ++s) p.column_at(s, b, 0, j) = kNan;
      }
    }
    ExpectSame(p.Run(), expected);
  }
}

// A non-finite value affects only rows that see its key, in any order of the keys.
TEST(Positions, NonFiniteValuesReachWhatSeesThem) {
  Problem<float> p =
      RandomProblem(FindPairFunction("dot"), {.shape = {1, 1, 1, 130, 300, 16, 16},
                                              .right = 0,
                                              .query_positions = Shuffled(Drawn(1, 130, 600)),
                                              .key_positions = Shuffled(Drawn(1, 300, 600))});
  constexpr int64_t kSpoiled = 77;
  const Results<float> expected = p.Forward();
  p.v.at(0, 0, kSpoiled, 3) = kNan;
  OnEveryTarget([&] {
    const Results<float> actual = p.Forward();
    for (int64_t i = 0; i < 130; ++i) {
      const bool sees = Sees(p.options, 0, i, kSpoiled);
      EXPECT_EQ(std::isnan(actual.at("o")[static_cast<size_t>(i * 16 + 3)]), sees) << i;
      EXPECT_FALSE(std::isnan(actual.at("o")[static_cast<size_t>(i * 16 + 4)])) << i;
    }
  });
  EXPECT_EQ(expected.at("o").size(), 130U * 16U);
}

// A user-defined layout that does not override Differences().
class EveryThird final : public TableLayout {
 public:
  int64_t size() const override { return 4; }
  void AddRuns(int64_t p, int64_t begin, int64_t end, std::vector<TableRun>* runs) const override {
    for (int64_t key = begin; key < end; ++key) {
      const int64_t entry = (((key + p) % 4) + 4) % 4;
      if (entry != 3) runs->push_back({key, 1, entry, 0});
    }
  }
};

TEST(Positions, LayoutsMayBeAnyFunction) {
  const EveryThird layout;
  ExpectKernelsMatchReference(
      RandomProblem(FindPairFunction("umbral"), {.shape = {2, 2, 1, 97, 200, 17, 19},
                                                 .right = 0,
                                                 .query_positions = Shuffled(Drawn(2, 97, 300)),
                                                 .key_positions = Restarts(2, 200, 70),
                                                 .bias = ProblemOptions::kSharedBias,
                                                 .layout = &layout,
                                                 .relative = &layout}));
}

// The two descriptions of a layout, runs and differences of codes, agree.
TEST(Positions, DifferencesAreTheRuns) {
  const OffsetLayout clip(5, 3, Far::kClip);
  const OffsetLayout zero(4, 0, Far::kZero);
  const OffsetLayout ahead(-2, 6, Far::kClip);
  const KeyLayout keys(7);
  const GridLayout axes({3, 2, 4}, 2, GridLayout::Kind::kAxes);
  const GridLayout table({3, 2, 4}, 1, GridLayout::Kind::kTable);
  for (const TableLayout* layout :
       std::initializer_list<const TableLayout*>{&clip, &zero, &ahead, &keys, &axes, &table}) {
    const std::vector<EntryDifference> differences = layout->Differences();
    ASSERT_FALSE(differences.empty());
    for (int64_t p = -3; p < 30; ++p) {
      for (int64_t key = -3; key < 30; ++key) {
        std::vector<TableRun> runs;
        layout->AddRuns(p, key, key + 1, &runs);
        std::vector<int64_t> expected;
        for (const TableRun& run : runs) expected.push_back(run.entry);
        std::vector<int64_t> actual;
        for (size_t n = 0; n < differences.size(); ++n) {
          const auto of_key = layout->KeyCode(n, key);
          const auto of_query = layout->QueryCode(n, p);
          if (!of_key || !of_query) continue;
          int64_t entry = *of_key - *of_query;
          const EntryDifference& of = differences[n];
          if (of.clip) entry = std::clamp(entry, of.begin, of.end - 1);
          if (entry >= of.begin && entry < of.end) actual.push_back(entry);
        }
        std::sort(expected.begin(), expected.end());
        std::sort(actual.begin(), actual.end());
        EXPECT_EQ(actual, expected) << p << " " << key;
      }
    }
  }
}

TEST(Positions, AreChecked) {
  ProblemOptions options = {
      .shape = {1, 1, 1, 3, 4, 2, 2}, .query_positions = {0, 1, 2}, .key_positions = {0, 1, 2, 3}};
  const auto message = [](const Problem<float>& p, auto change) {
    AttentionInput<float> in = p.Input();
    change(in);
    std::vector<float> o(6), lse(3);
    try {
      AttentionForward(p.function, in, {{o.data(), {6, 6, 2}}, lse.data()});
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("nothing");
  };
  const Problem<float> p = RandomProblem(FindPairFunction("dot"), options);
  EXPECT_EQ(message(p, [](AttentionInput<float>& in) { in.key_positions = nullptr; }),
            "attention: one of query_positions and key_positions is null; expected both or "
            "neither");
  options.bias = ProblemOptions::kSharedBias;
  EXPECT_EQ(message(RandomProblem(FindPairFunction("dot"), options), [](AttentionInput<float>&) {}),
            "attention: bias has no layout; expected one, because the call has positions");
  options.bias = ProblemOptions::kNoBias;
  options.key_positions[3] = int64_t{1} << 30;
  EXPECT_EQ(
      message(RandomProblem(FindPairFunction("dot"), options), [](AttentionInput<float>&) {}),
      "attention: positions of batch element 0 range from 0 to 1073741824; expected values within "
      "+-2^53 and less than 2^30 apart");
}

}  // namespace
}  // namespace gnomon::testing
