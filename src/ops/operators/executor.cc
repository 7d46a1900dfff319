#include "ops/operators/executor.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <torch/csrc/stable/c/shim.h>

#include <exception>
#include <mutex>

namespace gnomon {
namespace {

class Torch final : public Executor {
 public:
  int max_workers() const override { return at::in_parallel_region() ? 1 : at::get_num_threads(); }
  void Run(int workers, const std::function<void(int)>& body) const override {
    ParallelFor(workers, 1, [&](int64_t first, int64_t last) {
      for (int64_t worker = first; worker < last; ++worker) body(static_cast<int>(worker));
    });
  }
};

struct Work {
  const std::function<void(int64_t, int64_t)>& body;
  std::mutex mutex;
  std::exception_ptr failure;  // the first exception
};

}  // namespace

const Executor& TorchExecutor() {
  static const Torch executor;
  return executor;
}

// Uses PyTorch's C interface, because at::parallel_for is inlined and requires OpenMP in the
// calling library.
void ParallelFor(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  Work work = {.body = body, .mutex = {}, .failure = nullptr};
  const auto call = [](int64_t first, int64_t last, void* of) {
    auto& shared = *static_cast<Work*>(of);
    try {
      shared.body(first, last);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(shared.mutex);
      if (!shared.failure) shared.failure = std::current_exception();
    }
  };
  const AOTITorchError error = torch_parallel_for(0, count, grain, call, &work);
  TORCH_INTERNAL_ASSERT(error == 0, "torch_parallel_for failed");
  if (work.failure) std::rethrow_exception(work.failure);
}

}  // namespace gnomon
