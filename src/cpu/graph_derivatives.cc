// Forward-mode derivatives of graph attention and of its gradients.
//
// Each task processes a few rows with all of their edges: it computes the weights of all pairs of
// an edge and a head, with their tangents, then the outputs and the gradients of the rows. A second
// loop over the transposed graph computes the sums over each key's edges from numbers that the
// tasks have stored per edge and head. Each row and each key belongs to one task, so results do not
// depend on the number of workers.
//
// As in the first-order kernels (graph_pairs-inl.h), sums over columns are vectorised along the
// columns, and elementwise work over all pairs. Pair functions are called through a table of
// functions (cpu/dual_table.h); the inner product itself does not need a table.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/graph_derivatives.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// Must follow foreach_target.h:
#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "base/dropout.h"
#include "base/edge_chunks.h"
#include "base/parallel.h"
#include "cpu/columns-inl.h"
#include "cpu/dual_columns-inl.h"
#include "cpu/dual_scores-inl.h"
#include "cpu/dual_table.h"
#include "cpu/graph_derivatives.h"
#include "cpu/packing-inl.h"
#include "cpu/rows-inl.h"
#include "cpu/vocabulary-inl.h"
#include "cpu/workspace.h"
#include "gnomon/graph.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {
namespace {

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

class GraphPass {
 public:
  GraphPass(const GraphDerivatives<Real>& of, const Executor& executor)
      : of_(of),
        function_(of.function),
        in_(of.input),
        tangent_(of.tangent),
        executor_(executor),
        n_(in_.shape),
        group_(n_.heads / std::max<int64_t>(1, n_.key_heads)),
        dim_(has_product() ? n_.dim : 0),
        task_edges_(std::max(kTaskPairs / std::max<int64_t>(1, n_.heads), int64_t{32})),
        step_edges_(RoundUp(DivideUp(kStepPairs, std::max<int64_t>(1, n_.heads)), kLaneCount)),
        stride_(step_edges_ * n_.heads),
        tasks_(in_.indptr, n_.queries, task_edges_),
        most_pairs_(RoundUp(tasks_.most_edges() * n_.heads, kLaneCount)),
        most_tops_(RoundUp(tasks_.most_rows() * n_.heads, kLaneCount)),
        zeros_(Size(std::max(n_.dim, n_.value_dim)), 0.0f),
        x_(in_.x, tangent_.x, zeros_),
        y_(in_.y, tangent_.y, zeros_),
        v_(in_.v, tangent_.v, zeros_),
        d_o_(of.d_o, of.d_o_tangent, zeros_),
        rows_(2 * row_scalars() * n_.heads * n_.queries),
        columns_(2 * column_scalars() * n_.heads * n_.keys),
        heads_(2 * (1 + head_scalars()) * stride_),
        d_heads_(Size(2 * tasks_.count() * head_sums() * n_.heads)) {
    const int64_t pairs = n_.edges * n_.heads;
    if (wants_v()) weights_.Reset(2 * pairs);
    if (wants_y()) d_products_.Reset(2 * pairs);
    if (wants_columns()) d_columns_.Reset(2 * column_scalars() * pairs);
  }
  // Not copyable, because members point into this object.
  GraphPass(const GraphPass&) = delete;
  GraphPass& operator=(const GraphPass&) = delete;

  void Run() {
    PackScalars();
    const Buffer memory(scratch_size() * WorkersFor(executor_, tasks_.count()));
    ParallelTasks(executor_, tasks_.count(), [&](int64_t task, int worker) {
      RunTask(task, MakeScratch(memory.data() + worker * scratch_size()));
    });
    SumHeads();
    for (const bool is_tangent : {false, true}) {
      if (has_product()) break;
      Clear(Gradient(is_tangent).x, n_.heads, n_.queries);
      Clear(Gradient(is_tangent).y, n_.key_heads, n_.keys);
    }
    if (wants_keys()) SumKeys();
  }

 private:
  // A task has about this many pairs, so that its arrays stay in cache.
  static constexpr int64_t kTaskPairs = 2048;
  // Pair functions are called for about this many pairs at a time.
  static constexpr int64_t kStepPairs = 512;

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

  // The rows [begin, end) of a task, and their first edge.
  struct Task {
    int64_t begin;
    int64_t end;
    int64_t first;
    int64_t edges;
    int64_t heads;

    int64_t pairs() const { return edges * heads; }
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

  // Scratch memory of a worker. The number of edge e and head h of a task is at index (e - first
  // edge) * heads + h.
  struct Scratch {
    DualRow g;         // the pair function's arguments
    DualRow weights;   // scores, then weights
    DualRow dropped;   // weights after dropout; equal to `weights` without dropout
    DualRow d_scores;  // gradients of weights, then of scores, then of g
    Real* largest;     // per row and head: the largest score
    Real* top_edges;   // per row and head: the edge with the largest weight, from the row's first
    Real* tops;        // per row and head: f and the slopes at that edge; one array each
    // Arrays of stride_ numbers.
    Real* pairs;   // scalars of rows, then of columns; then their tangents
    Real* f;       // values; then their tangents
    Real* slopes;  // slopes; then their tangents
    Real* work;    // gradients of f, and their tangents
    Real* sums;    // gradients of a row's tokens, or its outputs; then their tangents
    // Per row and head: sums over edges that are relative to the slopes of the top edge, one array
    // each for g and the row scalars; then their tangents.
    Real* row_sums;
  };
  static constexpr size_t kParts = 17;
  std::array<int64_t, kParts> Sizes() const {
    const bool is_backward = wants_any();
    const int64_t centred = centres() ? most_tops_ : 0;
    const int64_t dropped = drops() ? most_pairs_ : 0;
    return {most_pairs_,
            most_pairs_,
            most_pairs_,
            most_pairs_,
            dropped,
            dropped,
            is_backward ? most_pairs_ : 0,
            is_backward ? most_pairs_ : 0,
            most_tops_,
            is_backward ? most_tops_ : 0,
            (5 + 2 * row_scalars()) * centred,
            2 * (row_scalars() + column_scalars()) * stride_,
            2 * stride_,
            2 * slopes() * stride_,
            2 * stride_,
            2 * n_.heads * std::max(dim_, n_.value_dim),
            2 * (1 + row_scalars()) * centred};
  }
  int64_t scratch_size() const {
    int64_t size = 0;
    for (const int64_t of_part : Sizes()) size += RoundUp(of_part, kWidth);
    return size;
  }
  Scratch MakeScratch(Real* memory) const {
    std::array<Real*, kParts> p;
    const std::array<int64_t, kParts> sizes = Sizes();
    for (size_t n = 0; n < p.size(); ++n) {
      p[n] = memory;
      memory += RoundUp(sizes[n], kWidth);
    }
    const DualRow weights{p[2], p[3]};
    return {{p[0], p[1]}, weights, drops() ? DualRow{p[4], p[5]} : weights,
            {p[6], p[7]}, p[8],    p[9],
            p[10],        p[11],   p[12],
            p[13],        p[14],   p[15],
            p[16]};
  }

