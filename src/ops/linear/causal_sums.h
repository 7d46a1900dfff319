// The operators gnomon::causal_sums and gnomon::causal_linear, called through the PyTorch
// dispatcher.
#ifndef GNOMON_OPS_LINEAR_CAUSAL_SUMS_H_
#define GNOMON_OPS_LINEAR_CAUSAL_SUMS_H_

#include <ATen/core/Tensor.h>

#include <string_view>
#include <tuple>

namespace gnomon {

// The name of the function in error messages.
inline constexpr const char* kLinearAttention = "gnomon.linear_attention";

// Returns sum_j (x_i . y_j) z_j over j <= i, or over j >= i if reverse, of shape (B, H, L, E), for
// x (B, H, L, D), y (B, Hkv, L, D) and z (B, Hkv, L, E).
at::Tensor CallCausalSums(const at::Tensor& x, const at::Tensor& y, const at::Tensor& z,
                          bool reverse);

// Returns o and the denominators (B, H, L, 1) of causal linear attention with the feature map elu
// or relu. Rows of o whose denominator is 0 are 0.
std::tuple<at::Tensor, at::Tensor> CallCausalLinear(const at::Tensor& q, const at::Tensor& k,
                                                    const at::Tensor& v, std::string_view feature);

// elu(x) + 1 without cancellation, or relu(x).
at::Tensor Features(const at::Tensor& x, std::string_view feature);

}  // namespace gnomon

#endif  // GNOMON_OPS_LINEAR_CAUSAL_SUMS_H_
