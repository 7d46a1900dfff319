// The attention weights of some rows, for inspection.
#ifndef GNOMON_OPS_ATTENTION_ATTENTION_WEIGHTS_H_
#define GNOMON_OPS_ATTENTION_ATTENTION_WEIGHTS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "ops/attention/call.h"

namespace gnomon {

// Returns the weights p_ij (B, H, rows, Lk) of AttentionOfSpecs, for the requested rows of q (-1 is
// the last).
at::Tensor AttentionWeights(const at::Tensor& q, const at::Tensor& k,
                            const std::vector<int64_t>& rows, const std::string& similarity,
                            at::TensorList similarity_tensors,
                            const std::vector<std::string>& positions,
                            at::TensorList position_tensors, const CallArguments& arguments);

// Returns the weights for resolved terms and checked tokens.
at::Tensor AttentionWeights(const at::Tensor& q, const at::Tensor& k,
                            const std::vector<int64_t>& rows, const ResolvedSimilarity& similarity,
                            std::vector<ResolvedPosition> positions, const CallArguments& call);

}  // namespace gnomon

#endif  // GNOMON_OPS_ATTENTION_ATTENTION_WEIGHTS_H_
