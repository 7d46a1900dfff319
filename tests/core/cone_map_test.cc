// Compares the token maps of cones with their formulas, and their gradients with finite
// differences, on every instruction set.
#include "core/cone_map.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/random_problem.h"

namespace gnomon {
namespace testing {
namespace {

using Function = ConeMap::Function;

// The expected map of a token's height, from the formulas in section 4 of Tseng et al. 2023.
struct Expected {
  double m;
  std::vector<double> scalars;
};

Expected Formula(const ConeMap& map, double z) {
  if (map.function == Function::kUmbral) {
    const double h = map.as_is ? z : std::exp(std::clamp(z, -map.farthest, map.farthest));
    return {(map.as_is ? 1 : h) / std::sinh(map.r), {h}};
  }
  const double u = map.as_is ? std::clamp(z / map.r, 0.0, 1.0) : 1 / (1 + std::exp(-z));
  const double m = map.as_is ? 1 / map.r : u;
  const double a = std::sqrt((1 - u) * (1 + u));
  return {m, {u * u / (1 + a), u * u}};
}

std::vector<ConeMap> Maps() {
  std::vector<ConeMap> maps;
  for (const Function function : {Function::kUmbral, Function::kPenumbral}) {
    for (const bool as_is : {false, true}) maps.push_back({function, as_is, 1.3, 4.0});
  }
  return maps;
}

// Tokens with gaps between batches, heads and rows.
template <class T>
struct Cones {
  static constexpr int64_t kGap = 3;

  Cones(const ConeMap& map, int64_t rows, int64_t columns) {
    std::mt19937 engine(11);
    std::normal_distribution<double> normal;
    call.map = map;
    call.batch = 2;
    call.heads = 3;
    call.rows = rows;
    call.columns = columns;
    call.width = columns + (4 - columns % 4) % 4;
    const int64_t row = columns + 1 + kGap;
    const int64_t head = rows * row + kGap;
    tokens.resize(static_cast<size_t>(call.batch * call.heads * head));
    for (T& number : tokens) number = static_cast<T>(normal(engine));
    call.tokens = {tokens.data(), {call.heads * head, head, row}};
    const auto count = static_cast<size_t>(call.count());
    x.assign(count * static_cast<size_t>(call.width), T(-1));
    scalars.assign(count * static_cast<size_t>(map.scalars()), T(-1));
    d_x.resize(x.size());
    for (T& number : d_x) number = static_cast<T>(normal(engine));
    d_scalars.resize(scalars.size());
    for (T& number : d_scalars) number = static_cast<T>(normal(engine));
    d_tokens.resize(count * static_cast<size_t>(columns + 1));
    call.x = x.data();
    call.scalars = scalars.data();
  }

  T* token(int64_t n) {
    const int64_t head = n / call.rows;
    return const_cast<T*>(call.tokens.row(head / call.heads, head % call.heads, n % call.rows));
  }
  // Maps the tokens in two pieces, the first with at most five tokens.
  void Run() {
    const int64_t piece = std::min<int64_t>(call.count(), 5);
    MapConeTokens(call, 0, piece);
    MapConeTokens(call, piece, call.count());
  }
  void Forward() {
    call.d_tokens = nullptr;
    Run();
  }
  void Backward(bool with_x, bool with_scalars) {
    call.d_x = with_x ? d_x.data() : nullptr;
    call.d_scalars = with_scalars ? d_scalars.data() : nullptr;
    call.d_tokens = d_tokens.data();
    Run();
  }

