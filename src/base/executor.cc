#include <thread>
#include <vector>

#include "gnomon/attention.h"

namespace gnomon {
namespace {

class Serial final : public Executor {
 public:
  int max_workers() const override { return 1; }
  void Run(int workers, const std::function<void(int)>& body) const override {
    for (int worker = 0; worker < workers; ++worker) body(worker);
  }
};

}  // namespace

const Executor& SerialExecutor() {
  static const Serial executor;
  return executor;
}

void ThreadExecutor::Run(int workers, const std::function<void(int)>& body) const {
  if (workers < 1) return;
  std::vector<std::thread> threads;
  threads.reserve(static_cast<size_t>(workers - 1));
  for (int worker = 1; worker < workers; ++worker) threads.emplace_back(body, worker);
  body(0);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace gnomon
