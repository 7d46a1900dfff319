// Compares the token maps of src/cuda/token_map.cuh, in the emulator, with their formulas in double
// precision and with the kernels for CPUs.
#include "cuda/token_map.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/cone_map.h"
#include "core/rotation.h"
#include "cuda_problem.h"
#include "gtest/gtest.h"

namespace gnomon::testing {
namespace {

using cuda::TokenMapCall;
using Turns = TokenMapCall::Turns;
using Function = ConeMap::Function;

constexpr double kFarthest = 30;

struct MapCase {
  const char* name;
  std::optional<ConeMap> cone;
  Turns turns = Turns::kNone;
  Element tokens = Element::kFloat32;
  Element mapped = Element::kFloat32;
  int64_t columns = 16;
  std::array<int64_t, 2> rows = {5, 9};
  int64_t pairs = 0;
  int64_t block = 0;
  double scale = 1;
  bool padded = false;  // whether rows have gaps and are not aligned
  bool shares_turns = false;
  bool rotates_keys = true;
};

const ConeMap kPsi = {Function::kUmbral, false, 0.1, kFarthest};
const ConeMap kUmbralHeights = {Function::kUmbral, true, 1.3, kFarthest};
const ConeMap kXi = {Function::kPenumbral, false, 1, kFarthest};
const ConeMap kPenumbralHeights = {Function::kPenumbral, true, 1.3, kFarthest};

// Pieces of eight columns that are whole, partial, single, or more than one per lane.
const MapCase kMapCases[] = {
    {"Psi", kPsi, Turns::kNone, Element::kBFloat16, Element::kBFloat16, 64, {3, 70}},
    {"PsiTiny", kPsi, Turns::kNone, Element::kFloat32, Element::kFloat32, 2, {1, 0}},
    {"PsiLarge",
     kPsi,
     Turns::kAdjacent,
     Element::kFloat32,
     Element::kBFloat16,
     17,
     {7, 4},
     8,
     0,
     1e4},
    {"PsiHalves",
     kPsi,
     Turns::kHalves,
     Element::kFloat16,
     Element::kFloat16,
     33,
     {9, 2},
     16,
     32,
     1e-4,
     false,
     true},
    {"UmbralHeights",
     kUmbralHeights,
     Turns::kHalves,
     Element::kBFloat16,
     Element::kBFloat16,
     136,
     {4, 6},
     60,
     40,
     1,
     true},
    {"UmbralHeightsSmall",
     kUmbralHeights,
     Turns::kNone,
     Element::kFloat16,
     Element::kFloat32,
     9,
     {65, 3},
     0,
     0,
     1e-4},
    {"Xi", kXi, Turns::kHalves, Element::kBFloat16, Element::kBFloat16, 72, {5, 40}, 32, 64},
    {"XiLarge",
     kXi,
     Turns::kNone,
     Element::kFloat32,
     Element::kFloat32,
     300,
     {3, 2},
     0,
     0,
     1e4,
     true},
    {"XiUnevenPairs",
     kXi,
     Turns::kAdjacent,
     Element::kFloat32,
     Element::kFloat32,
     64,
     {33, 1},
     31,
     0,
     1,
     false,
     true},
    {"XiPendingQueries",
     kXi,
     Turns::kAdjacent,
     Element::kBFloat16,
     Element::kFloat32,
     40,
     {6, 6},
     12,
     0,
     1,
     true,
     false,
     false},
    {"PenumbralHeights",
     kPenumbralHeights,
     Turns::kAdjacent,
     Element::kFloat16,
     Element::kFloat16,
     25,
     {8, 11},
     3},
    {"PenumbralHeightsSmall",
     kPenumbralHeights,
     Turns::kNone,
     Element::kBFloat16,
     Element::kFloat32,
     8,
     {2, 130},
     0,
     0,
     1e-4},
    {"Adjacent",
     std::nullopt,
     Turns::kAdjacent,
     Element::kBFloat16,
     Element::kBFloat16,
     128,
     {3, 5},
     64},
    {"AdjacentPartial",
     std::nullopt,
     Turns::kAdjacent,
     Element::kFloat32,
     Element::kFloat32,
     15,
     {1, 34},
     6,
     0,
     1e4,
     true},
    {"Halves",
     std::nullopt,
     Turns::kHalves,
     Element::kFloat16,
     Element::kFloat16,
     64,
     {17, 0},
     32,
     64,
     1,
     false,
     true},
    {"HalvesOfBlocks",
     std::nullopt,
     Turns::kHalves,
     Element::kFloat32,
     Element::kBFloat16,
     52,
     {5, 5},
     24,
     16},
    {"HalvesOfOddBlocks",
     std::nullopt,
     Turns::kHalves,
     Element::kFloat32,
     Element::kFloat32,
     31,
     {5, 4},
     15,
     10,
     1e-4},
};

// The tensors of q or k. Gaps hold NaN.
struct Side {
  Array<float> tokens;
  Array<float> d_mapped;
  Array<float> cosines;
  Array<float> sines;
  std::vector<float> d_scalars;
  bool rotates = false;
};

struct SideResult {
  Array<float> mapped;
  Array<float> d_tokens;
  std::vector<float> scalars;
  std::vector<float> d_cosines;  // of tokens that are only rotated, (B, heads, rows, pairs)
  std::vector<float> d_sines;
};
using MapResults = std::array<SideResult, 2>;

// Bitwise, except for gaps.
void ExpectSameNumbers(const Array<float>& a, const Array<float>& b, const char* what) {
  const std::vector<float> first = a.Elements();
  const std::vector<float> second = b.Elements();
  ASSERT_EQ(first.size(), second.size());
  for (size_t n = 0; n < first.size(); ++n) {
    ASSERT_EQ(device::BitsOf(first[n]), device::BitsOf(second[n])) << what << " " << n;
  }
}

class MapProblem {
 public:
  explicit MapProblem(const MapCase& c) : c_(c) {
    std::mt19937 engine(7);
    std::normal_distribution<double> normal;
    std::uniform_real_distribution<double> angle(-100, 100);
    const int64_t heads[] = {3, 2};
    for (size_t n = 0; n < 2; ++n) {
      Side& side = sides_[n];
      const auto fill = [&](Array<float>& array, int64_t columns, double scale, Element element) {
        array = Array<float>({kBatch, heads[n], c.rows[n], columns}, c.padded, kNan);
        array.ForEach([&](float& x) { x = Rounded(float(scale * normal(engine)), element); });
      };
      fill(side.tokens, c.columns, c.scale, c.tokens);
      fill(side.d_mapped, Width(), 1, c.mapped);
      if (c.cone) SetHeights(side.tokens, engine);
      side.d_scalars.resize(Scalars(side));
      for (float& d : side.d_scalars) d = float(normal(engine));
      side.rotates = c.turns != Turns::kNone && (n == 0 || c.rotates_keys);
      if (!side.rotates) continue;
      const int64_t shared = c.shares_turns ? 1 : 0;
      side.cosines = Array<float>(
          {shared != 0 ? 1 : kBatch, shared != 0 ? 1 : heads[n], c.rows[n], c.pairs}, false, 0);
      side.sines = side.cosines;
      std::vector<double> angles;
      side.cosines.ForEach([&](float& x) {
        angles.push_back(angle(engine));
        x = float(std::cos(angles.back()));
      });
      size_t at = 0;
      side.sines.ForEach([&](float& x) { x = float(std::sin(angles[at++])); });
    }
  }

