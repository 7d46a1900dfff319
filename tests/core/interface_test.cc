// Tests the parts of the interface other than numerical results: error messages, names, instruction
// sets and executors.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "core/dual_tables.h"
#include "core/engine.h"
#include "core/peak.h"
#include "core/random_problem.h"
#include "gmock/gmock.h"
#include "gnomon/attention.h"
#include "gnomon/table_layout.h"
#include "gtest/gtest.h"

namespace gnomon::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Returns the message of the Error that body throws.
template <class Body>
std::string Message(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

// All arrays of a small valid call; each test invalidates one.
template <class T>
struct Call {
  explicit Call(const char* name) : function(FindPairFunction(name)) {
    in.shape = {1, 2, 1, 2, 3, 2, 2};
    const View<T> view = {memory.data(), {8, 4, 2}};
    const View<const T> const_view = {memory.data(), {8, 4, 2}};
    in.x = in.y = in.v = saved.o = saved.d_o = const_view;
    out.o = gradient.x = gradient.y = gradient.v = view;
    in.row_scalars = in.column_scalars = in.head_scalars = in.factor = saved.lse = memory.data();
    out.lse = memory.data();
  }
  void Forward() { AttentionForward(function, in, out); }
  void Backward() { AttentionBackward(function, in, saved, gradient); }

  std::vector<T> memory = std::vector<T>(64);
  const PairFunction& function;
  AttentionInput<T> in;
  AttentionOutput<T> out;
  AttentionBackwardInput<T> saved;
  AttentionGradient<T> gradient;
};

template <class T>
class ErrorTest : public ::testing::Test {};
using Types = ::testing::Types<float, double>;
TYPED_TEST_SUITE(ErrorTest, Types);

TYPED_TEST(ErrorTest, NothingIsWrongWithTheCall) {
  for (const char* name : {"dot", "penumbral"}) {
    EXPECT_NO_THROW(Call<TypeParam>(name).Forward());
    EXPECT_NO_THROW(Call<TypeParam>(name).Backward());
  }
}

TYPED_TEST(ErrorTest, InputsAreChecked) {
  using C = Call<TypeParam>;
  struct Case {
    const char* message;
    std::function<void(C&)> spoil;
  };
  const Case cases[] = {
      {"attention: batch is -1; expected at least 0", [](C& c) { c.in.shape.batch = -1; }},
      {"attention: heads is -2; expected at least 0", [](C& c) { c.in.shape.heads = -2; }},
      {"attention: key_heads is -1; expected at least 0", [](C& c) { c.in.shape.key_heads = -1; }},
      {"attention: queries is -7; expected at least 0", [](C& c) { c.in.shape.queries = -7; }},
      {"attention: keys is -1; expected at least 0", [](C& c) { c.in.shape.keys = -1; }},
      {"attention: dim is -1; expected at least 0", [](C& c) { c.in.shape.dim = -1; }},
      {"attention: dim is 0; expected at least 1", [](C& c) { c.in.shape.dim = 0; }},
      {"attention: value_dim is -1; expected at least 0", [](C& c) { c.in.shape.value_dim = -1; }},
      {"attention: heads is 3; expected a multiple of key_heads, 2",
       [](C& c) {
         c.in.shape.heads = 3;
         c.in.shape.key_heads = 2;
       }},
      {"attention: heads is 2; expected a multiple of key_heads, 0",
       [](C& c) { c.in.shape.key_heads = 0; }},
      {"attention: the number of queries or keys is too large; expected a number below 2^30",
       [](C& c) { c.in.shape.queries = int64_t{1} << 31; }},
      {"attention: the number of queries or keys is too large; expected a number below 2^30",
       [](C& c) { c.in.shape.keys = int64_t{1} << 40; }},
      {"attention: x is null", [](C& c) { c.in.x.data = nullptr; }},
      {"attention: y is null", [](C& c) { c.in.y.data = nullptr; }},
      {"attention: v is null", [](C& c) { c.in.v.data = nullptr; }},
      {"attention: factor is null", [](C& c) { c.in.factor = nullptr; }},
      {"attention: one of query_segments and key_segments is null; expected both or neither",
       [](C& c) {
         static constexpr int32_t kSegment = 0;
         c.in.mask.query_segments = &kSegment;
       }},
      {"attention: relative has a table without a layout; expected both",
       [](C& c) { c.in.relative.keys = c.memory.data(); }},
      {"attention: relative has a table without a layout; expected both",
       [](C& c) { c.in.relative.values = c.memory.data(); }},
      {"attention: relative dim is 0; expected at least 1",
       [](C& c) {
         static const KeyLayout layout(1);
         c.in.relative.layout = &layout;
         c.in.relative.keys = c.memory.data();
       }},
      {"attention: relative query is null",
       [](C& c) {
         static const KeyLayout layout(1);
         c.in.relative.layout = &layout;
         c.in.relative.keys = c.memory.data();
         c.in.relative.dim = 1;
       }},
      {"attention: relative has a table without a layout; expected both",
       [](C& c) { c.in.relative.queries = c.memory.data(); }},
      {"attention: relative key_dim is 0; expected at least 1",
       [](C& c) {
         static const OffsetLayout layout(0, 0, OffsetLayout::Far::kClip);
         c.in.relative.layout = &layout;
         c.in.relative.queries = c.memory.data();
       }},
      {"attention: relative key is null",
       [](C& c) {
         static const OffsetLayout layout(0, 0, OffsetLayout::Far::kClip);
         c.in.relative.layout = &layout;
         c.in.relative.queries = c.memory.data();
         c.in.relative.key_dim = 1;
       }},
      {"attention: relative has queries and a layout that is not indexed by offset; expected an "
       "OffsetLayout",
       [](C& c) {
         static const KeyLayout layout(1);
         c.in.relative.layout = &layout;
         c.in.relative.queries = c.memory.data();
         c.in.relative.key.data = c.memory.data();
         c.in.relative.key_dim = 1;
       }},
      {"attention: one of key_bias_low and key_bias_base is null; expected both or "
       "neither",
       [](C& c) { c.in.key_bias_base = c.memory.data(); }},
      {"attention: key_bias_low is given without key_bias; expected both",
       [](C& c) { c.in.key_bias_low = c.in.key_bias_base = c.memory.data(); }},
      {"attention: dropout is 1.500000; expected a probability from 0 to 1",
       [](C& c) { c.in.dropout.rate = 1.5; }},
      {"attention: dropout is nan; expected a probability from 0 to 1",
       [](C& c) { c.in.dropout.rate = std::nan(""); }},
      {"attention: chunks contains -1; expected 0 to 2^30 - 1",
       [](C& c) { c.in.mask.chunks.before = -1; }},
      {"attention: chunks contains 1073741824; expected 0 to 2^30 - 1",
       [](C& c) { c.in.mask.chunks.size = int64_t{1} << 30; }},
      {"attention: chunks contains 1073741824; expected 0 to 2^30 - 1",
       [](C& c) { c.in.mask.chunks.after = int64_t{1} << 30; }},
      {"attention: row_scalars is null; the pair function penumbral requires it",
       [](C& c) { c.in.row_scalars = nullptr; }},
      {"attention: column_scalars is null; the pair function penumbral requires it",
       [](C& c) { c.in.column_scalars = nullptr; }},
  };
  for (const Case& test_case : cases) {
    C call("penumbral");
    test_case.spoil(call);
    EXPECT_EQ(Message([&] { call.Forward(); }), test_case.message);
    EXPECT_EQ(Message([&] { call.Backward(); }), test_case.message);
  }
}

TYPED_TEST(ErrorTest, OutputsAreChecked) {
  Call<TypeParam> without_o("dot");
  without_o.out.o.data = nullptr;
  EXPECT_EQ(Message([&] { without_o.Forward(); }), "attention: o is null");
  Call<TypeParam> without_lse("dot");
  without_lse.out.lse = nullptr;
  EXPECT_EQ(Message([&] { without_lse.Forward(); }), "attention: lse is null");
}

TYPED_TEST(ErrorTest, HeadScalarsAreChecked) {
  Call<TypeParam> call("additive");
  call.in.head_scalars = nullptr;
  EXPECT_EQ(Message([&] { call.Forward(); }),
            "attention: head_scalars is null; the pair function additive requires it");
}

TYPED_TEST(ErrorTest, BackwardIsChecked) {
  using C = Call<TypeParam>;
  struct Case {
    const char* message;
    std::function<void(C&)> spoil;
  };
  const Case cases[] = {
      {"attention: o is null", [](C& c) { c.saved.o.data = nullptr; }},
      {"attention: d_o is null", [](C& c) { c.saved.d_o.data = nullptr; }},
      {"attention: lse is null", [](C& c) { c.saved.lse = nullptr; }},
      {"attention: d_bias is given without bias; expected both",
       [](C& c) { c.gradient.bias.table = c.memory.data(); }},
      {"attention: d_bias has a different batch_stride than bias; expected the same",
       [](C& c) {
         c.in.bias.table = c.memory.data();
         c.gradient.bias = {c.memory.data(), 8, nullptr};
       }},
      {"attention: d_key_bias is given without key_bias; expected both",
       [](C& c) { c.gradient.key_bias = c.memory.data(); }},
      {"attention: d_temperature is given without temperature; expected both",
       [](C& c) { c.gradient.temperature = c.memory.data(); }},
      {"attention: d_pair_bias is given without pair_bias; expected both",
       [](C& c) { c.gradient.pair_bias = c.gradient.x; }},
      {"attention: d_pair_bias has rows that share memory; expected separate rows",
       [](C& c) {
         c.in.pair_bias = c.saved.o;
         c.gradient.pair_bias = {c.memory.data(), {8, 4, 0}};
       }},
      {"attention: d_relative_keys is given without relative keys; expected both",
       [](C& c) { c.gradient.relative_keys = c.memory.data(); }},
      {"attention: d_relative_keys is given without relative keys; expected both",
       [](C& c) { c.gradient.relative_query.data = c.memory.data(); }},
      {"attention: d_relative_queries is given without relative queries; expected both",
       [](C& c) { c.gradient.relative_queries = c.memory.data(); }},
      {"attention: d_relative_queries is given without relative queries; expected both",
       [](C& c) { c.gradient.relative_key.data = c.memory.data(); }},
      {"attention: d_relative_values is given without relative values; expected both",
       [](C& c) { c.gradient.relative_values = c.memory.data(); }},
  };
  for (const Case& test_case : cases) {
    C call("dot");
    test_case.spoil(call);
    EXPECT_EQ(Message([&] { call.Backward(); }), test_case.message);
  }
}

TEST(PairFunctionsTest, AreFoundByName) {
  std::vector<std::string> names;
  for (const PairFunction* function : PairFunctions()) {
    EXPECT_EQ(&FindPairFunction(function->name), function);
    names.emplace_back(function->name);
  }
  EXPECT_THAT(
      names, ::testing::IsSupersetOf({"additive", "dot", "entailment", "gaussian", "hyperbolic",
                                      "laplacian", "penumbral", "penumbral_log", "penumbral_square",
                                      "umbral", "umbral_log"}));
  EXPECT_THAT(Message([] { FindPairFunction("cosine"); }),
              ::testing::ContainsRegex(
                  "unknown pair function 'cosine'; known: (.*, )?dot, (.*, )?penumbral_square"));
}

// A library of definitions may have been compiled for a single instruction set.
TEST(EngineTest, RefusesATableForAnotherInstructionSet) {
  PairTable table = {};
  table.target = int64_t{1} << 62;
  const AttentionInput<float> in;
  const GraphInput<float> graph;
  const auto refuses = ::testing::ThrowsMessage<Error>(
      ::testing::HasSubstr("the current instruction set is " + CurrentTarget()));
  EXPECT_THAT([&] { EngineForward(table, in, {}, SerialExecutor()); }, refuses);
  EXPECT_THAT([&] { EngineBackward(table, in, {}, {}, SerialExecutor()); }, refuses);
  EXPECT_THAT([&] { EngineGraphForward(table, graph, {}, SerialExecutor()); }, refuses);
  EXPECT_THAT([&] { EngineGraphBackward(table, graph, {}, {}, SerialExecutor()); }, refuses);
}

TEST(TargetsTest, CanBeChosen) {
  ASSERT_FALSE(Targets().empty());
  for (const std::string& target : Targets()) {
    const ScopedTarget scope(target);
    EXPECT_EQ(CurrentTarget(), target);
  }
  EXPECT_THAT(Message([] { SetTarget("Z80"); }),
              AllOf(HasSubstr("SetTarget: this machine or build does not support the instruction "
                              "set 'Z80'; supported: "),
                    HasSubstr(Targets().back())));
}

// Each test runs in a separate process, in which no target has been chosen yet. Kernels must use
// the target that is chosen first, so the first call must not choose again.
class FirstChoiceTest : public ::testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
  void TearDown() override { unsetenv("GNOMON_TARGET"); }

  [[noreturn]] static void ExitIfTargetIs(const std::string& expected) {
    RandomProblem(FindPairFunction("dot"), {.shape = {1, 1, 1, 2, 3, 4, 5}}).Forward();
    std::exit(CurrentTarget() == expected ? 0 : 1);
  }
};

