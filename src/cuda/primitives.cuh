// The GPU primitives that the kernels use. The emulator used in tests implements the same
// functions. All accesses to shared memory go through them, so the emulator detects races between
// the threads of a block.
//
// A warp multiplies tiles of 16 x 8 numbers. One product is 32 bytes deep: 16 numbers in bf16 or
// fp16, or 8 in fp32. fp32 numbers are split into high and low tf32 parts, and three products are
// summed.
#ifndef GNOMON_SRC_CUDA_PRIMITIVES_CUH_
#define GNOMON_SRC_CUDA_PRIMITIVES_CUH_

#include "base/most_bias.h"
#include "base/near_share.h"
#include "cuda/constants.h"
#include "cuda/parameters.h"

#ifndef GNOMON_CUDA_EMULATION

#define GNOMON_DEVICE __device__ __forceinline__
// An array size that depends on a kernel's constants; `most` is its upper bound over all kernels.
#define GNOMON_SIZE(size, most) (size)

extern __shared__ __align__(16) unsigned char gnomon_shared_memory[];

namespace gnomon {

enum class PairInput { kNone, kInnerProduct, kSquaredDistance };

namespace device {

using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;
using cuda::Int64;

GNOMON_DEVICE unsigned char* SharedMemory() { return gnomon_shared_memory; }
GNOMON_DEVICE int Thread() { return static_cast<int>(threadIdx.x); }
GNOMON_DEVICE int BlockX() { return static_cast<int>(blockIdx.x); }
GNOMON_DEVICE int BlockY() { return static_cast<int>(blockIdx.y); }

GNOMON_DEVICE uint32 Address(const void* shared) {
  return static_cast<uint32>(__cvta_generic_to_shared(shared));
}
template <class T>
GNOMON_DEVICE T LoadShared(const void* from) {
  return *static_cast<const T*>(from);
}
template <class T>
GNOMON_DEVICE void StoreShared(void* to, T value) {
  *static_cast<T*>(to) = value;
}

// Copies the first `bytes` of 16 bytes (or all or none of 4 bytes) and clears the rest. The calling
// thread can read the data after waiting for its group; other threads also need a barrier.
GNOMON_DEVICE void CopyAsync16(void* to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(Address(to)), "l"(from),
               "r"(bytes)
               : "memory");
}
GNOMON_DEVICE void CopyAsync4(void* to, const void* from, bool inside) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(Address(to)), "l"(from),
               "r"(inside ? 4 : 0)
               : "memory");
}
GNOMON_DEVICE void CopyCommit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
// Waits for all groups of copies except the last n.
template <int n>
GNOMON_DEVICE void CopyWait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(n) : "memory");
}
GNOMON_DEVICE void Barrier() { __syncthreads(); }
GNOMON_DEVICE void WarpBarrier() { __syncwarp(); }
// Returns `a` in a way that is opaque to the compiler, so that addresses derived from it are
// computed where they are used. Otherwise, loop-invariant addresses would occupy registers.
GNOMON_DEVICE int Fresh(int a) {
  asm volatile("" : "+r"(a));
  return a;
}

// Loads four matrices, each with 8 rows of 16 bytes. Lanes 8 n ... 8 n + 7 point to the rows of
// matrix n, at `offset` bytes from `row`; constant parts of an offset become immediates.
template <bool kTranspose>
GNOMON_DEVICE void LoadMatrices(uint32 (&r)[4], const void* row, int offset) {
  if constexpr (kTranspose) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(Address(row) + static_cast<uint32>(offset))
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(Address(row) + static_cast<uint32>(offset))
                 : "memory");
  }
}

