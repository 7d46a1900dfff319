// Runs kernels on the CPU, with the interface of src/cuda/primitives.cuh. Each GPU thread is a
// fiber. A warp-level operation is computed when its last lane arrives. The emulator throws if
//   - shared memory is read before it is written, or outside the requested range;
//   - two threads access the same bytes without a barrier in between, and one of them writes;
//   - bytes are used while an asynchronous copy is in flight, or a block ends before the copy does;
//   - lanes or threads meet at different places, or some never arrive;
//   - all blocks that run wait for counts that the others never store;
//   - two blocks add to a sum without a fence in between;
//   - ldmatrix or a copy is misaligned, or a copy is too large.
// emulated_wgmma.h lists the errors that it detects in kernels whose warps run apart.
// It cannot detect its own wrong assumptions about PTX, such as the order of numbers in fragments.
// It does not emulate performance or, except for additions to sums, weak memory ordering.
#ifndef GNOMON_TESTS_CUDA_EMULATION_H_
#define GNOMON_TESTS_CUDA_EMULATION_H_

#define GNOMON_CUDA_EMULATION
#define GNOMON_DEVICE inline
#define GNOMON_SIZE(size, most) (most)
#define __global__

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "base/near_share.h"
#include "cuda/backend.h"
#include "cuda/constants.h"
#include "cuda/parameters.h"
#include "gnomon/attention.h"

namespace gnomon::device {

using uint16 = uint16_t;
using uint32 = uint32_t;
using uint64 = unsigned long long;
using cuda::Int64;
// The location of a source line; replaces std::source_location, which Clang 14 lacks.
class Place {
 public:
  static constexpr Place current(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    Place place;
    place.file_ = file;
    place.line_ = line;
    return place;
  }

  constexpr const char* file_name() const { return file_; }
  constexpr int line() const { return line_; }

 private:
  const char* file_ = "";
  int line_ = 0;
};

// The constants of the running kernel. In the emulator, they are variables, so that each definition
// is compiled only once.
struct Constants {
#define GNOMON_MEMBER(name) static inline int name = 0;
  GNOMON_CUDA_CONSTANTS(GNOMON_MEMBER)
#undef GNOMON_MEMBER
};

struct ThreadState {
  int thread = 0;
  int block_x = 0;
  int block_y = 0;
  unsigned char* shared = nullptr;
};
extern ThreadState state;

inline unsigned char* SharedMemory() { return state.shared; }
inline int Thread() { return state.thread; }
inline int BlockX() { return state.block_x; }
inline int BlockY() { return state.block_y; }

// Functions for shared memory.
void CheckRead(const void* from, int bytes, Place place);
void CheckWrite(const void* to, int bytes, Place place);
template <class T>
T LoadShared(const void* from, Place place = Place::current()) {
  CheckRead(from, sizeof(T), place);
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}
template <class T>
void StoreShared(void* to, T value, Place place = Place::current()) {
  CheckWrite(to, sizeof(T), place);
  std::memcpy(to, &value, sizeof(T));
}

void Copy(void* to, const void* from, int bytes, int size, Place place);
void CopyCommit();
void WaitForCopies(int groups);
inline void CopyAsync16(void* to, const void* from, int bytes, Place place = Place::current()) {
  Copy(to, from, bytes, 16, place);
}
inline void CopyAsync4(void* to, const void* from, bool inside, Place place = Place::current()) {
  Copy(to, from, inside ? 4 : 0, 4, place);
}
template <int n>
void CopyWait() {
  WaitForCopies(n);
}
void Barrier(Place place = Place::current());

// Functions for global memory that several blocks use. Additions take effect at a fence, as late as
// the order of memory accesses on a GPU allows.
int TakeTicket(int* next);
void Fence();
void StoreCount(int* to, int count);
int LoadCount(const int* from);
void WaitForCount(const int* from, int count);
void AddToSums(float* to, int n, const float (&c)[4]);
void AddToSum(float* to, float a);
void LoadSums(float (&c)[4], const float* from);

// A lane's input to a warp-level operation, and its result.
union Slot {
  float f[4];
  uint32 u[10];
  const void* row;
};
using Work = void (*)(const Slot* in, Slot* out, int argument);
Slot Meet(const Slot& in, Work work, int argument, Place place);

void LoadMatricesOfWarp(const Slot* in, Slot* out, int transpose);
void MultiplyOfWarp(const Slot* in, Slot* out, int type);
void ShuffleOfWarp(const Slot* in, Slot* out, int);
void VoteOfWarp(const Slot* in, Slot* out, int);
void BarrierOfWarp(const Slot* in, Slot* out, int);

template <bool kTranspose>
void LoadMatrices(uint32 (&r)[4], const void* first, int offset, Place place = Place::current()) {
  const void* const row = static_cast<const unsigned char*>(first) + offset;
  CheckRead(row, 16, place);
  Slot slot{};
  slot.row = row;
  slot = Meet(slot, LoadMatricesOfWarp, kTranspose ? 1 : 0, place);
  std::memcpy(r, slot.u, sizeof(r));
}
template <class C>
void Multiply(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1,
              Place place = Place::current()) {
  Slot slot{};
  std::memcpy(slot.f, c, sizeof(c));
  std::memcpy(slot.u + 4, a, sizeof(a));
  slot.u[8] = b0;
  slot.u[9] = b1;
  slot = Meet(slot, MultiplyOfWarp, C::kType, place);
  std::memcpy(c, slot.f, sizeof(c));
}
inline float Shuffle(float a, int lane, Place place = Place::current()) {
  Slot slot{};
  slot.f[0] = a;
  slot.u[1] = static_cast<uint32>(lane);
  return Meet(slot, ShuffleOfWarp, 0, place).f[0];
}
inline float ShuffleXor(float a, int mask, Place place = Place::current()) {
  return Shuffle(a, (Thread() % 32) ^ mask, place);
}
inline bool AnyOfWarp(bool a, Place place = Place::current()) {
  Slot slot{};
  slot.u[0] = a ? 1 : 0;
  return Meet(slot, VoteOfWarp, 0, place).u[0] != 0;
}

inline void WarpBarrier(Place place = Place::current()) { Meet({}, BarrierOfWarp, 0, place); }

inline int Fresh(int a) { return a; }
inline float Larger(float a, float b) { return std::fmax(a, b); }

inline uint32 BitsOf(float a) {
  uint32 bits;
  std::memcpy(&bits, &a, sizeof(bits));
  return bits;
}
inline float FromBits(uint32 bits) {
  float a;
  std::memcpy(&a, &bits, sizeof(a));
  return a;
}

// Rounds to the nearest number of type 1 (bf16) or 2 (fp16), ties to even.
uint16 Narrow(float a, int type);
float Widen(uint16 bits, int type);
template <class C>
uint32 Pack(float low, float high) {
  return Narrow(low, C::kType) | static_cast<uint32>(Narrow(high, C::kType)) << 16;
}
template <class C>
float Widen(uint16 bits) {
  return Widen(bits, C::kType);
}
// Rounds to the nearest tf32 number, ties away from zero.
inline uint32 ToTf32(float a) {
  const uint32 bits = BitsOf(a);
  if ((bits & 0x7f800000u) == 0x7f800000u) return bits;
  return (bits + 0x1000u) & ~0x1fffu;
}

inline float Exp2(float a) { return std::exp2(a); }
inline float Log2(float a) { return std::log2(a); }
inline float Fma(float a, float b, float c) { return std::fma(a, b, c); }

inline float Splat(float /*like*/, float value) { return value; }
inline float Tiny(float /*like*/) { return 1e-30f; }
inline float Max(float a, float b) { return a > b || a != a ? a : b; }
inline float Min(float a, float b) { return a < b || a != a ? a : b; }
inline float Abs(float a) { return std::fabs(a); }
inline float Sqrt(float a) { return std::sqrt(a); }
inline float Rsqrt(float a) { return 1.0f / std::sqrt(a); }
inline float Exp(float a) { return std::exp(a); }
inline float Log(float a) { return std::log(a); }
inline float Log1p(float a) { return std::log1p(a); }
inline float Tanh(float a) { return std::tanh(a); }
inline float Angle(float x, float y) { return std::atan2(y, x + 0.0f); }
inline float Select(bool mask, float yes, float no) { return mask ? yes : no; }
inline float Step(float a) { return std::fmin(1.0f, std::fmax(0.0f, std::fma(a, 1e38f, 0.5f))); }

}  // namespace gnomon::device