TEST_F(FirstChoiceTest, IsTheBest) {
  unsetenv("GNOMON_TARGET");
  EXPECT_EXIT(ExitIfTargetIs(Targets().front()), ::testing::ExitedWithCode(0), "");
}

TEST_F(FirstChoiceTest, IsTheCallers) {
  const auto choose = [] {
    SetTarget(Targets().back());
    ExitIfTargetIs(Targets().back());
  };
  EXPECT_EXIT(choose(), ::testing::ExitedWithCode(0), "");
}

TEST_F(FirstChoiceTest, IsThatOfTheEnvironment) {
  setenv("GNOMON_TARGET", Targets().back().c_str(), 1);
  EXPECT_EXIT(ExitIfTargetIs(Targets().back()), ::testing::ExitedWithCode(0), "");
}

// A table for derivatives may be looked up before any other call.
TEST_F(FirstChoiceTest, IsMadeBeforeATableIsFound) {
  setenv("GNOMON_TARGET", Targets().back().c_str(), 1);
  const auto find = [](const auto& find_table, bool must_exist) {
    const PairFunction& gaussian = FindPairFunction("gaussian");
    const auto* first = find_table(gaussian);
    const bool is_same = CurrentTarget() == Targets().back() && find_table(gaussian) == first;
    std::exit((first != nullptr || !must_exist) && is_same ? 0 : 1);
  };
  EXPECT_EXIT(find(FindDualTable<float>, true), ::testing::ExitedWithCode(0), "");
  EXPECT_EXIT(find(FindDualTable<double>, HasDoubles()), ::testing::ExitedWithCode(0), "");
}

