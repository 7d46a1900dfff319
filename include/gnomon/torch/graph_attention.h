// Attention over the edges of a graph on PyTorch tensors, with any similarity, exact gradients, and
// memory linear in the number of edges.
//
//   o = gnomon::graph_attention(q, k, v, indptr, indices,
//                               GraphAttentionOptions().similarity(similarity::Umbral(gamma)));
//
// Invalid arguments throw the exceptions that gnomon/torch/attention.h describes.
#ifndef GNOMON_TORCH_GRAPH_ATTENTION_H_
#define GNOMON_TORCH_GRAPH_ATTENTION_H_

#include <gnomon/torch/attention.h>
#include <torch/arg.h>
#include <torch/types.h>

#include <optional>
#include <tuple>

namespace gnomon {

struct GraphAttentionOptions {
  TORCH_ARG(Similarity, similarity) = gnomon::similarity::Dot();
  // Factor of the dot product, by default 1/sqrt(D). It must not be set with any other similarity.
  TORCH_ARG(std::optional<double>, scale);
  // (E, H), or (E,) if shared by all heads: values that are added to the scores of the edges; -inf
  // removes an edge.
  TORCH_ARG(std::optional<torch::Tensor>, edge_bias);
  // Probability of dropping a weight. The other weights are multiplied by 1 / (1 - dropout), and
  // lse is computed before dropout. The mask depends only on the seed, the head, the node and the
  // index of the edge. Without a seed, PyTorch's generator draws one.
  TORCH_ARG(double, dropout) = 0;
  TORCH_ARG(std::optional<int64_t>, seed);
};

// o_i = sum_e p_e v_{indices[e]} over the edges e in [indptr[i], indptr[i + 1]) of node i, where p
// is the softmax of their scores. q (N, H, D), k (Nk, Hkv, D), v (Nk, Hkv, Dv), H a multiple of
// Hkv, as in attention(); queries and keys may be different nodes. indptr (N + 1,) and indices (E,)
// are integers, a sparse matrix in CSR format: indptr is non-decreasing from 0 to E, and indices
// are keys in [0, Nk). Duplicate edges are counted once per occurrence. Returns o (N, H, Dv) in the
// dtype of q; rows without edges are 0.
torch::Tensor graph_attention(const torch::Tensor& q, const torch::Tensor& k,
                              const torch::Tensor& v, const torch::Tensor& indptr,
                              const torch::Tensor& indices,
                              const GraphAttentionOptions& options = {});

// Computes attention, and also returns lse (N, H), in float32 or float64: the natural logarithm of
// the sum of exp(s) over a row's edges, which is differentiable. It is -inf for rows without edges.
std::tuple<torch::Tensor, torch::Tensor> graph_attention_with_lse(
    const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v,
    const torch::Tensor& indptr, const torch::Tensor& indices,
    const GraphAttentionOptions& options = {});

}  // namespace gnomon

#endif  // GNOMON_TORCH_GRAPH_ATTENTION_H_