  MappedCones<T> call;
  std::vector<T> tokens;
  std::vector<T> x;
  std::vector<T> scalars;
  std::vector<T> d_x;
  std::vector<T> d_scalars;
  std::vector<T> d_tokens;
};

std::string Name(const ConeMap& map) {
  return std::to_string(static_cast<int>(map.function)) + (map.as_is ? " as is" : "");
}

template <class T>
void ExpectFormula(double tolerance) {
  for (const ConeMap& map : Maps()) {
    for (const int64_t columns : {1, 2, 7, 15, 16, 17, 33, 63, 64}) {
      for (const int64_t rows : {1, 11, 64}) {
        SCOPED_TRACE(Name(map) + ", " + std::to_string(columns) + " columns");
        Cones<T> cones(map, rows, columns);
        cones.Forward();
        for (int64_t n = 0; n < cones.call.count(); ++n) {
          const T* token = cones.token(n);
          const Expected expected = Formula(map, token[columns]);
          for (int64_t e = 0; e < cones.call.width; ++e) {
            const double value = e < columns ? expected.m * token[e] : 0;
            ASSERT_NEAR(cones.x[static_cast<size_t>(n * cones.call.width + e)], value,
                        tolerance * (1 + std::fabs(value)));
          }
          for (int s = 0; s < map.scalars(); ++s) {
            const double value = expected.scalars[static_cast<size_t>(s)];
            ASSERT_NEAR(cones.scalars[static_cast<size_t>(s * cones.call.count() + n)], value,
                        tolerance * (1 + std::fabs(value)));
          }
        }
      }
    }
  }
}

TEST(ConeMapTest, FloatsAreTheFormula) {
  OnEveryTarget([] { ExpectFormula<float>(2e-6); });
}

TEST(ConeMapTest, DoublesAreTheFormula) {
  OnEveryTarget([] { ExpectFormula<double>(1e-14); });
}

TEST(ConeMapTest, GradientsAreDifferences) {
  constexpr double kStep = 1e-6;
  for (const ConeMap& map : Maps()) {
    for (const int64_t columns : {1, 6, 17, 35}) {
      SCOPED_TRACE(Name(map) + ", " + std::to_string(columns) + " columns");
      Cones<double> cones(map, 3, columns);
      cones.Backward(true, true);
      // The sum of d_x * x and d_scalars * scalars over all tokens.
      const auto sum = [&] {
        cones.Forward();
        double total = 0;
        for (int64_t n = 0; n < cones.call.count(); ++n) {
          for (int64_t e = 0; e < columns; ++e) {
            const auto at = static_cast<size_t>(n * cones.call.width + e);
            total += cones.d_x[at] * cones.x[at];
          }
        }
        for (size_t at = 0; at < cones.scalars.size(); ++at) {
          total += cones.d_scalars[at] * cones.scalars[at];
        }
        return total;
      };
      for (int64_t n = 0; n < cones.call.count(); ++n) {
        for (int64_t e = 0; e <= columns; ++e) {
          double& number = cones.token(n)[e];
          const double before = number;
          // Skips heights without a derivative: those clamped to a fraction of r, and penumbral
          // heights close to r.
          const double share = before / map.r;
          if (e == columns && map.as_is && map.function != Function::kUmbral &&
              (std::fabs(share) < 1e-3 || share > 1 - 1e-3)) {
            continue;
          }
          number = before + kStep;
          const double above = sum();
          number = before - kStep;
          const double below = sum();
          number = before;
          const double slope = (above - below) / (2 * kStep);
          ASSERT_NEAR(cones.d_tokens[static_cast<size_t>(n * (columns + 1) + e)], slope,
                      2e-7 * (1 + std::fabs(slope)))
              << "token " << n << ", column " << e;
        }
      }
    }
  }
}

TEST(ConeMapTest, GradientsOfFloatsAreThoseOfDoubles) {
  OnEveryTarget([] {
    for (const ConeMap& map : Maps()) {
      for (const int64_t columns : {1, 5, 16, 17, 63, 64}) {
        for (const bool with_x : {true, false}) {
          for (const bool with_scalars : {true, false}) {
            SCOPED_TRACE(Name(map) + ", " + std::to_string(columns) + " columns");
            Cones<float> cones(map, 23, columns);
            Cones<double> exact(map, 23, columns);
            std::copy(cones.tokens.begin(), cones.tokens.end(), exact.tokens.begin());
            std::copy(cones.d_x.begin(), cones.d_x.end(), exact.d_x.begin());
            std::copy(cones.d_scalars.begin(), cones.d_scalars.end(), exact.d_scalars.begin());
            cones.Backward(with_x, with_scalars);
            exact.Backward(with_x, with_scalars);
            for (size_t at = 0; at < cones.d_tokens.size(); ++at) {
              ASSERT_NEAR(cones.d_tokens[at], exact.d_tokens[at],
                          2e-5 * (1 + std::fabs(exact.d_tokens[at])));
            }
          }
        }
      }
    }
  });
}

// Each token's result is bitwise independent of the other tokens and of its memory address.
TEST(ConeMapTest, TokensDoNotTouchEachOther) {
  OnEveryTarget([] {
    for (const ConeMap& map : Maps()) {
      SCOPED_TRACE(Name(map));
      Cones<float> clean(map, 21, 18);
      Cones<float> spoiled(map, 21, 18);
      for (int64_t n = 0; n < clean.call.count(); n += 2) {
        float* token = spoiled.token(n);
        token[0] = std::numeric_limits<float>::infinity();
        token[18] = std::numeric_limits<float>::quiet_NaN();
      }
      clean.Forward();
      spoiled.Forward();
      clean.Backward(true, true);
      spoiled.Backward(true, true);
      for (int64_t n = 0; n < clean.call.count(); ++n) {
        const auto first = static_cast<size_t>(n * clean.call.width);
        if (n % 2 == 0) {
          // A NaN height gives NaN scalars.
          ASSERT_TRUE(std::isnan(spoiled.scalars[static_cast<size_t>(n)]));
          continue;
        }
        for (size_t e = 0; e < 18; ++e) ASSERT_EQ(clean.x[first + e], spoiled.x[first + e]);
        ASSERT_EQ(clean.scalars[static_cast<size_t>(n)], spoiled.scalars[static_cast<size_t>(n)]);
        for (size_t e = 0; e < 19; ++e) {
          const size_t at = static_cast<size_t>(n) * 19 + e;
          ASSERT_EQ(clean.d_tokens[at], spoiled.d_tokens[at]);
        }
      }
    }
  });
}

// For these inputs, exp(z) overflows or a height reaches its bounds.
TEST(ConeMapTest, HeightsAtTheirEnds) {
  OnEveryTarget([] {
    for (const ConeMap& map : Maps()) {
      if (map.as_is && map.function == Function::kUmbral) continue;
      SCOPED_TRACE(Name(map));
      Cones<float> cones(map, 4, 3);
      const float ends[] = {0.0f, 30.0f, -30.0f, 100.0f, -100.0f, 1e30f, -1e30f};
      for (int64_t n = 0; n < cones.call.count(); ++n) cones.token(n)[3] = ends[n % 7];
      cones.Forward();
      for (int64_t n = 0; n < cones.call.count(); ++n) {
        const Expected expected = Formula(map, ends[n % 7]);
        for (int s = 0; s < map.scalars(); ++s) {
          const double value = expected.scalars[static_cast<size_t>(s)];
          ASSERT_NEAR(cones.scalars[static_cast<size_t>(s * cones.call.count() + n)], value,
                      1e-6 * (1 + value))
              << ends[n % 7];
        }
      }
      cones.Backward(true, true);
      for (const float number : cones.d_tokens) ASSERT_TRUE(std::isfinite(number));
    }
  });
}

}  // namespace
}  // namespace testing
}  // namespace gnomon