namespace gnomon::testing {

// A kernel compiled for the emulator.
using EmulatedKernel = void (*)(const cuda::Parameters&);
// Registers a kernel by its kind, its definition ("" for none) and the definition's struct.
void AddEmulatedKernel(const char* kind, const char* definition, EmulatedKernel kernel,
                       const char* structure = "");
struct EmulatedKernelName {
  std::string kind, definition, structure;
};
const std::vector<EmulatedKernelName>& EmulatedKernelNames();

// Registers a pair function whose kernels are compiled for the emulator.
void AddEmulatedPairFunction(const PairFunction& function);
std::vector<const PairFunction*> EmulatedPairFunctions();

// The scheduling order of a block's fibers, when copies take effect (immediately, or when a thread
// waits for them), and how many blocks run at the same time, each for random intervals.
struct EmulatedOrder {
  bool backwards = false;  // lanes, warps and blocks in reverse order
  bool far_ahead = false;  // a warp runs as far as possible before the next one starts
  bool early_copies = false;
  int resident = 1;
};

class EmulatedBackend final : public cuda::Backend {
 public:
  explicit EmulatedBackend(EmulatedOrder order = {}, int64_t blocks_to_fill = 264,
                           bool is_hopper = false)
      : order_(order), blocks_to_fill_(blocks_to_fill), is_hopper_(is_hopper) {}
  ~EmulatedBackend() override;
  EmulatedBackend(const EmulatedBackend&) = delete;
  EmulatedBackend& operator=(const EmulatedBackend&) = delete;

  // Throws std::runtime_error for the errors that the emulator detects.
  void Launch(const cuda::KernelName& name, const cuda::LaunchShape& shape, const void* parameters,
              size_t bytes) override;
  void* Scratch(size_t bytes) override;
  int64_t BlocksToFill() const override { return blocks_to_fill_; }
  bool IsHopper() const override { return is_hopper_; }

  const std::vector<cuda::KernelName>& launched() const { return launched_; }
  int64_t largest_shared() const { return largest_shared_; }

 private:
  EmulatedOrder order_;
  int64_t blocks_to_fill_;
  bool is_hopper_;
  std::vector<void*> scratch_;
  std::vector<cuda::KernelName> launched_;
  int64_t largest_shared_ = 0;
};

}  // namespace gnomon::testing

#include "emulated_wgmma.h"

#endif  // GNOMON_TESTS_CUDA_EMULATION_H_
