// A call of the kernel for derivatives of graph attention, and its tasks: a few rows with all of
// their edges.
#if defined(GNOMON_SRC_CPU_GRAPH_DUAL_TASKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_GRAPH_DUAL_TASKS_INL_H_
#undef GNOMON_SRC_CPU_GRAPH_DUAL_TASKS_INL_H_
#else
#define GNOMON_SRC_CPU_GRAPH_DUAL_TASKS_INL_H_
#endif

#include <algorithm>
#include <vector>

#include "base/dropout.h"
#include "base/parallel.h"
#include "cpu/columns-inl.h"
#include "cpu/dual_call-inl.h"
#include "cpu/dual_columns-inl.h"
#include "cpu/dual_scores-inl.h"
#include "cpu/graph_derivatives.h"
#include "cpu/packing-inl.h"
#include "cpu/vocabulary-inl.h"
#include "cpu/workspace.h"
#include "gnomon/graph.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {

// Splits the rows of a graph into tasks of whole rows with about `size` edges and rows.
class RowTasks {
 public:
  RowTasks(const int64_t* indptr, int64_t rows, int64_t size) : indptr_(indptr) {
    for (int64_t i = 0; i < rows; ++i) {
      if (first_.empty() || (indptr[i] + i) / size != (indptr[i - 1] + i - 1) / size) {
        first_.push_back(i);
      }
    }
    first_.push_back(rows);
    for (int64_t task = 0; task < count(); ++task) {
      const Range rows_of = Rows(task);
      most_edges_ = std::max(most_edges_, indptr[rows_of.end] - indptr[rows_of.begin]);
      most_rows_ = std::max(most_rows_, rows_of.end - rows_of.begin);
    }
  }

  struct Range {
    int64_t begin;
    int64_t end;
  };
  int64_t count() const { return static_cast<int64_t>(first_.size()) - 1; }
  Range Rows(int64_t task) const { return {first_[Size(task)], first_[Size(task + 1)]}; }
  Range Edges(int64_t i) const { return {indptr_[i], indptr_[i + 1]}; }
  int64_t most_edges() const { return most_edges_; }
  int64_t most_rows() const { return most_rows_; }

 private:
  const int64_t* indptr_;
  std::vector<int64_t> first_;
  int64_t most_edges_ = 0;
  int64_t most_rows_ = 0;
};

// Rows of tokens and of their tangents; missing tangents are 0.
class DualTokens {
 public:
  DualTokens(const View<const Real>& values, const View<const Real>& tangents,
             const std::vector<Real>& zeros)
      : values_(values),
        tangents_(tangents.data != nullptr ? tangents : View<const Real>{zeros.data(), {}}) {}

  DualNumbers Row(int64_t h, int64_t i) const {
    return {values_.row(0, h, i), tangents_.row(0, h, i)};
  }

 private:
  View<const Real> values_;
  View<const Real> tangents_;
};

// Scratch memory of a task. The number of edge e and head h is at index (e - first edge) * heads +
// h.
struct GraphScratch {
  DualRow g;         // the pair function's arguments
  DualRow weights;   // scores, then weights
  DualRow dropped;   // weights after dropout; equal to `weights` without dropout
  DualRow d_scores;  // gradients of weights, then of scores, then of g
  Real* largest;     // per row and head: the largest score
  Real* top_edges;   // per row and head: the edge with the largest weight, from the row's first
  Real* tops;        // per row and head: f and the slopes at that edge; one array each
  // Arrays of `stride` numbers.
  Real* pairs;   // scalars of rows, then of columns; then their tangents
  Real* f;       // values; then their tangents
  Real* slopes;  // slopes; then their tangents
  Real* work;    // gradients of f, and their tangents
  Real* sums;    // gradients of a row's tokens, or its outputs; then their tangents
  // Per row and head: sums over edges that are relative to the slopes of the top edge, one array
  // each for g and the row scalars; then their tangents.
  Real* row_sums;
};

// The rows [begin, end) of a task, and their first edge.
struct GraphTask : GraphScratch {
  int64_t number;
  int64_t begin;
  int64_t end;
  int64_t first;
  int64_t edges;
  int64_t heads;

  // The number of pairs of an edge and a head.
  int64_t size() const { return edges * heads; }
  // The index of a row's first number in arrays with one number per row and head.
  int64_t At(int64_t i) const { return (i - begin) * heads; }
};

// Edges [begin, end) of row i. `offset` is the index of their first pair in a task's arrays.
struct RowEdges {
  int64_t i;
  int64_t begin;
  int64_t end;
  int64_t offset;
};

inline DualRow From(const DualRow& row, int64_t n) { return {row.values + n, row.tangents + n}; }
inline DualNumber At(const DualRow& row, int64_t n) { return {row.values[n], row.tangents[n]}; }

