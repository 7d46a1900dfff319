#include "ops/operators/argument_list.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "ops/operators/graph_operators.h"
#include "ops/operators/tangent_tensors.h"

namespace gnomon {
namespace {

TEST(AxisOfTest, CountsFromTheEnd) {
  EXPECT_EQ(AxisOf("B H Q K", 'K', 4), -1);
  EXPECT_EQ(AxisOf("B H Q K", 'Q', 4), -2);
  EXPECT_EQ(AxisOf("1|B 1|H Q", 'B', 3), -3);
  EXPECT_EQ(AxisOf("B H Q K", 'V', 4), std::nullopt);
  EXPECT_EQ(AxisOf("", 'Q', 2), std::nullopt);
}

TEST(AxisOfTest, ATensorOfFewerAxesHasTheLastOnes) {
  EXPECT_EQ(AxisOf("B H Q K", 'Q', 2), -2);
  EXPECT_EQ(AxisOf("B H Q K", 'Q', 1), std::nullopt);
  EXPECT_EQ(AxisOf("B H Q", 'Q', 0), std::nullopt);
}

TEST(AxisOfTest, AFormOfItsNumberOfAxesComesFirst) {
  EXPECT_EQ(AxisOf("B H Q or H", 'Q', 3), -1);
  EXPECT_EQ(AxisOf("B H Q or H", 'Q', 1), std::nullopt);
  EXPECT_EQ(AxisOf("B Q or B Q A", 'Q', 3), -2);
  EXPECT_EQ(AxisOf("B Q or B Q A", 'Q', 2), -1);
  EXPECT_EQ(AxisOf("B Q or B Q A", 'Q', 1), -1);
}

// A kernel that does not read a tangent must not treat it as 0.
TEST(NamedTangentsTest, NamesATangentThatIsNotRead) {
  Tangents given;
  for (size_t n = 0; n < GraphOperator::kGradients; ++n) given.push_back(std::nullopt);
  given.set(IndexOf<GraphArguments>("edge_bias"), at::ones({2, 1}));
  NamedTangents<GraphArguments> tangents(given);
  EXPECT_FALSE(tangents("x").defined());
  try {
    tangents.Done();
    FAIL() << "the tangent of edge_bias was not read";
  } catch (const c10::NotImplementedError& error) {
    EXPECT_NE(std::string(error.what()).find("the tangent of edge_bias"), std::string::npos);
  }
  EXPECT_EQ(*tangents.Numbers<float>("edge_bias"), 1);
  tangents.Done();
}

}  // namespace
}  // namespace gnomon
