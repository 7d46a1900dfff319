// Launches the GPU kernels of token maps (cuda/token_map.h) for tensors.
#ifndef GNOMON_OPS_OPERATORS_TOKEN_MAP_CUDA_H_
#define GNOMON_OPS_OPERATORS_TOKEN_MAP_CUDA_H_

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>

#include "base/cone_map.h"
#include "ops/operators/pair_rotation.h"

namespace gnomon {

// The tensors of q or k. A side without tokens is skipped. Tokens and mapped tokens of both sides
// have the same two dtypes.
struct TokenMapTensors {
  at::Tensor tokens = {};         // (B, heads, L, D)
  PendingRotation rotation = {};  // turns in float32
  // (B, heads, L, width): the result or, in the backward pass, its gradient; undefined means 0
  at::Tensor mapped = {};
  at::Tensor scalars = {};  // (S, B, heads, L), likewise, contiguous
  // Only in the backward pass, which computes them: the gradients of the tokens and, if defined,
  // those of the turns of each token, (B, heads, L, pairs) in float32.
  at::Tensor d_tokens = {};
  Turns d_turns = {};
};

// Whether the kernels support the dtype.
bool HasTokenMapKernel(at::ScalarType type);

// Rotates the tokens, by the opposite angles if `back`, and then applies the map of the cone, if
// there is one.
void MapTokensOnGpu(const char* operation, const std::array<TokenMapTensors, 2>& sides,
                    const std::optional<ConeMap>& cone, bool back = false);
// The gradients of MapTokensOnGpu(). Those of turns are available without a cone.
void MapTokensBackwardOnGpu(const char* operation, const std::array<TokenMapTensors, 2>& sides,
                            const std::optional<ConeMap>& cone, bool back = false);

}  // namespace gnomon

#endif  // GNOMON_OPS_OPERATORS_TOKEN_MAP_CUDA_H_
