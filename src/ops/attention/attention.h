#ifndef GNOMON_OPS_ATTENTION_ATTENTION_H_
#define GNOMON_OPS_ATTENTION_ATTENTION_H_

#include <ATen/core/Tensor.h>
#include <gnomon/torch/attention.h>

#include <string>
#include <vector>

#include "ops/attention/call.h"

namespace gnomon {

// Resolves a similarity for q (B, H, ...) from its specification and the tensors of the parameters
// that the specification marks as tensors. Omitted parameters take the initial values of a module.
// Error messages begin with `operation`.
ResolvedSimilarity ResolveSimilarity(const char* operation, const std::string& spec,
                                     at::TensorList tensors, const at::Tensor& q);

// Resolves positions, each of which is a sum of components, in the same way.
std::vector<ResolvedPosition> ResolvePositions(const std::vector<std::string>& positions,
                                               at::TensorList tensors, const at::Tensor& q);

// Computes attention with a similarity and a list of positions, each of which is a sum of
// components. The tensors belong to the parameters that are marked as tensors, in catalogue order.
// Returns the result of Compose.
Outputs AttentionOfSpecs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const std::string& similarity, at::TensorList similarity_tensors,
                         const std::vector<std::string>& positions, at::TensorList position_tensors,
                         const CallArguments& arguments, bool returns_lse);

// Computes attention with terms of the C++ interface.
Outputs AttentionOfTerms(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const Similarity& similarity, const AttentionOptions::Positions& positions,
                         const CallArguments& arguments, bool returns_lse);

}  // namespace gnomon

#endif  // GNOMON_OPS_ATTENTION_ATTENTION_H_
