// Content terms: positions that multiply the unrotated query or key by a row of a table, selected
// by the positions of the query and the key.
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
  at::Tensor values = {};  // (1 or H, n, Dv); may be undefined
  // (B, Hkv, Lk, D) and (1 or H, n, D), as for relative_queries (attention_operators.h); either
  // both are defined or neither is.
  at::Tensor key = {};
  at::Tensor queries = {};
  at::Tensor key_weights = {};  // (H, D): adds its product with each key; may be undefined
  std::string layout;           // see OperatorArguments::relative_layout
  bool takes_scale = true;      // whether the argument `scale` multiplies its products
  double factor = 1;            // the factor if it does not
};

// The properties of a call.
struct ContentCall {
  const at::Tensor& q;
  const at::Tensor& k;
  int64_t heads;
  int64_t head_dim;
  int64_t value_dim;
  bool causal;
  // The largest distance between a query and a key; nullopt if it is unknown before the call runs.
  std::optional<int64_t> farthest;
};

// tensors: the entry's tensors, in the entry's order. Throws c10::ValueError.
using ContentFunction = ContentTerm (*)(const Component& component,
                                        const std::vector<at::Tensor>& tensors,
                                        const ContentCall& call);

}  // namespace gnomon

#endif  // GNOMON_OPS_CATALOGUE_CONTENT_H_
