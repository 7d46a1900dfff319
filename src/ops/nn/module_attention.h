// Attention calls of a module.
#ifndef GNOMON_OPS_NN_MODULE_ATTENTION_H_
#define GNOMON_OPS_NN_MODULE_ATTENTION_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "ops/attention/call.h"
#include "ops/nn/module_terms.h"

namespace gnomon {

// The tensors of a module for one call. The weights of a token projection are replaced by the
// projection of the query tokens (B, Lq, ...) or of the key tokens (B, Lk, ...).
struct ProjectedTensors {
  std::vector<at::Tensor> tensors;
  // The indices of tensors (B, H, Lk, ...) that belong to keys and are cached with them.
  std::vector<int64_t> of_keys;
};
ProjectedTensors ProjectTokens(const ModuleTerms& terms, int64_t heads, at::TensorList tensors,
                               const at::Tensor& query_tokens, const at::Tensor& key_tokens);

// The terms of a module, with the tensors of one call.
struct ResolvedTerms {
  ResolvedSimilarity similarity;
  std::vector<ResolvedPosition> positions;
};
ResolvedTerms ResolveModule(const at::Tensor& q, const at::Tensor& k, const ModuleTerms& terms,
                            at::TensorList tensors, const CallArguments& arguments);

// The values (H,) of the similarity parameters for which a module without a position has tensors.
// They can be passed to a call with q, with a specification that sets each of these parameters to
// "tensor". The values have the compute dtype; `tensors` may have any floating-point dtype.
std::vector<at::Tensor> SimilarityTensors(const at::Tensor& q, const ModuleTerms& terms,
                                          at::TensorList tensors);

// Whether keys with this position are rotated identically in all calls and not read before the
// rotation, so that a cache can store rotated keys.
bool TurnsKeysOnce(const ModuleTerms& terms);
// Keys (B, Hkv, L, D) after this position's rotation. The first key is at position `first` and the
// others follow, unless positions (L,) or (B, L) are given. The result may be written to `to`
// (RotationCall).
at::Tensor TurnedKeys(const at::Tensor& k, const ModuleTerms& terms, int64_t heads,
                      const c10::SymInt& first, const OptionalTensor& positions,
                      const at::Tensor& to = {});

at::Tensor ModuleAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const ModuleTerms& terms, at::TensorList tensors,
                           const CallArguments& arguments);

// Like ModuleAttention, for keys that TurnedKeys has rotated. If new_keys (B, Hkv, n, D) are given,
// they are rotated first and overwrite the last n rows of k, without recording gradients.
at::Tensor ModuleAttentionOfTurnedKeys(const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& v, const ModuleTerms& terms,
                                       at::TensorList tensors, const OptionalTensor& new_keys,
                                       const CallArguments& arguments);

// The attention weights of the given query rows (AttentionWeights).
at::Tensor ModuleAttentionWeights(const at::Tensor& q, const at::Tensor& k,
                                  const std::vector<int64_t>& rows, const ModuleTerms& terms,
                                  at::TensorList tensors, const CallArguments& arguments);

}  // namespace gnomon

#endif  // GNOMON_OPS_NN_MODULE_ATTENTION_H_
