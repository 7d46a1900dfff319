// Compares the vocabulary functions that Highway lacks with their double-precision counterparts, on
// every instruction set.
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "core/random_problem.h"
#include "gnomon/attention.h"
#include "gtest/gtest.h"
#include "reference/vocabulary.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/vocabulary_test.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// Must follow foreach_target.h:
#include "cpu/vocabulary-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace HWY_NAMESPACE {
namespace {

// Stores word(x, y) for n numbers each, one vector at a time; n is a multiple of 64.
template <class Word>
HWY_INLINE void ForVectors(const Word& word, const float* x, const float* y, float* to, size_t n) {
  const DF d;
  for (size_t i = 0; i < n; i += kLanes) {
    hn::StoreU(word(hn::LoadU(d, x + i), hn::LoadU(d, y + i)), d, to + i);
  }
}

void LogOf(const float* x, const float* y, float* to, size_t n) {
  ForVectors([](VF a, VF) HWY_ATTR { return Log(a); }, x, y, to, n);
}
void Log1pOf(const float* x, const float* y, float* to, size_t n) {
  ForVectors([](VF a, VF) HWY_ATTR { return Log1p(a); }, x, y, to, n);
}
void ExpOf(const float* x, const float* y, float* to, size_t n) {
  ForVectors([](VF a, VF) HWY_ATTR { return Exp(a); }, x, y, to, n);
}
void TanhOf(const float* x, const float* y, float* to, size_t n) {
  ForVectors([](VF a, VF) HWY_ATTR { return Tanh(a); }, x, y, to, n);
}
void AngleOf(const float* x, const float* y, float* to, size_t n) {
  ForVectors([](VF a, VF b) HWY_ATTR { return Angle(a, b); }, x, y, to, n);
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gnomon {

HWY_EXPORT(LogOf);
HWY_EXPORT(Log1pOf);
HWY_EXPORT(ExpOf);
HWY_EXPORT(TanhOf);
HWY_EXPORT(AngleOf);

namespace testing {
namespace {

constexpr float kMost = std::numeric_limits<float>::max();
constexpr float kLeast = std::numeric_limits<float>::min();

// Returns positive numbers of all magnitudes, including the ends of the range and numbers near 1.
std::vector<float> Numbers() {
  std::vector<float> numbers = {
      kLeast,      kMost,      1.0f, std::nextafter(1.0f, 0.0f), std::nextafter(1.0f, 2.0f),
      0.70710678f, 1.41421356f};
  std::mt19937 engine(3);
  std::uniform_real_distribution<float> exponent(-37.5f, 38.5f);
  std::uniform_real_distribution<float> near(-0.4f, 0.4f);
  while (numbers.size() % 64 != 0 || numbers.size() < 20000) {
    numbers.push_back(numbers.size() % 2 == 0 ? std::pow(10.0f, exponent(engine))
                                              : 1 + std::pow(near(engine), 5.0f));
  }
  return numbers;
}

template <class Run, class Expected>
void ExpectWithin(double tolerance, const std::vector<float>& x, const std::vector<float>& y,
                  const Run& run, const Expected& expected) {
  OnEveryTarget([&] {
    std::vector<float> actual(x.size());
    run(x.data(), y.data(), actual.data(), x.size());
    for (size_t i = 0; i < x.size(); ++i) {
      const double value = expected(x[i], y[i]);
      if (std::isfinite(value)) {
        ASSERT_NEAR(actual[i], value, tolerance * std::fabs(value)) << x[i] << ", " << y[i];
      } else {
        ASSERT_TRUE(std::isnan(value) ? std::isnan(actual[i]) : actual[i] == value)
            << x[i] << ", " << y[i];
      }
    }
  });
}

std::vector<float> WithSpecials(std::vector<float> numbers, std::initializer_list<float> specials) {
  size_t at = 100;
  for (const float special : specials) numbers.at(at++) = special;
  return numbers;
}

TEST(VocabularyTest, Log) {
  const std::vector<float> x = WithSpecials(Numbers(), {kInfinity, kNan});
  ExpectWithin(
      2e-7, x, x, [](auto... a) { HWY_DYNAMIC_DISPATCH(LogOf)(a...); },
      [](double a, double) { return reference::Log(a); });
}

TEST(VocabularyTest, Log1p) {
  const std::vector<float> x = WithSpecials(Numbers(), {0.0f, kInfinity, kNan});
  ExpectWithin(
      3e-7, x, x, [](auto... a) { HWY_DYNAMIC_DISPATCH(Log1pOf)(a...); },
      [](double a, double) { return reference::Log1p(a); });
}

TEST(VocabularyTest, Exp) {
  std::vector<float> x = Numbers();
  // The numbers are between -87 and 87; WithSpecials adds others.
  for (size_t i = 0; i < x.size(); ++i) {
    const float number = std::fmod(x[i], 87.0f);
    x[i] = i % 2 == 0 ? number : -number;
  }
  x = WithSpecials(x, {0.0f, -0.0f, 88.0f, 87.0f, -87.0f, kNan});
  const auto run = [](auto... a) { HWY_DYNAMIC_DISPATCH(ExpOf)(a...); };
  ExpectWithin(1e-7, x, x, run, [](double a, double) { return std::exp(a); });
  std::vector<float> low(64, -88.0f);
  low[1] = -kMost;
  low[2] = -kInfinity;
  ExpectWithin(0, low, low, run, [](double, double) { return 0.0; });
}

TEST(VocabularyTest, Tanh) {
  std::vector<float> x = Numbers();
  for (size_t i = 0; i < x.size(); i += 2) x[i] = -x[i];
  x = WithSpecials(x, {0.0f, -0.0f, kInfinity, -kInfinity, 0.625f, -0.625f, 9.5f, kNan});
  ExpectWithin(
      3e-7, x, x, [](auto... a) { HWY_DYNAMIC_DISPATCH(TanhOf)(a...); },
      [](double a, double) { return reference::Tanh(a); });
}

TEST(VocabularyTest, Angle) {
  std::vector<float> x = Numbers();
  std::vector<float> y(x.rbegin(), x.rend());
  for (size_t i = 0; i < x.size(); ++i) {
    if (i % 4 < 2) y[i] = x[i] * static_cast<float>(i) / static_cast<float>(x.size() - i);
    if (i % 2 == 0) x[i] = -x[i];
  }
  x = WithSpecials(x, {0.0f, 0.0f, 1.0f, -1.0f, -0.0f, kNan, 1.0f, 0.0f});
  y = WithSpecials(y, {0.0f, 2.0f, 0.0f, 0.0f, 0.0f, 1.0f, kNan, kNan});
  ExpectWithin(
      3e-7, x, y, [](auto... a) { HWY_DYNAMIC_DISPATCH(AngleOf)(a...); },
      [](double a, double b) { return reference::Angle(a, b); });
}

}  // namespace
}  // namespace testing
}  // namespace gnomon
#endif
