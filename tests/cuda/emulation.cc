#include "emulation.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "emulated_asynchronous.h"
#include "emulated_block.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace gnomon::device {

ThreadState state;

Block* block = nullptr;

Block::Block() = default;
Block::~Block() = default;

std::string At(Place place) {
  const std::string file = place.file_name();
  return file.substr(file.rfind('/') + 1) + ":" + std::to_string(place.line());
}
[[noreturn]] void Fail(const std::string& what, Place place) {
  throw std::runtime_error("emulation: " + At(place) + ": thread " + std::to_string(state.thread) +
                           ": " + what);
}

namespace {

// AddressSanitizer must know the current stack to find the frames that an exception unwinds.
#if defined(__SANITIZE_ADDRESS__)
void Leave(Stack& from, const Stack& to) {
  __sanitizer_start_switch_fiber(&from.fake, to.bottom, to.size);
}
void Enter(Stack& self) { __sanitizer_finish_switch_fiber(self.fake, nullptr, nullptr); }
// On first entry, records the bounds of the previous stack.
void EnterFirst(Stack& other) {
  __sanitizer_finish_switch_fiber(nullptr, &other.bottom, &other.size);
}
// The previous fiber left its frames without returning, so they may still be poisoned.
void Clear(const Stack& stack) { ASAN_UNPOISON_MEMORY_REGION(stack.bottom, stack.size); }
#else
void Leave(Stack& /*from*/, const Stack& /*to*/) {}
void Enter(Stack& /*self*/) {}
void EnterFirst(Stack& /*other*/) {}
void Clear(const Stack& /*stack*/) {}
#endif

// Execution contexts of fibers.
#if defined(__x86_64__)
extern "C" void gnomon_emulation_switch(void** from, void* to);
asm(R"(
.text
.globl gnomon_emulation_switch
.type gnomon_emulation_switch, @function
gnomon_emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size gnomon_emulation_switch, .-gnomon_emulation_switch
)");
void SwitchStacks(Context& from, Context& to) {
  gnomon_emulation_switch(&from.stack_pointer, to.stack_pointer);
}
void Prepare(Context& context, char* stack, void (*main)()) {
  auto* top = reinterpret_cast<void**>(stack + kStack);
  // The stack is 16-byte aligned and has a return address, as at the entry to main.
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(main);
  for (int n = 0; n < 6; ++n) *--top = nullptr;
  context.stack_pointer = top;
}
#else
void SwitchStacks(Context& from, Context& to) { swapcontext(&from.context, &to.context); }
void Prepare(Context& context, char* stack, void (*main)()) {
  getcontext(&context.context);
  context.context.uc_stack = {stack, 0, kStack};
  context.context.uc_link = nullptr;
  makecontext(&context.context, main, 0);
}
#endif
void Switch(Context& from, Context& to) {
  Leave(from.stack, to.stack);
  SwitchStacks(from, to);
  Enter(from.stack);
}
void Start(Context& context, char* stack, void (*main)()) {
  context.stack = {stack, kStack, nullptr};
  Clear(context.stack);
  Prepare(context, stack, main);
}

// The blocks that have added to sums without a fence.
std::unordered_map<const float*, const Block*> adding;

void Apply(const Addition& addition) {
  *addition.to += addition.value;
  adding.erase(addition.to);
}

void Main() {
  EnterFirst(block->scheduler.stack);
  try {
    block->kernel(*block->parameters);
    if (!Self().copies.empty()) {
      Fail("the block ends before an asynchronous copy does", Place::current());
    }
    if (block->asynchronous) block->asynchronous->EndThread();
  } catch (...) {
    block->error = std::current_exception();
  }
  Self().done = true;
  Switch(Self().context, block->scheduler);
  std::abort();
}

}  // namespace

Fiber& Self() { return *block->fibers[static_cast<size_t>(state.thread)]; }

void Yield() {
  // The scheduler restores state.thread.
  Switch(Self().context, block->scheduler);
  if (block->error) std::abort();
}

Shadow* ShadowOf(const void* at, int bytes, Place place) {
  const auto offset = static_cast<const unsigned char*>(at) - state.shared;
  const auto size = static_cast<int64_t>(2 * block->shadow.size());
  if (offset < 0 || offset + bytes > size) {
    Fail("byte " + std::to_string(offset) + " of " + std::to_string(size) + " of shared memory",
         place);
  }
  if (offset % std::min(bytes, 16) != 0) Fail("the address is not aligned", place);
  return block->shadow.data() + offset / 2;
}

