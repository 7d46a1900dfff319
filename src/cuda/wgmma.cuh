// Primitives of compute capability 9.0: matrix products by groups of four warps (wgmma), mbarriers,
// and barriers of some of a block's threads. Like primitives.cuh, the emulator implements the same
// functions.
//
// The warps of a group execute the same products, of 64 rows: 16 per warp. Products read operands
// in shared memory after the threads have gone on. They run through the "async proxy", which sees
// other writes to shared memory only after a proxy fence.
//
// A tile of rows in shared memory consists of blocks of 64 columns. A block has 128 bytes per row.
// In each 8 rows, which begin at a multiple of 1024 bytes, the 16-byte pieces of row r are
// exchanged (the 128-byte swizzle): piece n is at n ^ r.
#ifndef GNOMON_SRC_CUDA_WGMMA_CUH_
#define GNOMON_SRC_CUDA_WGMMA_CUH_

#include "cuda/primitives.cuh"

#ifndef GNOMON_CUDA_EMULATION

namespace gnomon::device {

// An mbarrier takes 8 bytes. Each of its phases ends after `count` arrivals.
GNOMON_DEVICE void InitMbarrier(void* at, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(Address(at)), "r"(count)
               : "memory");
}
GNOMON_DEVICE void ArriveAt(void* at) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(Address(at)) : "memory");
}
// Arrives as soon as all earlier copies of the thread have finished. Orders only these copies.
GNOMON_DEVICE void ArriveWithCopies(void* at) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(Address(at))
               : "memory");
}
// Waits for the end of the phase with this parity: 0 for the first one. The phase before the first
// has parity 1 and has ended.
GNOMON_DEVICE void WaitForPhase(void* at, int parity) {
  uint32 ended;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.b32 %0, 1, 0, p;\n}\n"
        : "=r"(ended)
        : "r"(Address(at)), "r"(parity)
        : "memory");
  } while (ended == 0);
}
// Barriers 1 to 15 of some of the block's threads: waits for `threads` threads, or only arrives.
GNOMON_DEVICE void NamedSync(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}
GNOMON_DEVICE void NamedArrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}
// Lets later products see what the thread has written, or has waited for.
GNOMON_DEVICE void ProxyFence() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

// Must follow all writes to the registers of the products that come next, and the last wait.
GNOMON_DEVICE void WgmmaFence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
// Ends a group of products.
GNOMON_DEVICE void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}
// Waits for all groups of products except the last n.
template <int n>
GNOMON_DEVICE void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(n) : "memory");
}
// Keeps the compiler from moving accesses to registers of products across this place.
template <int kTiles>
GNOMON_DEVICE void Pin(float (&c)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(c[n][e])::"memory");
  }
}
template <int kTiles>
GNOMON_DEVICE void Pin(uint32 (&a)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+r"(a[n][e])::"memory");
  }
}

#define GNOMON_SUMS_8(c, n)                                                      \
  "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3]), "+f"(c[n + 1][0]), \
      "+f"(c[n + 1][1]), "+f"(c[n + 1][2]), "+f"(c[n + 1][3])
#define GNOMON_SUMS_32(c, n) \
  GNOMON_SUMS_8(c, n), GNOMON_SUMS_8(c, n + 2), GNOMON_SUMS_8(c, n + 4), GNOMON_SUMS_8(c, n + 6)
#define GNOMON_NAMES_32                                                                        \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define GNOMON_NAMES_64                                                                          \
  GNOMON_NAMES_32                                                                                \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
  "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
// Both operands in shared memory, with rows as operands; or the left one in registers and the rows
// of the right one as its depth.
#define GNOMON_WGMMA_SHARED(type, columns, names, left, right, adds)                         \
  "{\n.reg .pred p;\nsetp.ne.b32 p, " adds                                                   \
  ", 0;\n"                                                                                   \
  "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " {" names "}, " left \
  ", " right ", p, 1, 1, 0, 0;\n}\n"
#define GNOMON_WGMMA_WEIGHTS(type, columns, names, left, right)                               \
  "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " {" names "}, {" left \
  "}, " right ", 1, 1, 1, 1;\n"

// Starts c += left right^T, or c = left right^T unless `adds`, for a depth of 16. The operands are
// 64 rows and 8 kTiles rows in shared memory; `columns` is 8 kTiles.
template <class C, int kTiles>
GNOMON_DEVICE void MultiplyShared(float (&c)[kTiles][4], int /*columns*/, uint64 left, uint64 right,
                                  bool adds) {
  static_assert(kTiles == 8 || kTiles == 16);
  const int add = adds ? 1 : 0;
  if constexpr (kTiles == 8 && C::kType == 1) {
    asm volatile(GNOMON_WGMMA_SHARED("bf16", "64", GNOMON_NAMES_32, "%32", "%33", "%34")
                 : GNOMON_SUMS_32(c, 0)
                 : "l"(left), "l"(right), "r"(add));
  } else if constexpr (kTiles == 8) {
    asm volatile(GNOMON_WGMMA_SHARED("f16", "64", GNOMON_NAMES_32, "%32", "%33", "%34")
                 : GNOMON_SUMS_32(c, 0)
                 : "l"(left), "l"(right), "r"(add));
  } else if constexpr (C::kType == 1) {
    asm volatile(GNOMON_WGMMA_SHARED("bf16", "128", GNOMON_NAMES_64, "%64", "%65", "%66")
                 : GNOMON_SUMS_32(c, 0), GNOMON_SUMS_32(c, 8)
                 : "l"(left), "l"(right), "r"(add));
  } else {
    asm volatile(GNOMON_WGMMA_SHARED("f16", "128", GNOMON_NAMES_64, "%64", "%65", "%66")
                 : GNOMON_SUMS_32(c, 0), GNOMON_SUMS_32(c, 8)
                 : "l"(left), "l"(right), "r"(add));
  }
}