  bool has_product() const { return function_ == nullptr || function_->pairs->has_product(); }
  bool is_distance() const { return function_ != nullptr && function_->pairs->is_distance(); }
  int row_scalars() const { return function_ == nullptr ? 0 : function_->pairs->row_scalars; }
  int column_scalars() const { return function_ == nullptr ? 0 : function_->pairs->column_scalars; }
  int head_scalars() const { return function_ == nullptr ? 0 : function_->pairs->head_scalars; }
  // Slopes with respect to g and to all scalars.
  int slopes() const { return 1 + row_scalars() + column_scalars() + head_scalars(); }
  int head_sums() const { return 1 + head_scalars(); }  // factor, head scalars
  bool drops() const { return in_.dropout.rate > 0; }

  const GraphGradient<Real>& Gradient(bool is_tangent) const {
    return is_tangent ? of_.gradient_tangent : of_.gradient;
  }
  // Whether a gradient or its tangent is needed.
  template <class Member>
  bool Wants(const Member& member) const {
    return member(of_.gradient) || member(of_.gradient_tangent);
  }
  bool wants_x() const {
    return has_product() && Wants([](const auto& to) { return to.x.data != nullptr; });
  }
  bool wants_y() const {
    return has_product() && Wants([](const auto& to) { return to.y.data != nullptr; });
  }
  bool wants_v() const {
    return Wants([](const auto& to) { return to.v.data != nullptr; });
  }
  bool wants_rows() const {
    return row_scalars() > 0 && Wants([](const auto& to) { return to.row_scalars != nullptr; });
  }
  bool wants_columns() const {
    return column_scalars() > 0 &&
           Wants([](const auto& to) { return to.column_scalars != nullptr; });
  }
  bool wants_heads() const {
    return Wants([](const auto& to) { return to.factor != nullptr || to.head_scalars != nullptr; });
  }
  bool wants_bias() const {
    return Wants([](const auto& to) { return to.edge_bias != nullptr; });
  }
  // Whether gradients of f are needed.
  bool wants_slopes() const {
    return wants_x() || wants_y() || wants_rows() || wants_columns() || wants_heads();
  }
  bool wants_scores() const { return wants_slopes() || wants_bias(); }
  bool wants_any() const { return wants_scores() || wants_v(); }
  bool wants_keys() const { return wants_y() || wants_v() || wants_columns(); }
  // Whether sums over a row's edges are relative to the slopes of its top edge (see RowSoftmax).
  bool centres() const { return function_ != nullptr && wants_slopes(); }

  // Packs the scalars of nodes in the order in which edges read them: node, scalar, query head.
  // Repeats the scalars of heads for all pairs of a step.
  void PackScalars() {
    for (const bool is_tangent : {false, true}) {
      const GraphInput<Real>& from = is_tangent ? tangent_ : in_;
      PackNodes(from.row_scalars, row_scalars(), n_.queries, n_.heads,
                rows_.data() + is_tangent * row_scalars() * n_.heads * n_.queries);
      PackNodes(from.column_scalars, column_scalars(), n_.keys, n_.key_heads,
                columns_.data() + is_tangent * column_scalars() * n_.heads * n_.keys);
      for (int s = 0; s < head_sums(); ++s) {
        const Real* const numbers = s == 0 ? from.factor
                                    : from.head_scalars == nullptr
                                        ? nullptr
                                        : from.head_scalars + (s - 1) * n_.heads;
        Real* const to = HeadNumbers(is_tangent, s);
        for (int64_t q = 0; q < stride_; ++q) {
          to[q] = numbers != nullptr ? numbers[q % n_.heads] : 0.0f;
        }
      }
    }
  }
  // The factor (s = 0) and the head scalars of a step's pairs.
  Real* HeadNumbers(bool is_tangent, int s) const {
    return heads_.data() + (is_tangent * head_sums() + s) * stride_;
  }
  // Transposes (count, heads, nodes) to (nodes, count, query heads).
  void PackNodes(const Real* from, int count, int64_t nodes, int64_t heads, Real* to) const {
    constexpr int64_t kNodes = 256;
    if (count == 0) return;
    const int64_t repeat = n_.heads / std::max<int64_t>(1, heads);
    ParallelTasks(executor_, DivideUp(nodes, kNodes), [&](int64_t task, int) {
      const int64_t begin = task * kNodes;
      const int64_t end = std::min(begin + kNodes, nodes);
      if (from == nullptr) {
        std::fill(to + begin * count * n_.heads, to + end * count * n_.heads, 0.0f);
        return;
      }
      for (int64_t s = 0; s < count; ++s) {
        for (int64_t h = 0; h < n_.heads; ++h) {
          const Real* const row = from + (s * heads + h / repeat) * nodes;
          for (int64_t i = begin; i < end; ++i) to[(i * count + s) * n_.heads + h] = row[i];
        }
      }
    });
  }

  void RunTask(int64_t number, const Scratch& scratch) {
    const auto [begin, end] = tasks_.Rows(number);
    const int64_t first = in_.indptr[begin];
    const Task task{begin, end, first, in_.indptr[end] - first, n_.heads};
    if (has_product()) {
      if (is_distance()) {
        Multiply<true>(task, x_, y_, dim_, scratch.g);
      } else {
        Multiply<false>(task, x_, y_, dim_, scratch.g);
      }
    }
    SetScores(task, scratch);
    SetWeights(task, scratch);
    WriteOutputs(task, scratch);
    if (!wants_any()) return;
    if (wants_v()) Keep(task, scratch.dropped, weights_);
    if (!wants_scores()) return;
    Multiply<false>(task, d_o_, v_, n_.value_dim, scratch.d_scores);
    SetScoreGradients(task, scratch);
    if (centres()) SetTops(task, scratch);
    if (wants_slopes()) SetProductGradients(number, task, scratch);
    if (centres()) FinishSums(number, task, scratch);
    if (wants_x()) WriteQueryGradients(task, scratch);
    if (wants_y()) Keep(task, scratch.d_scores, d_products_);
  }

  // Calls body(row) for each row of a task.
  template <class Body>
  HWY_INLINE void ForRows(const Task& task, const Body& body) const {
    for (int64_t i = task.begin; i < task.end; ++i) {
      const auto [begin, end] = tasks_.Edges(i);
      body(RowEdges{i, begin, end, (begin - task.first) * n_.heads});
    }
  }
  // Calls body(first pair, number of pairs) for the steps of a task.
  template <class Body>
  HWY_INLINE void ForSteps(int64_t pairs, const Body& body) const {
    for (int64_t q = 0; q < pairs; q += stride_) body(q, std::min(stride_, pairs - q));
  }
  // Calls body(edge, row, index of the first pair) for the edges of `count` pairs that start at
  // pair q of a task.
  template <class Body>
  HWY_INLINE void ForEdges(const Task& task, int64_t q, int64_t count, const Body& body) const {
    const int64_t begin = task.first + q / n_.heads;
    const int64_t end = begin + count / n_.heads;
    const int64_t* const indptr = in_.indptr;
    int64_t i = std::upper_bound(indptr + task.begin, indptr + task.end, begin) - indptr - 1;
    for (int64_t e = begin; e < end; ++e) {
      while (indptr[i + 1] <= e) ++i;
      body(e, i, (e - begin) * n_.heads);
    }
  }

