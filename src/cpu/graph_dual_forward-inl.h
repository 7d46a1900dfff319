// The forward pass of the kernel for derivatives of graph attention: weights and outputs of a task,
// and their tangents.
#if defined(GNOMON_SRC_CPU_GRAPH_DUAL_FORWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_GRAPH_DUAL_FORWARD_INL_H_
#undef GNOMON_SRC_CPU_GRAPH_DUAL_FORWARD_INL_H_
#else
#define GNOMON_SRC_CPU_GRAPH_DUAL_FORWARD_INL_H_
#endif

#include <algorithm>

#include "cpu/columns-inl.h"
#include "cpu/dual_call-inl.h"
#include "cpu/dual_columns-inl.h"
#include "cpu/dual_scores-inl.h"
#include "cpu/graph_dual_tasks-inl.h"
#include "cpu/vocabulary-inl.h"
#include "gnomon/graph.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {

class GraphForward {
 public:
  explicit GraphForward(const GraphCall& call) : call_(call) {}

  // Computes scores in log2 units, and the tangents of scores.
  void SetScores(const GraphTask& task) const {
    const DF d;
    const VF log2e = hn::Set(d, kLog2E);
    const Real* const c = call_.HeadNumbers(false, 0);
    const Real* const dc = call_.HeadNumbers(true, 0);
    std::fill_n(task.work, call_.stride, 1.0f);
    call_.ForSteps(task.size(), [&](int64_t begin, int64_t count) HWY_ATTR {
      if (call_.function != nullptr) {
        call_.ForEdges(task, begin, count, [&](int64_t e, int64_t i, int64_t q) {
          call_.CopyScalars(i, call_.in.indices[e], 0, call_.n.heads, q, task);
        });
        const DualRow g = From(task.g, begin);
        const PairArrays pairs = call_.PairsOf(false, g.values, task);
        call_.function->pairs->values(pairs, count, task.f);
        call_.function->pairs->slopes(pairs, count, task.work, call_.SlopesOf(false, task));
        call_.SetValueTangents(call_.PairsOf(true, g.tangents, task), count, task);
      }
      const DualRow f = call_.ValuesOf(begin, task);
      const DualRow to = From(task.weights, begin);
      for (int64_t q = 0; q < count; q += kLaneCount) {
        const VF value = hn::Load(d, f.values + q);
        const VF factor = hn::Load(d, c + q);
        hn::Store(value * (factor * log2e), d, to.values + q);
        hn::Store(hn::MulAdd(factor, hn::Load(d, f.tangents + q), hn::Load(d, dc + q) * value), d,
                  to.tangents + q);
      }
    });
    AddBias(task, task.weights);
  }

  // Turns scores into weights, and their tangents into tangents of weights. Writes the statistics
  // of the rows, and applies dropout.
  void SetWeights(const GraphTask& task) const {
    const DualRow& weights = task.weights;
    const int64_t heads = call_.n.heads;
    call_.ForRows(task, [&](const RowEdges& row) HWY_ATTR {
      const int64_t end = row.offset + (row.end - row.begin) * heads;
      Real* const to_largest = task.largest + task.At(row.i);
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
    for (int64_t q = 0; q < task.size(); q += kLaneCount) {
      const DF d;
      hn::Store(Exp2(hn::Load(d, weights.values + q)), d, weights.values + q);
    }
    const bool has_statistics = call_.of.output.statistics != nullptr;
    call_.ForRows(task, [&](const RowEdges& row) HWY_ATTR {
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
          call_.WriteStatistics(call_.n.queries * heads, row.i * heads + h + n,
                                task.largest[task.At(row.i) + h + n], {sums[n], means[n]},
                                static_cast<int64_t>(tops[n]));
        }
      });
      if (call_.drops()) {
        for (const bool is_tangent : {false, true}) {
          const Real* const from = weights.Of(is_tangent);
          std::copy(from + row.offset, from + end, task.dropped.Of(is_tangent) + row.offset);
        }
        call_.Drop(row, task.dropped);
      }
    });
  }
  void WriteOutputs(const GraphTask& task) const {
    const bool has_o = call_.of.output.o.data != nullptr;
    if (!has_o && call_.of.o_tangent.data == nullptr) return;
    const int64_t columns = call_.n.value_dim;
    call_.ForRows(task, [&](const RowEdges& row) {
      const DualRow sums = ClearSums(task.sums, call_.n.heads * columns, has_o);
      int64_t q = row.offset;
      for (int64_t e = row.begin; e < row.end; ++e) {
        const int64_t j = call_.in.indices[e];
        for (int64_t h = 0; h < call_.n.heads; ++h, ++q) {
          AddScaledDual(At(task.dropped, q), call_.v.Row(h / call_.group, j), columns,
                        SumsAt(sums, h * columns));
        }
      }
      WriteSums(call_.of.output.o, call_.of.o_tangent, sums, call_.n.heads, row.i, columns);
    });
  }

 private:
  // Adds the bias of the edges and its tangent. An edge with bias -inf has zero weight even if f is
  // NaN.
  void AddBias(const GraphTask& task, const DualRow& to) const {
    const int64_t first = task.first * call_.n.heads;
    if (call_.in.edge_bias != nullptr) {
      const Real* const bias = call_.in.edge_bias + first;
      const Real* const tangent =
          call_.tangent.edge_bias != nullptr ? call_.tangent.edge_bias + first : nullptr;
      ForLanes(task.size(), [=](auto d, int64_t q) HWY_ATTR {
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

  const GraphCall& call_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
