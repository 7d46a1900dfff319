#include "models/graph_network.h"

#include <cmath>
#include <utility>

#include "gnomon/torch/graph_attention.h"

namespace gnomon::lab {
namespace {

torch::Tensor Glorot(const std::vector<int64_t>& shape, int64_t inputs, int64_t outputs) {
  const double bound = std::sqrt(6.0 / static_cast<double>(inputs + outputs));
  return torch::empty(shape).uniform_(-bound, bound);
}

}  // namespace

Graph Graph::To(torch::Device device) const {
  Graph there = *this;
  there.indptr = indptr.to(device);
  there.indices = indices.to(device);
  there.edges = edges.To(device);
  there.sparse_features = sparse_features.To(device);
  if (dense_features.defined()) there.dense_features = dense_features.to(device);
  return there;
}

Graph MakeGraph(int64_t nodes, const torch::Tensor& edges, bool is_directed) {
  const torch::Tensor from = edges.select(1, 0);
  const torch::Tensor to = edges.select(1, 1);
  const torch::Tensor itself = torch::arange(nodes);
  // Represent each edge by a single number, so that sorting the numbers sorts the edges by their
  // attending node.
  std::vector<torch::Tensor> pairs = {to * nodes + from, itself * nodes + itself};
  if (!is_directed) pairs.push_back(from * nodes + to);
  const torch::Tensor sorted = std::get<0>(torch::_unique(torch::cat(pairs), /*sorted=*/true));
  Graph graph;
  graph.nodes = nodes;
  graph.indices = sorted.remainder(nodes);
  graph.indptr = RowStarts(sorted.div(nodes, "floor"), nodes);
  graph.edges = SparseMatrix(torch::arange(sorted.size(0) + 1), graph.indices, nodes);
  return graph;
}

GraphAttentionLayerImpl::GraphAttentionLayerImpl(int64_t inputs, int64_t heads, int64_t columns,
                                                 const std::string& similarity, double dropout)
    : dropout_(dropout) {
  similarity_ = register_module("similarity", LearnedSimilarity(similarity, heads, columns));
  const int64_t scores = similarity_->columns();
  weight = register_parameter("weight", Glorot({inputs, heads, columns}, inputs, heads * columns));
  query_weight =
      register_parameter("query_weight", Glorot({heads, columns, scores}, columns, scores));
  key_weight = register_parameter("key_weight", Glorot({heads, columns, scores}, columns, scores));
  bias = register_parameter("bias", torch::zeros({heads, columns}));
}

torch::Tensor GraphAttentionLayerImpl::forward(const Graph& graph, const torch::Tensor& h) {
  const int64_t heads = weight.size(1);
  const torch::Tensor v = h.view({h.size(0), heads, weight.size(2)});
  // Arranged by head: (heads, nodes, columns).
  const torch::Tensor by_head = v.transpose(0, 1);
  const torch::Tensor q = torch::bmm(by_head, query_weight).transpose(0, 1);
  const torch::Tensor k = torch::bmm(by_head, key_weight).transpose(0, 1);
  const GraphAttentionOptions options = GraphAttentionOptions().similarity(similarity_->term());
  if (!is_training() || dropout_ == 0) {
    return graph_attention(q, k, v, graph.indptr, graph.indices, options) + bias;
  }
  // Dropout applies to the weights after the softmax, separately for each edge and head. Dropping a
  // weight is the same as zeroing the value, so each edge gets its own key and value.
  const int64_t edges = graph.indices.size(0);
  const torch::Tensor tokens =
      graph.edges.Multiply(torch::cat({k.flatten(1), h}, 1)).view({edges, -1});
  const int64_t split = heads * k.size(2);
  const torch::Tensor keys = tokens.narrow(1, 0, split).view({edges, heads, k.size(2)});
  const torch::Tensor kept =
      torch::dropout(torch::ones({edges, heads, 1}, h.options()), dropout_, /*train=*/true);
  const torch::Tensor values =
      tokens.narrow(1, split, h.size(1)).view({edges, heads, v.size(2)}) * kept;
  return graph_attention(q, keys, values, graph.indptr,
                         torch::arange(edges, graph.indices.options()), options) +
         bias;
}

GraphNetworkImpl::GraphNetworkImpl(const GraphNetworkOptions& options,
                                   const std::string& similarity)
    : options_(options) {
  torch::nn::ModuleList list = register_module("layers", torch::nn::ModuleList());
  int64_t inputs = options.features;
  for (int64_t layer = 0; layer < options.depth; ++layer) {
    const bool is_last = layer + 1 == options.depth;
    const int64_t heads = is_last ? options.out_heads : options.heads;
    const int64_t columns = is_last ? options.classes : options.hidden;
    layers_.emplace_back(inputs, heads, columns, similarity, options.attention_dropout);
    list->push_back(layers_.back());
    inputs = heads * columns;
  }
}

torch::Tensor GraphNetworkImpl::forward(const Graph& graph) {
  const auto drop_out = [&](const torch::Tensor& x) {
    return torch::dropout(x, options_.dropout, is_training());
  };
  torch::Tensor x;
  for (size_t n = 0; n < layers_.size(); ++n) {
    GraphAttentionLayer& layer = layers_[n];
    const torch::Tensor weight = layer->weight.flatten(1);
    torch::Tensor h;
    if (n > 0) {
      h = drop_out(torch::elu(x.flatten(1))).matmul(weight);
    } else if (graph.sparse_features.defined()) {
      // Dropout leaves zeros unchanged, so it is applied only to the stored values.
      const SparseMatrix& features = graph.sparse_features;
      h = features.Multiply(weight, drop_out(*features.values()));
    } else {
      h = drop_out(graph.dense_features).matmul(weight);
    }
    x = layer->forward(graph, h);
  }
  return x.mean(1);
}

torch::Tensor GraphNetworkImpl::Penalty() const {
  torch::Tensor sum = torch::zeros({}, device());
  for (const GraphAttentionLayer& layer : layers_) {
    for (const torch::Tensor& part : {layer->weight, layer->query_weight, layer->key_weight}) {
      sum = sum + part.square().sum();
    }
  }
  return sum / 2;
}

}  // namespace gnomon::lab
