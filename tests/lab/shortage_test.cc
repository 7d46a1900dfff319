#include "cli/shortage.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <new>
#include <stdexcept>
#include <string>

namespace gnomon::lab::cli {
namespace {

TEST(ShortageTest, NamesTheSizeThatAllocatorsReport) {
  const auto described = [](const std::string& message) {
    return DescribeShortage(c10::Error({__func__, __FILE__, __LINE__}, message));
  };
  EXPECT_EQ(described("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 "
                      "bytes. Error code 12 (Cannot allocate memory)"),
            ": failed to allocate 4096 bytes");
  EXPECT_EQ(described("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity "
                      "of 1.50 GiB"),
            ": failed to allocate 2.00 GiB");
  EXPECT_EQ(described("Storage size calculation overflowed: multiplication overflow"), "");
  EXPECT_EQ(described("The size of tensor a (2) must match"), std::nullopt);
  EXPECT_EQ(DescribeShortage(std::bad_alloc()), "");
  EXPECT_EQ(DescribeShortage(std::runtime_error("tried to allocate 1 bytes. ")), std::nullopt);
}

}  // namespace
}  // namespace gnomon::lab::cli
