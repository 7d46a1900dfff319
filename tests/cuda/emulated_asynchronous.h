// The state of an emulated block whose warps run apart (emulated_wgmma.h): vector clocks of its
// threads, copies in flight, barriers, and products in flight.
#ifndef GNOMON_TESTS_CUDA_EMULATED_ASYNCHRONOUS_H_
#define GNOMON_TESTS_CUDA_EMULATED_ASYNCHRONOUS_H_

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "emulated_block.h"

namespace gnomon::device {

// What a thread has seen of the agents' accesses: for each agent, the clock of the last one. The
// agents are the threads, each thread's copies, and each warp's products.
struct View {
  explicit View(int agents = 0) : all(static_cast<size_t>(agents)), fenced(all) {}
  void Join(const View& other);
  int& of(int agent) { return all[static_cast<size_t>(agent)]; }

  std::vector<int> all;
  std::vector<int> fenced;  // the part that products can see: a proxy fence followed
};

class AsynchronousState {
 public:
  AsynchronousState(int threads, bool early);

  // Accesses by the running thread.
  void CheckRead(Shadow& s, Place place);
  void CheckWrite(Shadow& s, Place place);
  void StartCopy(AsyncCopy& copy, Shadow* first, Place place);
  // Waits for the thread's copies up to a number.
  void FinishCopies(int number);
  // The last thread or lane has arrived.
  void BarrierOfAll();
  void BarrierOfWarp();
  void Fence();
  void ChangeRegisters(int count, bool more, Place place);

  void Init(void* at, int count, Place place);
  void Arrive(void* at, Place place);
  void ArriveWithCopies(void* at, Place place);
  void Wait(void* at, int parity, Place place);
  void NamedSync(int id, int threads, bool waits, Place place);

  // Products of the running warp.
  void FenceProducts(Place place);
  void CommitProducts(Place place);
  void WaitForProducts(int groups, Place place);
  void Issue(const std::array<const WgmmaCall*, kLanes>& calls, Place place);

  // Lets some copies land; all of them if `all`. Returns whether there were any.
  bool Land(bool all);
  // The running thread, or all threads, have ended.
  void EndThread() const;
  void EndBlock() const;

 private:
  struct Flight {
    AsyncCopy copy;
    int thread;
  };
  struct Arrival {
    void* at;
    int thread;
    int number;  // of the last copy that it waits for
  };
  struct Mbarrier {
    int count = 0;
    int pending = 0;
    int completed = 0;  // phases
    int initialiser = 0;
    int clock = 0;
    View arriving, seen;
    std::map<int, int> next;  // the phase for which a thread waits next
  };
  struct NamedBarrier {
    int size = 0;
    int arrived = 0;
    int held = 0;
    std::shared_ptr<View> view;
  };
  // Registers that products have used, of all lanes, and their values at the last fence.
  struct Registers {
    std::array<const void*, kLanes> of;
    size_t bytes;
    bool fenced = false;
    std::vector<unsigned char> values;

    void Read(std::vector<unsigned char>* to) const;
  };
  struct Product {
    std::array<float*, kLanes> c;
    int columns;
    int group;
    std::vector<std::array<float, 8>> sums;  // 16 rows for each 8 columns
    std::vector<Registers> operands;
  };
  struct Operation {
    int line;
    uint64 left, right;

    bool operator==(const Operation&) const = default;
  };
  struct Warp {
    bool fenced = false;
    int committed = 0;
    std::vector<Product> pending;
    std::vector<Registers> known;
    std::vector<Operation> operations;
    int registers = 0;
  };

  bool IsOrdered(int thread, int agent, int clock) const;
  int Now() const;
  void AddReader(Shadow& s, int agent, int clock);
  void CheckOverwrite(Shadow& s, Place place);
  void Release(View* to, int thread);
  Mbarrier& Find(void* at, Place place);
  void Complete(Mbarrier& barrier);
  void LandOne(const Flight& flight);
  Warp& Mine();
  void Record(const Operation& operation, Place place);
  // Reads an element of shared memory by a product of the running warp.
  float Element(uint32 address, int type, const std::vector<int>& fenced, Place place);
  void CheckRegisters(const Registers& registers, Place place) const;

  int threads_;
  bool early_;
  std::vector<View> views_;
  std::vector<std::vector<std::pair<int, int>>> readers_;
  std::vector<int> free_readers_;
  std::vector<Flight> flights_;
  std::vector<Arrival> arrivals_;
  std::vector<std::vector<char>> landed_;  // of each thread's copies
  std::vector<int> landed_prefix_;
  std::map<const void*, Mbarrier> barriers_;
  std::array<NamedBarrier, 16> named_;
  std::vector<Warp> warps_;
  int most_registers_;  // of each thread at the start
  uint32_t random_ = 1;
};

}  // namespace gnomon::device

#endif  // GNOMON_TESTS_CUDA_EMULATED_ASYNCHRONOUS_H_