TEST_F(FirstChoiceTest, OfTheEnvironmentMustExist) {
  setenv("GNOMON_TARGET", "Z80", 1);
  const auto report = [] {
    const std::string message = Message([] { CurrentTarget(); });
    std::exit(message.find("does not support the instruction set 'Z80'") != std::string::npos ? 0
                                                                                              : 1);
  };
  EXPECT_EXIT(report(), ::testing::ExitedWithCode(0), "");
}

TEST(PeakTest, IsARateOfAllWorkers) {
  for (const double seconds : {0.0, -1.0, std::nan("")}) {
    EXPECT_EQ(Message([&] { MeasurePeakFlops(seconds, SerialExecutor()); }),
              "MeasurePeakFlops: seconds must be positive");
  }
  OnEveryTarget([] {
    EXPECT_GT(MeasurePeakFlops(0.02, SerialExecutor()), 1e7);
    EXPECT_GT(MeasurePeakFlops(0.02, ThreadExecutor(2)), 1e7);
  });
}

TEST(SerialExecutorTest, RunsInOrderOnTheCallingThread) {
  EXPECT_EQ(SerialExecutor().max_workers(), 1);
  std::vector<int> workers;
  SerialExecutor().Run(3, [&](int worker) { workers.push_back(worker); });
  EXPECT_THAT(workers, ElementsAre(0, 1, 2));
}