  // Computes the inner products of the rows of queries and keys, or their squared distances.
  template <bool kDistance>
  HWY_NOINLINE void Multiply(const Task& task, const DualTokens& queries, const DualTokens& keys,
                             int64_t columns, const DualRow& to) const {
    ForRows(task, [&](const RowEdges& row) {
      int64_t q = row.offset;
      for (int64_t e = row.begin; e < row.end; ++e) {
        const int64_t j = in_.indices[e];
        for (int64_t h = 0; h < n_.heads; ++h, ++q) {
          const DualNumber product =
              DualProduct<kDistance>(queries.Row(h, row.i), keys.Row(h / group_, j), columns);
          to.values[q] = product.value;
          to.tangents[q] = product.tangent;
        }
      }
    });
  }

  // The arrays of a step's pairs, or the arrays of their tangents.
  PairArrays PairsOf(bool is_tangent, const Real* g, const Scratch& scratch) const {
    const Real* const a = scratch.pairs + is_tangent * (row_scalars() + column_scalars()) * stride_;
    return {g, a, a + row_scalars() * stride_, HeadNumbers(is_tangent, 1), stride_};
  }
  SlopeArrays SlopesOf(bool is_tangent, const Scratch& scratch) const {
    Real* const g = scratch.slopes + is_tangent * slopes() * stride_;
    Real* const a = g + stride_;
    Real* const b = a + row_scalars() * stride_;
    return {g, a, b, b + column_scalars() * stride_};
  }

  static HWY_INLINE void CopyHeads(const Real* from, int64_t count, Real* to) {
    ForLanes(count,
             [=](auto d, int64_t n) HWY_ATTR { hn::StoreU(hn::LoadU(d, from + n), d, to + n); });
  }
  // Copies the scalars of a row and of a key to the numbers at index q of a step's arrays, for
  // heads [h, h + count).
  void CopyScalars(int64_t i, int64_t j, int64_t h, int64_t count, int64_t q,
                   const Scratch& scratch) const {
    Real* to = scratch.pairs + q;
    for (const bool is_tangent : {false, true}) {
      const Real* const rows =
          rows_.data() + (is_tangent * n_.queries + i) * row_scalars() * n_.heads + h;
      for (int s = 0; s < row_scalars(); ++s, to += stride_) {
        CopyHeads(rows + s * n_.heads, count, to);
      }
      const Real* const columns =
          columns_.data() + (is_tangent * n_.keys + j) * column_scalars() * n_.heads + h;
      for (int s = 0; s < column_scalars(); ++s, to += stride_) {
        CopyHeads(columns + s * n_.heads, count, to);
      }
    }
  }

  // The tangent of f for the vector of pairs at index q of a step.
  HWY_INLINE VF ValueTangent(const SlopeArrays& slopes, const PairArrays& tangents,
                             int64_t q) const {
    const DF d;
    VF sum = hn::Zero(d);
    const auto add = [&](const Real* of_slopes, const Real* of_tangents, int scalars) HWY_ATTR {
      for (int s = 0; s < scalars; ++s) {
        const int64_t at = s * stride_ + q;
        sum = hn::MulAdd(hn::Load(d, of_slopes + at), hn::LoadU(d, of_tangents + at), sum);
      }
    };
    add(slopes.g, tangents.g, has_product() ? 1 : 0);
    add(slopes.a, tangents.a, row_scalars());
    add(slopes.b, tangents.b, column_scalars());
    add(slopes.t, tangents.t, head_scalars());
    return sum;
  }

  // Computes f and its slopes for `count` pairs of a step, with their tangents. g is their
  // argument.
  void Differentiate(const DualRow& g, int64_t count, const Scratch& scratch) const {
    const PairArrays pairs = PairsOf(false, g.values, scratch);
    const PairArrays tangents = PairsOf(true, g.tangents, scratch);
    const SlopeArrays slopes = SlopesOf(false, scratch);
    function_->pairs->values(pairs, count, scratch.f);
    function_->slopes(pairs, tangents, count, slopes, SlopesOf(true, scratch));
    SetValueTangents(tangents, count, scratch);
  }
  void SetValueTangents(const PairArrays& tangents, int64_t count, const Scratch& scratch) const {
    const SlopeArrays slopes = SlopesOf(false, scratch);
    for (int64_t q = 0; q < count; q += kLaneCount) {
      hn::Store(ValueTangent(slopes, tangents, q), DF(), scratch.f + stride_ + q);
    }
  }

  static DualRow From(const DualRow& row, int64_t n) { return {row.values + n, row.tangents + n}; }
  // f of the pairs of a step that starts at pair q.
  DualRow ValuesOf(int64_t q, const Scratch& scratch) const {
    if (function_ == nullptr) return From(scratch.g, q);
    return {scratch.f, scratch.f + stride_};
  }

  // Computes scores in log2 units, and the tangents of scores.
  void SetScores(const Task& task, const Scratch& scratch) const {
    const DF d;
    const VF log2e = hn::Set(d, kLog2E);
    const Real* const c = HeadNumbers(false, 0);
    const Real* const dc = HeadNumbers(true, 0);
    std::fill_n(scratch.work, stride_, 1.0f);
    ForSteps(task.pairs(), [&](int64_t begin, int64_t count) HWY_ATTR {
      if (function_ != nullptr) {
        ForEdges(task, begin, count, [&](int64_t e, int64_t i, int64_t q) {
          CopyScalars(i, in_.indices[e], 0, n_.heads, q, scratch);
        });
        const DualRow g = From(scratch.g, begin);
        const PairArrays pairs = PairsOf(false, g.values, scratch);
        function_->pairs->values(pairs, count, scratch.f);
        function_->pairs->slopes(pairs, count, scratch.work, SlopesOf(false, scratch));
        SetValueTangents(PairsOf(true, g.tangents, scratch), count, scratch);
      }
      const DualRow f = ValuesOf(begin, scratch);
      const DualRow to = From(scratch.weights, begin);
      for (int64_t q = 0; q < count; q += kLaneCount) {
        const VF value = hn::Load(d, f.values + q);
        const VF factor = hn::Load(d, c + q);
        hn::Store(value * (factor * log2e), d, to.values + q);
        hn::Store(hn::MulAdd(factor, hn::Load(d, f.tangents + q), hn::Load(d, dc + q) * value), d,
                  to.tangents + q);
      }
    });
    AddBias(task, scratch.weights);
  }

