// Attention over the edges of a graph, on plain views: no Torch.
//
//   o_i = sum_e p_e v_{j(e)},   p_e = exp(s_e) / sum exp(s),   both sums over the edges of row i
//
// with the scores s of gnomon/attention.h, without bias and mask. The graph is in compressed rows
// (CSR): edges indptr[i] ... indptr[i + 1] - 1 belong to query i, and edge e leads to the key
// indices[e]. An edge that is there twice counts twice. Memory is O(E H) beside the arguments, in
// both directions. Results are bitwise the same from run to run and for any number of workers.
#ifndef GNOMON_GRAPH_H_
#define GNOMON_GRAPH_H_

#include <cstdint>

#include "gnomon/attention.h"

namespace gnomon {

struct GraphShape {
  int64_t heads = 0;      // H, in groups of H / Hkv on one key head
  int64_t key_heads = 0;  // Hkv
  int64_t queries = 0;    // N
  int64_t keys = 0;       // Nk: N where queries and keys are the same nodes
  int64_t edges = 0;      // E
  int64_t dim = 0;        // D
  int64_t value_dim = 0;  // Dv
};

// The views are those of attention with one batch: row(0, head, node).
template <class T>
struct GraphInput {
  GraphShape shape;
  const int64_t* indptr = nullptr;    // (N + 1), from 0 to E, never falling
  const int64_t* indices = nullptr;   // (E), each in [0, Nk)
  View<const T> x;                    // (H, N, D)
  View<const T> y;                    // (Hkv, Nk, D)
  View<const T> v;                    // (Hkv, Nk, Dv)
  const T* row_scalars = nullptr;     // a: (R, H, N), contiguous
  const T* column_scalars = nullptr;  // b: (C, Hkv, Nk), contiguous
  const T* head_scalars = nullptr;    // t: (S, H), contiguous
  const T* factor = nullptr;          // c: (H)
};

template <class T>
struct GraphOutput {
  View<T> o;         // (H, N, Dv); 0 in a row without edges
  T* lse = nullptr;  // (N, H), contiguous; natural logarithm, -inf in a row without edges
  // (3, N, H), contiguous; null: not kept. As in gnomon/attention.h, with the number of an edge
  // instead of that of a key.
  T* statistics = nullptr;
};

// What the backward pass reads besides the input.
template <class T>
struct GraphBackwardInput {
  View<const T> o;
  const T* lse = nullptr;    // (N, H), as the forward pass gave it
  View<const T> d_o;         // (H, N, Dv)
  const T* d_lse = nullptr;  // (N, H), contiguous; null: zero
  // (3, N, H), as the forward pass gave them; null: it is computed anew for them.
  const T* statistics = nullptr;
};

// Gradients; a null pointer is not computed. All but the views are contiguous, in the shape of what
// they belong to.
template <class T>
struct GraphGradient {
  View<T> x;
  View<T> y;
  View<T> v;
  T* row_scalars = nullptr;
  T* column_scalars = nullptr;
  T* head_scalars = nullptr;
  T* factor = nullptr;
};

// Checks the views against the shape and the graph (throws Error), then runs the kernels.
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
