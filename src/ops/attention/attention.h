#ifndef GNOMON_OPS_ATTENTION_ATTENTION_H_
#define GNOMON_OPS_ATTENTION_ATTENTION_H_

#include <ATen/core/Tensor.h>
#include <gnomon/torch/attention.h>

#include <string>
#include <tuple>
#include <vector>

#include "ops/attention/call.h"

namespace gnomon {

// A similarity given by a component and the tensors of those of its parameters that the component
// says are tensors, for q (B, H, ...); those that it says nothing of have their start in a module.
// Messages begin with `operation`.
ResolvedSimilarity ResolveSimilarity(const char* operation, const std::string& spec,
                                     at::TensorList tensors, const at::Tensor& q);

// Positions, each a sum of components, and their tensors likewise.
std::vector<ResolvedPosition> ResolvePositions(const std::vector<std::string>& positions,
                                               at::TensorList tensors, const at::Tensor& q);

// Attention of a similarity and a list of positions, each a sum of components and the tensors of
// those of their parameters that they say are tensors, in the entries' order. Returns what Compose
// does.
Outputs AttentionOfSpecs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const std::string& similarity, at::TensorList similarity_tensors,
                         const std::vector<std::string>& positions, at::TensorList position_tensors,
                         const CallArguments& arguments, bool returns_lse);

// The same of terms of the C++ interface.
Outputs AttentionOfTerms(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const Similarity& similarity, const AttentionOptions::Positions& positions,
                         const CallArguments& arguments, bool returns_lse);

}  // namespace gnomon

#endif  // GNOMON_OPS_ATTENTION_ATTENTION_H_