TEST(ThreadExecutorTest, RunsEveryWorkerOnceAndWaits) {
  EXPECT_EQ(ThreadExecutor(4).max_workers(), 4);
  EXPECT_EQ(ThreadExecutor(0).max_workers(), 1);
  EXPECT_EQ(ThreadExecutor(-3).max_workers(), 1);
  for (const int count : {0, 1, 2, 4}) {
    std::mutex mutex;
    std::vector<int> workers;
    std::set<std::thread::id> threads;
    ThreadExecutor(4).Run(count, [&](int worker) {
      std::this_thread::sleep_for(std::chrono::milliseconds(worker));
      const std::lock_guard lock(mutex);
      workers.push_back(worker);
      threads.insert(std::this_thread::get_id());
    });
    std::sort(workers.begin(), workers.end());
    ASSERT_EQ(workers.size(), static_cast<size_t>(count));
    EXPECT_EQ(threads.size(), static_cast<size_t>(count));
    for (int worker = 0; worker < count; ++worker) EXPECT_EQ(workers[worker], worker);
  }
}

// Runs workers one after the other, in reverse order. Checks that their number is at most
// max_workers(), and records the largest number.
class RecordingExecutor final : public Executor {
 public:
  int max_workers() const override { return 3; }
  void Run(int workers, const std::function<void(int)>& body) const override {
    EXPECT_LE(workers, 3);
    most_ = std::max(most_, workers);
    for (int worker = workers - 1; worker >= 0; --worker) body(worker);
  }
  int most() const { return most_; }

 private:
  mutable int most_ = 0;
};

TEST(ExecutorTest, IsUsedUpToItsWorkersInAnyOrder) {
  const Problem<float> p =
      RandomProblem(FindPairFunction("umbral"), {.shape = {2, 4, 2, 100, 100, 8, 8}});
  const RecordingExecutor executor;
  ExpectSame(p.Run(executor), p.Run());
  EXPECT_EQ(executor.most(), 3);
}

}  // namespace
}  // namespace gnomon::testing