void CheckRead(const void* from, int bytes, Place place) {
  Shadow* const first = ShadowOf(from, bytes, place);
  const int self = state.thread;
  const int epoch = block->epoch;
  for (Shadow* s = first; s < first + bytes / 2; ++s) {
    if (block->asynchronous) {
      block->asynchronous->CheckRead(*s, place);
      continue;
    }
    if (s->on_its_way >= 0) Fail("reads memory that an asynchronous copy still writes", place);
    if (!s->written) Fail("reads unwritten memory", place);
    if (s->write_epoch == epoch && s->writer != self) {
      Fail("reads memory that thread " + std::to_string(s->writer) +
               " writes before the same barrier",
           place);
    }
    s->reader = s->read_epoch == epoch && s->reader != self ? -2 : self;
    s->read_epoch = epoch;
  }
}

namespace {

void CheckOverwrite(const Shadow& s, Place place) {
  const int self = state.thread;
  if (s.on_its_way >= 0) Fail("writes memory that an asynchronous copy still writes", place);
  if (s.write_epoch == block->epoch && s.writer != self) {
    Fail(
        "writes memory that thread " + std::to_string(s.writer) + " writes before the same barrier",
        place);
  }
  if (s.read_epoch == block->epoch && s.reader != self) {
    Fail("writes memory that other threads read before the same barrier", place);
  }
}

}  // namespace

void CheckWrite(const void* to, int bytes, Place place) {
  Shadow* const first = ShadowOf(to, bytes, place);
  for (Shadow* s = first; s < first + bytes / 2; ++s) {
    if (block->asynchronous) {
      block->asynchronous->CheckWrite(*s, place);
      continue;
    }
    CheckOverwrite(*s, place);
    s->written = true;
    s->writer = state.thread;
    s->write_epoch = block->epoch;
  }
}

void Copy(void* to, const void* from, int bytes, int size, Place place) {
  if (bytes < 0 || bytes > size) Fail("copies " + std::to_string(bytes) + " bytes", place);
  if (bytes > 0 && reinterpret_cast<uintptr_t>(from) % static_cast<uintptr_t>(size) != 0) {
    Fail("copies from an address that is not aligned", place);
  }
  Shadow* const first = ShadowOf(to, size, place);
  Fiber& self = Self();
  if (block->asynchronous) {
    self.copies.push_back({to, from, bytes, size, self.groups});
    block->asynchronous->StartCopy(self.copies.back(), first, place);
    return;
  }
  for (Shadow* s = first; s < first + size / 2; ++s) {
    CheckOverwrite(*s, place);
    s->on_its_way = state.thread;
  }
  self.copies.push_back({to, from, bytes, size, self.groups});
  if (block->early) {
    std::memset(to, 0, static_cast<size_t>(size));
    if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
  }
}

void CopyCommit() { ++Self().groups; }

void WaitForCopies(int groups) {
  Fiber& self = Self();
  int last = 0;
  std::erase_if(self.copies, [&](const AsyncCopy& copy) {
    if (copy.group >= self.groups - groups) return false;
    if (block->asynchronous) {
      last = std::max(last, copy.number);
      return true;
    }
    if (!block->early) {
      std::memset(copy.to, 0, static_cast<size_t>(copy.size));
      if (copy.bytes > 0) std::memcpy(copy.to, copy.from, static_cast<size_t>(copy.bytes));
    }
    Shadow* const first = ShadowOf(copy.to, copy.size, Place::current());
    for (Shadow* s = first; s < first + copy.size / 2; ++s) {
      s->on_its_way = -1;
      s->written = true;
      s->writer = state.thread;
      s->write_epoch = block->epoch;
    }
    return true;
  });
  if (block->asynchronous) block->asynchronous->FinishCopies(last);
}

int TakeTicket(int* next) { return (*next)++; }
void Fence() {
  // The additions of other threads before a barrier, and the thread's own.
  std::erase_if(block->additions, [](const Addition& addition) {
    if (addition.thread != state.thread && addition.epoch == block->epoch) return false;
    Apply(addition);
    return true;
  });
}
void StoreCount(int* to, int count) { *to = count; }
int LoadCount(const int* from) { return *from; }
void WaitForCount(const int* from, int count) {
  Fiber& self = Self();
  while (*from < count) {
    self.counter = from;
    self.count = count;
    Yield();
  }
}
void AddToSum(float* to, float a) {
  if (adding.emplace(to, block).first->second != block) {
    Fail("adds to a sum to which another block adds at the same time", Place::current());
  }
  block->additions.push_back({to, a, state.thread, block->epoch});
}
void AddToSums(float* to, int n, const float (&c)[4]) {
  for (int e = 0; e < 4; ++e) AddToSum(to + 128 * n + 4 * (state.thread % kLanes) + e, c[e]);
}
void LoadSums(float (&c)[4], const float* from) {
  std::memcpy(c, from + static_cast<ptrdiff_t>(4 * (state.thread % kLanes)), sizeof(c));
}

