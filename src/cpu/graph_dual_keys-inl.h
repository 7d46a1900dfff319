// The gradients of keys, values and column scalars of graph attention, and their tangents. They are
// sums over the edges of the transposed graph, whose terms the tasks have stored.
#if defined(GNOMON_SRC_CPU_GRAPH_DUAL_KEYS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_GRAPH_DUAL_KEYS_INL_H_
#undef GNOMON_SRC_CPU_GRAPH_DUAL_KEYS_INL_H_
#else
#define GNOMON_SRC_CPU_GRAPH_DUAL_KEYS_INL_H_
#endif

#include <algorithm>

#include "base/edge_chunks.h"
#include "base/parallel.h"
#include "cpu/dual_columns-inl.h"
#include "cpu/dual_scores-inl.h"
#include "cpu/graph_dual_tasks-inl.h"
#include "cpu/packing-inl.h"
#include "cpu/vocabulary-inl.h"
#include "cpu/workspace.h"
#include "gnomon/graph.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {

class GraphKeys {
 public:
  explicit GraphKeys(const GraphCall& call) : call_(call), pairs_(call.n.edges * call.n.heads) {
    if (call.wants_v) weights_.Reset(2 * pairs_);
    if (call.wants_y) d_products_.Reset(2 * pairs_);
    if (call.wants_columns) d_columns_.Reset(2 * call.column_scalars() * pairs_);
  }

  // Store the weights of a task after dropout, and the gradients of its products or distances.
  void KeepWeights(const GraphTask& task) const {
    if (call_.wants_v) Keep(task, task.dropped, weights_);
  }
  void KeepProducts(const GraphTask& task) const {
    if (call_.wants_y) Keep(task, task.d_scores, d_products_);
  }
  // The gradients of column scalar s that a task stores, starting at pair `begin`.
  DualRow ColumnGradients(const GraphTask& task, int s, int64_t begin) const {
    Real* const values = d_columns_.data() + 2 * s * pairs_ + task.first * call_.n.heads + begin;
    return {values, values + pairs_};
  }

  // Computes the gradients.
  void Run(const Executor& executor) const {
    const TransposedGraph graph(call_.in.indptr, call_.in.indices, call_.n.queries, call_.n.keys);
    const RowTasks tasks(graph.indptr.data(), call_.n.keys, call_.task_edges);
    const int64_t size = 2 * call_.n.key_heads * std::max(call_.dim, call_.n.value_dim);
    const Buffer memory(size * WorkersFor(executor, tasks.count()));
    ParallelTasks(executor, tasks.count(), [&](int64_t task, int worker) {
      const auto [begin, end] = tasks.Rows(task);
      Real* const sums = memory.data() + worker * size;
      for (int64_t j = begin; j < end; ++j) {
        if (call_.wants_v) SumValues(graph, j, sums);
        if (call_.wants_y) SumKeys(graph, j, sums);
        if (call_.wants_columns) SumColumns(graph, j);
      }
    });
  }

 private:
  // Copies a task's numbers to an array with one number per edge and head, followed by the
  // tangents.
  void Keep(const GraphTask& task, const DualRow& from, const Buffer& to) const {
    Real* const values = to.data() + task.first * call_.n.heads;
    std::copy_n(from.values, task.size(), values);
    std::copy_n(from.tangents, task.size(), values + pairs_);
  }

  // Calls body(row, head, number) for the edges of key j, with the numbers of pairs in `numbers`.
  template <class Body>
  HWY_INLINE void ForPairsOfKey(const TransposedGraph& graph, int64_t j, const Buffer& numbers,
                                const Body& body) const {
    for (int64_t t = graph.indptr[Size(j)]; t < graph.indptr[Size(j + 1)]; ++t) {
      const Real* const of_edge = numbers.data() + graph.edges[Size(t)] * call_.n.heads;
      for (int64_t h = 0; h < call_.n.heads; ++h) {
        body(graph.rows[Size(t)], h, DualNumber{of_edge[h], of_edge[pairs_ + h]});
      }
    }
  }

  // Compute the gradients of a value, or of a key.
  void SumValues(const TransposedGraph& graph, int64_t j, Real* memory) const {
    const int64_t columns = call_.n.value_dim;
    const DualRow sums =
        ClearSums(memory, call_.n.key_heads * columns, call_.of.gradient.v.data != nullptr);
    ForPairsOfKey(graph, j, weights_, [&](int64_t i, int64_t h, const DualNumber& weight) {
      AddScaledDual(weight, call_.d_o.Row(h, i), columns, SumsAt(sums, h / call_.group * columns));
    });
    WriteSums(call_.of.gradient.v, call_.of.gradient_tangent.v, sums, call_.n.key_heads, j,
              columns);
  }
  void SumKeys(const TransposedGraph& graph, int64_t j, Real* memory) const {
    const DualRow sums =
        ClearSums(memory, call_.n.key_heads * call_.dim, call_.of.gradient.y.data != nullptr);
    ForPairsOfKey(graph, j, d_products_, [&](int64_t i, int64_t h, const DualNumber& d_product) {
      const int64_t key_head = h / call_.group;
      const DualRow to = SumsAt(sums, key_head * call_.dim);
      if (call_.is_distance()) {
        AddScaledDualDifference(d_product, call_.y.Row(key_head, j), call_.x.Row(h, i), call_.dim,
                                to);
      } else {
        AddScaledDual(d_product, call_.x.Row(h, i), call_.dim, to);
      }
    });
    WriteSums(call_.of.gradient.y, call_.of.gradient_tangent.y, sums, call_.n.key_heads, j,
              call_.dim);
  }

  void SumColumns(const TransposedGraph& graph, int64_t j) const {
    for (const bool is_tangent : {false, true}) {
      Real* const to = call_.Gradient(is_tangent).column_scalars;
      for (int s = 0; to != nullptr && s < call_.column_scalars(); ++s) {
        const Real* const from = d_columns_.data() + (2 * s + is_tangent) * pairs_;
        for (int64_t h = 0; h < call_.n.key_heads; ++h) {
          Real sum = 0;
          for (int64_t t = graph.indptr[Size(j)]; t < graph.indptr[Size(j + 1)]; ++t) {
            const Real* const of_edge =
                from + graph.edges[Size(t)] * call_.n.heads + h * call_.group;
            for (int64_t g = 0; g < call_.group; ++g) sum += of_edge[g];
          }
          to[(s * call_.n.key_heads + h) * call_.n.keys + j] = sum;
        }
      }
    }
  }

  const GraphCall& call_;
  int64_t pairs_;  // edges times heads
  // The terms of the sums over a key's edges, per edge and head; then their tangents.
  Buffer weights_;
  Buffer d_products_;
  Buffer d_columns_;  // values and tangents of the first column scalar, then of the second, ...
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
