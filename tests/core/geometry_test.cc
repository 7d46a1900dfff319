// Compares the pair functions of cones and distances with geometric constructions that use
// different formulas.
#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "gnomon/attention.h"
#include "gtest/gtest.h"

namespace gnomon::testing {
namespace {

// A point of the upper half-space: horizontal coordinates and a height.
struct Token {
  double x;
  double y;
  double height;
};

double Horizontal(const Token& a, const Token& b) { return std::hypot(a.x - b.x, a.y - b.y); }

// The smallest number in [low, high] for which `holds` is true; it must be true for all larger
// numbers.
template <class Holds>
double Smallest(double low, double high, const Holds& holds) {
  for (int step = 0; step < 40; ++step) {
    const double middle = (low + high) / 2;
    (holds(middle) ? high : low) = middle;
  }
  return high;
}

// The minimum of a quasi-convex function on [low, high], by golden-section search.
template <class Function>
double Least(double low, double high, const Function& function) {
  const double ratio = (std::sqrt(5.0) - 1) / 2;
  double left = high - ratio * (high - low);
  double right = low + ratio * (high - low);
  double at_left = function(left);
  double at_right = function(right);
  for (int step = 0; step < 40; ++step) {
    if (at_left < at_right) {
      high = right;
      right = left;
      at_right = at_left;
      left = high - ratio * (high - low);
      at_left = function(left);
    } else {
      low = left;
      left = right;
      at_left = at_right;
      right = low + ratio * (high - low);
      at_right = function(right);
    }
  }
  return std::min(at_left, at_right);
}

// The height of the lowest apex whose cone contains both tokens, over all apex positions.
// `height(p, t)` is the lowest apex height above p whose cone contains t.
template <class Height>
double LowestCommonAncestor(const Token& a, const Token& b, const Height& height) {
  const auto [left, right] = std::minmax(a.x, b.x);
  const auto [front, back] = std::minmax(a.y, b.y);
  return Least(left - 0.1, right + 0.1, [&, front = front, back = back](double x) {
    return Least(front - 0.1, back + 0.1, [&](double y) {
      const Token p = {x, y, 0};
      return std::max(height(p, a), height(p, b));
    });
  });
}

// Whether t is in the umbral cone of an apex. The light is at infinity, and every point casts the
// shadow of its hyperbolic ball of radius r, which is a Euclidean ball of radius height * sinh(r).
// A point is in the cone if the shadow of its ball is within the shadow of the apex's ball.
bool InUmbra(const Token& apex, const Token& t, double radius) {
  return Horizontal(apex, t) + t.height * std::sinh(radius) <= apex.height * std::sinh(radius);
}

// Whether t is in the penumbral cone of an apex. The light is the horosphere at height r, whose
// tangent rays are half-circles of radius r centred on the boundary. A point is in the cone if it
// is below the ray through the apex that touches the light on the far side.
bool InPenumbra(const Token& apex, const Token& t, double light) {
  if (apex.height > light) return false;
  const double centre = std::sqrt(light * light - apex.height * apex.height);
  return std::hypot(Horizontal(apex, t) + centre, t.height) <= light;
}

double UmbralHeight(const Token& a, const Token& b, double radius) {
  return LowestCommonAncestor(a, b, [&](const Token& p, const Token& t) {
    return Smallest(0, 20, [&](double h) { return InUmbra({p.x, p.y, h}, t, radius); });
  });
}

// If no apex below the light has both tokens in its cone, the light is raised until an apex at its
// height does.
double PenumbralHeight(const Token& a, const Token& b, double light) {
  return LowestCommonAncestor(a, b, [&](const Token& p, const Token& t) {
    return Smallest(0, 20,
                    [&](double h) { return InPenumbra({p.x, p.y, h}, t, std::max(h, light)); });
  });
}

// The squared distance of a pair after the token maps, which divide coordinates by `scale`.
double SquaredDistance(const Token& a, const Token& b, double scale) {
  return std::pow(Horizontal(a, b) / scale, 2);
}

double Umbral(const Token& a, const Token& b, double radius) {
  const double g = SquaredDistance(a, b, std::sinh(radius));
  return FindPairFunction("umbral").value(g, &a.height, &b.height, nullptr);
}

double UmbralLog(const Token& a, const Token& b, double radius) {
  const double g = SquaredDistance(a, b, std::sinh(radius));
  return FindPairFunction("umbral_log").value(g, &a.height, &b.height, nullptr);
}

double Penumbral(const Token& a, const Token& b, double light, const char* function = "penumbral") {
  const auto scalars = [&](const Token& t) {
    const double square = t.height * t.height / light / light;
    return std::array<double, 2>{1 - std::sqrt(1 - square), square};
  };
  return FindPairFunction(function).value(SquaredDistance(a, b, light), scalars(a).data(),
                                          scalars(b).data(), nullptr);
}

double Laplacian(const Token& a, const Token& b) {
  return FindPairFunction("laplacian").value(SquaredDistance(a, b, 1), nullptr, nullptr, nullptr);
}

class ConeTest : public ::testing::TestWithParam<double> {
 protected:
  static constexpr int kPairs = 40;

