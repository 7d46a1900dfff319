// What finite biases beyond count as: shared by kernels of the CPU and of GPUs, and so without any
// include.
#ifndef GNOMON_SRC_BASE_MOST_BIAS_H_
#define GNOMON_SRC_BASE_MOST_BIAS_H_

namespace gnomon {

// So that they stay finite in units of log2, several of them added and with a temperature of up to
// 10: many write the least number there is to hide a key.
constexpr float kMostBias = 1e37f;

}  // namespace gnomon

#endif  // GNOMON_SRC_BASE_MOST_BIAS_H_
