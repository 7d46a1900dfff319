// Compares table layouts with their definitions, which are evaluated pair by pair.
#include "gnomon/table_layout.h"

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "gnomon/attention.h"
#include "gtest/gtest.h"

namespace gnomon::testing {
namespace {

struct LayoutCase {
  std::string name;
  std::shared_ptr<TableLayout> layout;
  // The entries that the query at position p reads for key j, sorted.
  std::function<std::vector<int64_t>(int64_t p, int64_t j)> entries;
  int64_t size;
  int64_t keys;
};

LayoutCase Offset(const std::string& name, int64_t past, int64_t future, bool clip) {
  const auto far = clip ? OffsetLayout::Far::kClip : OffsetLayout::Far::kZero;
  return {name, std::make_shared<OffsetLayout>(past, future, far),
          [=](int64_t p, int64_t j) -> std::vector<int64_t> {
            const int64_t offset = j - p;
            if (!clip && (offset < -past || offset > future)) return {};
            return {std::min(std::max(offset, -past), future) + past};
          },
          past + 1 + future, 40};
}

// The grid coordinates of a token, slowest axis first; empty for tokens of the prefix.
std::vector<int64_t> Place(const std::vector<int64_t>& shape, int64_t prefix, int64_t token) {
  int64_t n = prefix;
  std::vector<int64_t> place(shape.size(), 0);
  if (token < prefix) return {};
  while (n != token) {
    ++n;
    for (size_t axis = shape.size(); axis-- > 0;) {
      if (++place[axis] < shape[axis]) break;
      place[axis] = 0;
    }
  }
  return place;
}

LayoutCase Grid(const std::string& name, const std::vector<int64_t>& shape, int64_t prefix,
                bool table) {
  int64_t tokens = 1;
  for (const int64_t length : shape) tokens *= length;
  int64_t size = table ? 1 : 0;
  for (const int64_t length : shape) size = table ? size * (2 * length - 1) : size + 2 * length - 1;
  const auto kind = table ? GridLayout::Kind::kTable : GridLayout::Kind::kAxes;
  return {name, std::make_shared<GridLayout>(shape, prefix, kind),
          [=](int64_t p, int64_t j) -> std::vector<int64_t> {
            if (p < 0 || p >= tokens + prefix || j >= tokens + prefix) return {};
            const std::vector<int64_t> query = Place(shape, prefix, p);
            const std::vector<int64_t> key = Place(shape, prefix, j);
            if (query.empty() || key.empty()) return {};
            int64_t index = 0;
            int64_t first = 0;
            std::vector<int64_t> entries;
            for (size_t axis = 0; axis < shape.size(); ++axis) {
              const int64_t offset = key[axis] - query[axis] + shape[axis] - 1;
              index = index * (2 * shape[axis] - 1) + offset;
              entries.push_back(first + offset);
              first += 2 * shape[axis] - 1;
            }
            return table ? std::vector<int64_t>{index} : entries;
          },
          size, tokens + prefix};
}

std::vector<LayoutCase> LayoutCases() {
  std::vector<LayoutCase> cases = {
      Offset("Clip", 3, 2, true),        Offset("Zero", 3, 2, false),
      Offset("ClipPast", 5, 0, true),    Offset("ZeroPast", 5, 0, false),
      Offset("Wide", 70, 70, true),      Offset("One", 0, 0, true),
      Grid("Plane", {3, 5}, 0, true),    Grid("PlaneAxes", {3, 5}, 2, false),
      Grid("Line", {7}, 1, true),        Grid("LineAxes", {7}, 1, false),
      Grid("Space", {2, 3, 4}, 1, true), Grid("SpaceAxes", {2, 3, 4}, 0, false)};
  cases.push_back({"Keys", std::make_shared<KeyLayout>(9),
                   [](int64_t, int64_t j) -> std::vector<int64_t> {
                     if (j >= 9) return {};
                     return {j};
                   },
                   9, 12});
  return cases;
}

class TableLayoutTest : public ::testing::TestWithParam<LayoutCase> {};

TEST_P(TableLayoutTest, RunsAreTheEntriesOfEachPair) {
  const LayoutCase& c = GetParam();
  EXPECT_EQ(c.layout->size(), c.size);
  for (int64_t p = -9; p < c.keys + 9; ++p) {
    for (int64_t begin = 0; begin <= c.keys; begin += 1 + begin % 3) {
      for (int64_t end = begin; end <= c.keys; end += 4) {
        std::vector<TableRun> runs;
        c.layout->AddRuns(p, begin, end, &runs);
        std::map<int64_t, std::vector<int64_t>> read;
        for (const TableRun& run : runs) {
          EXPECT_GT(run.count, 0);
          for (int64_t n = 0; n < run.count; ++n) {
            read[run.column + n].push_back(run.entry + n * run.step);
          }
        }
        for (auto& [column, entries] : read) {
          EXPECT_TRUE(column >= begin && column < end);
          std::sort(entries.begin(), entries.end());
        }
        for (int64_t j = begin; j < end; ++j) {
          ASSERT_EQ(read[j], c.entries(p, j)) << "query at " << p << ", key " << j;
        }
      }
    }
  }
}

TEST_P(TableLayoutTest, WindowsHoldWhatIsReadAndAreNoLargerThanSaid) {
  const LayoutCase& c = GetParam();
  for (int64_t first = -9; first < c.keys + 9; first += 3) {
    for (const int64_t queries : {1, 4, 11}) {
      for (int64_t begin = 0; begin < c.keys; begin += 2) {
        for (int64_t end = begin + 1; end <= c.keys; end += 5) {
          const TableRange window = c.layout->Window(first, first + queries, begin, end);
          EXPECT_LE(window.end - window.begin, c.layout->LargestWindow(queries, end - begin));
          EXPECT_GE(window.begin, 0);
          EXPECT_LE(window.end, c.size);
          for (int64_t p = first; p < first + queries; ++p) {
            for (int64_t j = begin; j < end; ++j) {
              for (const int64_t entry : c.entries(p, j)) {
                EXPECT_TRUE(entry >= window.begin && entry < window.end);
              }
            }
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, TableLayoutTest, ::testing::ValuesIn(LayoutCases()),
                         [](const auto& test) { return test.param.name; });

TEST(OffsetLayoutTest, TakesAnyPosition) {
  const OffsetLayout layout(2, 2, OffsetLayout::Far::kClip);
  for (const int64_t p :
       {std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()}) {
    std::vector<TableRun> runs;
    layout.AddRuns(p, 3, 8, &runs);
    ASSERT_EQ(runs.size(), 1u);
    EXPECT_EQ(runs[0].count, 5);
    EXPECT_EQ(runs[0].entry, p > 0 ? 0 : 4);
    const TableRange window = layout.Window(p > 0 ? p - 1 : p, p > 0 ? p : p + 1, 3, 8);
    EXPECT_LE(window.begin, runs[0].entry);
    EXPECT_GT(window.end, runs[0].entry);
  }
}

TEST(GridLayoutTest, RefusesWhatIsNoGrid) {
  const auto kind = GridLayout::Kind::kAxes;
  EXPECT_THROW(GridLayout({}, 0, kind), Error);
  EXPECT_THROW(GridLayout({3, 0}, 0, kind), Error);
  EXPECT_THROW(GridLayout({3, 4}, -1, kind), Error);
  const int64_t wide = int64_t{1} << 32;
  EXPECT_THROW(GridLayout({wide, wide, 6}, 0, kind), Error);
}

}  // namespace
}  // namespace gnomon::testing
