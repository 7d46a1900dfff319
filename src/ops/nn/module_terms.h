// The similarity and the position of a module: specifications whose parameters the module holds.
#ifndef GNOMON_OPS_NN_MODULE_TERMS_H_
#define GNOMON_OPS_NN_MODULE_TERMS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ops/attention/compose.h"
#include "ops/nn/module_tensor.h"

namespace gnomon {

// gamma or beta of a similarity as it starts in a module: it makes the spread of the logits of
// N(0, 1) tokens of that many columns 1.
double HeadParameterStart(const SimilarityEntry& entry, const Component& component,
                          int64_t head_dim);

// The values (H,) at which a parameter of a position starts, for q, in the computing type.
at::Tensor PositionStart(const Parameter& parameter, const Component& component,
                         const ModuleShape& shape, const at::Tensor& q);

// The columns that a head of q and k has by default: the only number that the similarity takes, or
// `otherwise`. Throws c10::ValueError for a mistake in the specification.
int64_t HeadColumns(const std::string& similarity, int64_t otherwise);

// The tensors of a module of that shape, in the order in which ModuleAttention takes them. `given`
// are those of the parameters that the specifications say are tensors, which are kept as they are,
// learned where they require grad. Throws c10::ValueError for a mistake in a specification.
std::vector<ModuleTensor> ModuleTensors(const std::string& similarity, const std::string& position,
                                        const ModuleShape& shape, at::TensorList given = {});

// What such a module has learned: a value for each head as it acts in the scores, and where it
// started, or a table, or a tensor that was given; detached.
struct LearnedTensor {
  std::string name;
  at::Tensor value;
  std::optional<at::Tensor> start;  // of a value for each head that was not given
};
std::vector<LearnedTensor> LearnedTensors(const std::string& similarity,
                                          const std::string& position, const ModuleShape& shape,
                                          at::TensorList tensors);

// The components of a position that act in attention, "none" where there are none.
std::string AttentionPosition(const std::string& position);

// Whether a position has tensors that a module makes of its tokens in each call.
bool HasProjections(const std::string& position);

// The tensors of a module as the functions below take them: what it makes of the tokens of the
// queries (B, Lq, ...) and of the keys (B, Lk, ...) is in the place of what it makes them with.
struct ProjectedTensors {
  std::vector<at::Tensor> tensors;
  // Those (B, H, Lk, ...) that are of keys, which go with these into a cache.
  std::vector<int64_t> of_keys;
};
ProjectedTensors ProjectTokens(const std::string& similarity, const std::string& position,
                               int64_t heads, at::TensorList tensors,
                               const at::Tensor& query_tokens, const at::Tensor& key_tokens);

// The terms of a module, of the tensors of one call.
struct ResolvedTerms {
  ResolvedSimilarity similarity;
  std::vector<ResolvedPosition> positions;
};
ResolvedTerms ResolveModule(const at::Tensor& q, const at::Tensor& k, int64_t value_dim,
                            const std::string& similarity, const std::string& position,
                            at::TensorList tensors, const CallArguments& arguments);

at::Tensor ModuleAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const std::string& similarity, const std::string& position,
                           at::TensorList tensors, const CallArguments& arguments);

}  // namespace gnomon

#endif  // GNOMON_OPS_NN_MODULE_TERMS_H_
