// The kernel for causal linear sums, on plain views.
#ifndef GNOMON_SRC_CPU_CAUSAL_SUMS_H_
#define GNOMON_SRC_CPU_CAUSAL_SUMS_H_

#include <cstdint>

#include "gnomon/attention.h"

namespace gnomon {

// The feature map applied elementwise to x and y: identity, elu(x) + 1, or max(x, 0).
enum class Feature { kNone, kElu, kRelu };

// Computes out_i = sum_j (x_i . y_j) z_j over j <= i, or over j >= i if `reverse`. The shapes are x
// (B, H, L, D), y (B, Hkv, L, D) and z (B, Hkv, L, E); H is a multiple of Hkv.
struct CausalSums {
  int64_t batch = 0;
  int64_t heads = 0;
  int64_t key_heads = 0;
  int64_t rows = 0;
  int64_t dim = 0;
  int64_t value_dim = 0;
  View<const float> x;
  View<const float> y;
  View<const float> z;
  Feature feature = Feature::kNone;
  bool reverse = false;
  View<float> out;
  // If not null, receives d_i = sum_j x_i . y_j with shape (B, H, L), and out_i is divided by d_i
  // (or set to 0 if d_i = 0).
  float* denominator = nullptr;
};

// Dispatches to the selected instruction set.
void CausalSumsKernel(const CausalSums& sums, const Executor& executor);

}  // namespace gnomon

#endif  // GNOMON_SRC_CPU_CAUSAL_SUMS_H_