  const Side& side(size_t n) const { return sides_[n]; }
  int64_t Width() const { return c_.cone ? (c_.columns - 1 + 3) / 4 * 4 : c_.columns; }
  size_t Scalars(const Side& side) const {
    const auto [b, h, i, d] = side.tokens.size();
    return c_.cone ? static_cast<size_t>(c_.cone->scalars() * b * h * i) : 0;
  }

  // Both passes, in the emulator. For tokens that are only rotated, also checks that the gradients
  // of the tokens are those of the results, rotated back.
  MapResults Run(EmulatedOrder order, bool with_mapped = true, bool with_scalars = true) const {
    EmulatedBackend backend(order);
    MapResults results;
    std::vector<Elements> kept;
    kept.reserve(16);
    TokenMapCall forward = Call();
    TokenMapCall backward = Call();
    std::array<size_t, 2> mapped{};
    std::array<size_t, 2> gradients{};
    std::array<std::vector<float>, 2> d_scalars;
    const auto arrays = [&](const Array<float>& array, Element element) {
      kept.emplace_back(array, element);
      const cuda::Tensor tensor = kept.back().tensor();
      return cuda::Array{tensor.data, {tensor.stride[0], tensor.stride[1], tensor.stride[2]}};
    };
    for (size_t n = 0; n < 2; ++n) {
      const Side& side = sides_[n];
      const auto [b, h, i, d] = side.tokens.size();
      SideResult& result = results[n];
      result.mapped = Array<float>({b, h, i, Width()}, c_.padded, kNan);
      result.d_tokens = Array<float>({b, h, i, d}, c_.padded, kNan);
      result.scalars.assign(Scalars(side), kNan);
      cuda::TokenMapSide& to = forward.map.sides[n];
      to.heads = static_cast<int>(h);
      to.rows = static_cast<int>(i);
      to.columns = static_cast<int>(d);
      to.width = static_cast<int>(Width());
      to.tokens = arrays(side.tokens, c_.tokens);
      to.mapped = arrays(result.mapped, c_.mapped);
      mapped[n] = kept.size() - 1;
      to.scalars = result.scalars.data();
      if (side.rotates) {
        to.turned = static_cast<int>(2 * c_.pairs);
        to.turn_block = static_cast<int>(c_.block);
        to.cosines = Broadcast(arrays(side.cosines, Element::kFloat32), side.cosines);
        to.sines = Broadcast(arrays(side.sines, Element::kFloat32), side.sines);
      }
      cuda::TokenMapSide& from = backward.map.sides[n];
      from = to;
      d_scalars[n] = side.d_scalars;
      from.scalars = with_scalars ? d_scalars[n].data() : nullptr;
      from.mapped = with_mapped ? arrays(side.d_mapped, c_.mapped) : cuda::Array{};
      from.d_tokens = arrays(result.d_tokens, c_.tokens);
      gradients[n] = kept.size() - 1;
      if (c_.cone || !side.rotates) continue;
      result.d_cosines.assign(static_cast<size_t>(b * h * i * c_.pairs), kNan);
      result.d_sines = result.d_cosines;
      from.d_cosines = result.d_cosines.data();
      from.d_sines = result.d_sines.data();
    }
    cuda::MapTokens(forward, backend);
    cuda::MapTokensBackward(backward, backend);
    EXPECT_EQ(backend.launched().size(), 2);
    for (size_t n = 0; n < 2; ++n) {
      kept[mapped[n]].CopyTo(&results[n].mapped);
      kept[gradients[n]].CopyTo(&results[n].d_tokens);
    }
    if (c_.cone) return results;
    TokenMapCall turned_back = backward;
    std::swap(turned_back.tokens, turned_back.mapped);
    turned_back.map.back = 1;
    for (size_t n = 0; n < 2; ++n) {
      cuda::TokenMapSide& side = turned_back.map.sides[n];
      side.tokens = side.mapped;
      side.mapped = side.d_tokens;
    }
    cuda::MapTokens(turned_back, backend);
    for (size_t n = 0; n < 2; ++n) {
      Array<float> again = results[n].d_tokens;
      kept[gradients[n]].CopyTo(&again);
      ExpectSameNumbers(again, results[n].d_tokens, "turned back");
    }
    return results;
  }

