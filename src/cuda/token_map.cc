#include "cuda/token_map.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cuda/constants.h"
#include "cuda/launch_context.h"

namespace gnomon::cuda {
namespace {

bool Exists(const TokenMapSide& side) { return side.heads > 0 && side.rows > 0; }

// Whether all rows of an array are 16-byte aligned.
bool IsAligned(const Array& array, int bytes) {
  const auto multiple = [](int64_t n) { return n % 16 == 0; };
  return multiple(static_cast<int64_t>(reinterpret_cast<uintptr_t>(array.data))) &&
         std::all_of(std::begin(array.stride), std::end(array.stride),
                     [&](int64_t stride) { return multiple(stride * bytes); });
}

void Launch(const char* kind, const TokenMapCall& call, bool is_backward, Backend& backend) {
  Constants c;
  c.kType = static_cast<int>(call.mapped);
  c.kTokenType = static_cast<int>(call.tokens);
  c.kWarps = 4;
  c.kTurns = static_cast<int>(call.turns);
  Parameters p;
  // memset also clears padding, which is part of the kernel argument.
  std::memset(static_cast<void*>(&p), 0, sizeof(p));
  p.batch = Int(call.batch);
  p.map = call.map;
  if (call.cone) {
    const bool is_umbral = call.cone->function == ConeMap::Function::kUmbral;
    c.kMap = (is_umbral ? 1 : 3) + (call.cone->as_is ? 1 : 0);
    p.map.number = static_cast<float>(is_umbral ? 1 / std::sinh(call.cone->r) : call.cone->r);
    p.map.farthest = static_cast<float>(call.cone->farthest);
  }
  for (const TokenMapSide& side : call.map.sides) {
    if (Exists(side)) c.kDim = std::max(c.kDim, Padded(std::max(side.columns, side.width)));
  }
  const int64_t at_once = 32 * c.kWarps / LanesOfToken(Int(c.kDim));
  const int of_tokens = BytesOf(Int(c.kTokenType));
  c.kAligned = 1;
  p.map.turns_aligned = 1;
  int64_t blocks = 0;
  for (TokenMapSide& side : p.map.sides) {
    if (!Exists(side)) {
      side.heads = side.rows = 0;
      continue;
    }
    const bool aligned = IsAligned(side.tokens, of_tokens) &&
                         (!is_backward || IsAligned(side.d_tokens, of_tokens)) &&
                         IsAligned(side.mapped, BytesOf(Int(c.kType)));
    if (!aligned) c.kAligned = 0;
    if (!IsAligned(side.cosines, 4) || !IsAligned(side.sines, 4)) p.map.turns_aligned = 0;
    side.blocks = Int(Up(side.rows, at_once));
    blocks += call.batch * side.heads * side.blocks;
  }
  if (blocks == 0) return;
  backend.Launch({kind, "", c.List()},
                 {{static_cast<uint32_t>(blocks), 1, 1}, static_cast<uint32_t>(32 * c.kWarps), 0},
                 &p, sizeof(p));
}

}  // namespace

void MapTokens(const TokenMapCall& call, Backend& backend) {
  Launch("map_tokens", call, /*is_backward=*/false, backend);
}

void MapTokensBackward(const TokenMapCall& call, Backend& backend) {
  Launch("map_tokens_backward", call, /*is_backward=*/true, backend);
}

}  // namespace gnomon::cuda