  // Returns a random token below `ceiling`, at most `spread` from the origin along each axis.
  Token Draw(double spread, double ceiling) {
    std::uniform_real_distribution<double> place(-spread, spread);
    std::uniform_real_distribution<double> height(0.01 * ceiling, ceiling);
    return {place(engine_), place(engine_), height(engine_)};
  }

 private:
  std::mt19937 engine_{7};
};

TEST_P(ConeTest, UmbralHeightIsThatOfTheLowestCommonAncestor) {
  const double radius = GetParam();
  int nested = 0;
  for (int pair = 0; pair < kPairs; ++pair) {
    const Token a = Draw(std::sinh(radius) * (pair % 3 + 0.2), 2);
    const Token b = Draw(std::sinh(radius) * (pair % 3 + 0.2), 2);
    const double height = UmbralHeight(a, b, radius);
    EXPECT_NEAR(a.height - Umbral(a, b, radius) / 2, height, 1e-6);
    EXPECT_NEAR(std::exp(UmbralLog(a, b, radius)) / 2, height, 1e-6);
    nested += InUmbra(a, b, radius) || InUmbra(b, a, radius) ? 1 : 0;
  }
  EXPECT_GT(nested, kPairs / 10);
  EXPECT_LT(nested, kPairs * 9 / 10);
}

TEST_P(ConeTest, PenumbralHeightIsThatOfTheLowestCommonAncestor) {
  const double light = GetParam();
  int nested = 0;
  int outside = 0;
  for (int pair = 0; pair < kPairs; ++pair) {
    const Token a = Draw(light * (pair % 4 + 0.2) * 0.6, light);
    const Token b = Draw(light * (pair % 4 + 0.2) * 0.6, light);
    const double height = PenumbralHeight(a, b, light);
    EXPECT_NEAR(light * Penumbral(a, b, light) / 2, height, 1e-6);
    EXPECT_NEAR(light * std::exp(Penumbral(a, b, light, "penumbral_log")) / 2, height, 1e-6);
    EXPECT_NEAR(light * light * Penumbral(a, b, light, "penumbral_square") / 4, height * height,
                1e-6);
    nested += InPenumbra(a, b, light) || InPenumbra(b, a, light) ? 1 : 0;
    outside += height > light ? 1 : 0;
  }
  EXPECT_GT(nested, kPairs / 20);
  EXPECT_GT(outside, kPairs / 10);
  EXPECT_LT(nested + outside, kPairs * 9 / 10);
}

// At equal heights, gamma / 2 * f is -gamma / (2 sinh r) times the distance.
TEST_P(ConeTest, UmbralAtEqualHeightsIsLaplacian) {
  const double radius = GetParam();
  for (int pair = 0; pair < kPairs; ++pair) {
    const Token a = Draw(1, 1);
    Token b = Draw(1, 1);
    b.height = a.height;
    const double rate = 1 / (2 * std::sinh(radius));
    EXPECT_NEAR(Umbral(a, b, radius) / 2, -rate * Laplacian(a, b), 1e-9);
  }
}

INSTANTIATE_TEST_SUITE_P(Lights, ConeTest, ::testing::Values(0.1, 0.7, 1.0, 2.0));

// If no cone contains both points, the value is the radius of the half-circle through both points
// that is centred on the boundary, which is the height of their geodesic. The test finds the centre
// by bisection.
TEST(PenumbralTest, OutsideIsTheTopOfTheGeodesic) {
  const Token a = {0, 0, 0.3};
  for (const double distance : {2.0, 3.0, 10.0}) {
    const Token b = {distance, 0, 0.9};
    const double centre = Smallest(0, distance, [&](double c) {
      return std::hypot(c, a.height) >= std::hypot(distance - c, b.height);
    });
    EXPECT_NEAR(Penumbral(a, b, 1) / 2, std::hypot(centre, a.height), 1e-9);
  }
}

}  // namespace
}  // namespace gnomon::testing
