// The bound to which finite biases are clamped. CPU and GPU kernels share this file, so it has no
// includes.
#ifndef GNOMON_SRC_BASE_MOST_BIAS_H_
#define GNOMON_SRC_BASE_MOST_BIAS_H_

namespace gnomon {

// With this limit, a sum of several biases, in log2 units and times a temperature of up to 10, is
// finite.
// Clamping is needed because programs often mask keys with the lowest finite number.
constexpr float kMostBias = 1e37f;

}  // namespace gnomon

#endif  // GNOMON_SRC_BASE_MOST_BIAS_H_
