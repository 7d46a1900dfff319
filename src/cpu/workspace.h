// What the kernels of every instruction set share: memory and the plan of a call.
#ifndef GNOMON_SRC_CPU_WORKSPACE_H_
#define GNOMON_SRC_CPU_WORKSPACE_H_

#include <cstddef>
#include <cstdint>

#include "hwy/aligned_allocator.h"

namespace gnomon {

// Aligned floats, not initialised.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t size) { Reset(size); }
  void Reset(int64_t size) {
    data_ = hwy::AllocateAligned<float>(static_cast<size_t>(size > 0 ? size : 1));
  }
  float* data() const { return data_.get(); }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  hwy::AlignedFreeUniquePtr<float[]> data_;
};

inline int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t RoundUp(int64_t a, int64_t b) { return DivideUp(a, b) * b; }

}  // namespace gnomon

#endif  // GNOMON_SRC_CPU_WORKSPACE_H_