// The sums of `size` numbers in `memory`, all 0. If values are not needed, `values` is null.
inline DualRow ClearSums(Real* memory, int64_t size, bool needs_values) {
  std::fill_n(memory, needs_values ? 2 * size : size, 0.0f);
  return {needs_values ? memory + size : nullptr, memory};
}
inline DualRow SumsAt(const DualRow& sums, int64_t n) {
  return {sums.values != nullptr ? sums.values + n : nullptr, sums.tangents + n};
}
inline void Write(const View<Real>& view, int64_t h, int64_t i, const Real* from, int64_t columns) {
  if (view.data != nullptr) std::copy_n(from, columns, view.row(0, h, i));
}
// Writes the sums of `heads` heads to the rows of node i.
inline void WriteSums(const View<Real>& values, const View<Real>& tangents, const DualRow& sums,
                      int64_t heads, int64_t i, int64_t columns) {
  for (int64_t h = 0; h < heads; ++h) {
    const DualRow of_head = SumsAt(sums, h * columns);
    Write(values, h, i, of_head.values, columns);
    Write(tangents, h, i, of_head.tangents, columns);
  }
}

// A call that is computed in tasks: the results that it needs, sizes, and packed scalars.
struct GraphCall : DualCall<GraphDerivatives<Real>> {
  explicit GraphCall(const GraphDerivatives<Real>& call)
      : DualCall(call),
        group(n.heads / std::max<int64_t>(1, n.key_heads)),
        dim(has_product() ? n.dim : 0),
        task_edges(std::max(kTaskPairs / std::max<int64_t>(1, n.heads), int64_t{32})),
        stride(RoundUp(DivideUp(kStepPairs, std::max<int64_t>(1, n.heads)), kLaneCount) * n.heads),
        tasks(in.indptr, n.queries, task_edges),
        most_pairs(RoundUp(tasks.most_edges() * n.heads, kLaneCount)),
        most_tops(RoundUp(tasks.most_rows() * n.heads, kLaneCount)),
        zeros(Size(std::max({n.dim, n.value_dim, n.heads})), 0.0f),
        x(in.x, tangent.x, zeros),
        y(in.y, tangent.y, zeros),
        v(in.v, tangent.v, zeros),
        d_o(of.d_o, of.d_o_tangent, zeros),
        rows_(2 * row_scalars() * n.heads * n.queries),
        columns_(2 * column_scalars() * n.heads * n.keys),
        heads_(2 * (1 + head_scalars()) * stride) {}
  // Not copyable, because members point into this object.
  GraphCall(const GraphCall&) = delete;
  GraphCall& operator=(const GraphCall&) = delete;

  GraphScratch Scratch(ScratchParts& parts) const {
    const int64_t dropped = drops() ? most_pairs : 0;
    const int64_t scores = wants_any ? most_pairs : 0;
    const int64_t centred = centres ? most_tops : 0;
    const auto pair = [&](int64_t size) -> DualRow { return {parts.Take(size), parts.Take(size)}; };
    GraphScratch scratch = {.g = pair(most_pairs),
                            .weights = pair(most_pairs),
                            .dropped = pair(dropped),
                            .d_scores = pair(scores),
                            .largest = parts.Take(most_tops),
                            .top_edges = parts.Take(wants_any ? most_tops : 0),
                            .tops = parts.Take((5 + 2 * row_scalars()) * centred),
                            .pairs = parts.Take(2 * (row_scalars() + column_scalars()) * stride),
                            .f = parts.Take(2 * stride),
                            .slopes = parts.Take(2 * slopes() * stride),
                            .work = parts.Take(2 * stride),
                            .sums = parts.Take(2 * n.heads * std::max(dim, n.value_dim)),
                            .row_sums = parts.Take(2 * (1 + row_scalars()) * centred)};
    if (!drops()) scratch.dropped = scratch.weights;
    return scratch;
  }
  GraphTask Task(int64_t number, const GraphScratch& scratch) const {
    const auto [begin, end] = tasks.Rows(number);
    const int64_t first = in.indptr[begin];
    return {scratch, number, begin, end, first, in.indptr[end] - first, n.heads};
  }

  // The number of slopes with respect to g and to all scalars.
  int slopes() const { return 1 + row_scalars() + column_scalars() + head_scalars(); }
  int head_sums() const { return 1 + head_scalars(); }  // factor, head scalars
  bool drops() const { return in.dropout.rate > 0; }