 private:
  static constexpr int64_t kBatch = 2;

  TokenMapCall Call() const {
    TokenMapCall call;
    call.batch = kBatch;
    call.tokens = c_.tokens;
    call.mapped = c_.mapped;
    call.cone = c_.cone;
    call.turns = c_.turns;
    return call;
  }

  // Heights of all sizes, below, at and above their limits. Penumbral heights close to r, where the
  // map is ill-conditioned, are left out.
  void SetHeights(Array<float>& tokens, std::mt19937& engine) const {
    std::normal_distribution<double> normal;
    const auto [b, h, i, d] = tokens.size();
    int64_t turn = 0;
    for (int64_t n = 0; n < b * h * i; ++n) {
      float& z = tokens.at(n / i / h, n / i % h, n % i, d - 1);
      const double limits[] = {0, 29, 31, -31, 1e4, -1e4, 0.5, -2};
      double height = limits[turn++ % 8];
      if (turn % 3 == 0) height = 3 * normal(engine);
      if (c_.cone->as_is && c_.cone->function == Function::kPenumbral) {
        const double shares[] = {-1, 0, 1e-4, 0.3, 0.6, 0.9, 1.5, 1e4};
        height = c_.cone->r * shares[turn % 8];
      }
      z = Rounded(float(height), c_.tokens);
    }
  }

