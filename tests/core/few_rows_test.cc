// Tests key heads with few rows, for which keys and values are read in place. Row counts are around
// the limit, and results are compared with those of the same rows in larger calls.
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <new>
#include <sstream>
#include <string>
#include <vector>

#include "core/random_problem.h"
#include "gnomon/attention.h"
#include "gnomon/table_layout.h"
#include "gtest/gtest.h"

namespace gnomon::testing {
namespace {

constexpr TokenType kFloat32 = TokenType::kFloat32;
constexpr TokenType kBFloat16 = TokenType::kBFloat16;
constexpr TokenType kFloat16 = TokenType::kFloat16;

class FewRowsTest : public ::testing::TestWithParam<const PairFunction*> {
 protected:
  const PairFunction& function() const { return *GetParam(); }
};

INSTANTIATE_TEST_SUITE_P(All, FewRowsTest, ::testing::ValuesIn(PairFunctions()),
                         [](const auto& test) { return std::string(test.param->name); });

std::string Described(const ProblemOptions& options) {
  std::ostringstream description;
  description << options;
  return description.str();
}

// Tests row counts up to a few above the limit, in one head or several, and column counts around
// vector lengths.
TEST_P(FewRowsTest, OfAnyNumberAndSizeMatchReference) {
  constexpr int64_t kColumns[] = {1, 3, 4, 7, 8, 15, 16, 17, 31, 33, 40, 64, 65, 80, 130};
  constexpr size_t kCount = std::size(kColumns);
  for (int64_t rows = 1; rows <= 12; ++rows) {
    const auto n = static_cast<size_t>(rows);
    const int64_t group = rows % 4 == 0 ? 4 : rows % 3 == 0 ? 3 : 1;
    const ProblemOptions options = {.shape = {1, 2 * group, 2, rows / group, 90 + 37 * rows,
                                              kColumns[n % kCount], kColumns[7 * n % kCount]},
                                    .padded = rows % 2 == 0,
                                    .seed = static_cast<unsigned>(rows)};
    SCOPED_TRACE(Described(options));
    ExpectKernelsMatchReference(RandomProblem(function(), options));
  }
}

// Tests all masks, and all terms of scores and values.
TEST_P(FewRowsTest, WithMasksAndTermsMatchReference) {
  static const OffsetLayout clip(9, 9, OffsetLayout::Far::kClip);
  static const OffsetLayout zero(300, 40, OffsetLayout::Far::kZero);
  constexpr auto kShared = ProblemOptions::kSharedBias;
  const ProblemOptions all[] = {
      // With a causal mask, rows see different keys of the last tile and, with a window, of the
      // first tile.
      {.shape = {1, 2, 2, 8, 600, 17, 17}, .right = 0, .query_offset = 592},
      {.shape = {2, 4, 2, 3, 600, 33, 24}, .left = 270, .right = 0, .query_offsets = {590, 300}},
      {.shape = {3, 2, 1, 5, 333, 64, 64},
       .key_starts = {0, 7, 300},
       .key_lengths = {333, 290, 60},
       .bias = ProblemOptions::kBiasForEachBatch},
      {.shape = {2, 2, 1, 4, 300, 17, 3},
       .query_segments = Documents(2, 4, 2, 1),
       .key_segments = Documents(2, 300, 90),
       .padded = true},
      {.shape = {2, 4, 2, 3, 300, 17, 17}, .chunks = {33, 2, 1}, .query_offset = 200},
      {.shape = {1, 4, 1, 2, 700, 19, 17}, .bias = kShared, .key_bias = true, .temperature = true},
      {.shape = {2, 4, 2, 3, 300, 17, 9},
       .pair_bias = {true, false, false},
       .pair_mask = {true, true, false}},
      {.shape = {1, 4, 2, 2, 600, 17, 17}, .right = 0, .query_offset = 590, .relative = &clip},
      {.shape = {1, 4, 1, 2, 600, 17, 17},
       .query_offset = 400,
       .relative = &zero,
       .relative_dim = 33,
       .relative_values = false,
       .relative_heads = true},
      {.shape = {1, 2, 2, 3, 300, 17, 16},
       .query_positions = {40, 7, 500},
       .key_positions =
           [] {
             std::vector<int64_t> positions;
             for (int64_t j = 0; j < 300; ++j) positions.push_back(j * 7 % 300);
             return positions;
           }(),
       .relative = &clip},
      {.shape = {1, 4, 2, 2, 300, 17, 17}, .dropout = 0.3},
  };
  for (const ProblemOptions& options : all) {
    SCOPED_TRACE(Described(options));
    ExpectKernelsMatchReference(RandomProblem(function(), options));
  }
}

// A row's result is bitwise independent of the other queries and heads in the call.
TEST_P(FewRowsTest, AreTheSameAloneAndTogether) {
  for (const TokenType type : {kFloat32, kBFloat16, kFloat16}) {
    // For bfloat16 pairs, the row limit is lower.
    const int64_t queries = type == kBFloat16 ? 1 : 2;
    const Problem<float> together =
        RandomProblem(function(), {.shape = {1, 8, 2, queries, 700, 41, 23},
                                   .type = type,
                                   .value_type = type,
                                   .padded = true});
    const AttentionShape& n = together.options.shape;
    OnEveryTarget([&] {
      const Results<float> all = together.Forward();
      for (const int64_t heads : {1, 4}) {
        for (int64_t i = 0; i < n.queries; ++i) {
          for (int64_t h = 0; h < n.heads; h += heads) {
            AttentionInput<float> in = together.Input();
            const AttentionInput<float> of_all = in;
            in.shape.heads = heads;
            in.shape.key_heads = 1;
            in.shape.queries = 1;
            const int64_t key_head = h / 4;
            in.x.data = of_all.x.row(0, h, i);
            in.y.data = of_all.y.row(0, key_head, 0);
            in.v.data = of_all.v.row(0, key_head, 0);
            in.factor += h;
            std::vector<float> rows;
            for (int s = 0; s < function().row_scalars; ++s) {
              for (int64_t m = 0; m < heads; ++m) {
                rows.push_back(of_all.row_scalars[(s * n.heads + h + m) * n.queries + i]);
              }
            }
            in.row_scalars = rows.data();
            std::vector<float> columns;
            for (int s = 0; s < function().column_scalars; ++s) {
              const float* from = of_all.column_scalars + (s * n.key_heads + key_head) * n.keys;
              columns.insert(columns.end(), from, from + n.keys);
            }
            in.column_scalars = columns.data();
            std::vector<float> scalars;
            for (int s = 0; s < function().head_scalars; ++s) {
              const float* from = of_all.head_scalars + s * n.heads + h;
              scalars.insert(scalars.end(), from, from + heads);
            }
            in.head_scalars = scalars.data();
            std::vector<float> o(static_cast<size_t>(heads * n.value_dim), kNan);
            std::vector<float> lse(static_cast<size_t>(heads), kNan);
            AttentionForward(function(), in,
                             {{o.data(), {0, n.value_dim, n.value_dim}}, lse.data()});
            for (int64_t m = 0; m < heads; ++m) {
              const auto row = static_cast<size_t>((h + m) * n.queries + i);
              ASSERT_EQ(lse[static_cast<size_t>(m)], all.at("lse")[row]) << "query " << i;
              for (int64_t e = 0; e < n.value_dim; ++e) {
                ASSERT_EQ(
                    o[static_cast<size_t>(m * n.value_dim + e)],
                    all.at("o")[row * static_cast<size_t>(n.value_dim) + static_cast<size_t>(e)])
                    << "query " << i << " of head " << h + m << " column " << e;
              }
            }
          }
        }
      }
    });
  }
}

TEST_P(FewRowsTest, AreTheSameForAnyNumberOfWorkers) {
  const ProblemOptions problems[] = {
      {.shape = {1, 1, 1, 1, 2900, 65, 65}},
      {.shape = {2, 8, 4, 4, 900, 17, 40}, .right = 0, .query_offset = 896},
      {.shape = {1, 4, 4, 4, 1100, 64, 64},
       .bias = ProblemOptions::kSharedBias,
       .type = kBFloat16,
       .value_type = kBFloat16},
  };
  for (const ProblemOptions& options : problems) {
    SCOPED_TRACE(Described(options));
    ExpectSameForAnyNumberOfWorkers(RandomProblem(function(), options));
  }
}

// Unlike in calls with many rows, weights are not rounded to bfloat16.
TEST_P(FewRowsTest, OfBfloat16KeepTheirWeights) {
  size_t n = 0;
  for (const int64_t dim : {16, 31, 33, 64, 100}) {
    for (const int64_t rows : {1, 2, 3, 4}) {
      if (!RunsWith(function(), n++)) continue;
      const ProblemOptions options = {.shape = {1, 2, 2, rows, 700, dim, dim},
                                      .type = kBFloat16,
                                      .value_type = kBFloat16,
                                      .padded = dim == 33};
      SCOPED_TRACE(Described(options));
      const Problem<float> p = RandomProblem(function(), options);
      const Results<double> expected = p.InDouble().Forward();
      OnEveryTarget([&] {
        for (const auto& [name, values] : p.Forward()) {
          EXPECT_LE(Difference(values, expected.at(name)), 5e-5) << name;
        }
      });
    }
  }
}

// Stores numbers at the end of a page; the next page is inaccessible, so a read past the end
// crashes.
class AtPageEnd {
 public:
  AtPageEnd(const void* numbers, size_t bytes) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t pages = (bytes + page - 1) / page * page;
    size_ = pages + page;
    memory_ = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory_ == MAP_FAILED) throw std::bad_alloc();
    start_ = static_cast<char*>(memory_) + pages - bytes;
    std::memcpy(start_, numbers, bytes);
    mprotect(static_cast<char*>(memory_) + pages, page, PROT_NONE);
  }
  ~AtPageEnd() { munmap(memory_, size_); }
  AtPageEnd(const AtPageEnd&) = delete;
  AtPageEnd& operator=(const AtPageEnd&) = delete;
  const void* data() const { return start_; }

