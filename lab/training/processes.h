// The processes that train a model together; each computes its own rows of every batch.
#ifndef GNOMON_TRAINING_PROCESSES_H_
#define GNOMON_TRAINING_PROCESSES_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace gnomon::lab {

// Collective operations. All processes must call them in the same order, with contiguous tensors of
// the same shape and dtype. This base class implements a single process.
class Processes {
 public:
  Processes() = default;
  virtual ~Processes() = default;
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  virtual int64_t rank() const { return 0; }
  virtual int64_t size() const { return 1; }

  // Sums the tensor over all processes, in place. The result is bitwise identical in all processes.
  virtual void AllReduce(const at::Tensor& /*tensor*/) const {}
  // Returns the tensors (...) of all processes in rank order: (size, ...).
  virtual at::Tensor AllGather(const at::Tensor& tensor) const;
  // Broadcasts the tensor of process 0, in place.
  virtual void Broadcast(const at::Tensor& /*tensor*/) const {}

  // Whether the condition is true in any process.
  bool Any(bool here) const;
  // Broadcasts the text of process 0 and returns it.
  std::string BroadcastText(const std::string& text) const;
};

using ProcessesPtr = std::shared_ptr<const Processes>;

// A process group of torch.distributed, identified by its registered name.
class ProcessGroup final : public Processes {
 public:
  ProcessGroup(std::string name, int64_t rank, int64_t size)
      : name_(std::move(name)), rank_(rank), size_(size) {}

  int64_t rank() const override { return rank_; }
  int64_t size() const override { return size_; }
  void AllReduce(const at::Tensor& tensor) const override;
  at::Tensor AllGather(const at::Tensor& tensor) const override;
  void Broadcast(const at::Tensor& tensor) const override;

 private:
  std::string name_;
  int64_t rank_;
  int64_t size_;
};

// The first row, and the number of rows, that process `rank` of `size` processes computes. Rows are
// assigned in rank order, and the numbers of two processes differ by at most one.
int64_t FirstRow(int64_t batch, int64_t rank, int64_t size);
int64_t CountRows(int64_t batch, int64_t rank, int64_t size);

}  // namespace gnomon::lab

#endif  // GNOMON_TRAINING_PROCESSES_H_
