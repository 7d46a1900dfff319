// Content terms: positions that multiply the query, or the key, as it was passed, by a row of a
// table that the places of query and key choose.
#ifndef GNOMON_OPS_CATALOGUE_CONTENT_H_
#define GNOMON_OPS_CATALOGUE_CONTENT_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ops/grammar/component.h"

namespace gnomon {

struct ContentTerm {
  at::Tensor query;        // (B, H, Lq, D)
  at::Tensor keys;         // (1 or H, n, D)
  at::Tensor values = {};  // (1 or H, n, Dv); undefined: none
  // (B, Hkv, Lk, D) and (1 or H, n, D), as relative_queries are (attention_operators.h); undefined:
  // neither.
  at::Tensor key = {};
  at::Tensor queries = {};
  at::Tensor key_weights = {};  // (H, D): adds their product with each key; undefined: none
  std::string layout;           // of OperatorArguments::relative_layout
  bool takes_scale = true;      // whether the argument `scale` multiplies its products
};

// What a call says of itself.
struct ContentCall {
  const at::Tensor& q;
  const at::Tensor& k;
  int64_t heads;
  int64_t head_dim;
  int64_t value_dim;
  bool causal;
  // No query is farther from a key; none: not known before the call runs.
  std::optional<int64_t> farthest;
};

// tensors: those of the entry in its order. Throws c10::ValueError.
using ContentFunction = ContentTerm (*)(const Component& component,
                                        const std::vector<at::Tensor>& tensors,
                                        const ContentCall& call);

}  // namespace gnomon

#endif  // GNOMON_OPS_CATALOGUE_CONTENT_H_
