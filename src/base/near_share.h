// Which squared distances are computed anew from differences: shared by kernels of the CPU and of
// GPUs, and so without any include.
#ifndef GNOMON_SRC_BASE_NEAR_SHARE_H_
#define GNOMON_SRC_BASE_NEAR_SHARE_H_

namespace gnomon {

// Those below a share of the sum of the squared norms, of which too few digits are left. Of the
// least share their rounding is 2^-19 of them, and so is that of a slope by them.
constexpr float kLeastNear = 1.0f / 32;
constexpr float kMostNear = 0.5f;

// The share for a row of such a factor and squared norm: the larger, the larger the scores that the
// distances make, by which their rounding counts. Of similarities that go by a distance, the
// rounding of a score is that of the squared norms by the distance, and a share of (c |x|)^2 / 2^11
// keeps it below 2^-18; of those that go by its square it is c |x|^2, and less than 2^-18 or so up
// to 2^5.
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
