// The calls of a module.
#ifndef GNOMON_OPS_NN_MODULE_ATTENTION_H_
#define GNOMON_OPS_NN_MODULE_ATTENTION_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "ops/attention/call.h"
#include "ops/nn/module_terms.h"

namespace gnomon {

// The tensors of a module as the functions below take them: what it makes of the tokens of the
// queries (B, Lq, ...) and of the keys (B, Lk, ...) is in the place of what it makes them with.
struct ProjectedTensors {
  std::vector<at::Tensor> tensors;
  // Those (B, H, Lk, ...) that are of keys, which go with these into a cache.
  std::vector<int64_t> of_keys;
};
ProjectedTensors ProjectTokens(const ModuleTerms& terms, int64_t heads, at::TensorList tensors,
                               const at::Tensor& query_tokens, const at::Tensor& key_tokens);

// The terms of a module, of the tensors of one call.
struct ResolvedTerms {
  ResolvedSimilarity similarity;
  std::vector<ResolvedPosition> positions;
};
ResolvedTerms ResolveModule(const at::Tensor& q, const at::Tensor& k, int64_t value_dim,
                            const ModuleTerms& terms, at::TensorList tensors,
                            const CallArguments& arguments);

// The values (H,) of those parameters of the similarity that a module of it alone has tensors of,
// as a call of q takes them beside the specification with "=tensor" of each: in the computing type,
// of tensors of any floating-point type.
std::vector<at::Tensor> SimilarityTensors(const at::Tensor& q, const ModuleTerms& terms,
                                          at::TensorList tensors);

// Whether the keys of calls with such a position turn alike in all of them, and nothing else reads
// them before: a cache may then keep them turned.
bool TurnsKeysOnce(const ModuleTerms& terms);
// Keys (B, Hkv, L, D) turned by the rotation of such a position. They stand one after the other
// from `first` on, or at positions (L,) or (B, L).
at::Tensor TurnedKeys(const at::Tensor& k, const ModuleTerms& terms, int64_t heads,
                      const c10::SymInt& first, const OptionalTensor& positions);

at::Tensor ModuleAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const ModuleTerms& terms, at::TensorList tensors,
                           const CallArguments& arguments, bool of_turned_keys = false);

// Its weights of some rows (AttentionWeights); values have value_dim columns.
at::Tensor ModuleAttentionWeights(const at::Tensor& q, const at::Tensor& k,
                                  const std::vector<int64_t>& rows, const ModuleTerms& terms,
                                  at::TensorList tensors, int64_t value_dim,
                                  const CallArguments& arguments);

}  // namespace gnomon

#endif  // GNOMON_OPS_NN_MODULE_ATTENTION_H_
