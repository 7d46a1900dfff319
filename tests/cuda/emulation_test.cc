// Tests the emulator with kernels that have one error each, which it must detect.
#include "emulation.h"

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>

#include "gtest/gtest.h"

namespace gnomon::testing {
namespace {

using device::Barrier;
using device::CopyAsync16;
using device::CopyAsync4;
using device::CopyCommit;
using device::CopyWait;
using device::LoadShared;
using device::SharedMemory;
using device::Shuffle;
using device::StoreShared;
using device::Thread;

std::function<void()> body;
void Kernel(const cuda::Parameters&) { body(); }

// Returns the emulator's error for a kernel with 64 threads and 1 KiB of shared memory, which runs
// in all scheduling orders; "" if there is none.
std::string Seen(const std::function<void()>& kernel) {
  AddEmulatedKernel("test", "", Kernel);
  body = kernel;
  cuda::KernelName name{"test", "", {}};
#define GNOMON_ENTRY(constant) name.constants.emplace_back(#constant, 0);
  GNOMON_CUDA_CONSTANTS(GNOMON_ENTRY)
#undef GNOMON_ENTRY
  const cuda::Parameters parameters{};
  std::string seen;
  for (int order = 0; order < 8; ++order) {
    EmulatedBackend backend({(order & 1) != 0, (order & 2) != 0, (order & 4) != 0});
    std::string now;
    try {
      backend.Launch(name, {{2, 1, 1}, 64, 1024}, &parameters, sizeof(parameters));
    } catch (const std::runtime_error& error) {
      now = error.what();
      now = now.substr(now.rfind(": ") + 2);
    }
    // All orders detect the error, but with different messages.
    if (order > 0) {
      EXPECT_EQ(now.empty(), seen.empty()) << now << seen;
    }
    seen = now;
  }
  return seen;
}

unsigned char* At(int byte) { return SharedMemory() + byte; }
alignas(16) const float kNumbers[256] = {1, 2, 3, 4};

TEST(EmulationTest, LetsRightKernelsBe) {
  EXPECT_EQ(Seen([] {
              const int t = Thread();
              CopyAsync16(At(16 * t), kNumbers, 4 * (t % 5));
              CopyCommit();
              CopyWait<0>();
              Barrier();
              EXPECT_EQ(LoadShared<float>(At(16 * (63 - t))), (63 - t) % 5 > 0 ? 1 : 0);
              Barrier();
              StoreShared<int>(At(4 * t), t);
              Barrier();
              EXPECT_EQ(LoadShared<int>(At(4 * (63 - t))), 63 - t);
              EXPECT_EQ(Shuffle(static_cast<float>(t), 5), t < 32 ? 5 : 37);
            }),
            "");
}

TEST(EmulationTest, SeesAMissingBarrier) {
  EXPECT_NE(Seen([] {
              StoreShared<int>(At(4 * Thread()), 1);
              LoadShared<int>(At(4 * (Thread() ^ 32)));
            }),
            "");
  // There is no barrier between a read and the next write.
  EXPECT_NE(Seen([] {
              StoreShared<int>(At(4 * Thread()), 1);
              Barrier();
              LoadShared<int>(At(4 * (Thread() ^ 1)));
              StoreShared<int>(At(4 * Thread()), 2);
            }),
            "");
  // Two threads write the same bytes.
  EXPECT_NE(Seen([] { StoreShared<int>(At(4 * (Thread() / 2)), 1); }), "");
}

TEST(EmulationTest, SeesWhatNobodyHasWritten) {
  EXPECT_EQ(Seen([] { LoadShared<int>(At(4 * Thread())); }), "reads unwritten memory");
}

TEST(EmulationTest, SeesAddressesOutside) {
  EXPECT_EQ(Seen([] {
              if (Thread() == 7) StoreShared<int>(At(1024), 1);
            }),
            "byte 1024 of 1024 of shared memory");
  EXPECT_EQ(Seen([] {
              if (Thread() == 7) StoreShared<int>(At(-4), 1);
            }),
            "byte -4 of 1024 of shared memory");
}

TEST(EmulationTest, SeesAddressesThatAreNotAligned) {
  EXPECT_EQ(Seen([] {
              if (Thread() == 7) StoreShared<int>(At(6), 1);
            }),
            "the address is not aligned");
  EXPECT_EQ(Seen([] {
              if (Thread() == 7) CopyAsync16(At(16), kNumbers + 1, 16);
            }),
            "copies from an address that is not aligned");
}

TEST(EmulationTest, SeesCopiesThatAreNotWaitedFor) {
  const auto copy = [] {
    CopyAsync4(At(4 * Thread()), kNumbers, true);
    CopyCommit();
  };
  EXPECT_EQ(Seen([&] {
              copy();
              Barrier();
              LoadShared<int>(At(4 * Thread()));
            }),
            "reads memory that an asynchronous copy still writes");
  // The kernel waits for one group too few.
  EXPECT_EQ(Seen([&] {
              copy();
              CopyWait<1>();
              Barrier();
              LoadShared<int>(At(4 * Thread()));
            }),
            "reads memory that an asynchronous copy still writes");
  // The group has not been committed.
  EXPECT_EQ(Seen([&] {
              CopyAsync4(At(4 * Thread()), kNumbers, true);
              CopyWait<0>();
              Barrier();
              LoadShared<int>(At(4 * Thread()));
            }),
            "reads memory that an asynchronous copy still writes");
  EXPECT_EQ(Seen(copy), "the block ends before an asynchronous copy does");
  // A thread waits only for its own copies.
  EXPECT_NE(Seen([&] {
              copy();
              CopyWait<0>();
              LoadShared<int>(At(4 * (Thread() ^ 1)));
            }),
            "");
}

TEST(EmulationTest, SeesThreadsThatGoDifferentWays) {
  EXPECT_EQ(Seen([] {
              if (Thread() < 60) Barrier();
            }),
            "threads wait for others that never arrive");
  EXPECT_EQ(Seen([] {
              if (Thread() % 32 != 3) Shuffle(1, 0);
            }),
            "threads wait for others that never arrive");
  // The calls must be on different lines; within a macro, all lines would count as one.
  const auto apart = [] {
    if (Thread() % 32 < 16) {
      Shuffle(1, 0);
    } else {
      Shuffle(2, 0);
    }
  };
  EXPECT_NE(Seen(apart), "");
}

TEST(EmulationTest, RoundsAsAGpuDoes) {
  using device::Narrow;
  using device::Widen;
  // Ties are rounded to even.
  EXPECT_EQ(Widen(Narrow(1 + 1.0f / 256, 1), 1), 1);
  EXPECT_EQ(Widen(Narrow(1 + 3.0f / 256, 1), 1), 1 + 4.0f / 256);
  EXPECT_EQ(Widen(Narrow(1 + 1.0f / 2048, 2), 2), 1);
  EXPECT_EQ(Widen(Narrow(1 + 3.0f / 2048, 2), 2), 1 + 4.0f / 2048);
  // A round trip through float does not change any 16-bit number.
  for (int type = 1; type < 3; ++type) {
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      const float value = Widen(static_cast<uint16_t>(bits), type);
      if (value != value) continue;
      ASSERT_EQ(Narrow(value, type), bits) << type;
    }
  }
  EXPECT_EQ(Narrow(1e-7f, 2), 2);
  EXPECT_EQ(Narrow(65519, 2), 0x7bff);
  EXPECT_EQ(Narrow(65520, 2), 0x7c00);
  EXPECT_TRUE(Widen(Narrow(NAN, 1), 1) != Widen(Narrow(NAN, 1), 1));
  EXPECT_EQ(device::FromBits(device::ToTf32(1 + 1.0f / 2048)), 1 + 1.0f / 1024);
}

}  // namespace
}  // namespace gnomon::testing