void Barrier(Place place) {
  Arrive(block->all, place, [] {
    ++block->epoch;
    if (block->asynchronous) block->asynchronous->BarrierOfAll();
  });
}

Slot Meet(const Slot& in, Work work, int argument, Place place) {
  const int lane = state.thread % kLanes;
  Meeting& meeting = block->warps[static_cast<size_t>(state.thread / kLanes)];
  const int side = meeting.held % 2;
  if (meeting.arrived == 0) {
    meeting.work = work;
    meeting.argument = argument;
  } else if (meeting.work != work || meeting.argument != argument) {
    Fail("other threads make a different call together", place);
  }
  meeting.in[side][lane] = in;
  Arrive(meeting, place, [&] { work(meeting.in[side], meeting.out[side], argument); });
  return meeting.out[side][lane];
}

void LoadMatricesOfWarp(const Slot* in, Slot* out, int transpose) {
  for (int m = 0; m < 4; ++m) {
    uint16 matrix[8][8];
    for (int r = 0; r < 8; ++r) std::memcpy(matrix[r], in[8 * m + r].row, 16);
    for (int lane = 0; lane < kLanes; ++lane) {
      const int r = lane / 4;
      const int c = 2 * (lane % 4);
      const uint32 low = transpose != 0 ? matrix[c][r] : matrix[r][c];
      const uint32 high = transpose != 0 ? matrix[c + 1][r] : matrix[r][c + 1];
      out[lane].u[m] = low | high << 16;
    }
  }
}

namespace {

// The largest power of two that is at most a positive number.
double PowerOfTwo(double a) {
  uint64_t bits;
  std::memcpy(&bits, &a, sizeof(bits));
  bits &= uint64_t{0x7ff} << 52;
  std::memcpy(&a, &bits, sizeof(bits));
  return a;
}

}  // namespace

// See Fasi et al. 2021, "Numerical behavior of NVIDIA tensor cores".
void AddCutOff(float (&sum)[8], const float (&a)[16], const float (&b)[16][8], int depth,
               int bits) {
  const double cut = std::ldexp(1.0, -bits);
  double addends[17][8];
  double largest[8];
  double all[8];
  for (int c = 0; c < 8; ++c) {
    addends[16][c] = sum[c];
    largest[c] = all[c] = std::fabs(addends[16][c]);
  }
  for (int k = 0; k < depth; ++k) {
    for (int c = 0; c < 8; ++c) {
      addends[k][c] = static_cast<double>(a[k]) * b[k][c];
      largest[c] = std::max(largest[c], std::fabs(addends[k][c]));
      all[c] += std::fabs(addends[k][c]);
    }
  }
  for (int c = 0; c < 8; ++c) {
    if (all[c] == 0) continue;
    if (!std::isfinite(all[c])) {
      for (int k = 0; k < depth; ++k) sum[c] += static_cast<float>(addends[k][c]);
      continue;
    }
    const double unit = PowerOfTwo(largest[c]) * cut;
    const double inverse = 1 / unit;
    int units = static_cast<int>(addends[16][c] * inverse);
    for (int k = 0; k < depth; ++k) units += static_cast<int>(addends[k][c] * inverse);
    const double exact = units * unit;
    const auto rounded = static_cast<float>(exact);
    sum[c] = std::fabs(rounded) > std::fabs(exact) ? std::nextafter(rounded, 0.0f) : rounded;
  }
}

