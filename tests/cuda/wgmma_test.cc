// Tests the emulation of products by groups of warps, mbarriers and asynchronous copies: its
// layouts are compared with those of CuTe, which this file repeats, and it must detect the errors
// of small kernels.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "emulation.h"
#include "gtest/gtest.h"
// Must follow emulation.h:
#include "cuda/wgmma.cuh"

namespace gnomon::testing {
namespace {

using device::ArriveAt;
using device::ArriveWithCopies;
using device::Barrier;
using device::CopyAsync16;
using device::CopyCommit;
using device::CopyWait;
using device::Describe;
using device::InitMbarrier;
using device::LoadShared;
using device::MultiplyShared;
using device::MultiplyWeights;
using device::NamedArrive;
using device::NamedSync;
using device::ProxyFence;
using device::SharedMemory;
using device::StoreShared;
using device::Thread;
using device::WaitForPhase;
using device::WarpBarrier;
using device::WgmmaCommit;
using device::WgmmaFence;
using device::WgmmaWait;

std::function<void()> body;
void Kernel(const cuda::Parameters&) { body(); }

constexpr uint32_t kShared = 40 * 1024;

cuda::KernelName NameWithProducers() {
  AddEmulatedKernel("test_of_groups", "", Kernel);
  cuda::KernelName name{"test_of_groups", "", {}};
#define GNOMON_ENTRY(constant) name.constants.emplace_back(#constant, 0);
  GNOMON_CUDA_CONSTANTS(GNOMON_ENTRY)
#undef GNOMON_ENTRY
  for (auto& [constant, value] : name.constants) {
    if (constant == "kProducers") value = 4;
    if (constant == "kWarps") value = 8;
    if (constant == "kType") value = 1;
  }
  return name;
}

// Runs a kernel of 256 threads in all scheduling orders. Returns the emulator's error; "" if there
// is none.
std::string Seen(const std::function<void()>& kernel) {
  body = kernel;
  const cuda::KernelName name = NameWithProducers();
  const cuda::Parameters parameters{};
  std::string seen;
  for (int order = 0; order < 8; ++order) {
    EmulatedBackend backend({(order & 1) != 0, (order & 2) != 0, (order & 4) != 0, 1 + order % 2});
    std::string now;
    try {
      backend.Launch(name, {{2, 1, 1}, 256, kShared}, &parameters, sizeof(parameters));
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

unsigned char* At(int byte) {
  return SharedMemory() + (0u - device::Address(SharedMemory())) % 1024u + byte;
}

// CuTe's layouts (cute/atom/mma_traits_sm90_gmma.hpp, cute/arch/mma_sm90_desc.hpp): an index along
// each mode of a shape, the first fastest, is multiplied by a stride.
struct CuteMode {
  std::vector<int> shape, stride;
};
int IndexOf(const CuteMode& mode, int at) {
  int index = 0;
  for (size_t n = 0; n < mode.shape.size(); ++n) {
    const bool last = n + 1 == mode.shape.size();
    index += (last ? at : at % mode.shape[n]) * mode.stride[n];
    at /= mode.shape[n];
  }
  return index;
}
// Swizzle<3, 4, 3> of a byte address.
uint32_t Swizzled(uint32_t byte) { return byte ^ ((byte & (7u << 7)) >> 3); }

// Layout_K_SW128_Atom for 16-bit numbers, (8, 64) : (64, 1), repeated along the rows and then along
// the columns of a tile.
uint32_t ByteInTileOfRows(int rows, int row, int column) {
  const CuteMode by_row{{8, rows / 8}, {64, 512}};
  const CuteMode by_column{{64, 4}, {1, rows / 8 * 512}};
  return Swizzled(static_cast<uint32_t>(2 * (IndexOf(by_row, row) + IndexOf(by_column, column))));
}
// Layout_MN_SW128_Atom, (64, 8) : (1, 64), repeated along the depth and then along the columns.
uint32_t ByteInTileOfColumns(int depth, int column, int k) {
  const CuteMode by_column{{64, 4}, {1, depth / 8 * 512}};
  const CuteMode by_depth{{8, depth / 8}, {64, 512}};
  return Swizzled(static_cast<uint32_t>(2 * (IndexOf(by_column, column) + IndexOf(by_depth, k))));
}

// GmmaDescriptor.
struct CuteDescriptor {
  uint16_t start_address : 14, : 2;
  uint16_t leading_byte_offset : 14, : 2;
  uint16_t stride_byte_offset : 14, : 2;
  uint8_t : 1, base_offset : 3, : 4;
  uint8_t : 6, layout_type : 2;
};
static_assert(sizeof(CuteDescriptor) == 8);

// CLayout_64xN, and ALayout_64x16 with N = 16: the element row + 64 column of a thread's value.
std::pair<int, int> CuteElement(int thread, int value) {
  const CuteMode by_thread{{4, 8, 4}, {128, 1, 16}};
  const CuteMode by_value{{2, 2, 32}, {64, 8, 512}};
  const int at = IndexOf(by_thread, thread) + IndexOf(by_value, value);
  return {at % 64, at / 64};
}

TEST(WgmmaLayoutTest, PiecesAreWhereCuteExpectsThem) {
  for (const int rows : {64, 128}) {
    for (int row = 0; row < rows; ++row) {
      for (int column = 0; column < 128; ++column) {
        const auto byte =
            static_cast<uint32_t>(device::PlaceOfPiece(rows, row, column / 8) + column % 8 * 2);
        ASSERT_EQ(byte, ByteInTileOfRows(rows, row, column));
        // The same tile, as columns of an operand.
        ASSERT_EQ(byte, ByteInTileOfColumns(rows, column, row));
      }
    }
  }
}

TEST(WgmmaLayoutTest, DescriptorsAreThoseOfCute) {
  body = [] {
    if (Thread() != 0) return;
    for (const int block_bytes : {16, 64 * 128, 128 * 128}) {
      for (const int byte : {0, 32, 96, 2048, 1024 * 17 + 64}) {
        const uint64_t bits = Describe(At(0), block_bytes, byte);
        CuteDescriptor descriptor;
        std::memcpy(&descriptor, &bits, sizeof(bits));
        EXPECT_EQ(descriptor.start_address, device::Address(At(byte)) / 16);
        EXPECT_EQ(descriptor.leading_byte_offset, block_bytes / 16);
        EXPECT_EQ(descriptor.stride_byte_offset, 1024 / 16);
        EXPECT_EQ(descriptor.base_offset, 0);
        EXPECT_EQ(descriptor.layout_type, 1);  // B128
      }
    }
  };
  const cuda::Parameters parameters{};
  EmulatedBackend().Launch(NameWithProducers(), {{1, 1, 1}, 256, kShared}, &parameters,
                           sizeof(parameters));
}

// The canonical layouts of CuTe, in units of 16 bytes: ((8, n), 2) : ((8, SBO), 1) for rows, and
// ((8, n), (8, k)) : ((1, LBO), (8, SBO)) for columns.
TEST(WgmmaLayoutTest, DescribedElementsAreThoseOfCute) {
  std::mt19937 random(3);
  for (int draw = 0; draw < 50; ++draw) {
    CuteDescriptor fields{};
    fields.start_address = static_cast<uint16_t>(64 * (random() % 200) + 2 * (random() % 4));
    fields.leading_byte_offset = static_cast<uint16_t>(random() % 2000);
    fields.stride_byte_offset = static_cast<uint16_t>(random() % 2000);
    fields.layout_type = 1;
    uint64_t bits;
    std::memcpy(&bits, &fields, sizeof(bits));
    const int leading = fields.leading_byte_offset;
    const int stride = fields.stride_byte_offset;
    const CuteMode rows{{8, 32}, {8, stride}};
    const CuteMode columns{{8, 4}, {1, leading}};
    const CuteMode depth{{8, 2}, {8, stride}};
    for (int n = 0; n < 256; ++n) {
      for (int k = 0; k < 16; ++k) {
        const auto address = [&](int unit, int element) {
          return Swizzled(static_cast<uint32_t>(16 * (fields.start_address + unit) + 2 * element));
        };
        ASSERT_EQ(device::ElementOfDescriptor(bits, n, k, false, device::Place::current()),
                  address(IndexOf(rows, n) + k / 8, k % 8));
        if (fields.start_address % 64 != 0) continue;
        ASSERT_EQ(device::ElementOfDescriptor(bits, n, k, true, device::Place::current()),
                  address(IndexOf(columns, n / 8) + IndexOf(depth, k), n % 8));
      }
    }
  }
}

// Computes products of integers, which are exact, from tiles and registers in CuTe's layouts.
TEST(WgmmaLayoutTest, FragmentsAreThoseOfCute) {
  constexpr int kColumns = 128;
  std::mt19937 random(4);
  const auto matrix = [&](int rows, int columns) {
    std::vector<std::vector<float>> numbers(static_cast<size_t>(rows));
    for (auto& row : numbers) {
      for (int n = 0; n < columns; ++n) row.push_back(static_cast<float>(random() % 9) - 4.0f);
    }
    return numbers;
  };
  const auto left = matrix(64, 16);
  const auto right = matrix(kColumns, 16);
  const auto bits = [](float number) { return device::Narrow(number, 1); };
  const auto expected = [&](int row, int column) {
    float sum = 0;
    for (size_t k = 0; k < 16; ++k) {
      sum += left[static_cast<size_t>(row)][k] * right[static_cast<size_t>(column)][k];
    }
    return sum;
  };
  constexpr int kRight = 64 * 128;
  constexpr int kTransposed = kRight + kColumns * 128;
  EXPECT_EQ(
      Seen([&] {
        const int t = Thread();
        if (t >= 128) return;
        for (int n = t; n < 64 * 16; n += 128) {
          StoreShared<uint16_t>(
              At(static_cast<int>(ByteInTileOfRows(64, n / 16, n % 16))),
              bits(left[static_cast<size_t>(n / 16)][static_cast<size_t>(n % 16)]));
        }
        for (int n = t; n < kColumns * 16; n += 128) {
          const uint16_t number =
              bits(right[static_cast<size_t>(n / 16)][static_cast<size_t>(n % 16)]);
          StoreShared<uint16_t>(
              At(kRight + static_cast<int>(ByteInTileOfRows(kColumns, n / 16, n % 16))), number);
          StoreShared<uint16_t>(
              At(kTransposed + static_cast<int>(ByteInTileOfColumns(16, n / 16, n % 16))), number);
        }
        ProxyFence();
        NamedSync(1, 128);
        float sums[kColumns / 8][4] = {};
        float others[kColumns / 8][4] = {};
        uint32_t a[4];
        for (int value = 0; value < 8; ++value) {
          const auto [row, k] = CuteElement(t, value);
          const uint32_t number = bits(left[static_cast<size_t>(row)][static_cast<size_t>(k)]);
          a[value / 2] = value % 2 == 0 ? number : a[value / 2] | number << 16;
        }
        WgmmaFence();
        MultiplyShared<device::Constants>(sums, kColumns, Describe(At(0), 16),
                                          Describe(At(kRight), 16), false);
        MultiplyWeights<device::Constants>(others, kColumns, a,
                                           Describe(At(kTransposed), 16 * 128));
        WgmmaCommit();
        WgmmaWait<0>();
        for (int value = 0; value < kColumns / 2; ++value) {
          const auto [row, column] = CuteElement(t, value);
          ASSERT_EQ(sums[value / 4][value % 4], expected(row, column)) << row << " " << column;
          ASSERT_EQ(others[value / 4][value % 4], expected(row, column)) << row << " " << column;
        }
      }),
      "");
}

// Errors.

alignas(16) const float kNumbers[256] = {1, 2, 3, 4};

// Writes a tile of 64 rows of zeros at byte 0, by the threads of one group.
void WriteTile() {
  for (int n = Thread() % 128; n < 64 * 32; n += 128) StoreShared<uint32_t>(At(4 * n), 0);
}
uint64_t Tile(int byte = 0) { return Describe(At(byte), 16); }
void Multiply(float (&sums)[8][4], bool adds = false) {
  MultiplyShared<device::Constants>(sums, 64, Tile(), Tile(), adds);
}

// A kernel in which the second group multiplies a tile that the first group writes, with steps that
// tests replace or omit.
struct Steps {
  std::function<void()> write = WriteTile;
  std::function<void()> fence_writes = ProxyFence;
  std::function<void()> arrive = [] { ArriveAt(At(32768)); };
  std::function<void()> wait = [] { WaitForPhase(At(32768), 0); };
  std::function<void()> fence = [] { WgmmaFence(); };
  std::function<void()> commit = [] { WgmmaCommit(); };
  std::function<void()> wait_for_products = [] { WgmmaWait<0>(); };
  std::function<void()> release = [] {
    if (Thread() % 32 == 0) ArriveAt(At(32776));
  };
  std::function<void()> overwrite = [] { WaitForPhase(At(32776), 0); };
};
std::string SeenIn(const Steps& steps) {
  return Seen([&] {
    if (Thread() == 0) {
      InitMbarrier(At(32768), 128);
      InitMbarrier(At(32776), 4);
    }
    Barrier();
    if (Thread() < 128) {
      steps.write();
      steps.fence_writes();
      steps.arrive();
      steps.overwrite();
      WriteTile();
      return;
    }
    float sums[8][4] = {};
    steps.wait();
    steps.fence();
    Multiply(sums);
    steps.commit();
    steps.wait_for_products();
    steps.release();
  });
}

TEST(WgmmaErrorTest, LetsRightKernelsBe) {
  EXPECT_EQ(SeenIn({}), "");
  // The waiting threads may fence too.
  Steps other;
  other.fence_writes = [] {};
  other.fence = [] {
    ProxyFence();
    WgmmaFence();
  };
  EXPECT_EQ(SeenIn(other), "");
}

TEST(WgmmaErrorTest, SeesMissingFencesAndWaits) {
  const auto without = [](std::function<void()> Steps::* step) {
    Steps steps;
    steps.*step = [] {};
    return SeenIn(steps);
  };
  const std::string unfenced = "a product reads memory that is written without a proxy fence";
  EXPECT_EQ(without(&Steps::write), "a product reads unwritten memory");
  EXPECT_EQ(without(&Steps::fence_writes), unfenced);
  EXPECT_NE(without(&Steps::arrive), "");
  EXPECT_NE(without(&Steps::wait), "");
  EXPECT_EQ(without(&Steps::fence), "no fence precedes the products");
  EXPECT_NE(without(&Steps::commit), "");
  EXPECT_NE(without(&Steps::wait_for_products), "");
  EXPECT_EQ(without(&Steps::release), "threads wait for a phase that never ends");
  EXPECT_NE(without(&Steps::overwrite), "");
  Steps steps;
  // One warp's wait does not cover the products of the others.
  steps.release = [] {
    if (Thread() == 128) {
      for (int n = 0; n < 4; ++n) ArriveAt(At(32776));
    }
  };
  EXPECT_NE(SeenIn(steps), "");
  steps = {};
  steps.fence_writes = [] {};
  steps.write = [] {
    ProxyFence();
    WriteTile();
  };
  EXPECT_EQ(SeenIn(steps), unfenced);
  steps = {};
  steps.wait_for_products = [] { WgmmaWait<1>(); };
  EXPECT_NE(SeenIn(steps), "");
}

TEST(WgmmaErrorTest, SeesCopiesThatAreNotWaitedFor) {
  Steps steps;
  steps.write = [] {
    for (int n = Thread(); n < 512; n += 128) CopyAsync16(At(16 * n), kNumbers, 16);
  };
  const auto with_copies = [] { ArriveWithCopies(At(32768)); };
  steps.fence_writes = [] {};
  steps.arrive = with_copies;
  steps.fence = [] {
    ProxyFence();
    WgmmaFence();
  };
  const auto finish = [] {
    WaitForPhase(At(32776), 0);
    CopyCommit();
    CopyWait<0>();
  };
  steps.overwrite = finish;
  EXPECT_EQ(SeenIn(steps), "");
  // The arrival does not wait for the copies.
  steps.arrive = [] { ArriveAt(At(32768)); };
  EXPECT_EQ(SeenIn(steps), "a product reads memory that is written without a proxy fence");
  // The arrival precedes the copies.
  steps.arrive = [] {};
  const auto write = steps.write;
  steps.write = [&] {
    ArriveWithCopies(At(32768));
    write();
  };
  EXPECT_NE(SeenIn(steps), "");
  // The arrival orders only copies.
  steps.write = WriteTile;
  steps.arrive = with_copies;
  EXPECT_EQ(SeenIn(steps), "a product reads memory that is written without a proxy fence");
  // The producers do not wait for their copies.
  steps.write = write;
  steps.overwrite = [] { WaitForPhase(At(32776), 0); };
  EXPECT_NE(SeenIn(steps), "");
}

TEST(WgmmaErrorTest, SeesRegistersThatAreWrittenTooLate) {
  const auto run = [](const std::function<void(float (&)[8][4])>& products) {
    return Seen([&] {
      if (Thread() >= 128) return;
      WriteTile();
      ProxyFence();
      NamedSync(1, 128);
      float c[8][4] = {};
      products(c);
    });
  };
  EXPECT_EQ(run([](float (&c)[8][4]) {
              WgmmaFence();
              Multiply(c);
              Multiply(c, true);
              WgmmaCommit();
              WgmmaWait<0>();
              EXPECT_EQ(c[3][1], 0);
              c[3][1] = 5;
              WgmmaFence();
              Multiply(c, true);
              WgmmaCommit();
              WgmmaWait<0>();
              EXPECT_EQ(c[3][1], 5);
            }),
            "");
  // Sums are NaN until a wait.
  EXPECT_EQ(run([](float (&c)[8][4]) {
              WgmmaFence();
              Multiply(c);
              WgmmaCommit();
              EXPECT_TRUE(c[0][0] != c[0][0]);
              WgmmaWait<0>();
              EXPECT_EQ(c[0][0], 0);
            }),
            "");
  EXPECT_EQ(run([](float (&c)[8][4]) {
              WgmmaFence();
              Multiply(c);
              WgmmaCommit();
              c[1][2] = 1;
              WgmmaWait<0>();
            }),
            "writes the sums of a product");
  EXPECT_EQ(run([](float (&c)[8][4]) {
              WgmmaFence();
              Multiply(c);
              WgmmaCommit();
              WgmmaWait<0>();
              WgmmaFence();
              c[1][2] = 1;
              Multiply(c, true);
              WgmmaCommit();
              WgmmaWait<0>();
            }),
            "registers of a product are written too late");
  EXPECT_EQ(run([](float (&c)[8][4]) {
              uint32_t a[4] = {};
              WgmmaFence();
              MultiplyWeights<device::Constants>(c, 64, a, Tile());
              WgmmaCommit();
              a[2] = 1;
              WgmmaWait<0>();
            }),
            "registers of a product are written too late");
  // The sums of a product are not those of the next one.
  EXPECT_EQ(run([](float (&c)[8][4]) {
              WgmmaFence();
              Multiply(c);
              MultiplyShared<device::Constants>(c, 32, Tile(), Tile(), true);
              WgmmaCommit();
              WgmmaWait<0>();
            }),
            "products of other sizes share sums");
  EXPECT_EQ(run([](float (&c)[8][4]) {
              WgmmaFence();
              if (Thread() / 32 == 2) {
                MultiplyShared<device::Constants>(c, 64, Tile(), Tile(32), false);
              } else {
                Multiply(c);
              }
              WgmmaCommit();
              WgmmaWait<0>();
            }),
            "the warps of a group execute different products");
  EXPECT_EQ(run([](float (&c)[8][4]) {
              WgmmaFence();
              MultiplyShared<device::Constants>(c, 64, Tile(), Tile(128), false);
            }),
            "a descriptor whose start is not aligned to 1024 bytes");
}

TEST(WgmmaErrorTest, SeesWrongPhases) {
  const auto run = [](const std::function<void()>& kernel) {
    return Seen([&] {
      if (Thread() == 0) InitMbarrier(At(0), 1);
      Barrier();
      kernel();
    });
  };
  EXPECT_EQ(run([] {
              WaitForPhase(At(0), 1);
              Barrier();
              if (Thread() == 0) ArriveAt(At(0));
              WaitForPhase(At(0), 0);
            }),
            "");
  // The arrival may come first, and then a wait with parity 1 is for the phase after it.
  EXPECT_NE(run([] {
              if (Thread() == 0) ArriveAt(At(0));
              Barrier();
              WaitForPhase(At(0), 1);
            }),
            "");
  EXPECT_EQ(run([] { WaitForPhase(At(0), 0); }), "threads wait for a phase that never ends");
  EXPECT_NE(run([] {
              if (Thread() == 0) ArriveAt(At(0));
              WaitForPhase(At(0), 0);
              WaitForPhase(At(0), 0);
            }),
            "");
  // Nothing keeps the second arrival from preceding the first wait.
  EXPECT_NE(run([] {
              if (Thread() == 0) {
                ArriveAt(At(0));
                ArriveAt(At(0));
              }
              Barrier();
              WaitForPhase(At(0), 0);
            }),
            "");
  EXPECT_NE(Seen([] {
              if (Thread() == 0) InitMbarrier(At(0), 1);
              ArriveAt(At(0));
            }),
            "");
  EXPECT_EQ(run([] { LoadShared<int>(At(0)); }), "reads an mbarrier");
  EXPECT_EQ(run([] { StoreShared<int>(At(4), 1); }), "writes an mbarrier");
}

TEST(WgmmaErrorTest, SeesAccessesThatBarriersDoNotOrder) {
  // Half of the threads write, and the others read.
  const auto run = [](const std::function<void()>& between) {
    return Seen([&] {
      const int t = Thread();
      if (t < 128) StoreShared<int>(At(4 * t), t);
      between();
      if (t >= 128) {
        EXPECT_EQ(LoadShared<int>(At(4 * (t - 128))), t - 128);
      }
    });
  };
  EXPECT_EQ(run([] { Barrier(); }), "");
  EXPECT_EQ(run([] { NamedSync(3, 256); }), "");
  EXPECT_EQ(run([] {
              if (Thread() < 128) {
                NamedArrive(3, 256);
              } else {
                NamedSync(3, 256);
              }
            }),
            "");
  EXPECT_NE(run([] { NamedSync(1 + Thread() / 128, 128); }), "");
  EXPECT_NE(run([] { WarpBarrier(); }), "");
  EXPECT_NE(run([] { NamedArrive(3, 256); }), "");
  EXPECT_NE(run([] { NamedSync(3, Thread() < 128 ? 256 : 128); }), "");
  EXPECT_EQ(run([] { NamedSync(16, 256); }), "barrier 16 of 256 threads");
  EXPECT_EQ(run([] {
              if (Thread() < 128) NamedSync(3, 256);
              Barrier();
            }),
            "threads wait for others that never arrive");
  // Lanes may exchange numbers after a barrier of their warp.
  EXPECT_EQ(Seen([] {
              StoreShared<int>(At(4 * Thread()), Thread());
              WarpBarrier();
              EXPECT_EQ(LoadShared<int>(At(4 * (Thread() ^ 1))), Thread() ^ 1);
            }),
            "");
}

TEST(WgmmaErrorTest, SeesWrongRegisterLimits) {
  const auto place = device::Place::current();
  const auto run = [&](int first, int second) {
    return Seen([=] {
      if (Thread() < 128) {
        device::ChangeRegisters(first, false, place);
      } else {
        device::ChangeRegisters(second, true, place);
      }
    });
  };
  EXPECT_EQ(run(24, 256), "");
  EXPECT_EQ(run(40, 20), "a limit of 20 registers");
  EXPECT_EQ(run(40, 250), "a limit of 250 registers");
  EXPECT_EQ(run(256, 256), "the limit of registers changes from 255 to 256");
  // Blocks of three groups, each thread of which has at most 168 registers.
  const auto run_three = [&](int first, int others) -> std::string {
    body = [=] {
      device::ChangeRegisters(Thread() < 128 ? first : others, Thread() >= 128, place);
    };
    const cuda::Parameters parameters{};
    try {
      EmulatedBackend().Launch(NameWithProducers(), {{1, 1, 1}, 384, kShared}, &parameters,
                               sizeof(parameters));
    } catch (const std::runtime_error& error) {
      const std::string seen = error.what();
      return seen.substr(seen.rfind(": ") + 2);
    }
    return "";
  };
  EXPECT_EQ(run_three(40, 232), "");
  EXPECT_EQ(run_three(40, 240), "the groups wait for more registers than the block has");
}

}  // namespace
}  // namespace gnomon::testing
