// Tests the API of gnomon/torch/terms.h: types, order and defaults must not change.
#include <gnomon/torch/terms.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

namespace gnomon {
namespace {

using TextArgument = const std::string&;
using ShapeArgument = const std::vector<int64_t>&;

template <class Expected, class Actual>
constexpr bool kIs = std::is_same_v<Expected, Actual>;

static_assert(kIs<decltype(similarity::Dot), Similarity(std::optional<double>)>);
static_assert(kIs<decltype(similarity::Laplacian), Similarity(HeadValue)>);
static_assert(kIs<decltype(similarity::Gaussian), Similarity(HeadValue)>);
static_assert(
    kIs<decltype(similarity::Umbral), Similarity(HeadValue, double, TextArgument, TextArgument)>);
static_assert(kIs<decltype(similarity::Penumbral),
                  Similarity(HeadValue, double, TextArgument, TextArgument)>);
static_assert(kIs<decltype(similarity::Hyperbolic),
                  Similarity(HeadValue, TextArgument, const std::optional<std::string>&)>);
static_assert(
    kIs<decltype(similarity::Lorentz), Similarity(HeadValue, HeadValue, HeadValue, TextArgument)>);
static_assert(kIs<decltype(similarity::Entailment), Similarity(HeadValue, double, TextArgument)>);
static_assert(kIs<decltype(similarity::Additive), Similarity(double)>);

static_assert(kIs<decltype(position::ALiBi), Position(HeadValue)>);
static_assert(kIs<decltype(position::HyPE), Position(HeadValue, HeadValue, TextArgument)>);
static_assert(kIs<decltype(position::T5), Position(torch::Tensor, bool, int64_t)>);
static_assert(kIs<decltype(position::Kerple), Position(HeadValue, HeadValue, TextArgument)>);
static_assert(kIs<decltype(position::Sandwich), Position(HeadValue, int64_t, double)>);
static_assert(kIs<decltype(position::OffsetBias), Position(torch::Tensor)>);
static_assert(kIs<decltype(position::RoPE),
                  Position(double, TextArgument, std::optional<int64_t>, ShapeArgument, int64_t,
                           const std::optional<std::string>&, bool, ShapeArgument, TextArgument,
                           std::optional<torch::Tensor>, std::optional<torch::Tensor>)>);
static_assert(kIs<decltype(position::RoPEMixed),
                  Position(torch::Tensor, TextArgument, ShapeArgument, int64_t)>);
static_assert(
    kIs<decltype(position::Grid), Position(ShapeArgument, const std::vector<Position>&, int64_t)>);
static_assert(kIs<decltype(position::GridBias), Position(torch::Tensor, int64_t)>);
static_assert(kIs<decltype(position::Relative),
                  Position(torch::Tensor, int64_t, TextArgument, std::optional<torch::Tensor>,
                           std::optional<torch::Tensor>, std::optional<double>)>);
static_assert(
    kIs<decltype(position::TransformerXL),
        Position(torch::Tensor, torch::Tensor, torch::Tensor, bool, std::optional<double>)>);
static_assert(
    kIs<decltype(position::Relative2D),
        Position(torch::Tensor, torch::Tensor, int64_t, int64_t, int64_t, std::optional<double>)>);
static_assert(
    kIs<decltype(position::AbsoluteKeys), Position(torch::Tensor, std::optional<double>)>);
static_assert(kIs<decltype(position::KeyBias), Position(torch::Tensor)>);
static_assert(kIs<decltype(position::PairBias), Position(torch::Tensor)>);
static_assert(kIs<decltype(position::Forget), Position(torch::Tensor)>);
static_assert(
    kIs<decltype(position::ContentBias), Position(torch::Tensor, torch::Tensor, int64_t)>);
static_assert(kIs<decltype(position::Gate), Position(torch::Tensor)>);
static_assert(kIs<decltype(position::QKNorm), Position(torch::Tensor, torch::Tensor, double)>);
static_assert(kIs<decltype(position::Sink), Position(torch::Tensor)>);
static_assert(kIs<decltype(position::ScalableSoftmax), Position(HeadValue)>);
static_assert(kIs<decltype(position::LogTemperature), Position(double, double, TextArgument)>);

TEST(TermsTest, DefaultsAreThoseOfTheCatalogue) {
  EXPECT_EQ(similarity::Dot().spec, "dot");
  EXPECT_EQ(similarity::Umbral(0.5).spec, "umbral:gamma=0.5:r=0.1:map=psi:score=height");
  EXPECT_EQ(similarity::Penumbral(2).spec, "penumbral:gamma=2:r=1:map=xi:score=height");
  EXPECT_EQ(similarity::Hyperbolic(1).spec, "hyperbolic:beta=1:model=hyperboloid");
  EXPECT_EQ(similarity::Hyperbolic(1, "ball", "none").spec,
            "hyperbolic:beta=1:model=ball:map=none");
  EXPECT_EQ(similarity::Lorentz(1).spec, "lorentz:scale=1:c=1:bias=0:map=space");
  EXPECT_EQ(similarity::Entailment(1).spec, "entailment:gamma=1:K=0.1:map=ball");
  EXPECT_EQ(similarity::Additive().spec, "additive:slope=0.2");
  EXPECT_EQ(position::HyPE(0.1, 2).spec, "hype:tau=0.1:mu=2:mode=abs");
  EXPECT_EQ(position::Kerple(1, 2).spec, "kerple:r1=1:r2=2:kind=log");
  const auto scaled = [](const std::string& words) {
    return position::RoPE(10000, "interleaved", std::nullopt, {}, 0, words).spec;
  };
  EXPECT_NE(scaled("linear:factor=2").find(":scaling=linear:factor=2"), std::string::npos);
  for (const char* words : {"none+alibi", "none:dims=4", "yarn:factor=2:base=3", "=2"}) {
    EXPECT_THROW(scaled(words), c10::ValueError) << words;
  }
  EXPECT_EQ(position::RoPE().spec,
            "rope:base=10000:layout=interleaved:prefix=0:xpos=false:section_order=contiguous");
  EXPECT_EQ(
      position::RoPE(5, "half", 4, {2, 3}, 1).spec,
      "rope:base=5:layout=half:dims=4:shape=2x3:prefix=1:xpos=false:section_order=contiguous");
}

TEST(TermsTest, TensorsComeInTheOrderOfTheCatalogue) {
  const torch::Tensor first = torch::zeros({1});
  const torch::Tensor second = torch::ones({1});
  EXPECT_EQ(position::T5(first, true).spec, "t5:table=tensor:bidirectional=true:max_distance=128");
  const Position relative = position::Relative(first, 3, "zero", second);
  EXPECT_EQ(relative.spec, "relative:table=tensor:max_offset=3:far=zero:values=tensor");
  ASSERT_EQ(relative.tensors.size(), 2u);
  EXPECT_TRUE(relative.tensors[0].is_same(first));
  EXPECT_TRUE(relative.tensors[1].is_same(second));
  EXPECT_EQ(position::Relative(first, 3).tensors.size(), 1u);
  const Position grid = position::Relative2D(first, second, 2, 3);
  EXPECT_EQ(grid.spec, "relative2d:rows=tensor:columns=tensor:prefix=0:shape=2x3");
  ASSERT_EQ(grid.tensors.size(), 2u);
  EXPECT_TRUE(grid.tensors[1].is_same(second));
  const Similarity laplacian = similarity::Laplacian(second);
  EXPECT_EQ(laplacian.spec, "laplacian:gamma=tensor");
  EXPECT_TRUE(laplacian.tensors.at(0).is_same(second));
}

TEST(TermsTest, AWordMayNotBeAnotherOption) {
  EXPECT_THROW(position::HyPE(1, 1, "abs:mu=3"), c10::ValueError);
}

}  // namespace
}  // namespace gnomon