void MultiplyOfWarp(const Slot* in, Slot* out, int type) {
  float a[16][16];
  float b[16][8];
  const int depth = type == 0 ? 8 : 16;
  for (int lane = 0; lane < kLanes; ++lane) {
    const int r = lane / 4;
    const int c = lane % 4;
    const uint32* const left = in[lane].u + 4;
    const uint32* const right = in[lane].u + 8;
    if (type == 0) {
      // Tensor cores ignore the lowest 13 bits of tf32 numbers.
      const auto value = [](uint32 bits) { return FromBits(bits & ~0x1fffu); };
      for (int n = 0; n < 4; ++n) a[r + n % 2 * 8][c + n / 2 * 4] = value(left[n]);
      for (int n = 0; n < 2; ++n) b[c + n * 4][r] = value(right[n]);
      continue;
    }
    const auto value = [type](uint32 bits, int e) {
      return Widen(static_cast<uint16>(bits >> (16 * e)), type);
    };
    for (int e = 0; e < 2; ++e) {
      for (int n = 0; n < 4; ++n) a[r + n % 2 * 8][2 * c + n / 2 * 8 + e] = value(left[n], e);
      for (int n = 0; n < 2; ++n) b[2 * c + n * 8 + e][r] = value(right[n], e);
    }
  }
  float sum[16][8];
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int n = 0; n < 4; ++n) {
      sum[lane / 4 + n / 2 * 8][2 * (lane % 4) + n % 2] = in[lane].f[n];
    }
  }
  for (int r = 0; r < 16; ++r) AddCutOff(sum[r], a[r], b, depth, 24);
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int n = 0; n < 4; ++n) {
      out[lane].f[n] = sum[lane / 4 + n / 2 * 8][2 * (lane % 4) + n % 2];
    }
  }
}

void ShuffleOfWarp(const Slot* in, Slot* out, int /*argument*/) {
  for (int lane = 0; lane < kLanes; ++lane) out[lane].f[0] = in[in[lane].u[1] % kLanes].f[0];
}
void BarrierOfWarp(const Slot* /*in*/, Slot* /*out*/, int /*argument*/) {
  if (block->asynchronous) block->asynchronous->BarrierOfWarp();
}
void VoteOfWarp(const Slot* in, Slot* out, int /*argument*/) {
  const bool any = std::any_of(in, in + kLanes, [](const Slot& slot) { return slot.u[0] != 0; });
  for (int lane = 0; lane < kLanes; ++lane) out[lane].u[0] = any ? 1 : 0;
}

namespace {

float WidenHalf(uint16 bits) {
  const float sign = (bits & 0x8000) != 0 ? -1.0f : 1.0f;
  const int exponent = bits >> 10 & 31;
  const int mantissa = bits & 1023;
  if (exponent == 31) {
    return mantissa != 0 ? std::nanf("") : sign * HUGE_VALF;
  }
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -24);
  return sign * std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
}

uint16 NarrowHalf(float a) {
  const auto sign = static_cast<uint16>(BitsOf(a) >> 16 & 0x8000);
  if (a != a) return 0x7e00;
  const float size = std::fabs(a);
  if (size >= 65520.0f) return sign | 0x7c00;
  if (size == 0) return sign;
  // The spacing of fp16 numbers near this value; ties go to even multiples.
  int exponent = 0;
  std::frexp(size, &exponent);
  const int step = std::max(exponent, -13) - 11;
  const auto steps = static_cast<int>(std::nearbyint(std::ldexp(size, -step)));
  // A result of 2048 steps carries into the exponent.
  if (step == -24) return static_cast<uint16>(sign | steps);
  return static_cast<uint16>(sign | ((step + 24) * 1024 + steps));
}

}  // namespace

float Widen(uint16 bits, int type) {
  if (type == 1) return FromBits(static_cast<uint32>(bits) << 16);
  static const std::vector<float> kHalves = [] {
    std::vector<float> halves(65536);
    for (size_t n = 0; n < halves.size(); ++n) halves[n] = WidenHalf(static_cast<uint16>(n));
    return halves;
  }();
  return kHalves[bits];
}

