#include "ops/grammar/component.h"

#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace gnomon {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

using Kind = CatalogueParameter::Kind;

// An entry with one parameter of each kind, with and without a default.
const CatalogueEntry& Entry() {
  static const CatalogueEntry entry = {
      .name = "a",
      .title = "",
      .formula = "",
      .source = "",
      .parameters = {
          {.name = "number", .kind = Kind::kNumber, .default_value = "0.5"},
          {.name = "size", .kind = Kind::kNumber, .lowest = 0, .above = true},
          {.name = "integer", .kind = Kind::kInteger, .default_value = "7"},
          {.name = "count", .kind = Kind::kInteger, .lowest = 1, .highest = 9},
          {.name = "flag", .kind = Kind::kFlag, .default_value = "false"},
          {.name = "maybe", .kind = Kind::kFlag, .takes_tensor = true},
          {.name = "choice", .kind = Kind::kChoice, .default_value = "x", .choices = {"x", "y"}},
          {.name = "shape", .kind = Kind::kShape},
          {.name = "heads", .kind = Kind::kHeads, .default_value = "learned", .takes_tensor = true},
          {.name = "table", .kind = Kind::kTable, .takes_tensor = true}}};
  return entry;
}

Component Parse(const char* text) { return Component::Parse(text, Entry()); }

TEST(ComponentTest, ReadsWhatTheTextSays) {
  const Component component =
      Parse("a:number=2.5e-3:integer=-3:flag:choice=y:shape=3x14x1:maybe=true:count=9");
  component.Check();
  EXPECT_EQ(component.name(), "a");
  EXPECT_EQ(component.Number("number"), 2.5e-3);
  EXPECT_EQ(component.Integer("integer"), -3);
  EXPECT_TRUE(component.Flag("flag"));
  EXPECT_EQ(component.Choice("choice"), "y");
  EXPECT_EQ(component.FindShape("shape"), (std::vector<int64_t>{3, 14, 1}));
  EXPECT_EQ(component.FindFlag("maybe"), true);
  EXPECT_EQ(component.FindInteger("count"), 9);
  EXPECT_EQ(SizesText({3, 14, 1}), "3x14x1");
}

TEST(ComponentTest, DefaultsAreTheEntrys) {
  const Component component = Parse("a");
  EXPECT_EQ(component.Number("number"), 0.5);
  EXPECT_EQ(component.Integer("integer"), 7);
  EXPECT_FALSE(component.Flag("flag"));
  EXPECT_EQ(component.Choice("choice"), "x");
  EXPECT_EQ(component.FindNumber("size"), std::nullopt);
  EXPECT_EQ(component.FindInteger("count"), std::nullopt);
  EXPECT_EQ(component.FindFlag("maybe"), std::nullopt);
  EXPECT_EQ(component.FindShape("shape"), std::nullopt);
  EXPECT_EQ(component.Find("number"), std::nullopt);
  EXPECT_THROW(component.Number("size"), c10::ValueError);
  EXPECT_THROW(component.Integer("count"), c10::ValueError);
}

TEST(ComponentTest, TensorsStandWhereTheEntryTakesThem) {
  const Component component = Parse("a:heads=tensor:table=tensor:maybe=tensor");
  component.Check();
  EXPECT_TRUE(component.IsTensor("heads"));
  EXPECT_TRUE(component.IsTensor("table"));
  EXPECT_FALSE(component.IsTensor("number"));
  for (const char* value : {"learned", "fixed", "0.25", "-1e+3"}) {
    Parse((std::string("a:heads=") + value).c_str()).Check();
  }
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
  EXPECT_EQ(sum[0].Number("tau"), 1e20);
  EXPECT_EQ(sum[1].Number("base"), 1e5);
  EXPECT_EQ(ParseSum("rope+").size(), 2u);
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
  EXPECT_EQ(component.Integer("buckets"), 8);
}

struct BadValue {
  const char* text;
  const char* part;  // of the message
};

class BadValueTest : public ::testing::TestWithParam<BadValue> {};

TEST_P(BadValueTest, IsAnError) {
  try {
    Parse(GetParam().text).Check();
    FAIL() << GetParam().text;
  } catch (const c10::ValueError& error) {
    EXPECT_THAT(error.what_without_backtrace(), HasSubstr(GetParam().part));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Component, BadValueTest,
    ::testing::Values(BadValue{"a:number=", "a:number= is invalid; expected a number"},
                      BadValue{"a:number=1x", "expected a number"},
                      BadValue{"a:number=nan", "expected a number"},
                      BadValue{"a:number=tensor", "expected a number"},
                      BadValue{"a:size=0", "a:size=0 is invalid; expected a positive number"},
                      BadValue{"a:size=-1", "expected a positive number"},
                      BadValue{"a:integer=1.5", "a:integer=1.5 is invalid; expected an integer"},
                      BadValue{"a:integer=99999999999999999999", "expected an integer"},
                      BadValue{"a:count=0", "expected an integer from 1 to 9"},
                      BadValue{"a:count=10", "expected an integer from 1 to 9"},
                      BadValue{"a:flag=yes", "expected true or false"},
                      BadValue{"a:choice=z", "a:choice=z is invalid; expected one of x, y"},
                      BadValue{"a:shape=3x", "as in 14x14"}, BadValue{"a:shape=0x3", "as in 14x14"},
                      BadValue{"a:shape=3x-1", "as in 14x14"}, BadValue{"a:shape=", "as in 14x14"},
                      BadValue{"a:heads=many", "expected learned, fixed or a number"},
                      BadValue{"a:table=3", "has no option \"table\""},
                      BadValue{"a:", "empty option"}, BadValue{"a:=1", "empty option"},
                      BadValue{"a:number=1:number=1", "sets number twice"},
                      BadValue{"a:other=1", "a has no option \"other\"; it has number, size"},
                      BadValue{"a:nubmer=1", "\"nubmer\"; did you mean number? It has number"}),
    [](const auto& test) { return std::to_string(test.index); });

TEST(UnknownNameTest, NamesTheNearestFirst) {
  const std::vector<std::string> known = {"none", "rope", "alibi", "hype"};
  EXPECT_THAT(UnknownName("position", "hpye", known),
              AllOf(HasSubstr("unknown position \"hpye\""), HasSubstr("; did you mean hype?"),
                    HasSubstr("Known: none, rope, alibi, hype")));
  for (const char* name : {"quaternion", "", "x", "abcd"}) {
    EXPECT_THAT(UnknownName("position", name, known),
                AllOf(Not(HasSubstr("did you mean")), HasSubstr("; known: none, rope")));
  }
}

}  // namespace
}  // namespace gnomon
