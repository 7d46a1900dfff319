#include "ops/operators/executor.h"

#include <ATen/Parallel.h>

namespace gnomon {
namespace {

class Torch final : public Executor {
 public:
  int max_workers() const override { return at::in_parallel_region() ? 1 : at::get_num_threads(); }
  void Run(int workers, const std::function<void(int)>& body) const override {
    at::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
      for (int64_t worker = begin; worker < end; ++worker) body(static_cast<int>(worker));
    });
  }
};

}  // namespace

const Executor& TorchExecutor() {
  static const Torch executor;
  return executor;
}

}  // namespace gnomon
