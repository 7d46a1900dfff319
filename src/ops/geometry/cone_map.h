// The operator cone_map: computes the tokens of cones from q and k, whose last column determines
// the height.
#ifndef GNOMON_OPS_GEOMETRY_CONE_MAP_H_
#define GNOMON_OPS_GEOMETRY_CONE_MAP_H_

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>

#include "ops/catalogue/token_map.h"

namespace gnomon {

// Tokens X (B, H, L, D - 1) and scalars (S, B, H, L), as a pair function reads them, computed from
// q and k (B, H, L, D) = (w, z). X = m(z) w, zero-padded to a multiple of four columns. m and the
// scalars depend on the height h or u:
//   umbral     m = h / sinh(r); h
//   penumbral  m = u; u^2 / (1 + a), u^2, a = sqrt(1 - u^2)
// The height depends on the map: h = exp(z) for psi; u = sigmoid(z) for xi, independent of r. For
// none, z is the height: h = z with m = 1 / sinh(r), or u = z / r in [0, 1] with m = 1 / r.
struct ConeTokens {
  at::Tensor x;
  at::Tensor row_scalars;
  at::Tensor y;
  at::Tensor column_scalars;
};

// Calls the operator for tokens of any dtype, which are rotated first. x and y have the tokens'
// type; scalars have the computing type. function: umbral with the maps psi and none, or penumbral
// with xi and none. On a GPU, one kernel computes all results, and one their gradients. PyTorch's
// operators replace them in float64, in forward mode, and for second derivatives.
ConeTokens CallConeMap(const RawTokens& tokens, std::string_view function, std::string_view map,
                       double r);

// Supports any map, and returns tokens of the pair function; the caller supplies the factor. For
// "exp", where heights depend on all columns, cone_map processes the points with the map none.
MappedTokens MapCones(const RawTokens& tokens, const char* function, const std::string& map,
                      double r);

// Converts tokens for the score "height" to tokens for the score -gamma log h. `function` is the
// pair function log 2h.
void TakeLogarithm(const char* function, const at::Tensor& gamma, MappedTokens* tokens);

}  // namespace gnomon

#endif  // GNOMON_OPS_GEOMETRY_CONE_MAP_H_