  static cuda::Array Broadcast(cuda::Array array, const Array<float>& of) {
    for (int axis = 0; axis < 2; ++axis) {
      if (of.size()[static_cast<size_t>(axis)] == 1) array.stride[axis] = 0;
    }
    return array;
  }

  MapCase c_;
  std::array<Side, 2> sides_;
};

// A token's results in double precision, and the sizes that its rounding errors are relative to.
struct Exact {
  std::vector<double> mapped;
  std::vector<double> scalars;
  std::vector<double> d_tokens;
  std::vector<double> d_cosines;
  std::vector<double> d_sines;
  double size = 0;    // of mapped columns
  double d_size = 0;  // of gradients of columns
  double dz_size = 0;
};

// The first and second column of a pair.
std::array<int64_t, 2> ColumnsOf(const MapCase& c, int64_t pair) {
  if (c.turns == Turns::kAdjacent) return {2 * pair, 2 * pair + 1};
  const int64_t half = c.block / 2;
  const int64_t first = pair / half * c.block + pair % half;
  return {first, first + half};
}

void Rotate(const MapCase& c, const float* cosines, const float* sines, double sign,
            std::vector<double>& x) {
  for (int64_t pair = 0; pair < c.pairs; ++pair) {
    const auto [first, second] = ColumnsOf(c, pair);
    double& a = x[static_cast<size_t>(first)];
    double& b = x[static_cast<size_t>(second)];
    const double cosine = cosines[pair];
    const double sine = sign * sines[pair];
    const double turned = a * cosine - b * sine;
    b = b * cosine + a * sine;
    a = turned;
  }
}

double Norm(const std::vector<double>& x) {
  double sum = 0;
  for (const double a : x) sum += a * a;
  return std::sqrt(sum);
}

// The multiplier and the scalars as functions of z, and their derivatives, from section 4 of Tseng
// et al. 2023.
struct Heights {
  double m = 1;
  double dm = 0;
  std::vector<double> scalars;
  std::vector<double> slopes;
};
Heights HeightsOf(const ConeMap& map, double z) {
  if (map.function == Function::kUmbral) {
    const bool inside = std::fabs(z) <= map.farthest;
    const double h = map.as_is ? z : std::exp(std::clamp(z, -map.farthest, map.farthest));
    const double slope = map.as_is ? 1 : inside ? h : 0;
    return {(map.as_is ? 1 : h) / std::sinh(map.r),
            (map.as_is ? 0 : slope) / std::sinh(map.r),
            {h},
            {slope}};
  }
  const double share = z / map.r;
  const bool inside = share >= 0 && share <= 1;
  const double u = map.as_is ? std::clamp(share, 0.0, 1.0) : 1 / (1 + std::exp(-z));
  const double rest = map.as_is ? 1 - u : 1 / (1 + std::exp(z));
  const double slope = map.as_is ? (inside ? 1 / map.r : 0) : u * rest;
  const double a = std::sqrt(rest * (1 + u));
  const double a_slope = a > 0 ? -u * slope / a : 0;
  const double by = 1 / (1 + a);
  return {map.as_is ? 1 / map.r : u,
          map.as_is ? 0 : slope,
          {u * u * by, u * u},
          {2 * u * slope * by - u * u * by * by * a_slope, 2 * u * slope}};
}

Exact ExactOf(const MapCase& c, const MapProblem& p, size_t n, int64_t b, int64_t h, int64_t i,
              bool with_mapped, bool with_scalars) {
  const Side& side = p.side(n);
  const auto count = static_cast<size_t>(c.cone ? c.columns - 1 : c.columns);
  const auto at = [&](const Array<float>& of, size_t column) -> double {
    return of.at(b, h, i, static_cast<int64_t>(column));
  };
  std::vector<double> x(count);
  std::vector<double> d(count);  // with respect to rotated columns
  for (size_t column = 0; column < count; ++column) {
    x[column] = at(side.tokens, column);
    if (with_mapped) d[column] = at(side.d_mapped, column);
  }
  const auto rotate = [&](double sign, std::vector<double>& columns) {
    if (!side.rotates) return;
    const int64_t turns_b = side.cosines.size()[0] == 1 ? 0 : b;
    const int64_t turns_h = side.cosines.size()[1] == 1 ? 0 : h;
    Rotate(c, side.cosines.view().row(turns_b, turns_h, i),
           side.sines.view().row(turns_b, turns_h, i), sign, columns);
  };
  Exact exact;
  for (int64_t pair = 0; !c.cone && side.rotates && pair < c.pairs; ++pair) {
    const auto [first, second] = ColumnsOf(c, pair);
    const auto one = static_cast<size_t>(first);
    const auto other = static_cast<size_t>(second);
    exact.d_cosines.push_back(d[one] * x[one] + d[other] * x[other]);
    exact.d_sines.push_back(d[other] * x[one] - d[one] * x[other]);
  }
  rotate(1, x);
  const Heights heights = c.cone ? HeightsOf(*c.cone, at(side.tokens, count)) : Heights{};
  double d_z = 0;
  exact.dz_size = std::fabs(heights.dm) * Norm(x) * Norm(d);
  for (size_t column = 0; column < count; ++column) {
    exact.mapped.push_back(heights.m * x[column]);
    d_z += heights.dm * d[column] * x[column];
    d[column] *= heights.m;
  }
  exact.size = Norm(exact.mapped);
  exact.d_size = Norm(d);
  rotate(-1, d);
  exact.d_tokens = d;
  if (!c.cone) return exact;
  exact.mapped.resize(static_cast<size_t>(p.Width()), 0.0);
  exact.scalars = heights.scalars;
  const auto [batch, all, rows, columns] = side.tokens.size();
  for (size_t s = 0; with_scalars && s < heights.slopes.size(); ++s) {
    const double term =
        heights.slopes[s] * side.d_scalars[static_cast<size_t>(
                                ((static_cast<int64_t>(s) * batch + b) * all + h) * rows + i)];
    d_z += term;
    exact.dz_size += std::fabs(term);
  }
  exact.d_tokens.push_back(d_z);
  return exact;
}

// Whether a result is the rounded exact number, up to a few rounding errors in fp32 of numbers of
// the given size, and one of the element type.
::testing::AssertionResult IsNear(float ours, double exact, double size, Element element) {
  const double unit = element == Element::kFloat32    ? 0
                      : element == Element::kBFloat16 ? 0x1p-8
                                                      : 0x1p-11;
  const double most = element == Element::kFloat16 ? 65504 : 3.3e38;
  const double least = element == Element::kFloat16 ? 0x1p-25 : 1e-38;
  const double allowed = 1.5e-6 * size + 1.01 * unit * std::fabs(exact) + least;
  if (std::fabs(exact) + allowed >= most && std::fabs(ours) >= most) {
    return ::testing::AssertionSuccess();
  }
  if (std::fabs(ours - exact) <= allowed) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << ours << " instead of " << exact << " (size " << size << ")";
}

class TokenMapTest : public ::testing::TestWithParam<MapCase> {};

INSTANTIATE_TEST_SUITE_P(All, TokenMapTest, ::testing::ValuesIn(kMapCases),
                         [](const auto& test) { return std::string(test.param.name); });

void ExpectExact(const MapCase& c, const MapProblem& p, const MapResults& results, bool with_mapped,
                 bool with_scalars) {
  for (size_t n = 0; n < 2; ++n) {
    const auto [batch, heads, rows, columns] = p.side(n).tokens.size();
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t i = 0; i < rows; ++i) {
          SCOPED_TRACE("side " + std::to_string(n) + ", token " + std::to_string(i));
          const Exact exact = ExactOf(c, p, n, b, h, i, with_mapped, with_scalars);
          for (size_t d = 0; d < exact.mapped.size(); ++d) {
            ASSERT_TRUE(IsNear(results[n].mapped.at(b, h, i, static_cast<int64_t>(d)),
                               exact.mapped[d], exact.size, c.mapped))
                << "column " << d;
          }
          for (size_t s = 0; s < exact.scalars.size(); ++s) {
            const auto at =
                static_cast<size_t>(((static_cast<int64_t>(s) * batch + b) * heads + h) * rows + i);
            ASSERT_TRUE(IsNear(results[n].scalars[at], exact.scalars[s],
                               std::fabs(exact.scalars[s]), Element::kFloat32))
                << "scalar " << s;
          }
          for (size_t pair = 0; pair < exact.d_cosines.size(); ++pair) {
            const auto at = static_cast<size_t>(((b * heads + h) * rows + i) * c.pairs) + pair;
            const double size = std::hypot(exact.d_cosines[pair], exact.d_sines[pair]);
            ASSERT_TRUE(
                IsNear(results[n].d_cosines[at], exact.d_cosines[pair], size, Element::kFloat32));
            ASSERT_TRUE(
                IsNear(results[n].d_sines[at], exact.d_sines[pair], size, Element::kFloat32));
          }
          for (size_t d = 0; d < exact.d_tokens.size(); ++d) {
            const bool is_z = c.cone && d + 1 == exact.d_tokens.size();
            // Slopes of heights depend on 1 - u, which loses a digit for u up to 0.9.
            ASSERT_TRUE(IsNear(results[n].d_tokens.at(b, h, i, static_cast<int64_t>(d)),
                               exact.d_tokens[d], is_z ? 4 * exact.dz_size : exact.d_size,
                               c.tokens))
                << "gradient of column " << d;
          }
        }
      }
    }
  }
}

