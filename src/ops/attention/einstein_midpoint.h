// The values of the aggregation einstein_midpoint: the mean of points of the Klein ball, weighted
// by their Lorentz factors (Gulcehre et al. 2019, section 3.3).
#ifndef GNOMON_OPS_ATTENTION_EINSTEIN_MIDPOINT_H_
#define GNOMON_OPS_ATTENTION_EINSTEIN_MIDPOINT_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace gnomon {

// The logarithms of the Lorentz factors of values (B, Hkv, Lk, Dv) per query head: (B, H, Lk),
// which are added to the scores.
at::Tensor LogLorentzFactor(const at::Tensor& v, int64_t heads);

// Values times their factors, with the factors as an additional column (B, Hkv, Lk, Dv + 1).
at::Tensor WeighValues(const at::Tensor& v);

// Divides the output by its last column, the sum of the factors, and adjusts lse and the second
// statistic, the sum of a row's weights.
void UnweighValues(at::Tensor& o, at::Tensor& lse, at::Tensor& statistics);

}  // namespace gnomon

#endif  // GNOMON_OPS_ATTENTION_EINSTEIN_MIDPOINT_H_
