// The token maps on a GPU: rotations of pairs of columns (RoPE), and the maps of cones. Pointers
// are device pointers.
#ifndef GNOMON_SRC_CUDA_TOKEN_MAP_H_
#define GNOMON_SRC_CUDA_TOKEN_MAP_H_

#include <cstdint>
#include <optional>

#include "base/cone_map.h"
#include "cuda/backend.h"
#include "cuda/parameters.h"
#include "gnomon/attention.h"

namespace gnomon::cuda {

// The tokens of q and k, (B, heads, rows, columns), are rotated and then mapped to (B, heads, rows,
// width) and, for cones, to scalars. A side without heads or rows is skipped.
struct TokenMapCall {
  enum class Turns { kNone, kAdjacent, kHalves };  // see PairRotation (cpu/rotation.h)

  int64_t batch = 0;
  TokenType tokens = TokenType::kFloat32;  // the type of given tokens and their gradients
  TokenType mapped = TokenType::kFloat32;  // the type of mapped tokens and their gradients
  std::optional<ConeMap> cone;             // none: tokens are only rotated
  Turns turns = Turns::kNone;
  TokenMap map = {};  // MapTokens() sets the blocks, the numbers of the cone and `turns_aligned`
};

// One launch for both sides. The columns of x beyond those of the tokens are set to 0.
void MapTokens(const TokenMapCall& call, Backend& backend);
// Computes the gradients of the tokens, likewise, and, without a cone, those of the turns of each
// token. Sums have a fixed order.
void MapTokensBackward(const TokenMapCall& call, Backend& backend);

}  // namespace gnomon::cuda

#endif  // GNOMON_SRC_CUDA_TOKEN_MAP_H_
