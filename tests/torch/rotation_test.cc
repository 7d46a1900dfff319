// Tests RoPE with multi-axis positions.
#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <string>
#include <vector>

#include "ops/catalogue/registry.h"

namespace gnomon {
namespace {

constexpr int64_t kBatch = 2;
constexpr int64_t kLength = 7;
constexpr int64_t kPairs = 8;

// Returns a call that rotates tokens by their positions, with as many key heads as heads.
RotationCall CallOf(const torch::Tensor& x, const torch::Tensor& positions) {
  return {.x = x,
          .position = 0,
          .firsts = std::nullopt,
          .length = 0,
          .of_keys = false,
          .is_product = true,
          .last_is_height = false,
          .heads = x.size(1),
          .key_heads = x.size(1),
          .positions = TokenPositions{positions, positions}};
}

torch::Tensor Rotated(const std::string& spec, const torch::Tensor& x,
                      const torch::Tensor& positions) {
  const Component component = Component::Parse(spec);
  return FindPosition(component).rotate(component, {}, CallOf(x, positions.to(torch::kLong)));
}

// Rotates pairs (n, n + kPairs) by angles (kBatch, kLength, kPairs).
torch::Tensor Turned(const torch::Tensor& x, const torch::Tensor& angles) {
  const torch::Tensor a = x.narrow(3, 0, kPairs);
  const torch::Tensor b = x.narrow(3, kPairs, kPairs);
  const torch::Tensor cosine = angles.cos().unsqueeze(1);
  const torch::Tensor sine = angles.sin().unsqueeze(1);
  return torch::cat({a * cosine - b * sine, b * cosine + a * sine}, 3);
}

torch::Tensor Tokens() { return torch::randn({kBatch, 3, kLength, 2 * kPairs}, torch::kDouble); }

torch::Tensor Coordinates(int64_t batch = kBatch, int64_t axes = 3) {
  return torch::randint(0, 500, {batch, kLength, axes}, torch::kLong);
}

// As in transformers for Qwen2-VL and Qwen3-VL, the frequencies are those of RoPE in a sequence.
TEST(RotationTest, SectionsAreTurnedByTheirAxes) {
  torch::manual_seed(0);
  const torch::Tensor x = Tokens();
  const torch::Tensor frequencies =
      torch::pow(1e4, torch::arange(kPairs, torch::kDouble) * (-1.0 / kPairs));
  const std::vector<std::pair<std::string, std::vector<int64_t>>> kinds = {
      {"rope:layout=half:sections=2x3x3", {0, 0, 1, 1, 1, 2, 2, 2}},
      {"rope:layout=half:sections=4x2x2:section_order=interleaved", {0, 1, 2, 0, 1, 2, 0, 0}},
      {"rope:layout=half:sections=3x3x2:section_order=interleaved", {0, 1, 2, 0, 1, 2, 0, 1}}};
  for (const auto& [spec, axes] : kinds) {
    for (const int64_t batch : {int64_t{1}, kBatch}) {
      const torch::Tensor positions = Coordinates(batch);
      const torch::Tensor angles =
          positions.index_select(2, torch::tensor(axes)).to(torch::kDouble) * frequencies;
      EXPECT_TRUE(torch::allclose(Rotated(spec, x, positions), Turned(x, angles))) << spec;
    }
    // Text tokens have the same position along all axes.
    const torch::Tensor text = torch::randint(0, 500, {kBatch, kLength});
    const torch::Tensor plain = Rotated("rope:layout=half", x, text);
    EXPECT_TRUE(torch::allclose(Rotated(spec, x, text), plain));
    EXPECT_TRUE(
        torch::allclose(Rotated(spec, x, text.unsqueeze(2).expand({kBatch, kLength, 3})), plain));
  }
}

// Without sections, axes work as on a grid: each axis rotates a part of the columns.
TEST(RotationTest, AxesHaveAPartOfTheColumnsEach) {
  torch::manual_seed(0);
  const torch::Tensor x = Tokens();
  const torch::Tensor places = torch::arange(6).reshape({1, 6});
  const torch::Tensor on_grid =
      Rotated("rope:shape=2x3", x.narrow(2, 0, 6), places.expand({kBatch, 6}));
  const torch::Tensor coordinates = torch::stack({places.div(3, "floor"), places.remainder(3)}, 2);
  EXPECT_TRUE(torch::allclose(Rotated("rope", x.narrow(2, 0, 6), coordinates), on_grid));
}

TEST(RotationTest, MixedFrequenciesReadCoordinates) {
  torch::manual_seed(0);
  const torch::Tensor x = Tokens();
  const torch::Tensor positions = Coordinates(kBatch, 2);
  const torch::Tensor frequencies = torch::randn({3, 2, kPairs}, torch::kDouble);
  const Component component = Component::Parse("rope_mixed:frequencies=tensor:layout=half");
  const torch::Tensor found =
      FindPosition(component).rotate(component, {frequencies}, CallOf(x, positions));
  for (int64_t head = 0; head < 3; ++head) {
    const torch::Tensor angles = torch::matmul(positions.to(torch::kDouble), frequencies[head]);
    EXPECT_TRUE(torch::allclose(found.narrow(1, head, 1), Turned(x.narrow(1, head, 1), angles)));
  }
}

TEST(RotationTest, WrongAxesAreNamed) {
  const torch::Tensor x = Tokens();
  for (const auto& [spec, axes] :
       {std::pair("rope:sections=4x4", 3), std::pair("rope:sections=2x3x4", 3),
        std::pair("rope:xpos", 2), std::pair("rope:shape=1x7", 2), std::pair("rope:dims=10", 2)}) {
    EXPECT_THROW(Rotated(spec, x, Coordinates(kBatch, axes)), c10::ValueError) << spec;
  }
}

}  // namespace
}  // namespace gnomon