  // Packs the scalars of nodes in the order in which edges read them: node, scalar, query head.
  // Repeats the scalars of heads for all pairs of a step.
  void PackScalars(const Executor& executor) const {
    for (const bool is_tangent : {false, true}) {
      const GraphInput<Real>& from = is_tangent ? tangent : in;
      PackNodes(executor, from.row_scalars, row_scalars(), n.queries, n.heads,
                rows_.data() + is_tangent * row_scalars() * n.heads * n.queries);
      PackNodes(executor, from.column_scalars, column_scalars(), n.keys, n.key_heads,
                columns_.data() + is_tangent * column_scalars() * n.heads * n.keys);
      for (int s = 0; s < head_sums(); ++s) {
        const Real* const numbers = s == 0 ? from.factor
                                    : from.head_scalars == nullptr
                                        ? nullptr
                                        : from.head_scalars + (s - 1) * n.heads;
        Real* const to = HeadNumbers(is_tangent, s);
        for (int64_t q = 0; q < stride; ++q) {
          to[q] = numbers != nullptr ? numbers[q % n.heads] : 0.0f;
        }
      }
    }
  }
  // The factor (s = 0) and the head scalars of a step's pairs.
  Real* HeadNumbers(bool is_tangent, int s) const {
    return heads_.data() + (is_tangent * head_sums() + s) * stride;
  }
  // Calls body(row) for each row of a task.
  template <class Body>
  HWY_INLINE void ForRows(const GraphTask& task, const Body& body) const {
    for (int64_t i = task.begin; i < task.end; ++i) {
      const auto [begin, end] = tasks.Edges(i);
      body(RowEdges{i, begin, end, (begin - task.first) * n.heads});
    }
  }
  // Calls body(first pair, number of pairs) for the steps of a task.
  template <class Body>
  HWY_INLINE void ForSteps(int64_t pairs, const Body& body) const {
    for (int64_t q = 0; q < pairs; q += stride) body(q, std::min(stride, pairs - q));
  }
  // Calls body(edge, row, index of the first pair) for the edges of `count` pairs that start at
  // pair q of a task.
  template <class Body>
  HWY_INLINE void ForEdges(const GraphTask& task, int64_t q, int64_t count,
                           const Body& body) const {
    const int64_t begin = task.first + q / n.heads;
    const int64_t end = begin + count / n.heads;
    const int64_t* const indptr = in.indptr;
    int64_t i = std::upper_bound(indptr + task.begin, indptr + task.end, begin) - indptr - 1;
    for (int64_t e = begin; e < end; ++e) {
      while (indptr[i + 1] <= e) ++i;
      body(e, i, (e - begin) * n.heads);
    }
  }

  // Computes the inner products of the rows of queries and keys, or their squared distances.
  template <bool kDistance>
  HWY_NOINLINE void Multiply(const GraphTask& task, const DualTokens& queries,
                             const DualTokens& keys, int64_t columns, const DualRow& to) const {
    ForRows(task, [&](const RowEdges& row) {
      int64_t q = row.offset;
      for (int64_t e = row.begin; e < row.end; ++e) {
        const int64_t j = in.indices[e];
        for (int64_t h = 0; h < n.heads; ++h, ++q) {
          const DualNumber product =
              DualProduct<kDistance>(queries.Row(h, row.i), keys.Row(h / group, j), columns);
          to.values[q] = product.value;
          to.tangents[q] = product.tangent;
        }
      }
    });
  }

  // The arrays of a step's pairs, or the arrays of their tangents.
  PairArrays PairsOf(bool is_tangent, const Real* g, const GraphTask& task) const {
    const Real* const a = task.pairs + is_tangent * (row_scalars() + column_scalars()) * stride;
    return {g, a, a + row_scalars() * stride, HeadNumbers(is_tangent, 1), stride};
  }
  SlopeArrays SlopesOf(bool is_tangent, const GraphTask& task) const {
    Real* const g = task.slopes + is_tangent * slopes() * stride;
    Real* const a = g + stride;
    Real* const b = a + row_scalars() * stride;
    return {g, a, b, b + column_scalars() * stride};
  }

  // Copies the scalars of a row and of a key to the numbers at index q of a step's arrays, for
  // heads [h, h + count).
  void CopyScalars(int64_t i, int64_t j, int64_t h, int64_t count, int64_t q,
                   const GraphTask& task) const {
    Real* to = task.pairs + q;
    for (const bool is_tangent : {false, true}) {
      const Real* const rows =
          rows_.data() + (is_tangent * n.queries + i) * row_scalars() * n.heads + h;
      for (int s = 0; s < row_scalars(); ++s, to += stride) {
        CopyHeads(rows + s * n.heads, count, to);
      }
      const Real* const columns =
          columns_.data() + (is_tangent * n.keys + j) * column_scalars() * n.heads + h;
      for (int s = 0; s < column_scalars(); ++s, to += stride) {
        CopyHeads(columns + s * n.heads, count, to);
      }
    }
  }

