// The weights of some rows of attention, for people to look at.
#ifndef GNOMON_OPS_ATTENTION_ATTENTION_WEIGHTS_H_
#define GNOMON_OPS_ATTENTION_ATTENTION_WEIGHTS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "ops/attention/call.h"

namespace gnomon {

// p_ij (B, H, rows, Lk) of AttentionOfSpecs, for the rows of q (-1 the last) that are asked for.
at::Tensor AttentionWeights(const at::Tensor& q, const at::Tensor& k,
                            const std::vector<int64_t>& rows, const std::string& similarity,
                            at::TensorList similarity_tensors,
                            const std::vector<std::string>& positions,
                            at::TensorList position_tensors, const CallArguments& arguments);

// The same of terms, for tokens that are checked.
at::Tensor AttentionWeights(const at::Tensor& q, const at::Tensor& k,
                            const std::vector<int64_t>& rows, const ResolvedSimilarity& similarity,
                            std::vector<ResolvedPosition> positions, const CallArguments& call);

}  // namespace gnomon

#endif  // GNOMON_OPS_ATTENTION_ATTENTION_WEIGHTS_H_