  // Adds the bias of the edges and its tangent. An edge with bias -inf has zero weight even if f is
  // NaN.
  void AddBias(const Task& task, const DualRow& to) const {
    const int64_t first = task.first * n_.heads;
    if (in_.edge_bias != nullptr) {
      const Real* const bias = in_.edge_bias + first;
      const Real* const tangent =
          tangent_.edge_bias != nullptr ? tangent_.edge_bias + first : nullptr;
      ForLanes(task.pairs(), [=](auto d, int64_t q) HWY_ATTR {
        const auto hidden = hn::Set(d, -kInfinity);
        const auto value = hn::LoadU(d, bias + q);
        const auto hides = value == hidden;
        const auto score = hn::MulAdd(value, hn::Set(d, kLog2E), hn::LoadU(d, to.values + q));
        hn::StoreU(hn::IfThenElse(hides, hidden, score), d, to.values + q);
        auto sum = hn::LoadU(d, to.tangents + q);
        if (tangent != nullptr) sum = sum + hn::LoadU(d, tangent + q);
        hn::StoreU(hn::IfThenZeroElse(hides, sum), d, to.tangents + q);
      });
    }
  }

  // Turns scores into weights, and their tangents into tangents of weights. Writes the statistics
  // of the rows, and applies dropout.
  void SetWeights(const Task& task, const Scratch& scratch) const {
    const DualRow& weights = scratch.weights;
    const int64_t heads = n_.heads;
    ForRows(task, [&](const RowEdges& row) HWY_ATTR {
      const int64_t end = row.offset + (row.end - row.begin) * heads;
      Real* const to_largest = scratch.largest + task.At(row.i);
      ForLanes(heads, [=, &weights, &row](auto d, int64_t h) HWY_ATTR {
        const auto hidden = hn::Set(d, -kInfinity);
        auto largest = hidden;
        for (int64_t q = row.offset + h; q < end; q += heads) {
          const auto score = hn::LoadU(d, weights.values + q);
          largest = hn::IfThenElse(score > largest, score, largest);
        }
        hn::StoreU(largest, d, to_largest + h);
        // If all edges are hidden, 2^(-inf - 0) = 0.
        largest = hn::IfThenZeroElse(largest == hidden, largest);
        for (int64_t q = row.offset + h; q < end; q += heads) {
          hn::StoreU(hn::LoadU(d, weights.values + q) - largest, d, weights.values + q);
        }
      });
    });
    for (int64_t q = 0; q < task.pairs(); q += kLaneCount) {
      const DF d;
      hn::Store(Exp2(hn::Load(d, weights.values + q)), d, weights.values + q);
    }
    const bool has_statistics = of_.output.statistics != nullptr;
    ForRows(task, [&](const RowEdges& row) HWY_ATTR {
      const int64_t end = row.offset + (row.end - row.begin) * heads;
      HWY_ALIGN Real sums[kLanes];
      HWY_ALIGN Real means[kLanes];
      HWY_ALIGN Real tops[kLanes] = {};
      ForLanes(heads, [&](auto d, int64_t h) HWY_ATTR {
        const auto zero = hn::Zero(d);
        auto sum = zero;
        auto sum_of_tangents = zero;
        for (int64_t q = row.offset + h; q < end; q += heads) {
          const auto weight = hn::LoadU(d, weights.values + q);
          sum = sum + weight;
          sum_of_tangents = hn::MulAdd(weight, hn::LoadU(d, weights.tangents + q), sum_of_tangents);
        }
        const auto none = sum == zero;
        const auto inverse = hn::IfThenZeroElse(none, hn::Set(d, 1.0f) / sum);
        const auto mean = hn::IfThenZeroElse(none, sum_of_tangents * inverse);
        hn::StoreU(sum, d, sums);
        hn::StoreU(mean, d, means);
        if (has_statistics) {
          auto top = hn::Set(d, -1.0f);
          auto edge = zero;
          for (int64_t q = row.offset + h; q < end; q += heads, edge = edge + hn::Set(d, 1.0f)) {
            const auto is_first =
                hn::And(hn::LoadU(d, weights.values + q) == hn::Set(d, 1.0f), top < zero);
            top = hn::IfThenElse(is_first, edge, top);
          }
          hn::StoreU(top, d, tops);
        }
        for (int64_t q = row.offset + h; q < end; q += heads) {
          const auto weight = hn::LoadU(d, weights.values + q) * inverse;
          hn::StoreU(weight, d, weights.values + q);
          hn::StoreU(weight * (hn::LoadU(d, weights.tangents + q) - mean), d, weights.tangents + q);
        }
        for (int64_t n = 0; n < static_cast<int64_t>(hn::Lanes(d)); ++n) {
          WriteStatistics(row.i * heads + h + n, scratch.largest[task.At(row.i) + h + n], sums[n],
                          means[n], tops[n]);
        }
      });
      if (drops()) {
        for (const bool is_tangent : {false, true}) {
          const Real* const from = is_tangent ? weights.tangents : weights.values;
          Real* const to = is_tangent ? scratch.dropped.tangents : scratch.dropped.values;
          std::copy(from + row.offset, from + end, to + row.offset);
        }
        Drop(row, scratch.dropped);
      }
    });
  }
  void WriteStatistics(int64_t row, Real largest, Real sum, Real mean, Real top) const {
    if (of_.lse_tangent != nullptr) of_.lse_tangent[row] = mean;
    if (of_.output.lse != nullptr) {
      of_.output.lse[row] = sum == 0.0f ? -kInfinity : (largest + std::log(sum) * kLog2E) * kLn2;
    }
    if (of_.output.statistics == nullptr) return;
    const int64_t rows = n_.queries * n_.heads;
    of_.output.statistics[row] = sum == 0.0f ? -kInfinity : largest;
    of_.output.statistics[rows + row] = sum;
    of_.output.statistics[2 * rows + row] = TopKey(sum, static_cast<int64_t>(top));
  }

  // Multiplies the numbers of a row's pairs by the dropout mask.
  void Drop(const RowEdges& row, const DualRow& numbers) const {
    const uint32_t threshold = DropoutThreshold(in_.dropout);
    const auto scale = static_cast<Real>(DropoutScale(in_.dropout));
    for (int64_t h = 0; h < n_.heads; ++h) {
      const DropoutRow hashes = HashRow(in_.dropout.seed, 0, h, row.i);
      int64_t q = row.offset + h;
      for (int64_t e = row.begin; e < row.end; ++e, q += n_.heads) {
        const bool drops = HashColumn(hashes, static_cast<uint32_t>(e)) < threshold;
        numbers.values[q] = drops ? 0.0f : numbers.values[q] * scale;
        numbers.tangents[q] = drops ? 0.0f : numbers.tangents[q] * scale;
      }
    }
  }

  // The sums of `size` numbers in `memory`, all 0. If values are not needed, `values` is null.
  static DualRow ClearSums(Real* memory, int64_t size, bool needs_values) {
    std::fill_n(memory, needs_values ? 2 * size : size, 0.0f);
    return {needs_values ? memory + size : nullptr, memory};
  }
  static DualRow SumsAt(const DualRow& sums, int64_t n) {
    return {sums.values != nullptr ? sums.values + n : nullptr, sums.tangents + n};
  }
  static void Write(const View<Real>& view, int64_t h, int64_t i, const Real* from,
                    int64_t columns) {
    if (view.data != nullptr) std::copy_n(from, columns, view.row(0, h, i));
  }
  // Writes the sums of `heads` heads to the rows of node i.
  static void WriteSums(const View<Real>& values, const View<Real>& tangents, const DualRow& sums,
                        int64_t heads, int64_t i, int64_t columns) {
    for (int64_t h = 0; h < heads; ++h) {
      const DualRow of_head = SumsAt(sums, h * columns);
      Write(values, h, i, of_head.values, columns);
      Write(tangents, h, i, of_head.tangents, columns);
    }
  }