TEST_P(TokenMapTest, IsTheFormula) {
  const MapProblem p(GetParam());
  ExpectExact(GetParam(), p, p.Run({}), true, true);
  if (!GetParam().cone) return;
  // The gradients of parts of the result.
  ExpectExact(GetParam(), p, p.Run({}, true, false), true, false);
  ExpectExact(GetParam(), p, p.Run({}, false, true), false, true);
}

TEST_P(TokenMapTest, IsTheSameInAnyOrder) {
  const MapProblem p(GetParam());
  const MapResults first = p.Run({});
  const MapResults again = p.Run({.backwards = true, .far_ahead = true, .resident = 3});
  for (size_t n = 0; n < 2; ++n) {
    ExpectSameNumbers(again[n].mapped, first[n].mapped, "mapped");
    ExpectSameNumbers(again[n].d_tokens, first[n].d_tokens, "d_tokens");
    EXPECT_EQ(again[n].d_cosines, first[n].d_cosines);
    EXPECT_EQ(again[n].d_sines, first[n].d_sines);
    for (size_t s = 0; s < first[n].scalars.size(); ++s) {
      ASSERT_EQ(again[n].scalars[s], first[n].scalars[s]);
    }
  }
}

// Rotated tokens in fp32 have the bits of the CPU's, and maps are as close to them as two correctly
// rounded exponentials are.
class TokenMapCpuTest : public TokenMapTest {};

