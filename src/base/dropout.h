// Selects the weights that dropout keeps by hashing the seed and the pair's indices, so that the
// backward pass and all other targets keep the same weights. The kernels apply the same hash to
// many columns at once.
#ifndef GNOMON_SRC_BASE_DROPOUT_H_
#define GNOMON_SRC_BASE_DROPOUT_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "gnomon/attention.h"

namespace gnomon {

// The hash inputs that all columns of a row share.
struct DropoutRow {
  uint32_t first;
  uint32_t second;
};

// Odd constants with good mixing properties, 64 and 32 bits wide.
constexpr uint64_t kDropoutStep = 0x9e3779b97f4a7c15;
constexpr uint32_t kDropoutFirst = 0x7feb352d;
constexpr uint32_t kDropoutSecond = 0x846ca68b;

inline DropoutRow HashRow(uint64_t seed, int64_t b, int64_t h, int64_t i) {
  const auto mix = [](uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
  };
  uint64_t hash = mix(seed + kDropoutStep);
  for (const int64_t index : {b, h, i}) {
    hash = mix(hash + kDropoutStep * (static_cast<uint64_t>(index) + 1));
  }
  return {static_cast<uint32_t>(hash), static_cast<uint32_t>(hash >> 32)};
}

inline uint32_t HashColumn(DropoutRow row, uint32_t j) {
  uint32_t x = j + row.first;
  x = (x ^ (x >> 16)) * kDropoutFirst;
  x = ((x ^ (x >> 15)) + row.second) * kDropoutSecond;
  x = (x ^ (x >> 16)) * kDropoutFirst;
  return x ^ (x >> 15);
}

// Columns whose hash is below this are dropped.
inline uint32_t DropoutThreshold(const Dropout& dropout) {
  return static_cast<uint32_t>(std::min(std::round(dropout.rate * 4294967296.0), 4294967295.0));
}

// The scale of the weights that are kept.
inline double DropoutScale(const Dropout& dropout) {
  return dropout.rate < 1 ? 1 / (1 - dropout.rate) : 0;
}

}  // namespace gnomon

#endif  // GNOMON_SRC_BASE_DROPOUT_H_
