// Tests causal sums with different batch sizes, key heads and strides, and with features that
// underflow to zero, on every instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <ostream>
#include <random>
#include <vector>

#include "core/causal_sums.h"
#include "core/random_problem.h"

namespace gnomon::testing {
namespace {

double Map(Feature feature, double a) {
  if (feature == Feature::kElu) return a > 0 ? a + 1 : std::exp(a);
  return feature == Feature::kRelu ? std::max(a, 0.0) : a;
}

struct Layout {
  int64_t batch;
  int64_t heads;
  int64_t key_heads;
  int64_t rows;
  int64_t dim;
  int64_t value_dim;
  bool padded;
};

std::ostream& operator<<(std::ostream& out, const Layout& n) {
  return out << "batch " << n.batch << " heads " << n.heads << " key heads " << n.key_heads
             << " rows " << n.rows << " columns " << n.dim << " " << n.value_dim << " padded "
             << n.padded;
}

// Random inputs of a layout, whose causal sums Check() compares with the formula.
struct Sums {
  explicit Sums(const Layout& layout_)
      : layout(layout_),
        x({layout_.batch, layout_.heads, layout_.rows, layout_.dim}, layout_.padded, kNan),
        y({layout_.batch, layout_.key_heads, layout_.rows, layout_.dim}, layout_.padded, kNan),
        z({layout_.batch, layout_.key_heads, layout_.rows, layout_.value_dim}, layout_.padded,
          kNan) {
    std::mt19937 engine(5);
    std::normal_distribution<float> normal;
    for (Array<float>* array : {&x, &y, &z}) {
      array->ForEach([&](float& element) { element = normal(engine); });
    }
  }

  // Computes the causal sums and compares each row with the formula in double precision.
  void Check(Feature feature, bool reverse, bool divided) const {
    SCOPED_TRACE(::testing::Message() << layout << " feature " << static_cast<int>(feature)
                                      << " reverse " << reverse << " divided " << divided);
    const Layout& n = layout;
    Array<float> out({n.batch, n.heads, n.rows, n.value_dim}, n.padded, kNan);
    std::vector<float> denominator(static_cast<size_t>(n.batch * n.heads * n.rows), kNan);
    CausalSums sums;
    sums.batch = n.batch;
    sums.heads = n.heads;
    sums.key_heads = n.key_heads;
    sums.rows = n.rows;
    sums.dim = n.dim;
    sums.value_dim = n.value_dim;
    sums.x = x.view();
    sums.y = y.view();
    sums.z = z.view();
    sums.feature = feature;
    sums.reverse = reverse;
    sums.out = out.view();
    if (divided) sums.denominator = denominator.data();
    SumCausally(sums, ThreadExecutor(2));

    const std::vector<float> got = out.TakeOutput();
    size_t row = 0;
    for (int64_t b = 0; b < n.batch; ++b) {
      for (int64_t h = 0; h < n.heads; ++h) {
        for (int64_t i = 0; i < n.rows; ++i, ++row) {
          CheckRow(feature, reverse, divided ? &denominator[row] : nullptr, b, h, i,
                   got.data() + row * static_cast<size_t>(n.value_dim));
        }
      }
    }
  }

  void CheckRow(Feature feature, bool reverse, const float* denominator, int64_t b, int64_t h,
                int64_t i, const float* out) const {
    const Layout& n = layout;
    const int64_t key_head = h / (n.heads / n.key_heads);
    std::vector<double> sums(static_cast<size_t>(n.value_dim));
    double total = 0;
    double size = 0;
    for (int64_t j = reverse ? i : 0; j < (reverse ? n.rows : i + 1); ++j) {
      double product = 0;
      for (int64_t e = 0; e < n.dim; ++e) {
        product += Map(feature, x.at(b, h, i, e)) * Map(feature, y.at(b, key_head, j, e));
      }
      total += product;
      size += std::abs(product);
      for (size_t e = 0; e < sums.size(); ++e) {
        sums[e] += product * z.at(b, key_head, j, static_cast<int64_t>(e));
      }
    }
    // If the terms are this small, e^a underflows to 0 in fp32.
    const bool none = size < 1e-37;
    const auto where = [&] {
      return ::testing::Message() << "batch " << b << " head " << h << " row " << i;
    };
    if (denominator) {
      ASSERT_NEAR(*denominator, none ? 0 : total, 1e-5 * size) << where();
    }
    for (size_t e = 0; e < sums.size(); ++e) {
      const double expected = !denominator ? sums[e] : none ? 0 : sums[e] / total;
      ASSERT_NEAR(out[e], expected, 2e-5 * (denominator ? 1 : size + 1)) << where();
    }
  }