// Computes c += a b for one product of numbers of type `kType` (tf32 for fp32).
template <class C>
GNOMON_DEVICE void Multiply(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  if constexpr (C::kType == 0) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else if constexpr (C::kType == 1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Returns a number that grows by one with every call for the same address.
GNOMON_DEVICE int TakeTicket(int* next) { return atomicAdd(next, 1); }
// Counters that the blocks of a grid pass to each other. A block that has seen a count sees the
// global memory that other threads wrote before a fence, or before a barrier and another thread's
// fence, and before that count was stored.
GNOMON_DEVICE Int64 GlobalAddress(const void* global) {
  return static_cast<Int64>(__cvta_generic_to_global(global));
}
GNOMON_DEVICE void Fence() { asm volatile("fence.acq_rel.gpu;\n" ::: "memory"); }
GNOMON_DEVICE void StoreCount(int* to, int count) {
  asm volatile("st.relaxed.gpu.global.s32 [%0], %1;\n" ::"l"(GlobalAddress(to)), "r"(count)
               : "memory");
}
// A fence must follow before the count has been seen.
GNOMON_DEVICE int LoadCount(const int* from) {
  int count;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];\n"
               : "=r"(count)
               : "l"(GlobalAddress(from))
               : "memory");
  return count;
}
GNOMON_DEVICE void WaitForCount(const int* from, int count) {
  int now;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n"
                 : "=r"(now)
                 : "l"(GlobalAddress(from))
                 : "memory");
  } while (now < count);
}

// Adds a warp's fragment of 128 numbers to fp32 sums in global memory. LoadSums() reads them. `to`
// is the first of several fragments, which share the computation of addresses; `n` is the index.
GNOMON_DEVICE void AddToSums(float* to, int n, const float (&c)[4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"l"(
                   GlobalAddress(to + 4 * lane) + 512 * n),
               "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3])
               : "memory");
#else
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;\n" ::"l"(GlobalAddress(to + lane) +
                                                                    512 * n + 128 * e),
                 "f"(c[e])
                 : "memory");
  }
#endif
}
GNOMON_DEVICE void LoadSums(float (&c)[4], const float* from) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#if __CUDA_ARCH__ >= 900
  const float4 both = reinterpret_cast<const float4*>(from)[lane];
  c[0] = both.x;
  c[1] = both.y;
  c[2] = both.z;
  c[3] = both.w;
#else
#pragma unroll
  for (int e = 0; e < 4; ++e) c[e] = from[32 * e + lane];
#endif
}

GNOMON_DEVICE uint32 BitsOf(float a) { return __float_as_uint(a); }
GNOMON_DEVICE float FromBits(uint32 a) { return __uint_as_float(a); }

// Packs two 16-bit numbers, the first in the low half.
template <class C>
GNOMON_DEVICE uint32 Pack(float low, float high) {
  uint32 r;
  if constexpr (C::kType == 1) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(r) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(r) : "f"(high), "f"(low));
  }
  return r;
}
template <class C>
GNOMON_DEVICE float Widen(uint16 bits) {
  if constexpr (C::kType == 1) return FromBits(static_cast<uint32>(bits) << 16);
  float r;
  asm("cvt.f32.f16 %0, %1;\n" : "=f"(r) : "h"(bits));
  return r;
}
GNOMON_DEVICE uint32 ToTf32(float a) {
  uint32 r;
  asm("cvt.rna.tf32.f32 %0, %1;\n" : "=r"(r) : "f"(a));
  return r;
}

GNOMON_DEVICE float ShuffleXor(float a, int mask) { return __shfl_xor_sync(0xffffffffu, a, mask); }
GNOMON_DEVICE float Shuffle(float a, int lane) { return __shfl_sync(0xffffffffu, a, lane); }
GNOMON_DEVICE bool AnyOfWarp(bool a) { return __any_sync(0xffffffffu, a) != 0; }

GNOMON_DEVICE float Exp2(float a) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(r) : "f"(a));
  return r;
}
GNOMON_DEVICE float Log2(float a) { return log2f(a); }
// If one operand is NaN, returns the other one.
GNOMON_DEVICE float Larger(float a, float b) { return fmaxf(a, b); }
// Adds a number to an fp32 sum in global memory.
GNOMON_DEVICE void AddToSum(float* to, float a) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;\n" ::"l"(GlobalAddress(to)), "f"(a)
               : "memory");
}

