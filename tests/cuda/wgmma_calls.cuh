// A kernel that calls each primitive of compute capability 9.0 (src/cuda/wgmma.cuh) on data from
// the host, which checks the results. It runs in the emulator and, compiled by NVRTC, on a GPU.
#ifndef GNOMON_TESTS_CUDA_WGMMA_CALLS_CUH_
#define GNOMON_TESTS_CUDA_WGMMA_CALLS_CUH_

#include "cuda/wgmma.cuh"

namespace gnomon::device::calls {

constexpr int kGroupRounds = 3;
constexpr int kGroupRowsOfX = kGroupRows;
constexpr int kGroupDim = 128;
constexpr int kGroupSharedBytes = 1024 + 3 * 128 * kGroupDim * 2 + 32;

// Copies rows of `columns` elements to a tile, by the threads of a group.
template <class C>
GNOMON_DEVICE void CopyTile(unsigned char* to, const unsigned char* from, int rows, int columns) {
  const int pieces = columns / 8;
  for (int n = Thread() % kGroupThreads; n < rows * pieces; n += kGroupThreads) {
    CopyAsync16(to + PlaceOfPiece(rows, n / pieces, n % pieces), from + 16 * n, 16);
  }
}

// In each round, the first group copies Y and V over those of the previous round. The second group
// computes S = X Y^T, and adds S V to O. X has 64 rows, and Y and V have kStep rows; X and Y have
// kGroupDim columns, and V has kValueDim. Stores S of each round, and O. A third group only takes
// registers.
template <class C>
GNOMON_DEVICE void CallWgmma(const Parameters& p) {
  unsigned char* const x =
      SharedMemory() + (0u - Address(SharedMemory())) % static_cast<uint32>(kSwizzleBytes);
  unsigned char* const y = x + kGroupRowsOfX * kGroupDim * 2;
  unsigned char* const v = y + C::kStep * kGroupDim * 2;
  unsigned char* const copied = v + C::kStep * C::kValueDim * 2;
  unsigned char* const read = copied + 8;
  const auto* from = static_cast<const unsigned char*>(p.x.data);
  if (Thread() == 0) {
    InitMbarrier(copied, kGroupThreads);
    InitMbarrier(read, 4);
  }
  if (Thread() / kGroupThreads == 1) CopyTile<C>(x, from, kGroupRowsOfX, kGroupDim);
  CopyCommit();
  CopyWait<0>();
  ProxyFence();
  Barrier();
  from += kGroupRowsOfX * kGroupDim * 2;
  if (Thread() < kGroupThreads) {
    LowerRegisters();
    for (int round = 0; round < kGroupRounds; ++round) {
      WaitForPhase(read, round % 2 ^ 1);
      CopyTile<C>(y, from, C::kStep, kGroupDim);
      from += C::kStep * kGroupDim * 2;
      CopyTile<C>(v, from, C::kStep, C::kValueDim);
      from += C::kStep * C::kValueDim * 2;
      ArriveWithCopies(copied);
      // The groups also meet at a named barrier, which only one of them waits for.
      NamedArrive(1, 2 * kGroupThreads);
    }
    CopyCommit();
    CopyWait<0>();
    return;
  }
  RaiseRegisters();
  if (Thread() >= 2 * kGroupThreads) return;
  float o[GNOMON_SIZE(C::kValueDim / 8, 16)][4];
  float s[GNOMON_SIZE(C::kStep / 8, 16)][4];
  Clear(o);
  Clear(s);
  uint32 weights[GNOMON_SIZE(C::kStep / 16, 8)][4];
  const int lane = Thread() % 32;
  const int first = 16 * (Thread() / 32 % 4) + lane / 4;
  auto* to = static_cast<float*>(p.o.data);
  const auto store = [&](const auto& sums, int columns) {
#pragma unroll
    for (int n = 0; n < columns / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        to[(first + e / 2 * 8) * columns + 8 * n + 2 * (lane % 4) + e % 2] = sums[n][e];
      }
    }
    to += kGroupRowsOfX * columns;
  };
#pragma unroll 1
  for (int round = 0; round < kGroupRounds; ++round) {
    NamedSync(1, 2 * kGroupThreads);
    WaitForPhase(copied, round % 2);
    ProxyFence();
    Pin(s);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < kGroupDim / 16; ++k) {
      MultiplyShared<C>(s, C::kStep,
                        Describe(x, 16, k / 4 * kGroupRowsOfX * kBlockBytes + k % 4 * 32),
                        Describe(y, 16, k / 4 * C::kStep * kBlockBytes + k % 4 * 32), k > 0);
    }
    WgmmaCommit();
    WgmmaWait<0>();
    Pin(s);
    store(s, C::kStep);
#pragma unroll
    for (int k = 0; k < C::kStep / 16; ++k) {
      Operand left;
      ToLeft<C>(left, s, k);
#pragma unroll
      for (int e = 0; e < 4; ++e) weights[k][e] = left.high[e];
    }
    Pin(o);
    Pin(weights);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < C::kStep / 16; ++k) {
      MultiplyWeights<C>(o, C::kValueDim, weights[k],
                         Describe(v, C::kStep * kBlockBytes, k * 16 * kBlockBytes));
    }
    WgmmaCommit();
    WgmmaWait<0>();
    Pin(o);
    WarpBarrier();
    if (lane == 0) ArriveAt(read);
  }
  store(o, C::kValueDim);
}

}  // namespace gnomon::device::calls

#endif  // GNOMON_TESTS_CUDA_WGMMA_CALLS_CUH_
