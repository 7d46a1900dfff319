// What the catalogue says that a pair costs, held against the definitions by counting. No Torch.
#include <gnomon/catalogue.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

namespace gnomon {
namespace counting {

// A number whose operations are counted: arithmetic, comparisons and selections as simple ones,
// roots, logarithms, angles and divisions as special ones.
struct Number {
  double value;
};
struct Mask {
  bool value;
};

int simple = 0;
int special = 0;

Number Simple(double value) {
  ++simple;
  return {value};
}
Number Special(double value) {
  ++special;
  return {value};
}
Mask Compare(bool value) {
  ++simple;
  return {value};
}

Number operator+(Number a, Number b) { return Simple(a.value + b.value); }
Number operator-(Number a, Number b) { return Simple(a.value - b.value); }
Number operator*(Number a, Number b) { return Simple(a.value * b.value); }
Number operator/(Number a, Number b) { return Special(a.value / b.value); }
Mask operator<(Number a, Number b) { return Compare(a.value < b.value); }
Mask operator<=(Number a, Number b) { return Compare(a.value <= b.value); }
Mask operator>(Number a, Number b) { return Compare(a.value > b.value); }
Mask operator>=(Number a, Number b) { return Compare(a.value >= b.value); }

enum class PairInput { kNone, kInnerProduct, kSquaredDistance };

// Constants are free; results do not matter.
Number Splat(Number, float value) { return {value}; }
Number Max(Number a, Number) { return Simple(a.value); }
Number Min(Number a, Number) { return Simple(a.value); }
Number Abs(Number a) { return Simple(a.value); }
Number Select(Mask, Number yes, Number) { return Simple(yes.value); }
Number Sqrt(Number a) { return Special(a.value); }
Number Rsqrt(Number a) { return Special(a.value); }
Number Log(Number a) { return Special(a.value); }
Number Log1p(Number a) { return Special(a.value); }
Number Angle(Number a, Number) { return Special(a.value); }

#include "definitions/additive-inl.h"
#include "definitions/dot-inl.h"
#include "definitions/entailment-inl.h"
#include "definitions/gaussian-inl.h"
#include "definitions/hyperbolic-inl.h"
#include "definitions/laplacian-inl.h"
#include "definitions/penumbral-inl.h"
#include "definitions/penumbral_square-inl.h"
#include "definitions/umbral-inl.h"

// g of a distance: the norms' sum, less twice the product, and whether that is too near to be
// exact.
constexpr int kOfSquaredDistance = 5;

// "5 + 1": simple and special operations of the forward pass.
template <class Definition>
std::string Cost() {
  simple = special = 0;
  const Number one = {1};
  const Number scalars[] = {one, one, one};
  Definition::Value(one, scalars, scalars, scalars);
  // The squared distance comes of the norms and the product.
  if (Definition::kInput == PairInput::kSquaredDistance) simple += kOfSquaredDistance;
  return std::to_string(simple) + " + " + std::to_string(special);
}

}  // namespace counting

TEST(CatalogueTest, CostsAreThoseOfTheDefinitions) {
  using counting::Cost;
  const std::map<std::string, std::string> expected = {
      {"dot", Cost<counting::Dot>()},
      {"laplacian", Cost<counting::Laplacian>()},
      {"gaussian", Cost<counting::Gaussian>()},
      {"umbral", "height: " + Cost<counting::Umbral>() + "; log: " + Cost<counting::UmbralLog>()},
      {"penumbral", "height: " + Cost<counting::Penumbral>() +
                        "; height2: " + Cost<counting::PenumbralSquare>() +
                        "; log: " + Cost<counting::PenumbralLog>()},
      {"hyperbolic", Cost<counting::Hyperbolic>()},
      {"entailment", Cost<counting::Entailment>()},
      {"additive", Cost<counting::Additive>() + ", and no product"},
  };
  std::map<std::string, std::string> told;
  for (const CatalogueEntry& entry : SimilarityCatalogue()) told[entry.name] = entry.cost;
  EXPECT_EQ(told, expected);
}

}  // namespace gnomon
