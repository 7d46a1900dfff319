#include "ops/component.h"

#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace gnomon {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(ComponentTest, ReadsNameOptionsAndFlags) {
  const Component component = Component::Parse("t5:buckets=16:bidirectional:max_distance=-3");
  EXPECT_EQ(component.name(), "t5");
  EXPECT_EQ(component.Integer("buckets", 32), 16);
  EXPECT_EQ(component.Integer("max_distance", 128), -3);
  EXPECT_EQ(component.Integer("absent", 7), 7);
  EXPECT_EQ(component.FindFlag("bidirectional"), true);
  EXPECT_EQ(component.FindFlag("absent"), std::nullopt);
  EXPECT_EQ(Component::Parse("a:b=false").FindFlag("b"), false);
  EXPECT_EQ(Component::Parse("a:b=2.5e-3").Number("b", 1), 2.5e-3);
  EXPECT_EQ(Component::Parse("a").Number("b", 1), 1);
  EXPECT_EQ(Component::Parse("a:k=y").Choice("k", {"x", "y"}), "y");
  EXPECT_EQ(Component::Parse("a").Choice("k", {"x", "y"}), "x");
}

TEST(ComponentTest, SplitsASum) {
  const std::vector<Component> sum = ParseSum("rope:base=100+hype:tau=learned");
  ASSERT_EQ(sum.size(), 2u);
  EXPECT_EQ(sum[0].name(), "rope");
  EXPECT_EQ(sum[1].Find("tau"), "learned");
}

TEST(ComponentTest, APlusBeforeADigitBelongsToANumber) {
  const std::vector<Component> sum = ParseSum("hype:tau=1e+20:mu=1e-3+rope:base=1e+5");
  ASSERT_EQ(sum.size(), 2u);
  EXPECT_EQ(sum[0].Number("tau", 0), 1e20);
  EXPECT_EQ(sum[1].Number("base", 0), 1e5);
  EXPECT_EQ(ParseSum("rope+").size(), 2u);
}

TEST(ComponentTest, ReadsSizes) {
  const Component component = Component::Parse("rope:shape=3x14x1:base=10");
  EXPECT_EQ(component.FindSizes("shape"), (std::vector<int64_t>{3, 14, 1}));
  EXPECT_EQ(component.FindSizes("absent"), std::nullopt);
  EXPECT_EQ(Component::Parse("a:b=7").FindSizes("b"), (std::vector<int64_t>{7}));
  EXPECT_EQ(SizesText({3, 14, 1}), "3x14x1");
}

TEST(ComponentTest, TextReadsBack) {
  for (const char* text : {"rope", "rope:base=10:layout=half", "t5:bidirectional=true"}) {
    EXPECT_EQ(Component::Parse(text).Text(), text);
  }
  EXPECT_EQ(Component::Parse("t5:bidirectional").Text(), "t5:bidirectional=true");
}

TEST(ComponentTest, ADefaultYieldsToWhatIsSaid) {
  Component component = Component::Parse("t5:bidirectional=false");
  component.SetDefault("bidirectional", "true");
  component.SetDefault("buckets", "8");
  EXPECT_EQ(component.FindFlag("bidirectional"), false);
  EXPECT_EQ(component.Integer("buckets", 32), 8);
}

class BadValueTest : public ::testing::TestWithParam<const char*> {};

TEST_P(BadValueTest, IsAnError) {
  const auto read_all = [] {
    const Component component = Component::Parse(GetParam());
    component.Number("number", 0);
    component.Integer("integer", 0);
    component.FindFlag("flag");
    component.Choice("choice", {"x"});
    component.FindSizes("sizes");
  };
  EXPECT_THROW(read_all(), c10::ValueError);
}

INSTANTIATE_TEST_SUITE_P(Component, BadValueTest,
                         ::testing::Values("a:number=", "a:number=1x", "a:number=nan",
                                           "a:integer=1.5", "a:integer=99999999999999999999",
                                           "a:flag=yes", "a:choice=y", "a:sizes=3x", "a:sizes=0x3",
                                           "a:sizes=3x-1", "a:sizes=", "a:", "a:=1", "a:b=1:b=1"));

TEST(UnknownNameTest, NamesTheNearestFirst) {
  const std::vector<std::string> known = {"none", "rope", "alibi", "hype"};
  EXPECT_THAT(UnknownName("position", "hpye", known),
              AllOf(HasSubstr("unknown position \"hpye\""), HasSubstr("nearest: hype"),
                    HasSubstr("known: none, rope, alibi, hype")));
  EXPECT_THAT(UnknownName("position", "quaternion", known), Not(HasSubstr("nearest")));
  EXPECT_THAT(UnknownName("position", "", known), Not(HasSubstr("nearest")));
}

}  // namespace
}  // namespace gnomon