  // Computes f and its slopes for `count` pairs of a step, with their tangents. g is their
  // argument.
  void Differentiate(const DualRow& g, int64_t count, const GraphTask& task) const {
    const PairArrays pairs = PairsOf(false, g.values, task);
    const PairArrays tangents = PairsOf(true, g.tangents, task);
    const SlopeArrays slopes = SlopesOf(false, task);
    function->pairs->values(pairs, count, task.f);
    function->slopes(pairs, tangents, count, slopes, SlopesOf(true, task));
    SetValueTangents(tangents, count, task);
  }
  void SetValueTangents(const PairArrays& tangents, int64_t count, const GraphTask& task) const {
    const SlopeArrays slopes = SlopesOf(false, task);
    for (int64_t q = 0; q < count; q += kLaneCount) {
      hn::Store(ValueTangent(*this, slopes, tangents, q), DF(), task.f + stride + q);
    }
  }

  // f of the pairs of a step that starts at pair q.
  DualRow ValuesOf(int64_t q, const GraphTask& task) const {
    if (function == nullptr) return From(task.g, q);
    return {task.f, task.f + stride};
  }

  // Multiplies the numbers of a row's pairs by the dropout mask.
  void Drop(const RowEdges& row, const DualRow& numbers) const {
    const uint32_t threshold = DropoutThreshold(in.dropout);
    const auto scale = static_cast<Real>(DropoutScale(in.dropout));
    for (int64_t h = 0; h < n.heads; ++h) {
      const DropoutRow hashes = HashRow(in.dropout.seed, 0, h, row.i);
      int64_t q = row.offset + h;
      for (int64_t e = row.begin; e < row.end; ++e, q += n.heads) {
        const bool drops = HashColumn(hashes, static_cast<uint32_t>(e)) < threshold;
        numbers.values[q] = drops ? 0.0f : numbers.values[q] * scale;
        numbers.tangents[q] = drops ? 0.0f : numbers.tangents[q] * scale;
      }
    }
  }

  const int64_t group;
  const int64_t dim;
  const int64_t task_edges;  // edges and rows per task
  const int64_t stride;      // pairs per step
  const RowTasks tasks;
  const int64_t most_pairs;  // of a task, in whole vectors
  const int64_t most_tops;   // the most rows of a task times heads, in whole vectors
  const std::vector<Real> zeros;
  const DualTokens x;
  const DualTokens y;
  const DualTokens v;
  const DualTokens d_o;

  using To = GraphGradient<Real>;
  const bool wants_x = has_product() && Wants(&To::x);
  const bool wants_y = has_product() && Wants(&To::y);
  const bool wants_v = Wants(&To::v);
  const bool wants_columns = column_scalars() > 0 && Wants(&To::column_scalars);
  const bool wants_heads = Wants(&To::factor, &To::head_scalars);
  // Whether gradients of f are needed.
  const bool wants_slopes = wants_x || wants_y || wants_columns || wants_heads ||
                            (row_scalars() > 0 && Wants(&To::row_scalars));
  const bool wants_scores = wants_slopes || Wants(&To::edge_bias);
  const bool wants_any = wants_scores || wants_v;
  const bool wants_keys = wants_y || wants_v || wants_columns;
  // Whether sums over a row's edges are relative to the slopes of its top edge (see RowSoftmax).
  const bool centres = function != nullptr && wants_slopes;

 private:
  // A task has about this many pairs, so that its arrays stay in cache.
  static constexpr int64_t kTaskPairs = 2048;
  // Pair functions are called for about this many pairs at a time.
  static constexpr int64_t kStepPairs = 512;

  // Transposes (count, heads, nodes) to (nodes, count, query heads).
  void PackNodes(const Executor& executor, const Real* from, int count, int64_t nodes,
                 int64_t heads, Real* to) const {
    constexpr int64_t kNodes = 256;
    if (count == 0) return;
    const int64_t repeat = n.heads / std::max<int64_t>(1, heads);
    ParallelTasks(executor, DivideUp(nodes, kNodes), [&](int64_t task, int) {
      const int64_t begin = task * kNodes;
      const int64_t end = std::min(begin + kNodes, nodes);
      if (from == nullptr) {
        std::fill(to + begin * count * n.heads, to + end * count * n.heads, 0.0f);
        return;
      }
      for (int64_t s = 0; s < count; ++s) {
        for (int64_t h = 0; h < n.heads; ++h) {
          const Real* const row = from + (s * heads + h / repeat) * nodes;
          for (int64_t i = begin; i < end; ++i) to[(i * count + s) * n.heads + h] = row[i];
        }
      }
    });
  }
  static HWY_INLINE void CopyHeads(const Real* from, int64_t count, Real* to) {
    ForLanes(count,
             [=](auto d, int64_t n) HWY_ATTR { hn::StoreU(hn::LoadU(d, from + n), d, to + n); });
  }

  Buffer rows_;     // packed scalars of rows; then their tangents
  Buffer columns_;  // packed scalars of columns; then their tangents
  Buffer heads_;    // factor and head scalars, repeated for all pairs of a step
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
