#include "ops/operators/argument_list.h"

#include <gtest/gtest.h>

#include <optional>

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

}  // namespace
}  // namespace gnomon
