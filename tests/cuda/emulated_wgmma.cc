#include "emulated_wgmma.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "emulated_asynchronous.h"
#include "emulated_block.h"

namespace gnomon::device {
namespace {

// Registers of a multiprocessor.
constexpr int kRegisters = 65536;
constexpr int kWarpsInGroup = 4;
constexpr uint32 kInFlight = 0x7fc5a5a5u;  // a NaN

void JoinInto(std::vector<int>& to, const std::vector<int>& from) {
  for (size_t n = 0; n < to.size(); ++n) to[n] = std::max(to[n], from[n]);
}

AsynchronousState& State(Place place) {
  if (!block->asynchronous) Fail("the kernel has no producers", place);
  return *block->asynchronous;
}

std::string NameOf(const void* at) {
  return "the mbarrier at byte " +
         std::to_string(static_cast<const unsigned char*>(at) - state.shared);
}

}  // namespace

void View::Join(const View& other) {
  JoinInto(all, other.all);
  JoinInto(fenced, other.fenced);
}

AsynchronousState::AsynchronousState(int threads, bool early)
    : threads_(threads),
      early_(early),
      views_(static_cast<size_t>(threads), View(2 * threads + threads / kLanes)),
      landed_(static_cast<size_t>(threads)),
      landed_prefix_(static_cast<size_t>(threads)),
      warps_(static_cast<size_t>(threads / kLanes)),
      most_registers_(std::min(255, kRegisters / threads / 8 * 8)) {
  for (int t = 0; t < threads; ++t) views_[static_cast<size_t>(t)].of(t) = 1;
  for (Warp& warp : warps_) warp.registers = most_registers_;
}

// Accesses.

bool AsynchronousState::IsOrdered(int thread, int agent, int clock) const {
  return agent == thread ||
         views_[static_cast<size_t>(thread)].all[static_cast<size_t>(agent)] >= clock;
}

int AsynchronousState::Now() const {
  const auto self = static_cast<size_t>(state.thread);
  return views_[self].all[self];
}

void AsynchronousState::AddReader(Shadow& s, int agent, int clock) {
  if (s.readers < 0) {
    if (s.reader < 0 || s.reader == agent ||
        (agent < threads_ && IsOrdered(agent, s.reader, s.read_epoch))) {
      s.reader = agent;
      s.read_epoch = clock;
      return;
    }
    if (free_readers_.empty()) {
      free_readers_.push_back(static_cast<int>(readers_.size()));
      readers_.emplace_back();
    }
    s.readers = free_readers_.back();
    free_readers_.pop_back();
    readers_[static_cast<size_t>(s.readers)].assign(1, {s.reader, s.read_epoch});
  }
  auto& readers = readers_[static_cast<size_t>(s.readers)];
  for (auto& [known, last] : readers) {
    if (known != agent) continue;
    last = clock;
    return;
  }
  readers.emplace_back(agent, clock);
}

void AsynchronousState::CheckRead(Shadow& s, Place place) {
  if (s.in_barrier) Fail("reads an mbarrier", place);
  if (!s.written) Fail("reads unwritten memory", place);
  if (!IsOrdered(state.thread, s.writer, s.write_epoch)) {
    Fail(s.writer >= threads_
             ? "reads memory that an asynchronous copy still writes"
             : "reads memory that thread " + std::to_string(s.writer) + " writes at the same time",
         place);
  }
  AddReader(s, state.thread, Now());
}

void AsynchronousState::CheckOverwrite(Shadow& s, Place place) {
  const int self = state.thread;
  if (s.in_barrier) Fail("writes an mbarrier", place);
  if (s.written && !IsOrdered(self, s.writer, s.write_epoch)) {
    Fail(s.writer >= threads_
             ? "writes memory that an asynchronous copy still writes"
             : "writes memory that thread " + std::to_string(s.writer) + " writes at the same time",
         place);
  }
  const auto check = [&](int agent, int clock) {
    if (IsOrdered(self, agent, clock)) return;
    Fail(agent >= 2 * threads_
             ? "writes memory that a product still reads"
             : "writes memory that thread " + std::to_string(agent) + " reads at the same time",
         place);
  };
  if (s.readers >= 0) {
    for (const auto& [agent, clock] : readers_[static_cast<size_t>(s.readers)]) check(agent, clock);
    free_readers_.push_back(s.readers);
    s.readers = -1;
  } else if (s.reader >= 0) {
    check(s.reader, s.read_epoch);
  }
  s.reader = -1;
  s.written = true;
}

void AsynchronousState::CheckWrite(Shadow& s, Place place) {
  CheckOverwrite(s, place);
  s.writer = state.thread;
  s.write_epoch = Now();
}

void AsynchronousState::StartCopy(AsyncCopy& copy, Shadow* first, Place place) {
  auto& landed = landed_[static_cast<size_t>(state.thread)];
  landed.push_back(0);
  copy.number = static_cast<int>(landed.size());
  for (Shadow* s = first; s < first + copy.size / 2; ++s) {
    CheckOverwrite(*s, place);
    s->writer = threads_ + state.thread;
    s->write_epoch = copy.number;
  }
  flights_.push_back({copy, state.thread});
  if (early_) {
    LandOne(flights_.back());
    flights_.pop_back();
  }
}

void AsynchronousState::LandOne(const Flight& flight) {
  const AsyncCopy& copy = flight.copy;
  std::memset(copy.to, 0, static_cast<size_t>(copy.size));
  if (copy.bytes > 0) std::memcpy(copy.to, copy.from, static_cast<size_t>(copy.bytes));
  const auto thread = static_cast<size_t>(flight.thread);
  landed_[thread][static_cast<size_t>(copy.number - 1)] = 1;
  int& prefix = landed_prefix_[thread];
  while (prefix < static_cast<int>(landed_[thread].size()) &&
         landed_[thread][static_cast<size_t>(prefix)] != 0) {
    ++prefix;
  }
}

bool AsynchronousState::Land(bool all) {
  if (flights_.empty() && arrivals_.empty()) return false;
  const auto lands = [&] {
    random_ = random_ * 1664525 + 1013904223;
    return all || (random_ >> 28) < 5;
  };
  std::erase_if(flights_, [&](const Flight& flight) {
    if (!lands()) return false;
    LandOne(flight);
    return true;
  });
  std::erase_if(arrivals_, [&](const Arrival& arrival) {
    if (landed_prefix_[static_cast<size_t>(arrival.thread)] < arrival.number || !lands()) {
      return false;
    }
    Mbarrier& barrier = barriers_.at(arrival.at);
    // Orders only the copies, not the thread's other accesses.
    int& seen = barrier.arriving.of(threads_ + arrival.thread);
    seen = std::max(seen, arrival.number);
    Complete(barrier);
    return true;
  });
  return true;
}

void AsynchronousState::FinishCopies(int number) {
  std::erase_if(flights_, [&](const Flight& flight) {
    if (flight.thread != state.thread || flight.copy.number > number) return false;
    LandOne(flight);
    return true;
  });
  int& seen = views_[static_cast<size_t>(state.thread)].of(threads_ + state.thread);
  seen = std::max(seen, number);
}

// Barriers.

void AsynchronousState::Release(View* to, int thread) {
  View& own = views_[static_cast<size_t>(thread)];
  to->Join(own);
  ++own.of(thread);
}

void AsynchronousState::BarrierOfAll() {
  View all(static_cast<int>(views_[0].all.size()));
  for (const View& view : views_) all.Join(view);
  for (int t = 0; t < threads_; ++t) {
    views_[static_cast<size_t>(t)] = all;
    ++views_[static_cast<size_t>(t)].of(t);
  }
}

void AsynchronousState::BarrierOfWarp() {
  View all(static_cast<int>(views_[0].all.size()));
  const int first = state.thread / kLanes * kLanes;
  for (int t = first; t < first + kLanes; ++t) all.Join(views_[static_cast<size_t>(t)]);
  for (int t = first; t < first + kLanes; ++t) {
    views_[static_cast<size_t>(t)] = all;
    ++views_[static_cast<size_t>(t)].of(t);
  }
}

void AsynchronousState::Fence() {
  View& own = views_[static_cast<size_t>(state.thread)];
  JoinInto(own.fenced, own.all);
  ++own.of(state.thread);
}

void AsynchronousState::Init(void* at, int count, Place place) {
  Shadow* const first = ShadowOf(at, 8, place);
  if (count <= 0) Fail("an mbarrier of " + std::to_string(count) + " arrivals", place);
  for (Shadow* s = first; s < first + 4; ++s) {
    CheckOverwrite(*s, place);
    s->in_barrier = true;
  }
  Mbarrier& barrier = barriers_[at];
  barrier.count = barrier.pending = count;
  barrier.initialiser = state.thread;
  barrier.clock = Now();
  barrier.arriving = barrier.seen = View(static_cast<int>(views_[0].all.size()));
}

AsynchronousState::Mbarrier& AsynchronousState::Find(void* at, Place place) {
  const auto found = barriers_.find(at);
  if (found == barriers_.end()) Fail(NameOf(at) + " does not exist", place);
  if (!IsOrdered(state.thread, found->second.initialiser, found->second.clock)) {
    Fail(NameOf(at) + " may not exist yet", place);
  }
  return found->second;
}

void AsynchronousState::Complete(Mbarrier& barrier) {
  if (--barrier.pending > 0) return;
  barrier.pending = barrier.count;
  ++barrier.completed;
  barrier.seen.Join(barrier.arriving);
}

void AsynchronousState::Arrive(void* at, Place place) {
  Mbarrier& barrier = Find(at, place);
  Release(&barrier.arriving, state.thread);
  Complete(barrier);
}

void AsynchronousState::ArriveWithCopies(void* at, Place place) {
  Find(at, place);
  const auto copies = landed_[static_cast<size_t>(state.thread)].size();
  arrivals_.push_back({at, state.thread, static_cast<int>(copies)});
  if (early_) Land(true);
}

void AsynchronousState::Wait(void* at, int parity, Place place) {
  Mbarrier& barrier = Find(at, place);
  const int thread = state.thread;
  // The first wait with parity 1 returns at once: it is for the phase before the first.
  int& next = barrier.next.emplace(thread, parity == 1 ? -1 : 0).first->second;
  if (parity != (next & 1)) Fail(NameOf(at) + " is waited for with the wrong parity", place);
  Fiber& self = Self();
  while (barrier.completed <= next) {
    self.counter = &barrier.completed;
    self.count = next + 1;
    Yield();
  }
  if (barrier.completed > next + 1) Fail(NameOf(at) + " is already in the phase after", place);
  ++next;
  views_[static_cast<size_t>(thread)].Join(barrier.seen);
}

void AsynchronousState::NamedSync(int id, int threads, bool waits, Place place) {
  if (id < 1 || id > 15 || threads % kLanes != 0 || threads <= 0 || threads > threads_) {
    Fail("barrier " + std::to_string(id) + " of " + std::to_string(threads) + " threads", place);
  }
  NamedBarrier& barrier = named_[static_cast<size_t>(id)];
  if (barrier.arrived == 0) {
    barrier.size = threads;
    barrier.view = std::make_shared<View>(static_cast<int>(views_[0].all.size()));
  } else if (barrier.size != threads) {
    Fail("barrier " + std::to_string(id) + " has another number of threads", place);
  }
  const std::shared_ptr<View> view = barrier.view;
  const int thread = state.thread;
  Release(view.get(), thread);
  Fiber& self = Self();
  self.held_before = barrier.held;
  const bool is_last = ++barrier.arrived == barrier.size;
  if (is_last) {
    barrier.arrived = 0;
    ++barrier.held;
  }
  if (!waits) return;
  if (!is_last) {
    self.held = &barrier.held;
    Yield();
  }
  views_[static_cast<size_t>(thread)].Join(*view);
}

void AsynchronousState::ChangeRegisters(int count, bool more, Place place) {
  Warp& warp = Mine();
  if (count < 24 || count > 256 || count % 8 != 0) {
    Fail("a limit of " + std::to_string(count) + " registers", place);
  }
  // All lanes change the limit, and the first one changes that of the warp.
  if (state.thread % kLanes != 0) return;
  if (more ? count < warp.registers : count > warp.registers) {
    Fail("the limit of registers changes from " + std::to_string(warp.registers) + " to " +
             std::to_string(count),
         place);
  }
  warp.registers = count;
}

void AsynchronousState::EndThread() const {
  if (!warps_[static_cast<size_t>(state.thread / kLanes)].pending.empty()) {
    Fail("the block ends before a product does", Place::current());
  }
}

void AsynchronousState::EndBlock() const {
  int registers = 0;
  for (size_t w = 0; w < warps_.size(); ++w) {
    const Warp& first = warps_[w / kWarpsInGroup * kWarpsInGroup];
    if (warps_[w].operations != first.operations || warps_[w].registers != first.registers) {
      Fail("the warps of a group execute different products", Place::current());
    }
    registers += kLanes * warps_[w].registers;
  }
  if (registers > threads_ * most_registers_) {
    Fail("the groups wait for more registers than the block has", Place::current());
  }
  if (!arrivals_.empty()) Fail("the block ends before a copy arrives", Place::current());
}

// Products.

AsynchronousState::Warp& AsynchronousState::Mine() {
  return warps_[static_cast<size_t>(state.thread / kLanes)];
}

void AsynchronousState::Registers::Read(std::vector<unsigned char>* to) const {
  to->resize(kLanes * bytes);
  for (size_t lane = 0; lane < kLanes; ++lane) {
    std::memcpy(to->data() + lane * bytes, of[lane], bytes);
  }
}

void AsynchronousState::CheckRegisters(const Registers& registers, Place place) const {
  std::vector<unsigned char> values;
  registers.Read(&values);
  if (values != registers.values) Fail("registers of a product are written too late", place);
}

// The warps of a group must execute the same operations.
void AsynchronousState::Record(const Operation& operation, Place place) {
  Warp& mine = Mine();
  const size_t index = mine.operations.size();
  mine.operations.push_back(operation);
  const size_t first = static_cast<size_t>(state.thread / kLanes / kWarpsInGroup) * kWarpsInGroup;
  for (size_t w = first; w < first + kWarpsInGroup; ++w) {
    const std::vector<Operation>& theirs = warps_[w].operations;
    if (theirs.size() > index && !(theirs[index] == operation)) {
      Fail("the warps of a group execute different products", place);
    }
  }
}

void AsynchronousState::FenceProducts(Place place) {
  Warp& warp = Mine();
  Record({place.line(), 0, 0}, place);
  warp.fenced = true;
  for (Registers& registers : warp.known) {
    registers.fenced = true;
    registers.Read(&registers.values);
  }
}

void AsynchronousState::CommitProducts(Place place) {
  Warp& warp = Mine();
  Record({place.line(), 0, 0}, place);
  ++warp.committed;
}

void AsynchronousState::WaitForProducts(int groups, Place place) {
  Warp& warp = Mine();
  Record({place.line(), static_cast<uint64>(groups), 0}, place);
  warp.fenced = false;
  const int done = warp.committed - groups;
  std::erase_if(warp.pending, [&](const Product& product) {
    if (product.group >= done) return false;
    for (const Registers& operand : product.operands) CheckRegisters(operand, place);
    for (int lane = 0; lane < kLanes; ++lane) {
      float* const c = product.c[static_cast<size_t>(lane)];
      for (int n = 0; n < product.columns / 8; ++n) {
        for (int e = 0; e < 4; ++e) {
          if (BitsOf(c[4 * n + e]) != kInFlight) Fail("writes the sums of a product", place);
          const int row = lane / 4 + e / 2 * 8;
          c[4 * n + e] = product.sums[static_cast<size_t>(16 * n + row)]
                                     [static_cast<size_t>(2 * (lane % 4) + e % 2)];
        }
      }
    }
    return true;
  });
  const int first = state.thread / kLanes * kLanes;
  for (int t = first; t < first + kLanes; ++t) {
    int& seen = views_[static_cast<size_t>(t)].of(2 * threads_ + t / kLanes);
    seen = std::max(seen, done);
  }
}

float AsynchronousState::Element(uint32 address, int type, const std::vector<int>& fenced,
                                 Place place) {
  const unsigned char* const at = state.shared + (address - kSharedBase);
  Shadow& s = *ShadowOf(at, 2, place);
  if (s.in_barrier) Fail("a product reads an mbarrier", place);
  if (!s.written) Fail("a product reads unwritten memory", place);
  if (fenced[static_cast<size_t>(s.writer)] < s.write_epoch) {
    Fail("a product reads memory that is written without a proxy fence", place);
  }
  const int warp = state.thread / kLanes;
  AddReader(s, 2 * threads_ + warp, warps_[static_cast<size_t>(warp)].committed + 1);
  uint16 bits;
  std::memcpy(&bits, at, sizeof(bits));
  return Widen(bits, type);
}

void AsynchronousState::Issue(const std::array<const WgmmaCall*, kLanes>& calls, Place place) {
  Warp& warp = Mine();
  const WgmmaCall& call = *calls[0];
  for (const WgmmaCall* other : calls) {
    if (other->columns != call.columns || other->left != call.left || other->right != call.right ||
        other->adds != call.adds) {
      Fail("the lanes of a warp execute different products", place);
    }
  }
  if (call.columns % 8 != 0 || call.columns < 8 || call.columns > 256) {
    Fail("a product of " + std::to_string(call.columns) + " columns", place);
  }
  if (!warp.fenced) Fail("no fence precedes the products", place);
  Record({place.line(), call.left, call.right}, place);

  // Registers must not have been written since the last fence.
  const auto registers_of = [&](auto member, size_t bytes) {
    Registers registers{{}, bytes, false, {}};
    for (size_t lane = 0; lane < kLanes; ++lane) registers.of[lane] = (*calls[lane]).*member;
    return registers;
  };
  const auto check_known = [&](const Registers& registers) {
    for (Registers& known : warp.known) {
      if (known.of[0] != registers.of[0] || known.bytes != registers.bytes) continue;
      if (known.fenced) CheckRegisters(known, place);
      return;
    }
    warp.known.push_back(registers);
  };
  Product* product = nullptr;
  for (Product& pending : warp.pending) {
    if (pending.c[0] != call.c) continue;
    if (pending.columns != call.columns) Fail("products of other sizes share sums", place);
    product = &pending;
  }
  const auto blocks = static_cast<size_t>(call.columns / 8);
  if (product == nullptr) {
    check_known(registers_of(&WgmmaCall::c, 16 * blocks));
    product = &warp.pending.emplace_back();
    product->columns = call.columns;
    product->sums.resize(16 * blocks);
    for (size_t lane = 0; lane < kLanes; ++lane) {
      float* const c = product->c[lane] = calls[lane]->c;
      for (size_t n = 0; n < blocks; ++n) {
        for (size_t e = 0; e < 4; ++e) {
          product->sums[16 * n + lane / 4 + e / 2 * 8][2 * (lane % 4) + e % 2] = c[4 * n + e];
          c[4 * n + e] = FromBits(kInFlight);
        }
      }
    }
  }
  product->group = warp.committed;

  // What all lanes know to be visible to products.
  const auto first = static_cast<size_t>(state.thread / kLanes * kLanes);
  std::vector<int> fenced = views_[first].fenced;
  for (size_t t = first; t < first + kLanes; ++t) {
    for (size_t n = 0; n < fenced.size(); ++n) fenced[n] = std::min(fenced[n], views_[t].fenced[n]);
  }
  float a[16][16];
  if (call.a != nullptr) {
    Registers operand = registers_of(&WgmmaCall::a, sizeof(uint32[4]));
    check_known(operand);
    operand.Read(&operand.values);
    product->operands.push_back(std::move(operand));
    for (size_t lane = 0; lane < kLanes; ++lane) {
      for (size_t n = 0; n < 4; ++n) {
        for (size_t e = 0; e < 2; ++e) {
          a[lane / 4 + n % 2 * 8][2 * (lane % 4) + n / 2 * 8 + e] =
              Widen(static_cast<uint16>(calls[lane]->a[n] >> (16 * e)), call.type);
        }
      }
    }
  } else {
    const int row = 16 * (state.thread / kLanes % kWarpsInGroup);
    for (int r = 0; r < 16; ++r) {
      for (int k = 0; k < 16; ++k) {
        a[r][k] = Element(ElementOfDescriptor(call.left, row + r, k, false, place), call.type,
                          fenced, place);
      }
    }
  }
  for (size_t n = 0; n < blocks; ++n) {
    float b[16][8];
    for (int k = 0; k < 16; ++k) {
      for (int c = 0; c < 8; ++c) {
        b[k][c] = Element(ElementOfDescriptor(call.right, static_cast<int>(8 * n) + c, k,
                                              call.a != nullptr, place),
                          call.type, fenced, place);
      }
    }
    for (size_t r = 0; r < 16; ++r) {
      float sum[8] = {};
      auto& sums = product->sums[16 * n + r];
      if (call.adds) std::copy(sums.begin(), sums.end(), sum);
      // Cuts off one bit later than mma.sync, so that no test relies on equal bits.
      AddCutOff(sum, a[r], b, 16, 25);
      std::copy(sum, sum + 8, sums.begin());
    }
  }
}

namespace {

void IssueOfWarp(const Slot* in, Slot* /*out*/, int /*argument*/) {
  std::array<const WgmmaCall*, kLanes> calls;
  for (size_t lane = 0; lane < kLanes; ++lane) {
    calls[lane] = static_cast<const WgmmaCall*>(in[lane].row);
  }
  const Place place = block->warps[static_cast<size_t>(state.thread / kLanes)].place;
  State(place).Issue(calls, place);
}
void FenceOfWarp(const Slot* /*in*/, Slot* /*out*/, int /*argument*/) {
  const Place place = block->warps[static_cast<size_t>(state.thread / kLanes)].place;
  State(place).FenceProducts(place);
}
void CommitOfWarp(const Slot* /*in*/, Slot* /*out*/, int /*argument*/) {
  const Place place = block->warps[static_cast<size_t>(state.thread / kLanes)].place;
  State(place).CommitProducts(place);
}
void WaitOfWarp(const Slot* /*in*/, Slot* /*out*/, int groups) {
  const Place place = block->warps[static_cast<size_t>(state.thread / kLanes)].place;
  State(place).WaitForProducts(groups, place);
}

}  // namespace

uint32 Address(const void* shared) {
  return kSharedBase +
         static_cast<uint32>(static_cast<const unsigned char*>(shared) - state.shared);
}

void InitMbarrier(void* at, int count, Place place) { State(place).Init(at, count, place); }
void ArriveAt(void* at, Place place) { State(place).Arrive(at, place); }
void ArriveWithCopies(void* at, Place place) { State(place).ArriveWithCopies(at, place); }
void WaitForPhase(void* at, int parity, Place place) { State(place).Wait(at, parity, place); }
void NamedSync(int id, int threads, Place place) {
  State(place).NamedSync(id, threads, true, place);
}
void NamedArrive(int id, int threads, Place place) {
  State(place).NamedSync(id, threads, false, place);
}
void ProxyFence() { State(Place::current()).Fence(); }
void ChangeRegisters(int count, bool more, Place place) {
  State(place).ChangeRegisters(count, more, place);
}
void WgmmaFence(Place place) { Meet({}, FenceOfWarp, 0, place); }
void WgmmaCommit(Place place) { Meet({}, CommitOfWarp, 0, place); }
void WaitForGroups(int groups, Place place) { Meet({}, WaitOfWarp, groups, place); }
void IssueWgmma(const WgmmaCall& call, Place place) {
  Slot slot{};
  slot.row = &call;
  Meet(slot, IssueOfWarp, 0, place);
}

// From the PTX manual, "Matrix Descriptor Format" and "Strides": the start, the leading dimension
// and the stride dimension are in units of 16 bytes; with the 128-byte swizzle, the 16-byte pieces
// of each 1024 bytes are exchanged.
uint32 ElementOfDescriptor(uint64 descriptor, int n, int k, bool transposed, Place place) {
  const auto field = [descriptor](int first, int bits) {
    return static_cast<uint32>(descriptor >> first) & ((1u << bits) - 1);
  };
  const uint32 start = 16 * field(0, 14);
  const uint32 leading = 16 * field(16, 14);
  const uint32 stride = 16 * field(32, 14);
  constexpr uint32 k128ByteSwizzle = 1;
  if (field(62, 2) != k128ByteSwizzle) Fail("a descriptor without the 128-byte swizzle", place);
  if (field(49, 3) != 0 || start / 128 % 8 != 0) {
    Fail("a descriptor whose start is not aligned to 1024 bytes", place);
  }
  if (field(14, 2) != 0 || field(30, 2) != 0 || field(46, 3) != 0 || field(52, 10) != 0) {
    Fail("a descriptor with unknown bits", place);
  }
  const auto row = static_cast<uint32>(transposed ? k : n);
  const auto column = static_cast<uint32>(transposed ? n : k);
  // Rows of 128 bytes, in groups of eight; `leading` separates blocks of 64 columns.
  const uint32 straight =
      start + row / 8 * stride + row % 8 * 128 + column / 64 * leading + column % 64 * 2;
  return straight ^ (straight >> 7 & 7) << 4;
}

}  // namespace gnomon::device