  void WriteOutputs(const Task& task, const Scratch& scratch) const {
    const bool has_o = of_.output.o.data != nullptr;
    if (!has_o && of_.o_tangent.data == nullptr) return;
    const int64_t columns = n_.value_dim;
    ForRows(task, [&](const RowEdges& row) {
      const DualRow sums = ClearSums(scratch.sums, n_.heads * columns, has_o);
      int64_t q = row.offset;
      for (int64_t e = row.begin; e < row.end; ++e) {
        const int64_t j = in_.indices[e];
        for (int64_t h = 0; h < n_.heads; ++h, ++q) {
          AddScaledDual(At(scratch.dropped, q), v_.Row(h / group_, j), columns,
                        SumsAt(sums, h * columns));
        }
      }
      WriteSums(of_.output.o, of_.o_tangent, sums, n_.heads, row.i, columns);
    });
  }

  // Copies a task's numbers to an array with one number per edge and head, followed by the
  // tangents.
  void Keep(const Task& task, const DualRow& from, const Buffer& to) const {
    Real* const values = to.data() + task.first * n_.heads;
    std::copy_n(from.values, task.pairs(), values);
    std::copy_n(from.tangents, task.pairs(), values + n_.edges * n_.heads);
  }

  // Turns the gradients of dropped weights into those of scores. Sums over the edges of a row use
  // differences from the edge with the largest weight: if a few edges dominate, their terms nearly
  // cancel, and rounding errors must cancel as well.
  void SetScoreGradients(const Task& task, const Scratch& scratch) const {
    const DualRow& weights = scratch.weights;
    const DualRow& gradients = scratch.d_scores;
    const int64_t heads = n_.heads;
    ForRows(task, [&](const RowEdges& row) HWY_ATTR {
      if (drops()) Drop(row, gradients);
      const int64_t end = row.offset + (row.end - row.begin) * heads;
      const auto numbers = [&](const Real* of_rows) {
        return of_rows != nullptr ? of_rows + row.i * heads : nullptr;
      };
      const Real* const d_lse = numbers(of_.d_lse);
      const Real* const d_lse_tangent = numbers(of_.d_lse_tangent);
      Real* const to_top = scratch.top_edges + task.At(row.i);
      ForLanes(heads, [&](auto d, int64_t h) HWY_ATTR {
        const auto zero = hn::Zero(d);
        const auto load = [d](const Real* from, int64_t at)
                              HWY_ATTR { return hn::LoadU(d, from + at); };
        const auto lse = d_lse != nullptr ? load(d_lse, h) : zero;
        const auto lse_tangent = d_lse_tangent != nullptr ? load(d_lse_tangent, h) : zero;
        const int64_t begin = row.offset + h;
        auto most = zero;
        auto edge = zero;
        auto top_edge = zero;
        auto delta = zero;
        auto delta_tangent = zero;
        for (int64_t q = begin; q < end; q += heads, edge = edge + hn::Set(d, 1.0f)) {
          const auto weight = load(weights.values, q);
          const auto larger = weight > most;
          most = hn::IfThenElse(larger, weight, most);
          top_edge = hn::IfThenElse(larger, edge, top_edge);
          delta = hn::IfThenElse(larger, load(gradients.values, q), delta);
          delta_tangent = hn::IfThenElse(larger, load(gradients.tangents, q), delta_tangent);
        }
        hn::StoreU(top_edge, d, to_top + h);
        // The second pass corrects the rounding error of the first; its own error is negligible.
        for (int pass = 0; pass < 2; ++pass) {
          auto rest = zero;
          auto rest_tangent = zero;
          for (int64_t q = begin; q < end; q += heads) {
            const auto weight = load(weights.values, q);
            const auto difference = load(gradients.values, q) - delta;
            rest = hn::MulAdd(weight, difference, rest);
            rest_tangent = hn::MulAdd(
                load(weights.tangents, q), difference,
                hn::MulAdd(weight, load(gradients.tangents, q) - delta_tangent, rest_tangent));
          }
          delta = delta + rest;
          delta_tangent = delta_tangent + rest_tangent;
        }
        delta = delta - lse;
        delta_tangent = delta_tangent - lse_tangent;
        auto total = zero;
        auto total_tangent = zero;
        for (int64_t q = begin; q < end; q += heads) {
          const auto weight = load(weights.values, q);
          const auto difference = load(gradients.values, q) - delta;
          const auto d_score = weight * difference;
          const auto d_score_tangent =
              hn::MulAdd(load(weights.tangents, q), difference,
                         weight * (load(gradients.tangents, q) - delta_tangent));
          total = total + d_score;
          total_tangent = total_tangent + d_score_tangent;
          hn::StoreU(d_score, d, gradients.values + q);
          hn::StoreU(d_score_tangent, d, gradients.tangents + q);
        }
        if (!centres()) return;
        // Makes the sum of a row's gradients exact, because large slopes would multiply its error.
        HWY_ALIGN Real errors[2 * kLanes];
        const auto seen = most > zero;
        hn::StoreU(hn::IfThenElseZero(seen, total - lse), d, errors);
        hn::StoreU(hn::IfThenElseZero(seen, total_tangent - lse_tangent), d, errors + kLanes);
        for (int64_t n = 0; n < static_cast<int64_t>(hn::Lanes(d)) && begin < end; ++n) {
          const int64_t q = begin + n + static_cast<int64_t>(to_top[h + n]) * heads;
          gradients.values[q] -= errors[n];
          gradients.tangents[q] -= errors[static_cast<int64_t>(kLanes) + n];
        }
      });
    });
    for (const bool is_tangent : {false, true}) {
      Real* const to = Gradient(is_tangent).edge_bias;
      if (to == nullptr) continue;
      std::copy_n(is_tangent ? gradients.tangents : gradients.values, task.pairs(),
                  to + task.first * heads);
    }
  }

  // The numbers of a task's top edges, one per row and head: f (n = 0), the slope with respect to g
  // (n = 1), or the slope with respect to a row scalar (n = 2 + s); or their tangents.
  Real* Tops(bool is_tangent, int n, const Scratch& scratch) const {
    return scratch.tops + (is_tangent * (2 + row_scalars()) + n) * most_tops_;
  }
  // Edges with smaller squared distances than this are much nearer than the row's top edge.
  Real* NearDistances(const Scratch& scratch) const {
    return scratch.tops + 2 * (2 + row_scalars()) * most_tops_;
  }
  int64_t TopEdge(const Task& task, int64_t i, int64_t h, const Scratch& scratch) const {
    return in_.indptr[i] + static_cast<int64_t>(scratch.top_edges[task.At(i) + h]);
  }

