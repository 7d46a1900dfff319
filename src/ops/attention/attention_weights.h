// The weights of some rows of attention, for people to look at.
#ifndef GNOMON_OPS_ATTENTION_ATTENTION_WEIGHTS_H_
#define GNOMON_OPS_ATTENTION_ATTENTION_WEIGHTS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "ops/attention/call.h"

namespace gnomon {

class ModuleTerms;

// p_ij (B, H, rows, Lk) of AttentionOfSpecs, for the rows of q (-1 the last) that are asked for.
at::Tensor AttentionWeights(const at::Tensor& q, const at::Tensor& k,
                            const std::vector<int64_t>& rows, const std::string& similarity,
                            at::TensorList similarity_tensors,
                            const std::vector<std::string>& positions,
                            at::TensorList position_tensors, const CallArguments& arguments);

// The same of ModuleAttention, whose values have value_dim columns.
at::Tensor ModuleAttentionWeights(const at::Tensor& q, const at::Tensor& k,
                                  const std::vector<int64_t>& rows, const ModuleTerms& terms,
                                  at::TensorList tensors, int64_t value_dim,
                                  const CallArguments& arguments);

}  // namespace gnomon

#endif  // GNOMON_OPS_ATTENTION_ATTENTION_WEIGHTS_H_
