// Graph attention networks (Velickovic et al. 2018) with any similarity in the catalogue.
#ifndef GNOMON_MODELS_GRAPH_NETWORK_H_
#define GNOMON_MODELS_GRAPH_NETWORK_H_

#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

#include "models/learned_similarity.h"
#include "models/sparse_matrix.h"
#include "training/options.h"

namespace gnomon::lab {

// Nodes, their edges and features.
struct Graph {
  int64_t nodes = 0;
  // The nodes that each node attends to, including itself, in CSR format: in ascending order and
  // without duplicates.
  torch::Tensor indptr;
  torch::Tensor indices;
  SparseMatrix edges;  // (E, nodes): row e has a 1 in the column of the node that edge e comes from
  // The features (nodes, features), stored in one of these two tensors.
  SparseMatrix sparse_features;
  torch::Tensor dense_features;

  Graph To(torch::Device device) const;
};

// Creates a graph without features. For each row (i, j) of edges (E, 2), node j attends to node i;
// unless edges are directed, node i also attends to node j.
Graph MakeGraph(int64_t nodes, const torch::Tensor& edges, bool is_directed);

#define GNOMON_GRAPH_NETWORK_OPTIONS(OPTION)                                                      \
  /* The numbers of features and classes in the data; 0 before they are read. */                  \
  OPTION(int64_t, features, 0, .has_flag = false)                                                 \
  OPTION(int64_t, classes, 0, .has_flag = false)                                                  \
  OPTION(int64_t, depth, 2, .help = "Number of attention layers", .lowest = 1)                    \
  OPTION(int64_t, heads, 8,                                                                       \
         .help = "Number of heads per hidden layer; their outputs are concatenated", .lowest = 1) \
  OPTION(int64_t, hidden, 8, .help = "Dimension of each head in hidden layers", .lowest = 1)      \
  OPTION(int64_t, out_heads, 1,                                                                   \
         .help = "Number of heads in the output layer; their outputs are averaged", .lowest = 1)  \
  OPTION(double, dropout, 0.6,                                                                    \
         .help = "Dropout probability on the input of each layer during training; below 1",       \
         .highest = 1)                                                                            \
  OPTION(double, attention_dropout, 0.6,                                                          \
         .help = "Dropout probability on the attention weights during training; below 1",         \
         .highest = 1)                                                                            \
  OPTION(bool, directed, false,                                                                   \
         .help =                                                                                  \
             "Treat edges as directed: with an edge I J, node J attends to node I, but not vice " \
             "versa")

struct GraphNetworkOptions {
  GNOMON_OPTIONS(GNOMON_GRAPH_NETWORK_OPTIONS)
};

// One layer with `heads` heads on values h = x W (equations 1 to 4). Each node averages the values
// of the nodes that it attends to, with weights softmax(s(h_i Q, h_j K)), and adds a bias. For the
// additive similarity, Q and K are the two halves of the paper's vector a; for others, they have as
// many columns as the values.
class GraphAttentionLayerImpl : public torch::nn::Module {
 public:
  GraphAttentionLayerImpl(int64_t inputs, int64_t heads, int64_t columns,
                          const std::string& similarity, double dropout);
  // h has shape (nodes, heads * columns); the result has shape (nodes, heads, columns).
  torch::Tensor forward(const Graph& graph, const torch::Tensor& h);

  torch::Tensor weight;        // (inputs, heads, columns)
  torch::Tensor query_weight;  // (heads, columns, columns of q)
  torch::Tensor key_weight;    // (heads, columns, columns of k)
  torch::Tensor bias;          // (heads, columns)

 private:
  LearnedSimilarity similarity_{nullptr};
  double dropout_;
};
TORCH_MODULE(GraphAttentionLayer);

// Attention layers with ELU and dropout in between. Weights are initialised uniformly as in Glorot
// and Bengio (2010), with PyTorch's default generator.
class GraphNetworkImpl : public torch::nn::Module {
 public:
  GraphNetworkImpl(const GraphNetworkOptions& options, const std::string& similarity);
  torch::Device device() const { return layers_[0]->bias.device(); }
  // Returns the logits (nodes, classes) of a graph on the model's device.
  torch::Tensor forward(const Graph& graph);
  // Returns half the sum of squares of all weights, excluding biases and parameters of the
  // similarity.
  torch::Tensor Penalty() const;

 private:
  GraphNetworkOptions options_;
  std::vector<GraphAttentionLayer> layers_;
};
TORCH_MODULE(GraphNetwork);

}  // namespace gnomon::lab

#endif  // GNOMON_MODELS_GRAPH_NETWORK_H_
