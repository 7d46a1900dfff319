// The kernels for the cones' token maps, on plain views.
#ifndef GNOMON_SRC_CPU_CONE_MAP_H_
#define GNOMON_SRC_CPU_CONE_MAP_H_

#include <cstdint>

#include "base/cone_map.h"
#include "gnomon/attention.h"

namespace gnomon {

// Forward: maps tokens (B, H, L, D + 1) to x (B, H, L, width), whose D columns are followed by
// zeros, and to scalars (S, B, H, L). Backward (if d_tokens is not null): computes d_tokens (B, H,
// L, D + 1) from d_x and d_scalars; either may be null, which means zeros.
template <class T>
struct MappedCones {
  ConeMap map;
  int64_t batch = 0;
  int64_t heads = 0;
  int64_t rows = 0;
  int64_t columns = 0;  // D
  View<const T> tokens;
  int64_t width = 0;
  T* x = nullptr;
  T* scalars = nullptr;
  const T* d_x = nullptr;
  const T* d_scalars = nullptr;
  T* d_tokens = nullptr;

  int64_t count() const { return batch * heads * rows; }
};

// Maps tokens [begin, end), counted over (B, H, L), with the selected instruction set.
void ConeMapKernel(const MappedCones<float>& cones, int64_t begin, int64_t end);
void ConeMapKernel(const MappedCones<double>& cones, int64_t begin, int64_t end);

}  // namespace gnomon

#endif  // GNOMON_SRC_CPU_CONE_MAP_H_