 private:
  void* memory_ = nullptr;
  size_t size_ = 0;
  char* start_ = nullptr;
};

TEST(FewRowsMemoryTest, NothingIsReadBehindTheLastNumber) {
  for (const TokenType type : {kFloat32, kBFloat16, kFloat16}) {
    const size_t bytes = type == kFloat32 ? 4 : 2;
    for (const int64_t dim : {1, 2, 5, 9, 15, 17, 24, 33, 47, 63, 65}) {
      for (const int64_t rows : {1, 2, 3, 4, 8}) {
        const Problem<float> p = RandomProblem(
            FindPairFunction("dot"),
            {.shape = {1, 1, 1, rows, 83, dim, dim}, .type = type, .value_type = type});
        const AttentionShape& n = p.options.shape;
        AttentionInput<float> in = p.Input();
        const auto size = [&](int64_t count) { return static_cast<size_t>(count * n.dim) * bytes; };
        const AtPageEnd x(in.x.data, size(n.queries));
        const AtPageEnd y(in.y.data, size(n.keys));
        const AtPageEnd v(in.v.data, size(n.keys));
        OnEveryTarget([&] {
          const Results<float> expected = p.Forward();
          in.x.data = x.data();
          in.y.data = y.data();
          in.v.data = v.data();
          std::vector<float> o(static_cast<size_t>(n.queries * n.dim));
          std::vector<float> lse(static_cast<size_t>(n.queries));
          AttentionForward(p.function, in,
                           {{o.data(), {n.queries * n.dim, n.queries * n.dim, n.dim}}, lse.data()});
          EXPECT_EQ(o, expected.at("o"));
          EXPECT_EQ(lse, expected.at("lse"));
        });
      }
    }
  }
}

}  // namespace
}  // namespace gnomon::testing
