// A kernel that calls each primitive (src/cuda/primitives.cuh) on data from the host, which checks
// the results. It runs in the emulator and, compiled by NVRTC, on a GPU.
#ifndef GNOMON_TESTS_CUDA_PRIMITIVE_CALLS_CUH_
#define GNOMON_TESTS_CUDA_PRIMITIVE_CALLS_CUH_

#include "cuda/primitives.cuh"

namespace gnomon::device::calls {

// Parameters::batch selects the primitive to call. The kernel reads x.data and writes o.data.
enum Call {
  kIndices,
  kFunctions,
  kConversions,
  kLanes,
  kCopies,
  kRows,
  kMatrices,
  kProduct,
  kTiles,
  kElements,
  kSums,
};

constexpr int kWarps = 2;
constexpr int kThreads = 32 * kWarps;

// Stores thread and block indices. The grid has kGridColumns columns of blocks.
constexpr int kGridColumns = 3;
GNOMON_DEVICE void CallIndices(const Parameters& p) {
  const int at = (BlockY() * kGridColumns + BlockX()) * kThreads + Thread();
  auto* const to = static_cast<int*>(p.o.data) + 3 * at;
  to[0] = Thread();
  to[1] = BlockX();
  to[2] = BlockY();
}

// Applies each function to p.queries pairs of numbers a and b.
constexpr int kFunctionCount = 23;
GNOMON_DEVICE void CallFunctions(const Parameters& p) {
  const auto* const from = static_cast<const float*>(p.x.data);
  auto* const to = static_cast<float*>(p.o.data);
  for (int n = Thread(); n < p.queries; n += kThreads) {
    const float a = from[n];
    const float b = from[p.queries + n];
    const float results[kFunctionCount] = {
        Exp2(a),
        Log2(a),
        Sqrt(a),
        Rsqrt(a),
        Exp(a),
        Log(a),
        Log1p(a),
        Tanh(a),
        Abs(a),
        Max(a, b),
        Min(a, b),
        Larger(a, b),
        Angle(a, b),
        Fma(a, b, a),
        a * b + a,
        a / b,
        Splat(a, b),
        Tiny(a),
        Select(a < b, a, b),
        Step(a),
        Infinity(),
        static_cast<float>(DivideUp(n, 7)),
        static_cast<float>(Least(n, 50) + Most(n, 60)),
    };
    for (int f = 0; f < kFunctionCount; ++f) to[f * p.queries + n] = results[f];
  }
}

// Applies each conversion to p.queries pairs of words a and b.
constexpr int kConversionCount = 6;
template <class C>
GNOMON_DEVICE void CallConversions(const Parameters& p) {
  const auto* const from = static_cast<const uint32*>(p.x.data);
  auto* const to = static_cast<uint32*>(p.o.data);
  for (int n = Thread(); n < p.queries; n += kThreads) {
    const float a = FromBits(from[n]);
    const float b = FromBits(from[p.queries + n]);
    uint32 high = from[n];
    uint32 low = 0;
    Split(high, low);
    const uint32 results[kConversionCount] = {
        ToTf32(a),
        high,
        low,
        C::kType == 0 ? 0 : Pack<C>(a, b),
        C::kType == 0 ? 0 : BitsOf(Widen<C>(static_cast<uint16>(n))),
        BitsOf(Round<C>(a)),
    };
    for (int f = 0; f < kConversionCount; ++f) to[f * p.queries + n] = results[f];
  }
}

// Exchanges numbers between the lanes of a warp.
constexpr int kLaneCount = 9;
constexpr float kRare = 20;  // a few of the numbers are below it
GNOMON_DEVICE void CallLanes(const Parameters& p) {
  const float a = static_cast<const float*>(p.x.data)[Thread()];
  const int lane = Thread() % 32;
  float results[kLaneCount];
  for (int n = 0; n < 5; ++n) results[n] = ShuffleXor(a, 1 << n);
  results[5] = Shuffle(a, (5 * lane + 3) % 32);
  results[6] = SumOfRow(a);
  results[7] = SumOfWarp(a);
  results[8] = AnyOfWarp(a < kRare) ? 1.0f : 0.0f;
  WarpBarrier();
  for (int f = 0; f < kLaneCount; ++f) {
    static_cast<float*>(p.o.data)[f * kThreads + Thread()] = results[f];
  }
}

// Starts three groups of copies, and waits for the last group only after reading the others. Then
// stores and loads numbers of other sizes.
constexpr int kCopiesIn = 9 * kThreads;    // words
constexpr int kCopiesOut = 11 * kThreads;  // words
GNOMON_DEVICE int BytesOfFirst(int thread) { return thread % 17; }
GNOMON_DEVICE int BytesOfSecond(int thread) { return 16 - 4 * (thread % 5); }
GNOMON_DEVICE void CallCopies(const Parameters& p) {
  const auto* const from = static_cast<const uint32*>(p.x.data);
  auto* const to = static_cast<uint32*>(p.o.data);
  unsigned char* const memory = SharedMemory();
  const int t = Thread();
  CopyAsync16(memory + 16 * t, from + 4 * t, BytesOfFirst(t));
  CopyCommit();
  CopyAsync16(memory + 16 * (kThreads + t), from + 4 * (kThreads + t), BytesOfSecond(t));
  CopyCommit();
  CopyAsync4(memory + 4 * (8 * kThreads + t), from + 8 * kThreads + t, t % 3 != 0);
  CopyCommit();
  CopyWait<1>();
  Barrier();
  const int other = kThreads - 1 - t;
  for (int n = 0; n < 8; ++n) {
    const int word = n / 4 * 4 * kThreads + 4 * other + n % 4;
    to[word] = LoadShared<uint32>(memory + 4 * word);
  }
  CopyWait<0>();
  Barrier();
  to[8 * kThreads + other] = LoadShared<uint32>(memory + 4 * (8 * kThreads + other));
  Barrier();
  StoreShared<uint16>(memory + 2 * t, static_cast<uint16>(from[t]));
  StoreShared<double>(memory + 2 * kThreads + 8 * t, FromBits(from[t]) / 3.0);
  Barrier();
  to[9 * kThreads + other] = LoadShared<uint16>(memory + 2 * other);
  to[10 * kThreads + other] =
      BitsOf(static_cast<float>(3.0 * LoadShared<double>(memory + 2 * kThreads + 8 * other)));
}

// Copies rows of elements and single words to shared memory, with zeros for rows and words outside
// their ranges.
constexpr int kRowsFirst = 3, kRowsCount = 16, kRowsLow = 5, kRowsHigh = 15;
constexpr int kRowsColumns = 21, kRowsPadded = 32, kRowsStride = 40;
constexpr int kWordsCount = 70, kWordsLow = 10, kWordsHigh = 61;
template <class C>
GNOMON_DEVICE constexpr int WordsOfRows() {
  return kRowsCount * cuda::RowBytes(C::kType, kRowsPadded) / 4;
}
template <class C>
GNOMON_DEVICE void CallRows(const Parameters& p) {
  unsigned char* const memory = SharedMemory();
  unsigned char* const words = memory + 4 * WordsOfRows<C>();
  const Head rows = HeadOf<C>(p.x, 1, 2);
  const int row_bytes = cuda::RowBytes(C::kType, kRowsPadded);
  CopyRows<C>(memory, rows, kRowsFirst, kRowsCount, kRowsLow, kRowsHigh, kRowsColumns, kRowsPadded);
  CopyWords<C>(words, p.x.data, 0, kWordsCount, kWordsLow, kWordsHigh);
  CopyCommit();
  CopyWait<0>();
  Barrier();
  auto* const to = static_cast<uint32*>(p.o.data);
  // The bytes after the columns of a row are not written.
  const int row_words = kRowsPadded * Bytes<C>() / 4;
  for (int n = Thread(); n < kRowsCount * row_words; n += kThreads) {
    to[n] = LoadShared<uint32>(memory + n / row_words * row_bytes + n % row_words * 4);
  }
  for (int n = Thread(); n < kWordsCount; n += kThreads) {
    to[kRowsCount * row_words + n] = LoadShared<uint32>(words + 4 * n);
  }
}

// Loads four matrices of 8 x 8 16-bit numbers; the lanes of the second warp point to rows in
// reverse order.
GNOMON_DEVICE void CallMatrices(const Parameters& p) {
  const int lane = Thread() % 32;
  const bool second = Thread() >= 32;
  for (int n = Thread(); n < 128; n += kThreads) {
    StoreShared<uint32>(SharedMemory() + 4 * n, static_cast<const uint32*>(p.x.data)[n]);
  }
  Barrier();
  const int row = 16 * (second ? 31 - lane : lane);
  uint32 as_they_are[4];
  uint32 transposed[4];
  LoadMatrices<false>(as_they_are, SharedMemory() + row, 0);
  LoadMatrices<true>(transposed, SharedMemory(), row);
  auto* const to = static_cast<uint32*>(p.o.data) + 8 * Thread();
  for (int n = 0; n < 4; ++n) {
    to[n] = as_they_are[n];
    to[4 + n] = transposed[n];
  }
}

// Computes one product per warp with operands in registers; a, b and c of a lane take ten words.
template <class C>
GNOMON_DEVICE void CallProduct(const Parameters& p) {
  const auto* const from = static_cast<const uint32*>(p.x.data) + 10 * Thread();
  const uint32 a[4] = {from[0], from[1], from[2], from[3]};
  float c[4];
  for (int n = 0; n < 4; ++n) c[n] = FromBits(from[6 + n]);
  Multiply<C>(c, a, from[4], from[5]);
  for (int n = 0; n < 4; ++n) static_cast<float*>(p.o.data)[4 * Thread() + n] = c[n];
}

// Computes products as in the forward and backward passes: S = X Y^T, its transpose Y X^T (with
// swapped operands), and O = S V with S as an operand. X, Y and V have 32 rows of kTileColumns
// elements.
constexpr int kTileRows = 32, kTileColumns = 32;
constexpr int kTileNumbers = kTileRows * kTileColumns;
template <class C>
GNOMON_DEVICE void StoreTiles(void* to, const float (&sums)[4][4]) {
  const int lane = Thread() % 32;
  for (int tile = 0; tile < 4; ++tile) {
    for (int n = 0; n < 4; ++n) {
      const int row = Thread() / 32 * 16 + lane / 4 + n / 2 * 8;
      const int column = 8 * tile + 2 * (lane % 4) + n % 2;
      static_cast<float*>(to)[row * kTileColumns + column] = sums[tile][n];
    }
  }
}
template <class C, bool kSwapped>
GNOMON_DEVICE void MultiplyTiles(float (&s)[4][4], const unsigned char* left_tile,
                                 const unsigned char* right_tile, int row_bytes) {
  for (int k = 0; k < kTileColumns / Depth<C>(); ++k) {
    Operand left;
    LoadLeft<C>(left, left_tile, row_bytes, Thread() / 32 * 16, k);
    for (int n = 0; n < 2; ++n) {
      Operand right;
      LoadRight<C>(right, right_tile, row_bytes, 16 * n, k);
      MultiplyAdd<C, kSwapped>(s[2 * n], left, right, 0);
      MultiplyAdd<C, kSwapped>(s[2 * n + 1], left, right, 1);
    }
  }
}
template <class C>
GNOMON_DEVICE void CallTiles(const Parameters& p) {
  const int row_bytes = cuda::RowBytes(C::kType, kTileColumns);
  unsigned char* const x = SharedMemory();
  unsigned char* const y = x + kTileRows * row_bytes;
  unsigned char* const v = y + kTileRows * row_bytes;
  auto* const from = static_cast<unsigned char*>(p.x.data);
  for (int n = 0; n < 3; ++n) {
    CopyRows<C>(x + n * kTileRows * row_bytes,
                Head{from + n * kTileNumbers * Bytes<C>(), kTileColumns}, 0, kTileRows, 0,
                kTileRows, kTileColumns, kTileColumns);
  }
  CopyCommit();
  CopyWait<0>();
  Barrier();
  float s[4][4] = {};
  float swapped[4][4] = {};
  float o[4][4] = {};
  MultiplyTiles<C, false>(s, x, y, row_bytes);
  MultiplyTiles<C, true>(swapped, y, x, row_bytes);
#pragma unroll
  for (int k = 0; k < kTileRows / Depth<C>(); ++k) {
    Operand left;
    ToLeft<C>(left, s, k);
    for (int n = 0; n < 2; ++n) {
      Operand right;
      LoadRightRows<C>(right, v, row_bytes, k, 16 * n);
      MultiplyAdd<C, false>(o[2 * n], left, right, 0);
      MultiplyAdd<C, false>(o[2 * n + 1], left, right, 1);
    }
  }
  auto* const to = static_cast<float*>(p.o.data);
  StoreTiles<C>(to, s);
  StoreTiles<C>(to + kTileNumbers, swapped);
  StoreTiles<C>(to + 2 * kTileNumbers, o);
  if (C::kType == 0) return;
  // X^T V, with X as in the products for gradients of queries.
  float transposed[4][4] = {};
#pragma unroll
  for (int k = 0; k < kTileRows / 16; ++k) {
    Operand left;
    LoadLeftColumns<C>(left, x, row_bytes, k, Thread() / 32 * 16);
    for (int n = 0; n < 2; ++n) {
      Operand right;
      LoadRightRows<C>(right, v, row_bytes, k, 16 * n);
      MultiplyAdd<C, false>(transposed[2 * n], left, right, 0);
      MultiplyAdd<C, false>(transposed[2 * n + 1], left, right, 1);
    }
  }
  StoreTiles<C>(to + 3 * kTileNumbers, transposed);
}

// Loads kElementCount pairs of elements, stores them as floats, and then stores 0, 1 or 2 elements
// of each pair.
constexpr int kElementCount = 90;
template <class C>
GNOMON_DEVICE void CallElements(const Parameters& p) {
  auto* const to = static_cast<float*>(p.o.data);
  for (int n = Thread(); n < kElementCount; n += kThreads) {
    const float low = LoadElement<C>(p.x.data, 2 * n);
    const float high = LoadElement<C>(p.x.data, 2 * n + 1);
    to[2 * n] = low;
    to[2 * n + 1] = high;
    StorePair<C>(to + 2 * kElementCount, 2 * n, low, high, n % 3);
  }
}

// The blocks of a grid take tickets and, in their order, add four numbers per thread to sums, and
// the first of them to another sum. x holds the next ticket, the number of blocks that have added,
// the sums of four numbers, the numbers, and the other sums.
constexpr int kSumBlocks = 12;
constexpr int kSumsFirst = 4;  // the sums are aligned to 16 bytes
GNOMON_DEVICE void CallSums(const Parameters& p) {
  auto* const next = static_cast<int*>(p.x.data);
  int* const count = next + 1;
  auto* const all = static_cast<float*>(p.x.data) + kSumsFirst;
  auto* const sums = all + Thread() / 32 * 128;
  if (Thread() == 0) StoreShared<int>(SharedMemory(), TakeTicket(next));
  Barrier();
  const int ticket = LoadShared<int>(SharedMemory());
  const auto* const from =
      static_cast<const float*>(p.x.data) + kSumsFirst + 4 * (kThreads * (1 + ticket) + Thread());
  const float numbers[4] = {from[0], from[1], from[2], from[3]};
  // Half of the blocks look first whether it is their turn.
  if (Thread() == 0) {
    bool has_come = false;
    if (ticket % 2 != 0) {
      has_come = LoadCount(count) >= ticket;
      Fence();
    }
    if (!has_come) WaitForCount(count, ticket);
  }
  Barrier();
  AddToSums(all, Thread() / 32, numbers);
  float* const other =
      static_cast<float*>(p.x.data) + kSumsFirst + 4 * kThreads * (1 + kSumBlocks) + Thread();
  AddToSum(other, numbers[0]);
  Barrier();
  if (Thread() == 0) {
    Fence();
    StoreCount(count, ticket + 1);
  }
  if (ticket != kSumBlocks - 1) return;
  Barrier();
  float results[4];
  LoadSums(results, sums);
  for (int n = 0; n < 4; ++n) static_cast<float*>(p.o.data)[4 * Thread() + n] = results[n];
  static_cast<float*>(p.o.data)[4 * kThreads + Thread()] = *other;
}

template <class C>
GNOMON_DEVICE void CallPrimitives(const Parameters& p) {
  switch (p.batch) {
    case kIndices:
      return CallIndices(p);
    case kFunctions:
      return CallFunctions(p);
    case kConversions:
      return CallConversions<C>(p);
    case kLanes:
      return CallLanes(p);
    case kCopies:
      return CallCopies(p);
    case kRows:
      return CallRows<C>(p);
    case kMatrices:
      return CallMatrices(p);
    case kProduct:
      return CallProduct<C>(p);
    case kTiles:
      return CallTiles<C>(p);
    case kSums:
      return CallSums(p);
    default:
      return CallElements<C>(p);
  }
}

}  // namespace gnomon::device::calls

#endif  // GNOMON_TESTS_CUDA_PRIMITIVE_CALLS_CUH_
