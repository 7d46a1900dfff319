// Compares the vocabulary for vectors of doubles with the C library's long double functions, on
// every instruction set that has such vectors.
#include "cpu/double.h"
// Must follow double.h:
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/random_problem.h"
#include "gnomon/attention.h"
#include "gtest/gtest.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/double_vocabulary_test.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// Must follow foreach_target.h:
#include "cpu/vocabulary-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {
namespace {

// Stores word(x, y) for n numbers each, one vector at a time; n is a multiple of 64.
template <class Word>
HWY_INLINE void ForVectors(const Word& word, const double* x, const double* y, double* to,
                           size_t n) {
  const DF d;
  for (size_t i = 0; i < n; i += kLanes) {
    hn::StoreU(word(hn::LoadU(d, x + i), hn::LoadU(d, y + i)), d, to + i);
  }
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS

namespace HWY_NAMESPACE {
namespace {

namespace kernels = GNOMON_KERNELS;
using kernels::ForVectors;
using V = kernels::VF;

void RsqrtOf(const double* x, const double* y, double* to, size_t n) {
  ForVectors([](V a, V) HWY_ATTR { return kernels::Rsqrt(a); }, x, y, to, n);
}
void LogOf(const double* x, const double* y, double* to, size_t n) {
  ForVectors([](V a, V) HWY_ATTR { return kernels::Log(a); }, x, y, to, n);
}
void Log1pOf(const double* x, const double* y, double* to, size_t n) {
  ForVectors([](V a, V) HWY_ATTR { return kernels::Log1p(a); }, x, y, to, n);
}
void ExpOf(const double* x, const double* y, double* to, size_t n) {
  ForVectors([](V a, V) HWY_ATTR { return kernels::Exp(a); }, x, y, to, n);
}
void Exp2Of(const double* x, const double* y, double* to, size_t n) {
  ForVectors([](V a, V) HWY_ATTR { return kernels::Exp2(a); }, x, y, to, n);
}
void TanhOf(const double* x, const double* y, double* to, size_t n) {
  ForVectors([](V a, V) HWY_ATTR { return kernels::Tanh(a); }, x, y, to, n);
}
void AngleOf(const double* x, const double* y, double* to, size_t n) {
  ForVectors([](V a, V b) HWY_ATTR { return kernels::Angle(a, b); }, x, y, to, n);
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gnomon {

HWY_EXPORT(RsqrtOf);
HWY_EXPORT(LogOf);
HWY_EXPORT(Log1pOf);
HWY_EXPORT(ExpOf);
HWY_EXPORT(Exp2Of);
HWY_EXPORT(TanhOf);
HWY_EXPORT(AngleOf);

namespace testing {
namespace {

constexpr double kMost = std::numeric_limits<double>::max();
constexpr double kLeast = std::numeric_limits<double>::min();
constexpr double kInfinite = std::numeric_limits<double>::infinity();
constexpr double kNoNumber = std::numeric_limits<double>::quiet_NaN();

// Returns positive numbers of all magnitudes, including the ends of the range and numbers near 1.
std::vector<double> Numbers() {
  std::vector<double> numbers = {
      kLeast,       kMost,      1.0, std::nextafter(1.0, 0.0), std::nextafter(1.0, 2.0),
      0.7071067811, 1.414213562};
  std::mt19937 engine(3);
  std::uniform_real_distribution<double> exponent(-307, 308);
  std::uniform_real_distribution<double> near(-0.4, 0.4);
  while (numbers.size() % 64 != 0 || numbers.size() < 20000) {
    const size_t kind = numbers.size() % 3;
    numbers.push_back(kind == 0   ? std::pow(10.0, exponent(engine))
                      : kind == 1 ? std::pow(10.0, exponent(engine) / 30)
                                  : 1 + std::pow(near(engine), 5.0));
  }
  return numbers;
}

std::vector<double> WithSpecials(std::vector<double> numbers,
                                 std::initializer_list<double> specials) {
  size_t at = 100;
  for (const double special : specials) numbers.at(at++) = special;
  return numbers;
}

template <class Run, class Expected>
void ExpectWithin(double tolerance, const std::vector<double>& x, const std::vector<double>& y,
                  const Run& run, const Expected& expected) {
  OnEveryTarget([&] {
    std::vector<double> actual(x.size());
    run(x.data(), y.data(), actual.data(), x.size());
    for (size_t i = 0; i < x.size(); ++i) {
      const long double value = expected(static_cast<long double>(x[i]), y[i]);
      if (std::isfinite(value)) {
        const long double error = std::fabs(actual[i] - value);
        ASSERT_LE(error, tolerance * std::fabs(value)) << x[i] << ", " << y[i];
      } else {
        ASSERT_TRUE(std::isnan(value) ? std::isnan(actual[i]) : actual[i] == value)
            << x[i] << ", " << y[i];
      }
    }
  });
}

TEST(DoubleVocabularyTest, Rsqrt) {
  const std::vector<double> x = Numbers();
  ExpectWithin(
      4e-16, x, x, [](auto... a) { HWY_DYNAMIC_DISPATCH(RsqrtOf)(a...); },
      [](long double a, double) { return 1 / std::sqrt(a); });
}

TEST(DoubleVocabularyTest, Log) {
  const std::vector<double> x = WithSpecials(Numbers(), {kInfinite, kNoNumber});
  ExpectWithin(
      3e-16, x, x, [](auto... a) { HWY_DYNAMIC_DISPATCH(LogOf)(a...); },
      [](long double a, double) { return std::log(a); });
}

TEST(DoubleVocabularyTest, Log1p) {
  const std::vector<double> x = WithSpecials(Numbers(), {0.0, kInfinite, kNoNumber});
  ExpectWithin(
      6e-16, x, x, [](auto... a) { HWY_DYNAMIC_DISPATCH(Log1pOf)(a...); },
      [](long double a, double) { return std::log1p(a); });
}

TEST(DoubleVocabularyTest, Exponentials) {
  const std::vector<double> numbers = Numbers();
  const auto within = [&](double limit) {
    std::vector<double> x = numbers;
    for (size_t i = 0; i < x.size(); ++i) {
      x[i] = std::copysign(std::fmod(x[i], limit), i % 2 == 0 ? 1.0 : -1.0);
    }
    return WithSpecials(x, {0.0, -0.0, limit, -limit, 1.0, -1.0, kNoNumber});
  };
  const auto exp = [](auto... a) { HWY_DYNAMIC_DISPATCH(ExpOf)(a...); };
  const auto exp2 = [](auto... a) { HWY_DYNAMIC_DISPATCH(Exp2Of)(a...); };
  const std::vector<double> x = within(708.0);
  ExpectWithin(4e-16, x, x, exp, [](long double a, double) { return std::exp(a); });
  const std::vector<double> y = within(1022.0);
  ExpectWithin(4e-16, y, y, exp2, [](long double a, double) { return std::exp2(a); });
  std::vector<double> low(64, -1023.0);
  low[1] = -kMost;
  low[2] = -kInfinite;
  ExpectWithin(0, low, low, exp, [](long double, double) { return 0.0L; });
  ExpectWithin(0, low, low, exp2, [](long double, double) { return 0.0L; });
}

TEST(DoubleVocabularyTest, Tanh) {
  std::vector<double> x = Numbers();
  for (size_t i = 0; i < x.size(); i += 2) x[i] = -x[i];
  x = WithSpecials(x, {0.0, -0.0, kInfinite, -kInfinite, 0.625, -0.625, 21.5, kNoNumber});
  ExpectWithin(
      5e-16, x, x, [](auto... a) { HWY_DYNAMIC_DISPATCH(TanhOf)(a...); },
      [](long double a, double) { return std::tanh(a); });
}

TEST(DoubleVocabularyTest, Angle) {
  std::vector<double> x = Numbers();
  std::vector<double> y(x.rbegin(), x.rend());
  for (size_t i = 0; i < x.size(); ++i) {
    if (i % 4 < 2) y[i] = x[i] * static_cast<double>(i) / static_cast<double>(x.size() - i);
    if (i % 2 == 0) x[i] = -x[i];
  }
  // Avoids extreme quotients, which would be denormal or overflow.
  for (size_t i = 0; i < x.size(); ++i) {
    const bool is_extreme = std::fabs(std::log10(y[i] / std::fabs(x[i]))) > 280 || y[i] > 1e307;
    if (is_extreme) y[i] = std::fabs(x[i]) / 2;
  }
  x = WithSpecials(x, {0.0, 0.0, 1.0, -1.0, -0.0, kNoNumber, 1.0, 0.0});
  y = WithSpecials(y, {0.0, 2.0, 0.0, 0.0, 0.0, 1.0, kNoNumber, kNoNumber});
  ExpectWithin(
      6e-16, x, y, [](auto... a) { HWY_DYNAMIC_DISPATCH(AngleOf)(a...); },
      [](long double a, double b) { return std::atan2(static_cast<long double>(b), a + 0.0L); });
}

}  // namespace
}  // namespace testing
}  // namespace gnomon
#endif
