// The context of a call's launches: the kernel parameters that describe its input, the constants
// that its input requires, scratch memory, and the launches themselves.
#ifndef GNOMON_SRC_CUDA_LAUNCH_CONTEXT_H_
#define GNOMON_SRC_CUDA_LAUNCH_CONTEXT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cuda/attention.h"
#include "cuda/backend.h"
#include "cuda/constants.h"
#include "cuda/parameters.h"
#include "gnomon/attention.h"
#include "gnomon/table_layout.h"

namespace gnomon::cuda {

// The compile-time constants of a kernel. Constants that a kernel does not use keep these values.
struct Constants {
#define GNOMON_MEMBER(name) int64_t name = 0;
  GNOMON_CUDA_CONSTANTS(GNOMON_MEMBER)
#undef GNOMON_MEMBER

  std::vector<std::pair<std::string, int64_t>> List() const {
    return {
#define GNOMON_ENTRY(name) {#name, name},
        GNOMON_CUDA_CONSTANTS(GNOMON_ENTRY)
#undef GNOMON_ENTRY
    };
  }
};

inline int64_t Up(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t Padded(int64_t columns) { return std::max<int64_t>(16, Up(columns, 16) * 16); }
inline size_t Size(int64_t n) { return static_cast<size_t>(std::max<int64_t>(n, 0)); }
inline int Int(int64_t n) { return static_cast<int>(n); }

inline Array ToArray(const Tokens& t) {
  return {const_cast<void*>(t.data), {t.stride[0], t.stride[1], t.stride[2]}};
}
inline Array ToArray(const Tensor& t) { return {t.data, {t.stride[0], t.stride[1], t.stride[2]}}; }
template <class T>
Array ToArray(const View<T>& t) {
  return {const_cast<std::remove_const_t<T>*>(t.data), {t.stride[0], t.stride[1], t.stride[2]}};
}

// Describes a layout to the kernels. Returns false if they do not support it.
bool DescribeLayout(const TableLayout& layout, LayoutParameters* to);

class LaunchContext {
 public:
  // The input must be supported (see Unsupported()) and outlive the context.
  LaunchContext(const PairFunction& function, const Input& in, Backend& backend);
  LaunchContext(const LaunchContext&) = delete;
  LaunchContext& operator=(const LaunchContext&) = delete;

  const Input& in() const { return in_; }
  // The number of query heads of the batch, and of their queries.
  int64_t heads() const { return in_.shape.batch * in_.shape.heads; }
  int64_t rows() const { return heads() * in_.shape.queries; }
  int Type() const { return static_cast<int>(in_.x.type); }

  // The argument of all launches. Launch() passes its current value.
  Parameters& parameters() { return p_; }
  // The constants that describe the input.
  const Constants& features() const { return features_; }
  // The constants of row-wise kernels.
  Constants OfRows() const {
    Constants c;
    c.kType = Type();
    c.kWarps = 4;
    c.kRowTiles = 1;
    return c;
  }

  // Returns scratch memory for `count` elements.
  template <class T>
  T* New(size_t count) {
    return static_cast<T*>(backend_.Scratch(std::max<size_t>(count, 1) * sizeof(T)));
  }

  // Whether the rows of all arrays, which have the call's element type, are 16-byte aligned.
  bool Aligned(std::initializer_list<const Array*> arrays) const;

  int64_t BlocksToFill() const { return backend_.BlocksToFill(); }
  bool IsHopper() const { return backend_.IsHopper(); }

  // The kernels that have evaluated pair functions, in the order of their first launch: the name,
  // the rows per block and the rows per tile, such as "forward 128x64". Empty unless LogsCalls().
  const std::string& kernels() const { return kernels_; }

  // Launches a grid of x by y blocks, unless it is empty.
  void Launch(const char* kind, const Constants& c, int64_t x, int64_t y, int shared,
              const char* definition = "");

 private:
  void SetInput(const PairFunction& function);
  void SetFeatures();

  const Input& in_;
  Backend& backend_;
  Constants features_;
  Parameters p_;
  std::string kernels_;
};

}  // namespace gnomon::cuda

#endif  // GNOMON_SRC_CUDA_LAUNCH_CONTEXT_H_
