// Memory management and size rounding shared by the kernels of all instruction sets.
#ifndef GNOMON_SRC_CPU_WORKSPACE_H_
#define GNOMON_SRC_CPU_WORKSPACE_H_

#include <cstddef>
#include <cstdint>
#include <utility>

#include "hwy/aligned_allocator.h"

namespace gnomon {

// An uninitialised, aligned array of floats. The thread that frees an array caches its memory for
// later calls, up to 32 MiB in total. Without the cache, calls with short sequences would spend a
// tenth of their time on page faults.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t size) { Reset(size); }
  Buffer(Buffer&& other) noexcept : block_(std::exchange(other.block_, {})) {}
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Buffer& operator=(Buffer&&) = delete;
  ~Buffer() { Free(); }

  void Reset(int64_t size);
  float* data() const { return block_.memory.get(); }
  explicit operator bool() const { return block_.memory != nullptr; }

  struct Block {
    hwy::AlignedFreeUniquePtr<float[]> memory;
    size_t size = 0;
  };

 private:
  void Free();

  Block block_;
};

// An uninitialised, aligned array of doubles, cached in the same way.
class DoubleBuffer {
 public:
  DoubleBuffer() = default;
  explicit DoubleBuffer(int64_t size) : floats_(2 * size) {}

  void Reset(int64_t size) { floats_.Reset(2 * size); }
  double* data() const { return reinterpret_cast<double*>(floats_.data()); }
  explicit operator bool() const { return static_cast<bool>(floats_); }

 private:
  Buffer floats_;
};

inline int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t RoundUp(int64_t a, int64_t b) { return DivideUp(a, b) * b; }

}  // namespace gnomon

#endif  // GNOMON_SRC_CPU_WORKSPACE_H_
