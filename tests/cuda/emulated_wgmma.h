// The functions of src/cuda/wgmma.cuh for the emulator, which emulation.h includes. For kernels
// with producers (kProducers), the emulator orders memory accesses by vector clocks instead of
// counting the barriers of the whole block. It throws if
//   - two accesses to the same bytes are not ordered by barriers, mbarriers or waits;
//   - a product reads bytes whose write no proxy fence has followed;
//   - bytes are overwritten while a product may still read them;
//   - the registers of a product are written while it is in flight, or after the last fence;
//   - a thread waits for a phase of an mbarrier other than the next one, or the phase has passed;
//   - the warps of a group execute different products, or wait for different numbers of groups;
//   - the register limits of the groups exceed the block's registers.
// The sums of a product are NaN until a wait for it. Copies land in random order.
#ifndef GNOMON_TESTS_CUDA_EMULATED_WGMMA_H_
#define GNOMON_TESTS_CUDA_EMULATED_WGMMA_H_

#include "emulation.h"

namespace gnomon::device {

// The address of a byte in the window of shared memory. The window begins with reserved memory, so
// that the block's memory is aligned to 16 bytes only.
constexpr uint32 kSharedBase = 0x410;
uint32 Address(const void* shared);

void InitMbarrier(void* at, int count, Place place = Place::current());
void ArriveAt(void* at, Place place = Place::current());
void ArriveWithCopies(void* at, Place place = Place::current());
void WaitForPhase(void* at, int parity, Place place = Place::current());
void NamedSync(int id, int threads, Place place = Place::current());
void NamedArrive(int id, int threads, Place place = Place::current());
void ProxyFence();
// Changes the thread's register limit; `more`: whether it rises.
void ChangeRegisters(int count, bool more, Place place);

void WgmmaFence(Place place = Place::current());
void WgmmaCommit(Place place = Place::current());
void WaitForGroups(int groups, Place place);
template <int n>
void WgmmaWait(Place place = Place::current()) {
  WaitForGroups(n, place);
}
template <int kTiles>
void Pin(float (& /*c*/)[kTiles][4]) {}
template <int kTiles>
void Pin(uint32 (& /*a*/)[kTiles][4]) {}

// A thread's part of a product.
struct WgmmaCall {
  float* c;
  int columns;
  const uint32* a;  // null: `left` describes it
  uint64 left, right;
  bool adds;
  int type;
};
void IssueWgmma(const WgmmaCall& call, Place place);
template <class C, int kTiles>
void MultiplyShared(float (&c)[kTiles][4], int columns, uint64 left, uint64 right, bool adds,
                    Place place = Place::current()) {
  IssueWgmma({c[0], columns, nullptr, left, right, adds, C::kType}, place);
}
template <class C, int kTiles>
void MultiplyWeights(float (&c)[kTiles][4], int columns, const uint32 (&a)[4], uint64 right,
                     Place place = Place::current()) {
  IssueWgmma({c[0], columns, a, 0, right, true, C::kType}, place);
}

// The offset in the window of shared memory of a 16-bit element of a described operand: element
// `k` < 16 of row `n` or, if `transposed`, row k of column n.
uint32 ElementOfDescriptor(uint64 descriptor, int n, int k, bool transposed, Place place);

}  // namespace gnomon::device

#endif  // GNOMON_TESTS_CUDA_EMULATED_WGMMA_H_
