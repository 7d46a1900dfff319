// Token maps: from q and k to what the pair function of a similarity reads.
#ifndef GNOMON_OPS_TOKEN_MAP_H_
#define GNOMON_OPS_TOKEN_MAP_H_

#include <ATen/core/Tensor.h>

#include <functional>

#include "ops/component.h"

namespace gnomon {

// How far from the origin a map puts a token at most, in hyperbolic distance: heights lie between
// e^-30 and e^30, whose squares and quotients float32 still holds.
inline constexpr double kFarthest = 30;

struct MappedTokens {
  const char* function;            // the name of the pair function
  at::Tensor x;                    // (B, H, Lq, D')
  at::Tensor y;                    // (B, Hkv, Lk, D')
  at::Tensor factor;               // (H)
  at::Tensor row_scalars = {};     // (R, B, H, Lq), or undefined
  at::Tensor column_scalars = {};  // (C, B, Hkv, Lk), or undefined
  at::Tensor head_scalars = {};    // (S, H), or undefined
  // Gives what the pair function drops from the scores of a row, broadcast to (B, H, Lq); null: 0.
  std::function<at::Tensor()> row_constant = nullptr;
};

// head_factor (H): the scale of a dot product, gamma or beta of the others, or 1.
using TokenMap = MappedTokens (*)(const Component& component, const at::Tensor& q,
                                  const at::Tensor& k, const at::Tensor& head_factor);

MappedTokens MapDot(const Component&, const at::Tensor& q, const at::Tensor& k,
                    const at::Tensor& scale);
MappedTokens MapLaplacian(const Component&, const at::Tensor& q, const at::Tensor& k,
                          const at::Tensor& gamma);
MappedTokens MapGaussian(const Component&, const at::Tensor& q, const at::Tensor& k,
                         const at::Tensor& gamma);
MappedTokens MapUmbral(const Component& component, const at::Tensor& q, const at::Tensor& k,
                       const at::Tensor& gamma);
MappedTokens MapPenumbral(const Component& component, const at::Tensor& q, const at::Tensor& k,
                          const at::Tensor& gamma);
MappedTokens MapHyperbolic(const Component& component, const at::Tensor& q, const at::Tensor& k,
                           const at::Tensor& beta);
MappedTokens MapEntailment(const Component& component, const at::Tensor& q, const at::Tensor& k,
                           const at::Tensor& gamma);
MappedTokens MapAdditive(const Component& component, const at::Tensor& q, const at::Tensor& k,
                         const at::Tensor& one);

// Whether the last coordinate of a token of MapHyperbolic is told apart: a height, a time, or the
// distance from the origin.
bool HyperbolicHasHeight(const Component& component);

}  // namespace gnomon

#endif  // GNOMON_OPS_TOKEN_MAP_H_
