// Token maps: from q and k to what the pair function of a similarity reads.
#ifndef GNOMON_OPS_SIMILARITIES_TOKEN_MAP_H_
#define GNOMON_OPS_SIMILARITIES_TOKEN_MAP_H_

#include <ATen/core/Tensor.h>

#include <functional>

#include "ops/catalogue/component.h"

namespace gnomon {

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
using TokenMap = std::function<MappedTokens(const Component& component, const at::Tensor& q,
                                            const at::Tensor& k, const at::Tensor& head_factor)>;

}  // namespace gnomon

#endif  // GNOMON_OPS_SIMILARITIES_TOKEN_MAP_H_
