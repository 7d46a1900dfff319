#ifndef GNOMON_OPS_GRAPH_GRAPH_ATTENTION_H_
#define GNOMON_OPS_GRAPH_GRAPH_ATTENTION_H_

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <tuple>

namespace gnomon {

// Attention over a graph. The similarity is given by a specification, and by tensors for the
// parameters that the specification marks as tensors. Returns o and lse.
std::tuple<at::Tensor, at::Tensor> GraphAttentionOfSpecs(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& indptr,
    const at::Tensor& indices, const std::string& similarity, at::TensorList similarity_tensors,
    std::optional<double> scale, const std::optional<at::Tensor>& edge_bias = std::nullopt,
    double dropout = 0, const std::optional<at::Tensor>& seed = std::nullopt);

}  // namespace gnomon

#endif  // GNOMON_OPS_GRAPH_GRAPH_ATTENTION_H_