  // Computes f and the slopes of the edges with the largest weights.
  void SetTops(const Task& task, const Scratch& scratch) const {
    const int64_t heads = n_.heads;
    const DualRow g{scratch.work, scratch.work + stride_};
    ForSteps(task.At(task.end), [&](int64_t first, int64_t count) {
      for (int64_t q = 0; q < count; ++q) {
        const int64_t i = task.begin + (first + q) / heads;
        const int64_t h = (first + q) % heads;
        const int64_t e = TopEdge(task, i, h, scratch);
        const int64_t pair = (e - task.first) * heads + h;
        // A row without edges has no key; its numbers are not used.
        const bool has_edges = in_.indptr[i] < in_.indptr[i + 1];
        g.values[q] = has_edges && has_product() ? scratch.g.values[pair] : 1.0f;
        g.tangents[q] = has_edges && has_product() ? scratch.g.tangents[pair] : 0.0f;
        NearDistances(scratch)[first + q] = g.values[q] * (1.0f / 16);
        if (has_edges) {
          CopyScalars(i, in_.indices[e], h, 1, q, scratch);
        } else {
          for (int s = 0; s < 2 * (row_scalars() + column_scalars()); ++s) {
            scratch.pairs[s * stride_ + q] = 0;
          }
        }
      }
      Differentiate(g, count, scratch);
      for (int n = 0; n < 2 + row_scalars(); ++n) {
        if (n == 1 && !has_product()) continue;
        const Real* const values =
            n == 0 ? scratch.f : SlopesOf(false, scratch).g + (n - 1) * stride_;
        const Real* const tangents =
            n == 0 ? scratch.f + stride_ : SlopesOf(true, scratch).g + (n - 1) * stride_;
        for (int64_t q = 0; q < count; ++q) {
          const bool finite = std::isfinite(values[q]) && std::isfinite(tangents[q]);
          Tops(false, n, scratch)[first + q] = finite ? values[q] : 0.0f;
          Tops(true, n, scratch)[first + q] = finite ? tangents[q] : 0.0f;
        }
      }
    });
  }

  // A number and its tangent in each lane.
  template <class V>
  struct DualVectors {
    V value;
    V tangent;
    // GCC generates implicit constructors outside the region that selects the instruction set.
    HWY_INLINE DualVectors(V x, V dx) : value(x), tangent(dx) {}
  };
  template <class D>
  static HWY_INLINE DualVectors<hn::Vec<D>> LoadDual(D d, const Real* values,
                                                     const Real* tangents) {
    return {hn::LoadU(d, values), hn::LoadU(d, tangents)};
  }
  // Adds the product of the dual numbers x and y to a sum in memory.
  template <class D, class V>
  static HWY_INLINE void AddProduct(D d, const DualVectors<V>& x, const DualVectors<V>& y,
                                    const DualRow& to) {
    hn::StoreU(hn::MulAdd(x.value, y.value, hn::LoadU(d, to.values)), d, to.values);
    hn::StoreU(
        hn::MulAdd(x.tangent, y.value, hn::MulAdd(x.value, y.tangent, hn::LoadU(d, to.tangents))),
        d, to.tangents);
  }

  // The sums over the pairs of a task for the gradient of the factor (s = 0) or of a head scalar.
  DualRow HeadSum(int64_t number, int s) {
    const auto at = [&](bool is_tangent) {
      return &d_heads_[Size(((number * 2 + is_tangent) * head_sums() + s) * n_.heads)];
    };
    return {at(false), at(true)};
  }
  // The sums over the edges of a row for the gradient of g (n = 0) or of a row scalar (n = 1 + s).
  DualRow RowSums(int n, const Scratch& scratch) const {
    return {scratch.row_sums + n * most_tops_,
            scratch.row_sums + (1 + row_scalars() + n) * most_tops_};
  }
  DualRow TopsOf(int n, const Scratch& scratch) const {
    return {Tops(false, n, scratch), Tops(true, n, scratch)};
  }

  // Turns the gradients of scores into gradients of g, and sums the gradients of scalars and of the
  // factor.
  void SetProductGradients(int64_t number, const Task& task, const Scratch& scratch) {
    const DF d;
    if (centres()) std::fill_n(scratch.row_sums, 2 * (1 + row_scalars()) * most_tops_, 0.0f);
    const Real* const c = HeadNumbers(false, 0);
    const Real* const dc = HeadNumbers(true, 0);
    const DualRow df{scratch.work, scratch.work + stride_};
    ForSteps(task.pairs(), [&](int64_t begin, int64_t count) HWY_ATTR {
      const DualRow ds = From(scratch.d_scores, begin);
      if (function_ != nullptr) {
        ForEdges(task, begin, count, [&](int64_t e, int64_t i, int64_t q) {
          CopyScalars(i, in_.indices[e], 0, n_.heads, q, scratch);
        });
        Differentiate(From(scratch.g, begin), count, scratch);
      }
      for (int64_t q = 0; q < count; q += kLaneCount) {
        const VF d_score = hn::Load(d, ds.values + q);
        const VF factor = hn::Load(d, c + q);
        hn::Store(factor * d_score, d, df.values + q);
        hn::Store(hn::MulAdd(factor, hn::Load(d, ds.tangents + q), hn::Load(d, dc + q) * d_score),
                  d, df.tangents + q);
      }
      const DualRow f = ValuesOf(begin, scratch);
      if (function_ != nullptr) {
        ForEdges(task, begin, count, [&](int64_t, int64_t i, int64_t q) HWY_ATTR {
          AddCentred(number, task, i, begin, q, f, scratch);
        });
        SetSlopeGradients(task, begin, count, scratch);
        return;
      }
      for (int64_t q = 0; wants_heads() && q < count; q += n_.heads) {
        ForLanes(n_.heads, [&](auto part, int64_t h) HWY_ATTR {
          AddProduct(part, LoadDual(part, ds.values + q + h, ds.tangents + q + h),
                     LoadDual(part, f.values + q + h, f.tangents + q + h),
                     From(HeadSum(number, 0), h));
        });
      }
      std::copy_n(df.values, count, ds.values);
      std::copy_n(df.tangents, count, ds.tangents);
    });
  }

