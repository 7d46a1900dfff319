// Token maps: from q and k to the inputs of a similarity's pair function.
#ifndef GNOMON_OPS_CATALOGUE_TOKEN_MAP_H_
#define GNOMON_OPS_CATALOGUE_TOKEN_MAP_H_

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "ops/grammar/component.h"
#include "ops/operators/pair_rotation.h"

namespace gnomon {

struct MappedTokens {
  const char* function;            // the name of the pair function
  at::Tensor x;                    // (B, H, Lq, D')
  at::Tensor y;                    // (B, Hkv, Lk, D')
  at::Tensor factor;               // (H)
  at::Tensor row_scalars = {};     // (R, B, H, Lq), or undefined
  at::Tensor column_scalars = {};  // (C, B, Hkv, Lk), or undefined
  at::Tensor head_scalars = {};    // (S, H), or undefined
  // The constant that the pair function omits from the scores of a row, which broadcasts to (B, H,
  // Lq); null means 0.
  std::function<at::Tensor()> row_constant = nullptr;
};

// The per-head parameters of a similarity, (H). Maps that need only the factor may accept it as a
// tensor.
struct HeadParameters {
  at::Tensor factor;                    // the scale (dot product), gamma or beta (others), or 1
  std::vector<at::Tensor> others = {};  // SimilarityEntry::other_head_parameters

  operator const at::Tensor&() const { return factor; }  // NOLINT: implicit
};

// Keys y may have the heads of q, if the query heads map the same keys differently.
using TokenMap = std::function<MappedTokens(const Component& component, const at::Tensor& q,
                                            const at::Tensor& k, const HeadParameters& heads)>;

// Tokens of any dtype that are rotated before they are mapped. x and y are then rounded to `type`.
struct RawTokens {
  at::Tensor q;
  at::Tensor k;
  PendingRotation q_rotation = {};
  PendingRotation k_rotation = {};
  at::ScalarType type = q.scalar_type();
};

using RawTokenMap = std::function<MappedTokens(const Component& component, const RawTokens& tokens,
                                               const HeadParameters& heads)>;

}  // namespace gnomon

#endif  // GNOMON_OPS_CATALOGUE_TOKEN_MAP_H_
