// Compares every definition's derivatives with forward-mode differentiation of its value.
#include <array>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "core/dual_number.h"
#include "definition_list.h"
#include "gtest/gtest.h"
#include "test_definitions.h"

namespace gnomon::testing {
namespace {

using Number = dual::Dual<double>;

// The arguments of f, or the derivatives of f with respect to them.
struct Point {
  double g = 0;
  std::array<double, 3> a = {0, 0, 0};
  std::array<double, 3> b = {0, 0, 0};
  std::array<double, 3> t = {0, 0, 0};
};

struct Definition {
  const char* name;
  int row_scalars;
  int column_scalars;
  int head_scalars;
  PairInput input;
  // f and its directional derivative along the second argument.
  Number (*value)(const Point&, const Point&);
  // The derivatives set by Gradient; the others are NaN.
  Point (*gradient)(const Point&);
  // The same by Both, and its value; null if the definition has no Both.
  Point (*both)(const Point&, double* value);
};

struct Arguments {
  Arguments(const Point& at, const Point& direction) : g{at.g, direction.g} {
    for (size_t n = 0; n < 3; ++n) {
      a[n] = {at.a[n], direction.a[n]};
      b[n] = {at.b[n], direction.b[n]};
      t[n] = {at.t[n], direction.t[n]};
    }
  }
  Number g;
  Number a[3];
  Number b[3];
  Number t[3];
};

template <class D>
Number Value(const Point& at, const Point& direction) {
  const Arguments x(at, direction);
  return D::Value(x.g, x.a, x.b, x.t);
}

struct Slopes {
  Number g{std::nan("")};
  Number a[3] = {g, g, g};
  Number b[3] = {g, g, g};
  Number t[3] = {g, g, g};
};
Point PointOf(const Slopes& d) {
  Point derivative;
  derivative.g = d.g.value;
  for (size_t n = 0; n < 3; ++n) {
    derivative.a[n] = d.a[n].value;
    derivative.b[n] = d.b[n].value;
    derivative.t[n] = d.t[n].value;
  }
  return derivative;
}

template <class D>
Point Gradient(const Point& at) {
  const Arguments x(at, {});
  Slopes d;
  D::Gradient(x.g, x.a, x.b, x.t, d);
  return PointOf(d);
}

template <class D>
Point Both(const Point& at, double* value) {
  const Arguments x(at, {});
  Slopes d;
  *value = D::Both(x.g, x.a, x.b, x.t, d).value;
  return PointOf(d);
}
template <class D>
concept HasBoth = requires(Number number, const Number* numbers, Slopes& d) {
  D::Both(number, numbers, numbers, numbers, d);
};

template <class D>
constexpr Definition Describe(const char* name) {
  Definition definition = {name,      D::kRowScalars, D::kColumnScalars, D::kHeadScalars,
                           D::kInput, Value<D>,       Gradient<D>,       nullptr};
  if constexpr (HasBoth<D>) definition.both = Both<D>;
  return definition;
}

const std::vector<Definition>& Definitions() {
#define GNOMON_DESCRIBE(Struct, name) \
  Describe<dual::derived::Complete<dual::Struct, dual::derived::Struct>::Type>(#name),
  static const std::vector<Definition> definitions = {
      GNOMON_FOR_EACH_DEFINITION(GNOMON_DESCRIBE) GNOMON_FOR_EACH_TEST_DEFINITION(GNOMON_DESCRIBE)};
#undef GNOMON_DESCRIBE
  return definitions;
}

const Definition& Find(const std::string& name) {
  for (const Definition& definition : Definitions()) {
    if (definition.name == name) return definition;
  }
  throw std::invalid_argument(name);
}

// The arguments that the definition uses, by name.
std::map<std::string, double*> Entries(const Definition& definition, Point& p) {
  std::map<std::string, double*> entries = {{"g", &p.g}};
  const auto add = [&](const char* name, int count, std::array<double, 3>& values) {
    for (size_t n = 0; n < static_cast<size_t>(count); ++n) {
      entries[name + std::to_string(n)] = &values[n];
    }
  };
  add("a", definition.row_scalars, p.a);
  add("b", definition.column_scalars, p.b);
  add("t", definition.head_scalars, p.t);
  return entries;
}

Point Along(const Definition& definition, const std::string& argument) {
  Point direction;
  *Entries(definition, direction).at(argument) = 1;
  return direction;
}

// Draws two points of a plane and computes g from them. The first scalars of entailment cones are
// the squared norms of the points; all other arguments are random numbers.
Point RandomPoint(const Definition& definition, std::mt19937& engine) {
  std::normal_distribution<double> normal(0, 0.4);
  std::uniform_real_distribution<double> uniform(0.02, 0.98);
  Point p;
  for (auto* scalars : {&p.a, &p.b, &p.t}) {
    for (double& scalar : *scalars) scalar = uniform(engine);
  }
  const double x[2] = {normal(engine), normal(engine)};
  const double y[2] = {normal(engine), normal(engine)};
  switch (definition.input) {
    case PairInput::kNone:
      p.a[0] -= 0.5;
      p.b[0] -= 0.5;
      break;
    case PairInput::kSquaredDistance:
      p.g = (x[0] - y[0]) * (x[0] - y[0]) + (x[1] - y[1]) * (x[1] - y[1]);
      break;
    case PairInput::kInnerProduct:
      p.g = x[0] * y[0] + x[1] * y[1];
      break;
  }
  if (definition.row_scalars == 2 && definition.column_scalars == 1) {
    p.a[0] = x[0] * x[0] + x[1] * x[1];
    p.b[0] = y[0] * y[0] + y[1] * y[1];
  }
  return p;
}

// Returns the name of the branch that the formula of a definition takes at a point.
std::string Branch(const std::string& name, const Point& p) {
  const double distance = std::sqrt(std::max(0.0, p.g));
  const double turn = std::fabs(p.a[0] - p.b[0]);
  const std::string nested = distance > turn ? "crossing" : "ancestor";
  if (name == "umbral" || name == "umbral_log") return nested;
  if (name.starts_with("penumbral")) {
    return p.a[0] + p.b[0] + std::max(distance, turn) <= 2 ? nested : "outside";
  }
  if (name == "additive") return p.a[0] + p.b[0] > 0 ? "positive" : "negative";
  if (name == "every_function") {
    const std::string key = p.b[0] < 0.1F ? "low" : p.b[0] < 0.5 ? "middle" : "high";
    return key + (p.a[0] < 0 ? ", negative" : "");
  }
  if (name == "cosine_entailment" || name == "entailment") {
    const bool by_product = name == "cosine_entailment";
    const double other = p.a[0] + p.b[0] - p.g;
    const double distance2 = by_product ? other - p.g : p.g;
    const double product = by_product ? p.g : other / 2;
    const double cosine = (product * (1 + p.a[0]) - p.a[0] * (1 + p.b[0])) /
                          std::sqrt(p.a[0] * distance2 * (1 + p.a[0] * p.b[0] - 2 * product));
    return cosine < (by_product ? p.a[1] : std::cos(p.a[1])) ? "outside" : "inside";
  }
  return "everywhere";
}

std::set<std::string> Branches(const std::string& name) {
  if (name.starts_with("umbral")) return {"crossing", "ancestor"};
  if (name.starts_with("penumbral")) return {"crossing", "ancestor", "outside"};
  if (name == "additive") return {"positive", "negative"};
  if (name == "every_function") return {"low", "middle", "high"};
  if (name.ends_with("entailment")) return {"inside", "outside"};
  return {"everywhere"};
}

class DefinitionTest : public ::testing::TestWithParam<Definition> {};

TEST_P(DefinitionTest, GradientIsTheDerivativeOfValue) {
  const Definition& definition = GetParam();
  std::mt19937 engine(1);
  std::map<std::string, int> visits;
  for (int repeat = 0; repeat < 5000; ++repeat) {
    const Point p = RandomPoint(definition, engine);
    const std::string branch = Branch(definition.name, p);
    ++visits[branch];
    SCOPED_TRACE(branch);
    Point derivative = definition.gradient(p);
    for (const auto& [argument, slope] : Entries(definition, derivative)) {
      const double expected = definition.value(p, Along(definition, argument)).tangent;
      ASSERT_NEAR(*slope, expected, 1e-9 * std::max(1.0, std::fabs(expected))) << argument;
    }
  }
  for (const std::string& branch : Branches(definition.name)) {
    EXPECT_GE(visits[branch], 100) << branch;
  }
}

INSTANTIATE_TEST_SUITE_P(All, DefinitionTest, ::testing::ValuesIn(Definitions()),
                         [](const auto& test) { return std::string(test.param.name); });

// Both has the value and the derivatives of the other functions, also for equal points.
class BothTest : public ::testing::TestWithParam<std::string> {};

TEST_P(BothTest, ComputesTheSame) {
  const Definition& definition = Find(GetParam());
  ASSERT_NE(definition.both, nullptr);
  std::mt19937 engine(2);
  for (int repeat = 0; repeat < 5000; ++repeat) {
    Point p = RandomPoint(definition, engine);
    if (repeat % 10 == 0) p.g = 0;
    if (repeat % 20 == 0) p.b = p.a;
    SCOPED_TRACE(Branch(definition.name, p));
    double value = 0;
    Point both = definition.both(p, &value);
    const double expected_value = definition.value(p, {}).value;
    ASSERT_NEAR(value, expected_value, 1e-12 * std::max(1.0, std::fabs(expected_value)));
    Point derivative = definition.gradient(p);
    const auto slopes = Entries(definition, both);
    for (const auto& [argument, expected] : Entries(definition, derivative)) {
      ASSERT_NEAR(*slopes.at(argument), *expected, 1e-9 * std::max(1.0, std::fabs(*expected)))
          << argument;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, BothTest,
                         ::testing::Values("laplacian", "umbral", "penumbral", "penumbral_square"),
                         [](const auto& test) { return test.param; });

// A point where a definition has a kink (such as equal terms of a maximum), and an argument that
// moves the point to either side of the kink.
struct Tie {
  const char* description;
  const char* definition;
  Point point;
  const char* argument;
};

class TieTest : public ::testing::TestWithParam<Tie> {};

// If a tie is split evenly, the derivative is the mean of the derivatives on both sides.
TEST_P(TieTest, IsSplitEvenly) {
  const Tie& tie = GetParam();
  const Definition& definition = Find(tie.definition);
  constexpr double kStep = 1e-9;
  Point at = definition.gradient(tie.point);
  Point sides[2];
  Point moved[2] = {tie.point, tie.point};
  for (const int side : {0, 1}) {
    *Entries(definition, moved[side]).at(tie.argument) += side == 0 ? -kStep : kStep;
    sides[side] = definition.gradient(moved[side]);
  }
  ASSERT_NE(Branch(tie.definition, moved[0]), Branch(tie.definition, moved[1]));
  const auto left = Entries(definition, sides[0]);
  const auto right = Entries(definition, sides[1]);
  for (const auto& [argument, slope] : Entries(definition, at)) {
    EXPECT_NEAR(*slope, (*left.at(argument) + *right.at(argument)) / 2, 1e-6) << argument;
  }
}

// For cones, the distance and the difference of heights are both 1/4.
INSTANTIATE_TEST_SUITE_P(
    All, TieTest,
    ::testing::Values(
        Tie{"QueryAbove", "umbral", {0.0625, {0.5}, {0.25}, {}}, "g"},
        Tie{"KeyAbove", "umbral", {0.0625, {0.25}, {0.5}, {}}, "g"},
        Tie{"QueryAbove", "penumbral", {0.0625, {0.5, 0.4}, {0.25, 0.1}, {}}, "g"},
        Tie{"KeyAbove", "penumbral", {0.0625, {0.25, 0.1}, {0.5, 0.4}, {}}, "g"},
        Tie{"QueryAbove", "umbral_log", {0.0625, {0.5}, {0.25}, {}}, "g"},
        Tie{"KeyAbove", "umbral_log", {0.0625, {0.25}, {0.5}, {}}, "g"},
        Tie{"KeyAbove", "penumbral_log", {0.0625, {0.25, 0.1}, {0.5, 0.4}, {}}, "g"},
        Tie{"QueryAbove", "penumbral_square", {0.0625, {0.5, 0.4}, {0.25, 0.1}, {}}, "g"},
        Tie{"KeyAbove", "penumbral_square", {0.0625, {0.25, 0.1}, {0.5, 0.4}, {}}, "g"},
        Tie{"AtZero", "additive", {0, {0.25}, {-0.25}, {0.2}}, "a0"},
        Tie{"Maximum", "every_function", {0.3, {0.25}, {0.1F}, {0.2}}, "b0"},
        Tie{"Minimum", "every_function", {0.3, {0.25}, {0.5}, {0.2}}, "b0"},
        Tie{"AbsoluteValue", "every_function", {0.3, {0}, {0.3}, {0.2}}, "a0"}),
    [](const auto& test) { return std::string(test.param.definition) + test.param.description; });

// For equal points, the distance is 0 with derivative 0, and nothing is NaN.
class DistanceZeroTest : public ::testing::TestWithParam<std::string> {};

TEST_P(DistanceZeroTest, HasNoSlope) {
  const Definition& definition = Find(GetParam());
  for (const double other_height : {0.5, 0.25}) {
    const Point p = {0, {0.5, 0.4}, {other_height, 0.3}, {}};
    EXPECT_TRUE(std::isfinite(definition.value(p, {}).value));
    Point derivative = definition.gradient(p);
    for (const auto& [argument, slope] : Entries(definition, derivative)) {
      EXPECT_TRUE(std::isfinite(*slope)) << argument;
    }
    EXPECT_EQ(derivative.g, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(All, DistanceZeroTest,
                         ::testing::Values("laplacian", "umbral", "umbral_log", "penumbral",
                                           "penumbral_log", "penumbral_square", "hyperbolic"),
                         [](const auto& test) { return test.param; });

// The slope jumps where two cones just meet. The cone of a point at height 0 is the point itself.
TEST(PenumbralTest, IsFiniteAtItsOtherKinks) {
  for (const char* name : {"penumbral", "penumbral_log", "penumbral_square"}) {
    const Definition& definition = Find(name);
    // The first pair has distance 1 and alpha = beta = 1/2. The others are pairs of equal points:
    // at height 0, and at the height of the light.
    const Point points[] = {
        {1, {0.5, 0.75}, {0.5, 0.75}, {}},
        {0, {0, 0}, {0, 0}, {}},
        {0, {1, 1}, {1, 1}, {}},
    };
    for (const Point& p : points) {
      EXPECT_TRUE(std::isfinite(definition.value(p, {}).value)) << name;
      Point derivative = definition.gradient(p);
      for (const auto& [argument, slope] : Entries(definition, derivative)) {
        EXPECT_TRUE(std::isfinite(*slope)) << name << " " << argument;
      }
    }
  }
}

// Height 0 is replaced by the minimum height (in double precision), whose logarithm and slopes are
// finite.
TEST(LogTest, IsFiniteAtHeightZero) {
  for (const auto& [name, least] :
       {std::pair("umbral_log", 5e-16), std::pair("penumbral_log", 1e-75)}) {
    EXPECT_NEAR(Find(name).value({}, {}).value, std::log(2 * least), 0.1) << name;
    Point derivative = Find(name).gradient({});
    for (const auto& [argument, slope] : Entries(Find(name), derivative)) {
      EXPECT_TRUE(std::isfinite(*slope)) << name << " " << argument;
    }
  }
}

// Tests distances from 1e-12 to 60. One pair of points is above one another, so its distance is the
// difference of log heights; the other pair is side by side.
TEST(HyperbolicTest, IsExactForNearAndFarPoints) {
  const double root = std::sqrt(0.5);
  for (double distance = 1e-12; distance < 60; distance *= 1.7) {
    const double height = std::exp(-distance / 2);
    // In the definition's v - u, only v has a rounding error.
    const Point over = {0, {height, root / height, 1}, {1 / height, root * height, 1}, {}};
    const Definition& definition = Find("hyperbolic");
    const double tolerance = 1e-14 / distance + 1e-13;
    EXPECT_NEAR(definition.value(over, {}).value / distance, 1, tolerance);
    Point derivative = definition.gradient(over);
    EXPECT_NEAR(derivative.b[0] / height - derivative.b[1] * root * height, 1,
                tolerance);  // d f / d log v
    // If both heights are 1, then cosh f = 1 + g / 2, so f = 2 arsinh(sqrt(g) / 2).
    const double side = 2 * std::sinh(distance / 2);
    const Point beside = {side * side, {1, root, root}, {1, root, root}, {}};
    EXPECT_NEAR(definition.value(beside, {}).value / distance, 1, 1e-13);
    derivative = definition.gradient(beside);
    EXPECT_NEAR(derivative.g * 2 * side * std::cosh(distance / 2), 1, 1e-13);
  }
}

// A key on the boundary of its query's cone has energy 0. Its slopes are half the slopes just
// outside, because the slopes inside are 0. With aperture 0, the energy is the angle, with the same
// rounding as in Gradient.
TEST(EntailmentTest, ATieIsSplitEvenly) {
  const Definition& definition = Find("entailment");
  std::mt19937 engine(1);
  int ties = 0;
  for (int repeat = 0; repeat < 100; ++repeat) {
    Point p = RandomPoint(definition, engine);
    const auto energy = [&] { return definition.value(p, {}).value; };
    p.a[1] = 0;
    const double angle = energy();
    p.a[1] = angle;
    EXPECT_EQ(energy(), 0);
    Point at = definition.gradient(p);
    p.a[1] = angle * (1 - 1e-12);
    EXPECT_GT(energy(), 0);
    Point outside = definition.gradient(p);
    p.a[1] = angle * (1 + 1e-12);
    EXPECT_EQ(energy(), 0);
    Point inside = definition.gradient(p);
    const auto expected = Entries(definition, outside);
    const auto none = Entries(definition, inside);
    for (const auto& [argument, slope] : Entries(definition, at)) {
      EXPECT_NEAR(*slope, *expected.at(argument) / 2, 1e-12 * std::fabs(*slope)) << argument;
      EXPECT_EQ(*none.at(argument), 0) << argument;
    }
    EXPECT_EQ(at.a[1], -0.5);
    ties += *expected.at("g") != 0;
  }
  EXPECT_GE(ties, 90);
}

// The angle is 0 for keys outwards along the query's axis, pi for keys inwards, and pi / 2 (to
// first order) for keys perpendicular to it.
TEST(EntailmentTest, AnglesAreExactOnTheAxis) {
  const Definition& definition = Find("entailment");
  const double aperture = 0.25;
  Point derivative;
  const auto energy = [&](double x, double y) {
    const Point p = {(x - y) * (x - y), {x * x, aperture}, {y * y}, {}};
    derivative = definition.gradient(p);
    return definition.value(p, {}).value;
  };
  EXPECT_EQ(energy(0.5, 0.75), 0);
  EXPECT_EQ(energy(0.5, 0.5), 0);
  EXPECT_NEAR(energy(0.5, 0.25), std::acos(-1) - aperture, 1e-15);
  EXPECT_NEAR(energy(0.5, -0.25), std::acos(-1) - aperture, 1e-15);
  for (const auto& [argument, slope] : Entries(definition, derivative)) {
    EXPECT_TRUE(std::isfinite(*slope)) << argument;
  }
  const double step = 1e-6;
  EXPECT_NEAR(definition.value({step * step, {0.25, aperture}, {0.25 + step * step}, {}}, {}).value,
              std::acos(-1) / 2 - aperture, 1e-5);
}

}  // namespace
}  // namespace gnomon::testing