// The vocabulary of the definitions (src/definitions/README.md).
GNOMON_DEVICE float Splat(float, float value) { return value; }
GNOMON_DEVICE float Tiny(float) { return 1e-30f; }
GNOMON_DEVICE float Max(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;\n" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
GNOMON_DEVICE float Min(float a, float b) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;\n" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
GNOMON_DEVICE float Abs(float a) { return fabsf(a); }
// Treats arguments below 2^-126 as 0.
GNOMON_DEVICE float Sqrt(float a) {
  float r;
  asm("sqrt.approx.ftz.f32 %0, %1;\n" : "=f"(r) : "f"(a));
  return r;
}
GNOMON_DEVICE float Rsqrt(float a) {
  float r;
  asm("rsqrt.approx.ftz.f32 %0, %1;\n" : "=f"(r) : "f"(a));
  return r;
}
GNOMON_DEVICE float Exp(float a) { return expf(a); }
GNOMON_DEVICE float Log(float a) { return logf(a); }
GNOMON_DEVICE float Log1p(float a) { return log1pf(a); }
GNOMON_DEVICE float Tanh(float a) { return tanhf(a); }
GNOMON_DEVICE float Angle(float x, float y) { return atan2f(y, x + 0.0f); }
GNOMON_DEVICE float Select(bool mask, float yes, float no) { return mask ? yes : no; }
GNOMON_DEVICE float Fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
GNOMON_DEVICE float Step(float a) { return __saturatef(__fmaf_rn(a, 1e38f, 0.5f)); }

}  // namespace device
}  // namespace gnomon

#endif  // GNOMON_CUDA_EMULATION

