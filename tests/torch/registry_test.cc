#include "ops/catalogue/registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace gnomon {
namespace {

using ::testing::HasSubstr;
using Role = CatalogueEntry::Role;

CatalogueEntry Mine(Role role) {
  CatalogueEntry entry;
  entry.name = "mine";
  entry.role = role;
  return entry;
}

std::string Refusal(Role role, std::vector<Parameter> parameters = {},
                    OffsetBiasFunction bias = nullptr) {
  try {
    RegisterTogether("libmine.so", [&] {
      RegisterPosition(
          {.catalogue = Mine(role), .parameters = std::move(parameters), .bias = bias});
    });
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "";
}

TEST(RegisterTest, RefusesAnEntryWithoutWhatItsRoleAsksFor) {
  EXPECT_THAT(Refusal(Role::kBias), HasSubstr("bias mine without a function `bias`; expected it"));
  EXPECT_THAT(Refusal(Role::kRotation), HasSubstr("rotation mine without a function `rotate`"));
  EXPECT_THAT(Refusal(Role::kEmbedding), HasSubstr("a function `encoder`"));
  EXPECT_THAT(Refusal(Role::kContent), HasSubstr("a function `content`"));
  EXPECT_THAT(Refusal(Role::kNorm), HasSubstr("a function `norm`"));
  EXPECT_THAT(Refusal(Role::kTemperature), HasSubstr("a function `temperature`"));
  const OffsetBiasFunction bias = [](const Component& /*component*/,
                                     const std::vector<at::Tensor>& tensors,
                                     const OffsetRange& /*range*/) { return tensors[0]; };
  const char* const table = "without a table that is always there as its first tensor";
  for (const Role role : {Role::kSink, Role::kGate, Role::kGridBias, Role::kKeyBias}) {
    EXPECT_THAT(Refusal(role, {}, bias), HasSubstr(table));
    EXPECT_THAT(Refusal(role, {PerHead("slope", "1")}, bias), HasSubstr(table));
  }
  EXPECT_EQ(FindCatalogueEntry("mine"), nullptr);
  try {
    RegisterTogether("libmine.so", [] {
      RegisterSimilarity({.catalogue = Mine(Role::kSimilarity), .map = nullptr});
    });
    FAIL();
  } catch (const c10::ValueError& error) {
    EXPECT_THAT(error.what_without_backtrace(),
                HasSubstr("similarity mine without a function `map`"));
  }
}

}  // namespace
}  // namespace gnomon