INSTANTIATE_TEST_SUITE_P(All, TokenMapCpuTest, ::testing::ValuesIn([] {
                           std::vector<MapCase> cases;
                           for (const MapCase& c : kMapCases) {
                             if (c.mapped == Element::kFloat32) cases.push_back(c);
                           }
                           return cases;
                         }()),
                         [](const auto& test) { return std::string(test.param.name); });

TEST_P(TokenMapCpuTest, IsTheMapOfTheCpu) {
  const MapCase& c = GetParam();
  const MapProblem p(c);
  const MapResults ours = p.Run({});
  for (size_t n = 0; n < 2; ++n) {
    const Side& side = p.side(n);
    const auto [batch, heads, rows, columns] = side.tokens.size();
    if (rows == 0) continue;
    Array<float> turned = side.tokens;
    if (side.rotates) {
      PairRotation<float> rotation;
      rotation.batch = batch;
      rotation.heads = heads;
      rotation.rows = rows;
      rotation.columns = columns;
      rotation.pairs = c.pairs;
      rotation.block = c.turns == Turns::kHalves ? c.block : 0;
      rotation.tokens = side.tokens.view();
      rotation.cosines = side.cosines.view();
      rotation.sines = side.sines.view();
      for (View<const float>* turns : {&rotation.cosines, &rotation.sines}) {
        if (side.cosines.size()[0] == 1) turns->stride[0] = 0;
        if (side.cosines.size()[1] == 1) turns->stride[1] = 0;
      }
      rotation.turned = turned.view();
      RotatePairsOf(rotation, 0, rotation.count());
    }
    if (!c.cone) {
      ExpectSameNumbers(ours[n].mapped, turned, "rotated");
      continue;
    }
    MappedCones<float> cones;
    cones.map = *c.cone;
    cones.batch = batch;
    cones.heads = heads;
    cones.rows = rows;
    cones.columns = columns - 1;
    cones.tokens = std::as_const(turned).view();
    cones.width = p.Width();
    std::vector<float> x(static_cast<size_t>(cones.count() * cones.width));
    std::vector<float> scalars(ours[n].scalars.size());
    cones.x = x.data();
    cones.scalars = scalars.data();
    MapConeTokens(cones, 0, cones.count());
    const std::vector<float> mapped = ours[n].mapped.Elements();
    ASSERT_EQ(mapped.size(), x.size());
    for (size_t at = 0; at < x.size(); ++at) {
      ASSERT_NEAR(mapped[at], x[at], 1e-6 * std::fabs(x[at]) + 1e-37);
    }
    for (size_t at = 0; at < scalars.size(); ++at) {
      ASSERT_NEAR(ours[n].scalars[at], scalars[at], 1e-6 * std::fabs(scalars[at]) + 1e-37);
    }
  }
}