namespace gnomon::device {

using cuda::Array;
using cuda::LayoutParameters;
using cuda::Parameters;
using cuda::SharedLayout;

constexpr float kLog2E = 1.44269504f;
constexpr float kLn2 = 0.693147181f;

GNOMON_DEVICE float Infinity() { return FromBits(0x7f800000u); }

template <class T>
GNOMON_DEVICE constexpr T Least(T a, T b) {
  return a < b ? a : b;
}
template <class T>
GNOMON_DEVICE constexpr T Most(T a, T b) {
  return a > b ? a : b;
}
template <class T>
GNOMON_DEVICE constexpr T DivideUp(T a, T b) {
  return (a + b - 1) / b;
}

// An operand of a product. fp32 numbers are represented as high + low.
struct Operand {
  uint32 high[4];
  uint32 low[4];
};
GNOMON_DEVICE void Split(uint32& high, uint32& low) {
  const float value = FromBits(high);
  high = ToTf32(value);
  low = ToTf32(value - FromBits(high));
}
template <class C>
GNOMON_DEVICE void Split(Operand& a) {
  if (C::kType != 0) return;
#pragma unroll
  for (int n = 0; n < 4; ++n) Split(a.high[n], a.low[n]);
}

// Computes c += a b for one half of b: its left (0) or right (1) 8 columns. With `kSwapped`, a and
// b have exchanged roles, and the sums are bitwise the same as without it. Tensor cores truncate
// sums instead of rounding them, and the error would accumulate over many tiles. In fp32, each
// product is therefore summed separately and then added to c.
template <class C, bool kSwapped>
GNOMON_DEVICE void MultiplyAdd(float (&c)[4], const Operand& a, const Operand& b, int half) {
  const int n = 2 * half;
  if (C::kType != 0) {
    Multiply<C>(c, a.high, b.high[n], b.high[n + 1]);
    return;
  }
  float sum[4] = {};
  if (kSwapped) {
    Multiply<C>(sum, a.low, b.high[n], b.high[n + 1]);
    Multiply<C>(sum, a.high, b.low[n], b.low[n + 1]);
  } else {
    Multiply<C>(sum, a.high, b.low[n], b.low[n + 1]);
    Multiply<C>(sum, a.low, b.high[n], b.high[n + 1]);
  }
  Multiply<C>(sum, a.high, b.high[n], b.high[n + 1]);
#pragma unroll
  for (int e = 0; e < 4; ++e) c[e] += sum[e];
}

// The same with the lower halves of 16-bit numbers that ToLeft() split.
template <class C>
GNOMON_DEVICE void MultiplyAddLow(float (&c)[4], const Operand& a, const Operand& b, int half) {
  Multiply<C>(c, a.low, b.high[2 * half], b.high[2 * half + 1]);
}

// The number of terms in the sum that one product computes.
template <class C>
GNOMON_DEVICE constexpr int Depth() {
  return C::kType == 0 ? 8 : 16;
}

// Loads rows row ... row + 15 of a tile, starting at column k Depth(), as the left operand.
template <class C>
GNOMON_DEVICE void LoadLeft(Operand& a, const unsigned char* tile, int row_bytes, int row, int k) {
  const int lane = Thread() % 32;
  LoadMatrices<false>(a.high, tile + lane % 16 * row_bytes + lane / 16 * 16,
                      row * row_bytes + 32 * k);
  Split<C>(a);
}
// Loads rows k Depth() ... k Depth() + 15 of a tile of 16-bit numbers as columns of the left
// operand: the 16 columns of the tile that start at `column` are the operand's rows.
template <class C>
GNOMON_DEVICE void LoadLeftColumns(Operand& a, const unsigned char* tile, int row_bytes, int k,
                                   int column) {
  const int lane = Thread() % 32;
  LoadMatrices<true>(a.high, tile + (lane % 8 + lane / 16 * 8) * row_bytes + lane / 8 % 2 * 16,
                     16 * k * row_bytes + 2 * column);
}
// Loads the rows of LoadLeft() as columns of the right operand.
template <class C>
GNOMON_DEVICE void LoadRight(Operand& b, const unsigned char* tile, int row_bytes, int row, int k) {
  const int lane = Thread() % 32;
  LoadMatrices<false>(b.high, tile + (lane % 8 + lane / 16 * 8) * row_bytes + lane / 8 % 2 * 16,
                      row * row_bytes + 32 * k);
  Split<C>(b);
}
// Loads rows of a tile, starting at row k Depth(), as rows of the right operand: 16 columns
// starting at `column`.
// In fp32, the rows are in the same order as the columns in ToLeft().
template <class C>
GNOMON_DEVICE void LoadRightRows(Operand& b, const unsigned char* tile, int row_bytes, int k,
                                 int column) {
  const int lane = Thread() % 32;
  if (C::kType != 0) {
    LoadMatrices<true>(b.high, tile + lane % 16 * row_bytes + 16 * (lane / 16),
                       16 * k * row_bytes + 2 * column);
    return;
  }
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int row = 8 * k + 2 * (lane % 4) + n % 2;
    b.high[n] = LoadShared<uint32>(tile + row * row_bytes + 4 * (column + n / 2 * 8 + lane / 4));
  }
  Split<C>(b);
}
// Converts columns of sums, starting at column k Depth(), to a left operand. With kSplit, its lower
// half has the rounding errors of 16-bit numbers.
template <class C, int kTiles>
GNOMON_DEVICE void ToLeft(Operand& a, const float (&c)[kTiles][4], int k) {
  if (C::kType != 0) {
    a.high[0] = Pack<C>(c[2 * k][0], c[2 * k][1]);
    a.high[1] = Pack<C>(c[2 * k][2], c[2 * k][3]);
    a.high[2] = Pack<C>(c[2 * k + 1][0], c[2 * k + 1][1]);
    a.high[3] = Pack<C>(c[2 * k + 1][2], c[2 * k + 1][3]);
    if (C::kSplit == 0) return;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float (&of)[4] = c[2 * k + n / 2];
      a.low[n] = Pack<C>(of[n % 2 * 2] - Widen<C>(static_cast<uint16>(a.high[n] & 0xffffu)),
                         of[n % 2 * 2 + 1] - Widen<C>(static_cast<uint16>(a.high[n] >> 16)));
    }
    return;
  }
  a.high[0] = BitsOf(c[k][0]);
  a.high[1] = BitsOf(c[k][2]);
  a.high[2] = BitsOf(c[k][1]);
  a.high[3] = BitsOf(c[k][3]);
  Split<C>(a);
}