  Layout layout;
  Array<float> x;
  Array<float> y;
  Array<float> z;
};

TEST(CausalLayoutTest, IsTheFormulaForBatchesKeyHeadsAndStrides) {
  for (const Layout& layout : {Layout{3, 2, 2, 70, 5, 19, false}, Layout{2, 6, 3, 65, 7, 16, true},
                               Layout{2, 4, 1, 130, 16, 3, true}, Layout{1, 3, 3, 1, 3, 5, true},
                               // This layout is long enough for several segments, whose states are
                               // summed first.
                               Layout{2, 4, 2, 1100, 4, 6, true}}) {
    const Sums run(layout);
    OnEveryTarget([&] {
      for (const bool reverse : {false, true}) {
        for (const bool divided : {false, true}) {
          // Without a feature map, the terms of a denominator may cancel, so quotients are not
          // tested.
          if (!divided) run.Check(Feature::kNone, reverse, divided);
          run.Check(Feature::kElu, reverse, divided);
        }
      }
      run.Check(Feature::kRelu, false, false);
    });
  }
}

// For negative a, elu(a) + 1 is e^a, which is 0 below about -88 and at -inf. A query that sees only
// zero features has output 0; this includes all queries before the first non-zero key.
TEST(CausalLayoutTest, FeaturesThatVanish) {
  constexpr float kLeast = -kInfinity;
  const std::vector<float> values = {-1, -20, -60, -85, -104, -150, -1e3, -1e9, -3e38, kLeast, 0};
  for (const bool padded : {false, true}) {
    Sums run({2, 4, 2, 140, 3, 5, padded});
    for (int64_t i = 0; i < 140; ++i) {
      const float value = values[static_cast<size_t>(i) % values.size()];
      for (int64_t e = 0; e < 3; ++e) {
        for (int64_t h = 0; h < 4; ++h) run.x.at(0, h, i, e) = value;
        for (int64_t h = 0; h < 2; ++h) {
          run.y.at(0, h, i, e) = i < 66 ? kLeast : value;
          run.y.at(1, h, i, e) = i < 66 ? -1000.0f : run.y.at(1, h, i, e);
        }
      }
    }
    OnEveryTarget([&] {
      run.Check(Feature::kElu, false, true);
      run.Check(Feature::kRelu, false, true);
    });
  }
}

// Checks e^a down to just above the underflow threshold, as the denominator for a single key.
TEST(CausalLayoutTest, SmallFeaturesAreExact) {
  for (float a = -87; a < 0; a += 0.37f) {
    const float zero = 0;
    OnEveryTarget([&] {
      float out = kNan;
      float denominator = kNan;
      CausalSums sums;
      sums.batch = sums.heads = sums.key_heads = sums.rows = sums.dim = sums.value_dim = 1;
      sums.x = {&a, {1, 1, 1}};
      sums.y = {&zero, {1, 1, 1}};
      sums.z = {&zero, {1, 1, 1}};
      sums.feature = Feature::kElu;
      sums.out = {&out, {1, 1, 1}};
      sums.denominator = &denominator;
      SumCausally(sums, SerialExecutor());
      const double expected = std::exp(static_cast<double>(a));
      // AVX targets have fused multiply-adds, which recover the rounding error of a * log2(e).
      const double tolerance = CurrentTarget().starts_with("AVX") ? 1e-6 : 1e-5;
      EXPECT_NEAR(denominator, expected, tolerance * expected) << a;
    });
  }
}

}  // namespace
}  // namespace gnomon::testing
