// The state of an emulated block, shared by the files that implement the emulator.
#ifndef GNOMON_TESTS_CUDA_EMULATED_BLOCK_H_
#define GNOMON_TESTS_CUDA_EMULATED_BLOCK_H_

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#include "emulation.h"

namespace gnomon::device {

class AsynchronousState;

constexpr int kLanes = 32;
constexpr size_t kStack = size_t{1} << 18;

std::string At(Place place);
[[noreturn]] void Fail(const std::string& what, Place place);

struct Stack {
  const void* bottom = nullptr;
  size_t size = 0;
  void* fake = nullptr;
};

// An execution context of a fiber.
struct Context {
  Stack stack;
#if defined(__x86_64__)
  void* stack_pointer = nullptr;
#else
  ucontext_t context;
#endif
};

struct AsyncCopy {
  void* to;
  const void* from;
  int bytes;
  int size;
  int group;
  int number = 0;       // in the order of the thread's copies
  bool landed = false;  // only for kernels with producers
};

struct Fiber {
  Context context;
  std::unique_ptr<char[]> stack{new char[kStack]};
  bool done = false;
  // The completion count of the barrier or warp-level operation that the fiber waits for, and the
  // value of that count when the wait began.
  const int* held = nullptr;
  int held_before = 0;
  // The counter that the fiber waits for, and the count.
  const int* counter = nullptr;
  int count = 0;
  std::vector<AsyncCopy> copies;
  int groups = 0;
};

struct Meeting {
  int size = 0;
  int arrived = 0;
  int held = 0;
  Place place;
  Work work = nullptr;
  int argument = 0;
  Slot in[2][kLanes];
  Slot out[2][kLanes];
};

// The state of two bytes of shared memory. Kernels with producers (AsynchronousState) use the epoch
// fields for the clocks of the accessing threads.
struct Shadow {
  bool written = false;
  bool in_barrier = false;  // part of an mbarrier
  int writer = -1;
  int write_epoch = -1;
  int reader = -1;  // -2: several
  int read_epoch = -1;
  int on_its_way = -1;  // the thread whose copy is in flight
  int readers = -1;     // the index of a set of readers
};

// An addition to global memory that other blocks cannot see yet.
struct Addition {
  float* to;
  float value;
  int thread;
  int epoch;
};

struct Block {
  Block();
  ~Block();

  int block_x = 0;
  int block_y = 0;
  unsigned char* shared = nullptr;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Meeting> warps;
  Meeting all;
  Context scheduler;
  std::vector<Shadow> shadow;
  std::vector<unsigned char> memory;
  int threads = 0;
  int epoch = 0;
  bool early = false;
  std::vector<Addition> additions;
  std::exception_ptr error;
  testing::EmulatedKernel kernel = nullptr;
  const cuda::Parameters* parameters = nullptr;
  // Set for kernels with producers.
  std::unique_ptr<AsynchronousState> asynchronous;
};

// The block whose fiber runs.
extern Block* block;

Fiber& Self();
// Lets other fibers run.
void Yield();
// The first of the shadows of `bytes` bytes of shared memory. Fails if the address is misaligned or
// outside the block's memory.
Shadow* ShadowOf(const void* at, int bytes, Place place);
// Waits until all fibers of the meeting have arrived. The last one calls last() and continues
// immediately.
template <class Last>
void Arrive(Meeting& meeting, Place place, const Last& last) {
  if (meeting.arrived == 0) {
    meeting.place = place;
  } else if (meeting.place.line() != place.line() ||
             std::strcmp(meeting.place.file_name(), place.file_name()) != 0) {
    Fail("other threads wait at " + At(meeting.place), place);
  }
  Fiber& self = Self();
  self.held_before = meeting.held;
  if (++meeting.arrived == meeting.size) {
    last();
    meeting.arrived = 0;
    ++meeting.held;
    return;
  }
  self.held = &meeting.held;
  Yield();
}

// Computes sum += a * b with the arithmetic of tensor cores: all terms are truncated `bits` bits
// after the first bit of the largest term, and the result after its own last bit.
void AddCutOff(float (&sum)[8], const float (&a)[16], const float (&b)[16][8], int depth, int bits);

}  // namespace gnomon::device

#endif  // GNOMON_TESTS_CUDA_EMULATED_BLOCK_H_