uint16 Narrow(float a, int type) {
  if (type == 2) return NarrowHalf(a);
  if (a != a) return 0x7fff;
  const uint32 bits = BitsOf(a);
  return static_cast<uint16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace gnomon::device

namespace gnomon::testing {

namespace {

using device::state;

std::map<std::pair<std::string, std::string>, EmulatedKernel>& Kernels() {
  static std::map<std::pair<std::string, std::string>, EmulatedKernel> kernels;
  return kernels;
}

std::vector<EmulatedKernelName>& KernelNames() {
  static std::vector<EmulatedKernelName> names;
  return names;
}

void SetConstants(const cuda::KernelName& name) {
  std::map<std::string, int64_t> values(name.constants.begin(), name.constants.end());
#define GNOMON_SET(constant) device::Constants::constant = static_cast<int>(values.at(#constant));
  GNOMON_CUDA_CONSTANTS(GNOMON_SET)
#undef GNOMON_SET
}

// The blocks that run at the same time. Later launches reuse their fibers.
std::vector<std::unique_ptr<device::Block>>& Blocks() {
  static std::vector<std::unique_ptr<device::Block>> blocks;
  return blocks;
}

void StartBlock(device::Block& to, const cuda::LaunchShape& shape, uint32_t at,
                EmulatedOrder order) {
  const int threads = static_cast<int>(shape.threads);
  while (static_cast<int>(to.fibers.size()) < threads) {
    to.fibers.push_back(std::make_unique<device::Fiber>());
  }
  to.block_x = static_cast<int>(at % shape.grid[0]);
  to.block_y = static_cast<int>(at / shape.grid[0]);
  to.threads = threads;
  to.epoch = 0;
  to.early = order.early_copies;
  to.additions.clear();
  to.error = nullptr;
  to.asynchronous.reset();
  if (device::Constants::kProducers != 0) {
    to.asynchronous = std::make_unique<device::AsynchronousState>(threads, order.early_copies);
  }
  // With these bytes, numbers of all types are NaN.
  to.memory.assign(shape.shared_bytes + 16, 0xff);
  const auto misplaced = reinterpret_cast<uintptr_t>(to.memory.data()) % 16;
  to.shared = to.memory.data() + (16 - misplaced) % 16;
  to.shadow.assign(shape.shared_bytes / 2, {});
  to.warps.assign(static_cast<size_t>(threads / device::kLanes), {});
  for (device::Meeting& warp : to.warps) warp.size = device::kLanes;
  to.all = {};
  to.all.size = threads;
  for (int t = 0; t < threads; ++t) {
    device::Fiber& fiber = *to.fibers[static_cast<size_t>(t)];
    fiber.done = false;
    fiber.held = nullptr;
    fiber.counter = nullptr;
    fiber.copies.clear();
    fiber.groups = 0;
    device::Start(fiber.context, fiber.stack.get(), device::Main);
  }
}

// Runs each lane of a warp up to its next wait. Returns whether any lane could run.
bool RunWarp(device::Block& of, int warp, EmulatedOrder order) {
  device::block = &of;
  state.block_x = of.block_x;
  state.block_y = of.block_y;
  state.shared = of.shared;
  bool ran = false;
  for (int lane = 0; lane < device::kLanes; ++lane) {
    const int t = warp * device::kLanes + (order.backwards ? device::kLanes - 1 - lane : lane);
    device::Fiber& fiber = *of.fibers[static_cast<size_t>(t)];
    if (fiber.done || (fiber.held != nullptr && *fiber.held == fiber.held_before)) continue;
    if (fiber.counter != nullptr && *fiber.counter < fiber.count) continue;
    fiber.held = nullptr;
    fiber.counter = nullptr;
    state.thread = t;
    device::Switch(of.scheduler, fiber.context);
    if (of.error) std::rethrow_exception(of.error);
    ran = true;
  }
  return ran;
}

// Runs each warp once, or as far as possible. Returns whether any of them could run.
bool RunWarps(device::Block& of, EmulatedOrder order) {
  const int warps = of.threads / device::kLanes;
  bool ran = false;
  for (int n = 0; n < warps; ++n) {
    while (RunWarp(of, order.backwards ? warps - 1 - n : n, order)) {
      ran = true;
      if (!order.far_ahead) break;
    }
  }
  return ran;
}

bool Ends(device::Block& of) {
  const bool is_done = std::all_of(of.fibers.begin(), of.fibers.begin() + of.threads,
                                   [](const auto& fiber) { return fiber->done; });
  if (!is_done) return false;
  if (of.asynchronous) {
    while (of.asynchronous->Land(/*all=*/true)) {
    }
    device::block = &of;
    of.asynchronous->EndBlock();
  }
  for (const device::Addition& addition : of.additions) device::Apply(addition);
  return true;
}

[[noreturn]] void FailToEnd(const device::Block& of) {
  for (int t = 0; t < of.threads; ++t) {
    const device::Fiber& fiber = *of.fibers[static_cast<size_t>(t)];
    if (fiber.done) continue;
    if (fiber.counter != nullptr && of.asynchronous) {
      throw std::runtime_error("emulation: threads wait for a phase that never ends");
    }
    if (fiber.counter != nullptr) {
      throw std::runtime_error("emulation: block " + std::to_string(of.block_x) +
                               " waits for a count of " + std::to_string(fiber.count) +
                               ", which no block stores, not " + std::to_string(*fiber.counter));
    }
    const device::Meeting& warp = of.warps[static_cast<size_t>(t / device::kLanes)];
    throw std::runtime_error(
        "emulation: " +
        device::At(warp.arrived > 0 || of.asynchronous ? warp.place : of.all.place) +
        ": threads wait for others that never arrive");
  }
  std::abort();
}

// Runs all blocks, `order.resident` of them at the same time.
void RunGrid(const cuda::LaunchShape& shape, EmulatedKernel kernel,
             const cuda::Parameters& parameters, EmulatedOrder order) {
  std::vector<std::unique_ptr<device::Block>>& all = Blocks();
  while (static_cast<int>(all.size()) < order.resident) {
    all.push_back(std::make_unique<device::Block>());
  }
  const uint32_t count = shape.grid[0] * shape.grid[1];
  uint32_t started = 0;
  uint32_t random = 1;
  device::adding.clear();
  std::vector<device::Block*> running;
  std::vector<device::Block*> idle;
  for (int n = 0; n < order.resident; ++n) idle.push_back(all[static_cast<size_t>(n)].get());
  while (true) {
    while (started < count && !idle.empty()) {
      device::Block& next = *idle.back();
      next.kernel = kernel;
      next.parameters = &parameters;
      StartBlock(next, shape, order.backwards ? count - 1 - started : started, order);
      ++started;
      running.push_back(&next);
      idle.pop_back();
    }
    if (running.empty()) return;
    // One of the blocks runs for a random time, unless it waits for the others.
    random = random * 1664525 + 1013904223;
    const size_t first = (random >> 16) % running.size();
    bool ran = false;
    for (size_t n = 0; n < running.size() && !ran; ++n) {
      device::Block& chosen = *running[(first + n) % running.size()];
      for (uint32_t turns = 1 + (random >> 24) % 32; turns > 0; --turns) {
        const bool landed = chosen.asynchronous && chosen.asynchronous->Land(/*all=*/false);
        if (!RunWarps(chosen, order) && !landed) break;
        ran = true;
      }
    }
    if (!ran) FailToEnd(*running[first]);
    std::erase_if(running, [&](device::Block* of) {
      if (!Ends(*of)) return false;
      idle.push_back(of);
      return true;
    });
  }
}

}  // namespace

void AddEmulatedKernel(const char* kind, const char* definition, EmulatedKernel kernel,
                       const char* structure) {
  Kernels()[{kind, definition}] = kernel;
  KernelNames().push_back({kind, definition, structure});
}
const std::vector<EmulatedKernelName>& EmulatedKernelNames() { return KernelNames(); }

namespace {

std::map<std::string, const PairFunction*>& Functions() {
  static std::map<std::string, const PairFunction*> functions;
  return functions;
}

}  // namespace

void AddEmulatedPairFunction(const PairFunction& function) {
  Functions()[function.name] = &function;
}

std::vector<const PairFunction*> EmulatedPairFunctions() {
  std::vector<const PairFunction*> functions;
  for (const auto& [name, function] : Functions()) functions.push_back(function);
  return functions;
}

EmulatedBackend::~EmulatedBackend() {
  for (void* memory : scratch_) std::free(memory);
}

void* EmulatedBackend::Scratch(size_t bytes) {
  const size_t size = (bytes + 255) / 256 * 256;
  void* const memory = std::aligned_alloc(256, size);
  std::memset(memory, 0xff, size);
  scratch_.push_back(memory);
  return memory;
}

void EmulatedBackend::Launch(const cuda::KernelName& name, const cuda::LaunchShape& shape,
                             const void* parameters, size_t bytes) {
  const auto kernel = Kernels().find({name.kind, name.definition});
  if (kernel == Kernels().end()) {
    throw std::runtime_error("emulation: no kernel " + name.kind + " of " + name.definition);
  }
  if (bytes != sizeof(cuda::Parameters) || shape.threads % 32 != 0 || shape.threads == 0 ||
      shape.grid[0] == 0 || shape.grid[1] == 0 || shape.grid[1] > 65535 || shape.grid[2] != 1) {
    throw std::runtime_error("emulation: a launch that a GPU would refuse");
  }
  launched_.push_back(name);
  largest_shared_ = std::max<int64_t>(largest_shared_, shape.shared_bytes);
  SetConstants(name);
  RunGrid(shape, kernel->second, *static_cast<const cuda::Parameters*>(parameters), order_);
}

}  // namespace gnomon::testing
