// Attention over the edges of a graph, on plain views, without PyTorch.
//
//   o_i = sum_e p_e v_{j(e)},   p_e = exp(s_e) / sum exp(s),   both sums over the edges of row i
//
// The scores s are those of gnomon/attention.h plus a bias per edge, without masks. With a
// dropout mask m (see Dropout), o_i is the sum of p_e m_e v_{j(e)}, but lse includes all edges. The
// graph is a sparse matrix in CSR format: edges indptr[i] ... indptr[i + 1] - 1 belong to query i,
// and edge e leads to the key indices[e]. Duplicate edges are counted once per occurrence. Both
// passes use O(E H) memory in addition to the arguments. Results are bitwise identical from run to
// run and for any number of workers.
#ifndef GNOMON_GRAPH_H_
#define GNOMON_GRAPH_H_

#include <cstdint>

#include "gnomon/attention.h"

namespace gnomon {

struct GraphShape {
  int64_t heads = 0;      // H; H / Hkv of them share each key head
  int64_t key_heads = 0;  // Hkv
  int64_t queries = 0;    // N
  int64_t keys = 0;       // Nk: N if queries and keys are the same nodes
  int64_t edges = 0;      // E
  int64_t dim = 0;        // D
  int64_t value_dim = 0;  // Dv
};

// The views are those of attention with batch size 1: row(0, head, node).
template <class T>
struct GraphInput {
  GraphShape shape;
  const int64_t* indptr = nullptr;    // (N + 1), from 0 to E, non-decreasing
  const int64_t* indices = nullptr;   // (E), each in [0, Nk)
  View<const T> x;                    // (H, N, D)
  View<const T> y;                    // (Hkv, Nk, D)
  View<const T> v;                    // (Hkv, Nk, Dv)
  const T* row_scalars = nullptr;     // a: (R, H, N), contiguous
  const T* column_scalars = nullptr;  // b: (C, Hkv, Nk), contiguous
  const T* head_scalars = nullptr;    // t: (S, H), contiguous
  const T* factor = nullptr;          // c: (H)
  // (E, H), contiguous, added to the scores; -inf removes an edge. Null means no bias.
  const T* edge_bias = nullptr;
  Dropout dropout;  // the mask depends on the head, the node and the index of the edge
};

template <class T>
struct GraphOutput {
  View<T> o;         // (H, N, Dv); 0 in a row without edges
  T* lse = nullptr;  // (N, H), contiguous; natural logarithm, -inf in a row without edges
  // (3, N, H), contiguous; not stored if null. These are the statistics of gnomon/attention.h, with
  // edge indices instead of key indices.
  T* statistics = nullptr;
};

// Additional inputs of the backward pass.
template <class T>
struct GraphBackwardInput {
  View<const T> o;
  const T* lse = nullptr;    // (N, H), from the forward pass
  View<const T> d_o;         // (H, N, Dv)
  const T* d_lse = nullptr;  // (N, H), contiguous; null means 0
  // (3, N, H), from the forward pass; recomputed if null.
  const T* statistics = nullptr;
};

// Gradients; those with a null pointer are not computed. All except the views are contiguous and
// have the shape of the corresponding input.
template <class T>
struct GraphGradient {
  View<T> x;
  View<T> y;
  View<T> v;
  T* row_scalars = nullptr;
  T* column_scalars = nullptr;
  T* head_scalars = nullptr;
  T* factor = nullptr;
  T* edge_bias = nullptr;
};

// Checks the arguments and the graph, throwing Error if one is invalid, and runs the kernels.
void GraphForward(const PairFunction& function, const GraphInput<float>& input,
                  const GraphOutput<float>& output, const Executor& executor = SerialExecutor());
void GraphForward(const PairFunction& function, const GraphInput<double>& input,
                  const GraphOutput<double>& output, const Executor& executor = SerialExecutor());
void GraphBackward(const PairFunction& function, const GraphInput<float>& input,
                   const GraphBackwardInput<float>& saved, const GraphGradient<float>& gradient,
                   const Executor& executor = SerialExecutor());
void GraphBackward(const PairFunction& function, const GraphInput<double>& input,
                   const GraphBackwardInput<double>& saved, const GraphGradient<double>& gradient,
                   const Executor& executor = SerialExecutor());

}  // namespace gnomon

#endif  // GNOMON_GRAPH_H_
