// Bounds the speed of attention with many threads on a machine that has few cores. Records the
// tasks of each call on one core, simulates their order on many workers (task_simulation.h), and
// writes a Markdown table.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <utility>
#include <vector>

#include "gnomon/attention.h"
#include "task_simulation.h"

namespace gnomon::benchmarks {
namespace {

constexpr std::array kWorkers = {16, 64, 128};
// The time that PyTorch's pool takes to start and end a loop.
constexpr double kSecondsPerLoop = 10e-6;
constexpr int64_t kHeads = 8;
constexpr int64_t kDim = 64;

// Causal attention with random tokens; with `learned_bias`, also a bias by offset and its gradient.
class Call {
 public:
  Call(const PairFunction& function, int64_t batch, int64_t length, bool learned_bias)
      : function_(function), tokens_(batch * kHeads * length * kDim) {
    std::mt19937 generator(0);
    std::normal_distribution<float> normal;
    for (std::vector<float>* x : {&q_, &k_, &v_, &d_o_}) {
      x->resize(static_cast<size_t>(tokens_));
      for (float& element : *x) element = normal(generator);
    }
    for (std::vector<float>* x : {&o_, &d_q_, &d_k_, &d_v_}) x->resize(q_.size());
    const int64_t rows = tokens_ / kDim;
    lse_.resize(static_cast<size_t>(rows));
    statistics_.resize(static_cast<size_t>(3 * rows));
    const std::array<int64_t, 3> stride = {kHeads * length * kDim, length * kDim, kDim};
    input_.shape = {batch, kHeads, kHeads, length, length, kDim, kDim};
    input_.x = {q_.data(), stride};
    input_.y = {k_.data(), stride};
    input_.v = {v_.data(), stride};
    input_.factor = factor_.data();
    input_.mask.right = 0;
    output_ = {{o_.data(), stride}, lse_.data(), statistics_.data()};
    backward_.o = {o_.data(), stride};
    backward_.lse = lse_.data();
    backward_.d_o = {d_o_.data(), stride};
    backward_.statistics = statistics_.data();
    gradient_.x = {d_q_.data(), stride};
    gradient_.y = {d_k_.data(), stride};
    gradient_.v = {d_v_.data(), stride};
    if (!learned_bias) return;
    bias_.resize(static_cast<size_t>(kHeads * (2 * length - 1)));
    d_bias_.resize(bias_.size());
    input_.bias.table = bias_.data();
    gradient_.bias.table = d_bias_.data();
  }

  void Forward(const Executor& executor) { function_.forward(input_, output_, executor); }
  void Backward(const Executor& executor) {
    function_.backward(input_, backward_, gradient_, executor);
  }

 private:
  const PairFunction& function_;
  int64_t tokens_;
  std::vector<float> q_, k_, v_, o_, d_o_, d_q_, d_k_, d_v_, lse_, statistics_, bias_, d_bias_;
  std::vector<float> factor_ = std::vector<float>(kHeads, 1 / std::sqrt(float{kDim}));
  AttentionInput<float> input_;
  AttentionOutput<float> output_;
  AttentionBackwardInput<float> backward_;
  AttentionGradient<float> gradient_;
};

// The shortest times of several recordings, task by task, of a call planned for this many workers.
// While a Recorder exists, the executor runs nothing: all tasks run on this thread.
Recording Record(const std::function<void(const Executor&)>& run, int workers) {
  const ThreadExecutor executor(workers);
  {
    const Recorder ignored;
    run(executor);  // allocates memory
  }
  constexpr double kEnough = 1;
  Recording least;
  double total = 0;
  for (int repeat = 0; repeat < 9 && total < kEnough; ++repeat) {
    Recorder recorder;
    run(executor);
    Recording recording = recorder.Finish();
    total += Simulate(recording, 1, 0);
    if (repeat == 0) {
      least = std::move(recording);
    } else {
      least.TakeLeast(recording);
    }
  }
  return least;
}

void WriteRow(const char* what, int64_t batch, int64_t length,
              const std::function<void(const Executor&)>& run) {
  // Plans for many workers may also be the fastest on one.
  double alone = Simulate(Record(run, 1), 1, 0);
  std::vector<double> seconds;
  for (const int workers : kWorkers) {
    const Recording recording = Record(run, workers);
    alone = std::min(alone, Simulate(recording, 1, 0));
    seconds.push_back(Simulate(recording, workers, kSecondsPerLoop));
  }
  std::printf("| %s | %lld | %lld | %.2f |", what, static_cast<long long>(batch),
              static_cast<long long>(length), 1e3 * alone);
  for (const double with : seconds) std::printf(" %.1f |", alone / with);
  std::printf("\n");
  std::fflush(stdout);
}

int Main(int64_t longest) {
  std::printf("| pass | B | L | ms on one core |");
  for (const int workers : kWorkers) std::printf(" %d threads |", workers);
  std::printf("\n| :-- | --: | --: | --: | --: | --: | --: |\n");
  const PairFunction& dot = FindPairFunction("dot");
  for (const int64_t batch : {1, 8}) {
    for (int64_t length = 512; length * batch <= longest; length *= 2) {
      Call call(dot, batch, length, /*learned_bias=*/false);
      WriteRow("forward", batch, length, [&](const Executor& on) { call.Forward(on); });
      WriteRow("backward", batch, length, [&](const Executor& on) { call.Backward(on); });
      Call learned(dot, batch, length, /*learned_bias=*/true);
      learned.Forward(SerialExecutor());
      WriteRow("backward, learned bias", batch, length,
               [&](const Executor& on) { learned.Backward(on); });
    }
  }
  return 0;
}

}  // namespace
}  // namespace gnomon::benchmarks

int main(int argc, char** argv) {
  return gnomon::benchmarks::Main(argc > 1 ? std::atoll(argv[1]) : 16384);
}