// Starts c += a right, where a is a fragment of 16 columns in registers, and right has 16 rows and
// 8 kTiles columns in shared memory.
template <class C, int kTiles>
GNOMON_DEVICE void MultiplyWeights(float (&c)[kTiles][4], int /*columns*/, const uint32 (&a)[4],
                                   uint64 right) {
  static_assert(kTiles == 8 || kTiles == 16);
  if constexpr (kTiles == 8 && C::kType == 1) {
    asm volatile(GNOMON_WGMMA_WEIGHTS("bf16", "64", GNOMON_NAMES_32, "%32, %33, %34, %35", "%36")
                 : GNOMON_SUMS_32(c, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(right));
  } else if constexpr (kTiles == 8) {
    asm volatile(GNOMON_WGMMA_WEIGHTS("f16", "64", GNOMON_NAMES_32, "%32, %33, %34, %35", "%36")
                 : GNOMON_SUMS_32(c, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(right));
  } else if constexpr (C::kType == 1) {
    asm volatile(GNOMON_WGMMA_WEIGHTS("bf16", "128", GNOMON_NAMES_64, "%64, %65, %66, %67", "%68")
                 : GNOMON_SUMS_32(c, 0), GNOMON_SUMS_32(c, 8)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(right));
  } else {
    asm volatile(GNOMON_WGMMA_WEIGHTS("f16", "128", GNOMON_NAMES_64, "%64, %65, %66, %67", "%68")
                 : GNOMON_SUMS_32(c, 0), GNOMON_SUMS_32(c, 8)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(right));
  }
}

#undef GNOMON_WGMMA_SHARED
#undef GNOMON_WGMMA_WEIGHTS
#undef GNOMON_NAMES_32
#undef GNOMON_NAMES_64
#undef GNOMON_SUMS_8
#undef GNOMON_SUMS_32

}  // namespace gnomon::device

#endif  // GNOMON_CUDA_EMULATION

namespace gnomon::device {

template <int kTiles>
GNOMON_DEVICE void Clear(float (&c)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) c[n][e] = 0;
  }
}

// The threads of a group.
constexpr int kGroupThreads = 128;
// Rows of a group's products.
constexpr int kGroupRows = 64;

// Bytes of a row of a block of columns, and of 8 rows, in which pieces are exchanged.
constexpr int kBlockBytes = 128;
constexpr int kSwizzleBytes = 8 * kBlockBytes;

// The byte of a tile of `rows` rows where a piece of 16 bytes of a row begins.
GNOMON_DEVICE constexpr int PlaceOfPiece(int rows, int row, int piece) {
  return piece / 8 * rows * kBlockBytes + row * kBlockBytes + (piece % 8 ^ row % 8) * 16;
}

// Describes an operand, which begins at `offset` bytes from `at`: at its first row, and within the
// first 128 bytes of the row at any 16-byte piece. `block_bytes`: the distance between blocks of 64
// columns. Only the lower half of the result depends on the address.
GNOMON_DEVICE uint64 Describe(const void* at, int block_bytes, int offset = 0) {
  constexpr uint32 k128ByteSwizzle = 1u << 30;
  const uint32 low = static_cast<uint32>(block_bytes / 16) << 16 | (Address(at) & 0x3ffffu) >> 4;
  const uint32 high = k128ByteSwizzle | kSwizzleBytes / 16;
  return static_cast<uint64>(high) << 32 | (low + static_cast<uint32>(offset / 16));
}

// The register limits of the first group of a block, whose threads copy, and of two other groups.
// With 384 threads, a thread has at most 168 registers on average.
constexpr int kRegistersOfProducers = 40;
constexpr int kRegistersOfOthers = 232;
#ifdef GNOMON_CUDA_EMULATION
inline void LowerRegisters(Place place = Place::current()) {
  ChangeRegisters(kRegistersOfProducers, false, place);
}
inline void RaiseRegisters(Place place = Place::current()) {
  ChangeRegisters(kRegistersOfOthers, true, place);
}
#else
GNOMON_DEVICE void LowerRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegistersOfProducers));
}
GNOMON_DEVICE void RaiseRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegistersOfOthers));
}
#endif

}  // namespace gnomon::device

#endif  // GNOMON_SRC_CUDA_WGMMA_CUH_