// Non-finite numbers stay within their token.
TEST(TokenMapRulesTest, TokensDoNotTouchEachOther) {
  MapCase c = kMapCases[0];
  const MapProblem clean(c);
  MapProblem spoiled(c);
  const auto spoil = [](const Array<float>& array) {
    auto& numbers = const_cast<Array<float>&>(array);
    const auto [b, h, i, d] = numbers.size();
    for (int64_t row = 0; row < i; row += 2) {
      for (int64_t column = 0; column < d; ++column) {
        numbers.at(0, 0, row, column) = column % 2 == 0 ? kNan : HUGE_VALF;
      }
    }
  };
  for (size_t n = 0; n < 2; ++n) {
    spoil(spoiled.side(n).tokens);
    spoil(spoiled.side(n).d_mapped);
  }
  const MapResults expected = clean.Run({});
  const MapResults results = spoiled.Run({});
  for (size_t n = 0; n < 2; ++n) {
    const auto [batch, heads, rows, columns] = clean.side(n).tokens.size();
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t d = 0; d < columns; ++d) {
        const float ours = results[n].d_tokens.at(0, 0, i, d);
        if (i % 2 == 0) {
          EXPECT_TRUE(d + 1 < columns || std::isnan(ours));
        } else {
          EXPECT_EQ(ours, expected[n].d_tokens.at(0, 0, i, d));
        }
        if (d >= clean.Width() || i % 2 == 0) continue;
        EXPECT_EQ(results[n].mapped.at(0, 0, i, d), expected[n].mapped.at(0, 0, i, d));
      }
    }
  }
}

TEST(TokenMapRulesTest, EmptyCallsLaunchNothing) {
  EmulatedBackend backend;
  TokenMapCall call;
  call.cone = kPsi;
  cuda::MapTokens(call, backend);
  cuda::MapTokensBackward(call, backend);
  EXPECT_TRUE(backend.launched().empty());
}

}  // namespace
}  // namespace gnomon::testing