  // Adds the pairs of an edge of row i, at index q of a step, to the sums of the row and of the
  // heads.
  HWY_INLINE void AddCentred(int64_t number, const Task& task, int64_t i, int64_t begin, int64_t q,
                             const DualRow& f, const Scratch& scratch) {
    const SlopeArrays slopes = SlopesOf(false, scratch);
    const SlopeArrays tangents = SlopesOf(true, scratch);
    const int64_t row = task.At(i);
    ForLanes(n_.heads, [&](auto d, int64_t h) HWY_ATTR {
      const int64_t at = q + h;
      const auto load = [d, at](const Real* values, const Real* of_tangents, int s,
                                int64_t stride) HWY_ATTR {
        return LoadDual(d, values + s * stride + at, of_tangents + s * stride + at);
      };
      const auto centred = [&](auto slope, int n) HWY_ATTR {
        const auto top =
            LoadDual(d, Tops(false, n, scratch) + row + h, Tops(true, n, scratch) + row + h);
        slope.value = slope.value - top.value;
        slope.tangent = slope.tangent - top.tangent;
        return slope;
      };
      const auto ds =
          LoadDual(d, scratch.d_scores.values + begin + at, scratch.d_scores.tangents + begin + at);
      const auto df = LoadDual(d, scratch.work + at, scratch.work + stride_ + at);
      AddProduct(d, ds, centred(load(f.values, f.tangents, 0, 0), 0), From(HeadSum(number, 0), h));
      for (int s = 0; s < head_scalars(); ++s) {
        AddProduct(d, df, load(slopes.t, tangents.t, s, stride_), From(HeadSum(number, 1 + s), h));
      }
      for (int s = 0; s < row_scalars(); ++s) {
        AddProduct(d, df, centred(load(slopes.a, tangents.a, s, stride_), 2 + s),
                   From(RowSums(1 + s, scratch), row + h));
      }
      if (!is_distance()) return;
      // Near pairs are not part of the common multiple of x - y_top; see WriteQueryGradients.
      auto slope = load(slopes.g, tangents.g, 0, 0);
      const auto near = hn::LoadU(d, scratch.g.values + begin + at) <
                        hn::LoadU(d, NearDistances(scratch) + row + h);
      slope.value = hn::IfThenZeroElse(near, slope.value);
      slope.tangent = hn::IfThenZeroElse(near, slope.tangent);
      AddProduct(d, df, centred(slope, 1), From(RowSums(0, scratch), row + h));
    });
  }
  // Replaces the gradients of scores by those of g, and stores the gradients of column scalars.
  void SetSlopeGradients(const Task& task, int64_t begin, int64_t count,
                         const Scratch& scratch) const {
    const SlopeArrays slopes = SlopesOf(false, scratch);
    const SlopeArrays tangents = SlopesOf(true, scratch);
    const auto multiply = [&](const Real* slope, const Real* slope_tangent, Real scale, Real* to,
                              Real* to_tangent) HWY_ATTR {
      ForLanes(count, [=, &scratch, this](auto d, int64_t q) HWY_ATTR {
        const auto factor = hn::Set(d, scale);
        const auto df = hn::LoadU(d, scratch.work + q) * factor;
        const auto df_tangent = hn::LoadU(d, scratch.work + stride_ + q) * factor;
        const auto value = hn::LoadU(d, slope + q);
        hn::StoreU(df * value, d, to + q);
        hn::StoreU(hn::MulAdd(df, hn::LoadU(d, slope_tangent + q), df_tangent * value), d,
                   to_tangent + q);
      });
    };
    const int64_t pairs = n_.edges * n_.heads;
    for (int s = 0; d_columns_ && s < column_scalars(); ++s) {
      Real* const to = d_columns_.data() + 2 * s * pairs + task.first * n_.heads + begin;
      multiply(slopes.b + s * stride_, tangents.b + s * stride_, 1.0f, to, to + pairs);
    }
    if (!has_product()) return;
    // d|x - y|^2/dx = 2 (x - y).
    multiply(slopes.g, tangents.g, is_distance() ? 2.0f : 1.0f, scratch.d_scores.values + begin,
             scratch.d_scores.tangents + begin);
  }

  static DualNumber Product(const DualNumber& x, const DualNumber& y) {
    return {x.value * y.value, x.tangent * y.value + x.value * y.tangent};
  }
  static DualNumber At(const DualRow& row, int64_t n) { return {row.values[n], row.tangents[n]}; }
  static void AddTo(const DualRow& row, int64_t n, const DualNumber& number) {
    row.values[n] += number.value;
    row.tangents[n] += number.tangent;
  }

  // Adds the terms of the top edges' slopes to the sums: the gradients of the scores of a row sum
  // to its d_lse. Writes the gradients of row scalars.
  void FinishSums(int64_t number, const Task& task, const Scratch& scratch) {
    for (int64_t i = task.begin; i < task.end; ++i) {
      for (int64_t h = 0; h < n_.heads; ++h) {
        const int64_t at = task.At(i) + h;
        DualNumber d_lse;
        if (scratch.largest[at] != -kInfinity) d_lse = DLse(i * n_.heads + h);
        const DualNumber df = Product({HeadNumbers(false, 0)[h], HeadNumbers(true, 0)[h]}, d_lse);
        AddTo(HeadSum(number, 0), h, Product(d_lse, At(TopsOf(0, scratch), at)));
        if (is_distance()) {
          AddTo(RowSums(0, scratch), at, Product(df, At(TopsOf(1, scratch), at)));
        }
        for (int s = 0; s < row_scalars(); ++s) {
          const DualRow sums = RowSums(1 + s, scratch);
          AddTo(sums, at, Product(df, At(TopsOf(2 + s, scratch), at)));
          for (const bool is_tangent : {false, true}) {
            Real* const to = Gradient(is_tangent).row_scalars;
            if (to == nullptr) continue;
            to[(s * n_.heads + h) * n_.queries + i] =
                is_tangent ? sums.tangents[at] : sums.values[at];
          }
        }
      }
    }
  }
  DualNumber DLse(int64_t row) const {
    return {of_.d_lse != nullptr ? of_.d_lse[row] : 0.0f,
            of_.d_lse_tangent != nullptr ? of_.d_lse_tangent[row] : 0.0f};
  }

  // For distances, an edge contributes a multiple of y_top - y_e, and FinishSums has summed the
  // common multiple of x - y_top. Edges that are much nearer than the top edge contribute x - y_e.
  void WriteQueryGradients(const Task& task, const Scratch& scratch) const {
    ForRows(task, [&](const RowEdges& row) {
      const DualRow sums = ClearSums(scratch.sums, n_.heads * dim_, of_.gradient.x.data != nullptr);
      for (int64_t h = 0; h < n_.heads && row.begin < row.end; ++h) {
        AddQueryGradients(task, row, h, SumsAt(sums, h * dim_), scratch);
      }
      WriteSums(of_.gradient.x, of_.gradient_tangent.x, sums, n_.heads, row.i, dim_);
    });
  }
  void AddQueryGradients(const Task& task, const RowEdges& row, int64_t h, const DualRow& to,
                         const Scratch& scratch) const {
    const int64_t key_head = h / group_;
    int64_t q = row.offset + h;
    if (!is_distance()) {
      for (int64_t e = row.begin; e < row.end; ++e, q += n_.heads) {
        AddScaledDual(At(scratch.d_scores, q), y_.Row(key_head, in_.indices[e]), dim_, to);
      }
      return;
    }
    const DualNumbers x = x_.Row(h, row.i);
    const DualNumbers top = y_.Row(key_head, in_.indices[TopEdge(task, row.i, h, scratch)]);
    const int64_t at = task.At(row.i) + h;
    const Real least = NearDistances(scratch)[at];
    for (int64_t e = row.begin; e < row.end; ++e, q += n_.heads) {
      AddScaledDualDifference(At(scratch.d_scores, q), scratch.g.values[q] < least ? x : top,
                              y_.Row(key_head, in_.indices[e]), dim_, to);
    }
    const DualNumber common = At(RowSums(0, scratch), at);
    AddScaledDualDifference({2 * common.value, 2 * common.tangent}, x, top, dim_, to);
  }

