// Decides which squared distances are recomputed from differences. CPU and GPU kernels share this
// file, so it has no includes.
#ifndef GNOMON_SRC_BASE_NEAR_SHARE_H_
#define GNOMON_SRC_BASE_NEAR_SHARE_H_

namespace gnomon {

// Squared distances below a fraction of the sum of the squared norms have lost too many digits. At
// the smallest fraction, a squared distance has a relative rounding error of 2^-19, and so does a
// slope computed from it.
constexpr float kLeastNear = 1.0f / 32;
constexpr float kMostNear = 0.5f;

// The fraction for a row with the given factor and squared norm. It increases with the scores,
// because their absolute rounding error matters. For similarities that depend on the distance, a
// score's rounding error is that of the squared norms divided by the distance; a fraction of (c
// |x|)^2 / 2^11 keeps it below 2^-18. For similarities that depend on the squared distance, the
// score's rounding error is that of c |x|^2, which is below about 2^-18 for values up to 2^5.
constexpr float NearShare(float factor, float norm) {
  const float size = factor < 0 ? -factor : factor;
  const float of_square = size * norm;
  if (of_square > 32.0f) return kMostNear;
  const float share = of_square * size * (1.0f / 2048);
  if (share < kLeastNear) return kLeastNear;
  return share > kMostNear ? kMostNear : share;
}

}  // namespace gnomon

#endif  // GNOMON_SRC_BASE_NEAR_SHARE_H_