// Rounds a number to the precision of a product's operands.
template <class C>
GNOMON_DEVICE float Round(float a) {
  if (C::kType == 0) return a;
  return Widen<C>(static_cast<uint16>(Pack<C>(a, 0.0f)));
}

template <class C>
GNOMON_DEVICE constexpr int Bytes() {
  return cuda::BytesOf(C::kType);
}
template <class C>
GNOMON_DEVICE float LoadElement(const void* from, Int64 at) {
  if (C::kType == 0) return static_cast<const float*>(from)[at];
  return Widen<C>(static_cast<const uint16*>(from)[at]);
}
// Stores elements `at` and at + 1, or only the first `count` of them.
template <class C>
GNOMON_DEVICE void StorePair(void* to, Int64 at, float low, float high, int count) {
  if (count <= 0) return;
  if (C::kType == 0) {
    auto* const out = static_cast<float*>(to) + at;
    out[0] = low;
    if (count > 1) out[1] = high;
    return;
  }
  const uint32 both = Pack<C>(low, high);
  auto* const out = static_cast<uint16*>(to) + at;
  if (C::kAligned != 0 && count > 1) {
    *reinterpret_cast<uint32*>(out) = both;
    return;
  }
  out[0] = static_cast<uint16>(both);
  if (count > 1) out[1] = static_cast<uint16>(both >> 16);
}

// One head of an array.
struct Head {
  // Where a row begins, in elements.
  GNOMON_DEVICE Int64 Offset(int row) const { return row * stride; }

  unsigned char* data;
  Int64 stride;  // between rows, in elements
};
template <class C>
GNOMON_DEVICE Head HeadOf(const Array& array, int b, int h) {
  return {static_cast<unsigned char*>(array.data) +
              (b * array.stride[0] + h * array.stride[1]) * Bytes<C>(),
          array.stride[2]};
}

// One head of keys or values in pages.
struct PagedHead {
  GNOMON_DEVICE Int64 Offset(int key) const {
    const Int64 page = Most<Int64>(0, Least<Int64>(table[key >> shift], pages - 1));
    return page * page_stride + (key & ((1 << shift) - 1)) * stride;
  }

  unsigned char* data;
  Int64 page_stride;
  Int64 stride;
  const Int64* table;  // of the batch element
  int pages;
  int shift;
};
template <class C>
GNOMON_DEVICE PagedHead PagedHeadOf(const Parameters& p, const Array& array, int b, int h) {
  return {HeadOf<C>(array, 0, h).data,
          array.stride[0],
          array.stride[2],
          p.page_table + b * static_cast<Int64>(p.keys >> p.page_shift),
          p.pages,
          p.page_shift};
}