  // Adds up the sums of the tasks in order.
  void SumHeads() {
    for (const bool is_tangent : {false, true}) {
      const GraphGradient<Real>& gradient = Gradient(is_tangent);
      for (int s = 0; s < head_sums(); ++s) {
        Real* const to = s == 0 ? gradient.factor
                         : gradient.head_scalars == nullptr
                             ? nullptr
                             : gradient.head_scalars + (s - 1) * n_.heads;
        for (int64_t h = 0; to != nullptr && h < n_.heads; ++h) {
          double sum = 0;
          for (int64_t task = 0; task < tasks_.count(); ++task) {
            const DualRow of_task = HeadSum(task, s);
            sum += is_tangent ? of_task.tangents[h] : of_task.values[h];
          }
          to[h] = static_cast<Real>(sum);
        }
      }
    }
  }

  // Clears the gradient of tokens that the pair function does not use.
  void Clear(const View<Real>& view, int64_t heads, int64_t nodes) const {
    for (int64_t i = 0; view.data != nullptr && i < nodes; ++i) {
      for (int64_t h = 0; h < heads; ++h) std::fill_n(view.row(0, h, i), n_.dim, 0.0f);
    }
  }

  // Computes the gradients of keys, values and column scalars, which are sums over each key's
  // edges.
  void SumKeys() const {
    const TransposedGraph graph(in_.indptr, in_.indices, n_.queries, n_.keys);
    const RowTasks tasks(graph.indptr.data(), n_.keys, task_edges_);
    const int64_t size = 2 * n_.key_heads * std::max(dim_, n_.value_dim);
    const Buffer memory(size * WorkersFor(executor_, tasks.count()));
    ParallelTasks(executor_, tasks.count(), [&](int64_t task, int worker) {
      const auto [begin, end] = tasks.Rows(task);
      Real* const sums = memory.data() + worker * size;
      for (int64_t j = begin; j < end; ++j) {
        if (wants_v()) SumValues(graph, j, sums);
        if (wants_y()) SumKeys(graph, j, sums);
        if (wants_columns()) SumColumns(graph, j);
      }
    });
  }

  // Calls body(row, head, number) for the edges of key j, with the numbers of pairs in `numbers`.
  template <class Body>
  HWY_INLINE void ForPairsOfKey(const TransposedGraph& graph, int64_t j, const Buffer& numbers,
                                const Body& body) const {
    const int64_t pairs = n_.edges * n_.heads;
    for (int64_t t = graph.indptr[Size(j)]; t < graph.indptr[Size(j + 1)]; ++t) {
      const Real* const of_edge = numbers.data() + graph.edges[Size(t)] * n_.heads;
      for (int64_t h = 0; h < n_.heads; ++h) {
        body(graph.rows[Size(t)], h, DualNumber{of_edge[h], of_edge[pairs + h]});
      }
    }
  }

  // Compute the gradients of a value, or of a key.
  void SumValues(const TransposedGraph& graph, int64_t j, Real* memory) const {
    const int64_t columns = n_.value_dim;
    const DualRow sums = ClearSums(memory, n_.key_heads * columns, of_.gradient.v.data != nullptr);
    ForPairsOfKey(graph, j, weights_, [&](int64_t i, int64_t h, const DualNumber& weight) {
      AddScaledDual(weight, d_o_.Row(h, i), columns, SumsAt(sums, h / group_ * columns));
    });
    WriteSums(of_.gradient.v, of_.gradient_tangent.v, sums, n_.key_heads, j, columns);
  }
  void SumKeys(const TransposedGraph& graph, int64_t j, Real* memory) const {
    const DualRow sums = ClearSums(memory, n_.key_heads * dim_, of_.gradient.y.data != nullptr);
    ForPairsOfKey(graph, j, d_products_, [&](int64_t i, int64_t h, const DualNumber& d_product) {
      const int64_t key_head = h / group_;
      const DualRow to = SumsAt(sums, key_head * dim_);
      if (is_distance()) {
        AddScaledDualDifference(d_product, y_.Row(key_head, j), x_.Row(h, i), dim_, to);
      } else {
        AddScaledDual(d_product, x_.Row(h, i), dim_, to);
      }
    });
    WriteSums(of_.gradient.y, of_.gradient_tangent.y, sums, n_.key_heads, j, dim_);
  }

  void SumColumns(const TransposedGraph& graph, int64_t j) const {
    const int64_t pairs = n_.edges * n_.heads;
    for (const bool is_tangent : {false, true}) {
      Real* const to = Gradient(is_tangent).column_scalars;
      for (int s = 0; to != nullptr && s < column_scalars(); ++s) {
        const Real* const from = d_columns_.data() + (2 * s + is_tangent) * pairs;
        for (int64_t h = 0; h < n_.key_heads; ++h) {
          Real sum = 0;
          for (int64_t t = graph.indptr[Size(j)]; t < graph.indptr[Size(j + 1)]; ++t) {
            const Real* const of_edge = from + graph.edges[Size(t)] * n_.heads + h * group_;
            for (int64_t g = 0; g < group_; ++g) sum += of_edge[g];
          }
          to[(s * n_.key_heads + h) * n_.keys + j] = sum;
        }
      }
    }
  }

  const GraphDerivatives<Real>& of_;
  const DualTableOf<Real>* function_;
  const GraphInput<Real>& in_;
  const GraphInput<Real>& tangent_;
  const Executor& executor_;
  const GraphShape& n_;
  int64_t group_;
  int64_t dim_;
  int64_t task_edges_;  // edges and rows per task
  int64_t step_edges_;
  int64_t stride_;  // pairs per step
  RowTasks tasks_;
  int64_t most_pairs_;  // of a task, in whole vectors
  int64_t most_tops_;   // the most rows of a task times heads, in whole vectors
  std::vector<Real> zeros_;
  DualTokens x_;
  DualTokens y_;
  DualTokens v_;
  DualTokens d_o_;
  Buffer rows_;     // packed scalars of rows; then their tangents
  Buffer columns_;  // packed scalars of columns; then their tangents
  Buffer heads_;    // factor and head scalars, repeated for all pairs of a step
  std::vector<Real> d_heads_;
  // The terms of the sums over a key's edges, per edge and head; then their tangents.
  Buffer weights_;
  Buffer d_products_;
  Buffer d_columns_;  // values and tangents of the first column scalar, then of the second, ...
};

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS

namespace HWY_NAMESPACE {
namespace {

void DifferentiateEdges(const GraphDerivatives<GNOMON_REAL>& of, const Executor& executor) {
  GNOMON_KERNELS::GraphPass(of, executor).Run();
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gnomon {
namespace {
HWY_EXPORT(DifferentiateEdges);
}  // namespace

void GraphDerivativesKernel(const GraphDerivatives<GNOMON_REAL>& of, const Executor& executor) {
  HWY_DYNAMIC_DISPATCH(DifferentiateEdges)(of, executor);
}

}  // namespace gnomon
#endif
