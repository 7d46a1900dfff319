// The bound to which finite biases are clamped. Shared by CPU and GPU kernels, so it includes
// nothing.
#ifndef GNOMON_SRC_BASE_MOST_BIAS_H_
#define GNOMON_SRC_BASE_MOST_BIAS_H_

namespace gnomon {

// With this limit, sums of several biases are finite in log2 units and with temperatures up to 10.
// Clamping is needed because programs often mask keys with the lowest finite number.
constexpr float kMostBias = 1e37f;

}  // namespace gnomon

#endif  // GNOMON_SRC_BASE_MOST_BIAS_H_