// Copies whole rows: the thread's pieces of every at_once-th row, beginning at `row`. at_once is
// the number of rows that all threads copy at once.
template <class C>
GNOMON_DEVICE void CopyWholeRows(unsigned char* to, const unsigned char* row, Int64 stride,
                                 int rows, int at_once, int row_bytes) {
  const Int64 step = at_once * stride * Bytes<C>();
#pragma unroll
  for (int n = 0; n < rows / at_once; ++n) {
    CopyAsync16(to + n * at_once * row_bytes, row, 16);
    row += step;
  }
}
// The same, beginning at byte `byte` of row `first`.
template <class C>
GNOMON_DEVICE void CopyWholeRows(unsigned char* to, const Head& from, int first, int byte, int rows,
                                 int at_once, int row_bytes) {
  CopyWholeRows<C>(to, from.data + from.Offset(first) * Bytes<C>() + byte, from.stride, rows,
                   at_once, row_bytes);
}
template <class C>
GNOMON_DEVICE void CopyWholeRows(unsigned char* to, const PagedHead& from, int first, int byte,
                                 int rows, int at_once, int row_bytes) {
#pragma unroll
  for (int n = 0; n < rows / at_once; ++n) {
    CopyAsync16(to + n * at_once * row_bytes,
                from.data + from.Offset(first + n * at_once) * Bytes<C>() + byte, 16);
  }
}

// Copies rows first ... first + rows - 1 asynchronously, with 0 for rows outside [low, high) and
// for columns outside [0, columns). `from` is a Head or a PagedHead.
template <class C, class From>
GNOMON_DEVICE void CopyRows(unsigned char* to, const From& from, int first, int rows, int low,
                            int high, int columns, int padded) {
  const int threads = 32 * C::kWarps;
  const int row_bytes = cuda::RowBytes(C::kType, padded);
  if (C::kAligned != 0) {
    const int pieces = padded * Bytes<C>() / 16;
    const int at_once = threads / pieces;
    // In the common case, every thread copies the same column range of each of its rows, and all
    // columns exist.
    if (threads % pieces == 0 && rows % at_once == 0 && columns == padded && first >= low &&
        first + rows <= high) {
      const int r = Fresh(Thread()) / pieces;
      const int byte = Fresh(Thread()) % pieces * 16;
      CopyWholeRows<C>(to + r * row_bytes + byte, from, first + r, byte, rows, at_once, row_bytes);
      return;
    }
#pragma unroll 1
    for (int n = Fresh(Thread()); n < rows * pieces; n += threads) {
      const int r = n / pieces;
      const int byte = n % pieces * 16;
      const int row = first + r;
      int inside = Least(columns * Bytes<C>() - byte, 16);
      if (row < low || row >= high || inside < 0) inside = 0;
      CopyAsync16(to + r * row_bytes + byte,
                  from.data + (inside > 0 ? from.Offset(row) * Bytes<C>() + byte : 0), inside);
    }
    return;
  }
  for (int n = Fresh(Thread()); n < rows * padded; n += threads) {
    const int r = n / padded;
    const int column = n % padded;
    const int row = first + r;
    const bool inside = row >= low && row < high && column < columns;
    const Int64 at = inside ? from.Offset(row) + column : 0;
    if (C::kType == 0) {
      StoreShared<float>(to + r * row_bytes + 4 * column,
                         inside ? reinterpret_cast<const float*>(from.data)[at] : 0.0f);
    } else {
      StoreShared<uint16>(to + r * row_bytes + 2 * column,
                          inside ? reinterpret_cast<const uint16*>(from.data)[at] : uint16{0});
    }
  }
}

// Copies the rows of consecutive tiles like CopyRows(). In the common case, a thread's address
// only advances from tile to tile, if there are registers for it (`advances`).
template <class C>
class TileRows {
 public:
  // `first`: the first row of the first tile; `padded`: the tiles' columns. The array is a kernel
  // argument, so it needs no registers.
  GNOMON_DEVICE TileRows(const Array& array, int b, int h, int first, int padded,
                         bool advances = true)
      : array_(array), b_(b), h_(h), advances_(advances && C::kAligned != 0) {
    if (!advances_) return;
    const Head from = HeadOf<C>(array, b, h);
    const int pieces = padded * Bytes<C>() / 16;
    const int r = Thread() / pieces;
    const int byte = Thread() % pieces * 16;
    tile_byte_ = r * cuda::RowBytes(C::kType, padded) + byte;
    row_ = from.data + (first + r) * from.stride * Bytes<C>() + byte;
  }

