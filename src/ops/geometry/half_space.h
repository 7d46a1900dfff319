// Points of the upper half-space, the model of hyperbolic space that cones use.
#ifndef GNOMON_OPS_GEOMETRY_HALF_SPACE_H_
#define GNOMON_OPS_GEOMETRY_HALF_SPACE_H_

#include <ATen/core/Tensor.h>

#include <string>

namespace gnomon {

// The largest hyperbolic distance from the origin that a map produces: heights lie between e^-30
// and e^30, whose squares and quotients are representable in float32.
inline constexpr double kFarthest = 30;

struct HalfSpacePoint {
  at::Tensor x;
  at::Tensor height;
};

// The exponential map at (0, ..., 0, 1), for tangents in its orthonormal frame.
HalfSpacePoint ExponentialMap(const at::Tensor& token);

// Applies the map "psi", "xi", "exp" or "none".
HalfSpacePoint MapToHalfSpace(const at::Tensor& token, const std::string& map);

}  // namespace gnomon

#endif  // GNOMON_OPS_GEOMETRY_HALF_SPACE_H_