  // Copies the next tile, whose first row is `first`.
  GNOMON_DEVICE void Copy(unsigned char* to, int first, int low, int high, int columns,
                          int padded) {
    const int threads = 32 * C::kWarps;
    const int pieces = padded * Bytes<C>() / 16;
    const int at_once = threads / pieces;
    if (advances_ && threads % pieces == 0 && C::kStep % at_once == 0) {
      const unsigned char* const row = row_;
      row_ += C::kStep * array_.stride[2] * Bytes<C>();
      if (columns == padded && first >= low && first + C::kStep <= high) {
        CopyWholeRows<C>(to + tile_byte_, row, array_.stride[2], C::kStep, at_once,
                         cuda::RowBytes(C::kType, padded));
        return;
      }
    }
    CopyRows<C>(to, HeadOf<C>(array_, Fresh(b_), Fresh(h_)), first, C::kStep, low, high, columns,
                padded);
  }

 private:
  const Array& array_;
  int b_;
  int h_;
  bool advances_;
  int tile_byte_ = 0;
  const unsigned char* row_ = nullptr;
};

// The same for keys or values, which may be in pages.
template <class C>
class KeyTileRows {
 public:
  GNOMON_DEVICE KeyTileRows(const Parameters& p, const Array& array, int b, int h, int first,
                            int padded)
      : p_(p),
        array_(array),
        b_(b),
        h_(h),
        rows_(array, b, h, first, padded, /*advances=*/C::kPages == 0) {}

  GNOMON_DEVICE void Copy(unsigned char* to, int first, int low, int high, int columns,
                          int padded) {
    if (C::kPages == 0) {
      rows_.Copy(to, first, low, high, columns, padded);
    } else {
      CopyRows<C>(to, PagedHeadOf<C>(p_, array_, Fresh(b_), Fresh(h_)), first, C::kStep, low, high,
                  columns, padded);
    }
  }

 private:
  const Parameters& p_;
  const Array& array_;
  int b_;
  int h_;
  TileRows<C> rows_;
};

// The row of a key in an array of keys or values.
template <class C>
GNOMON_DEVICE Head KeyRowOf(const Parameters& p, const Array& array, int b, int h, int key) {
  if (C::kPages != 0) {
    const PagedHead head = PagedHeadOf<C>(p, array, b, h);
    return {head.data + head.Offset(key) * Bytes<C>(), head.stride};
  }
  const Head head = HeadOf<C>(array, b, h);
  return {head.data + head.Offset(key) * Bytes<C>(), head.stride};
}

// Copies words first ... first + count - 1, with 0 for words outside [low, high), which are not
// read.
template <class C>
GNOMON_DEVICE void CopyWords(unsigned char* to, const void* from, int first, int count, int low,
                             int high) {
#pragma unroll 1
  for (int n = Fresh(Thread()); n < count; n += 32 * C::kWarps) {
    const bool inside = first + n >= low && first + n < high;
    CopyAsync4(to + 4 * n, static_cast<const uint32*>(from) + (inside ? first + n : low), inside);
  }
}

// Reduces the numbers of the four lanes that share a row of a tile.
GNOMON_DEVICE float SumOfRow(float a) {
  a += ShuffleXor(a, 1);
  return a + ShuffleXor(a, 2);
}
GNOMON_DEVICE float LargestOfRow(float a) {
  a = Larger(a, ShuffleXor(a, 1));
  return Larger(a, ShuffleXor(a, 2));
}
GNOMON_DEVICE float SumOfWarp(float a) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) a += ShuffleXor(a, mask);
  return a;
}

}  // namespace gnomon::device

#endif  // GNOMON_SRC_CUDA_PRIMITIVES_CUH_
