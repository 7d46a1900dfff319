// The backward pass of the kernel for derivatives of graph attention: gradients of scores, queries
// and scalars of a task, and their tangents.
#if defined(GNOMON_SRC_CPU_GRAPH_DUAL_BACKWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_GRAPH_DUAL_BACKWARD_INL_H_
#undef GNOMON_SRC_CPU_GRAPH_DUAL_BACKWARD_INL_H_
#else
#define GNOMON_SRC_CPU_GRAPH_DUAL_BACKWARD_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/parallel.h"
#include "cpu/columns-inl.h"
#include "cpu/dual_call-inl.h"
#include "cpu/dual_columns-inl.h"
#include "cpu/dual_scores-inl.h"
#include "cpu/graph_dual_keys-inl.h"
#include "cpu/graph_dual_tasks-inl.h"
#include "cpu/packing-inl.h"
#include "cpu/vocabulary-inl.h"
#include "gnomon/graph.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {

class GraphBackward {
 public:
  GraphBackward(const GraphCall& call, const GraphKeys& keys)
      : call_(call),
        keys_(keys),
        d_heads_(Size(2 * call.tasks.count() * call.head_sums() * call.n.heads)) {}

  // Turns the gradients of dropped weights into those of scores. Sums over the edges of a row use
  // differences from the edge with the largest weight: if a few edges dominate, their terms nearly
  // cancel, and rounding errors must cancel as well.
  void SetScoreGradients(const GraphTask& task) const {
    const DualRow& weights = task.weights;
    const DualRow& gradients = task.d_scores;
    const int64_t heads = call_.n.heads;
    call_.ForRows(task, [&](const RowEdges& row) HWY_ATTR {
      if (call_.drops()) call_.Drop(row, gradients);
      const int64_t end = row.offset + (row.end - row.begin) * heads;
      const auto of_row = [&](const Real* of_rows) {
        return of_rows != nullptr ? of_rows + row.i * heads : call_.zeros.data();
      };
      const Real* const d_lse = of_row(call_.of.d_lse);
      const Real* const d_lse_tangent = of_row(call_.of.d_lse_tangent);
      Real* const to_top = task.top_edges + task.At(row.i);
      ForLanes(heads, [&](auto d, int64_t h) HWY_ATTR {
        const DualLanes<hn::Vec<decltype(d)>> zero(hn::Zero(d), hn::Zero(d));
        const DualLanes<hn::Vec<decltype(d)>> lse(hn::LoadU(d, d_lse + h),
                                                  hn::LoadU(d, d_lse_tangent + h));
        const int64_t begin = row.offset + h;
        auto most = hn::Zero(d);
        auto edge = most;
        auto top_edge = most;
        auto delta = zero;
        for (int64_t q = begin; q < end; q += heads, edge = edge + hn::Set(d, 1.0f)) {
          const auto weight = hn::LoadU(d, weights.values + q);
          const auto gradient = LoadDual(d, From(gradients, q));
          const auto larger = weight > most;
          most = hn::IfThenElse(larger, weight, most);
          top_edge = hn::IfThenElse(larger, edge, top_edge);
          delta.value = hn::IfThenElse(larger, gradient.value, delta.value);
          delta.tangent = hn::IfThenElse(larger, gradient.tangent, delta.tangent);
        }
        hn::StoreU(top_edge, d, to_top + h);
        // The second pass corrects the rounding error of the first; its own error is negligible.
        for (int pass = 0; pass < 2; ++pass) {
          auto rest = zero;
          for (int64_t q = begin; q < end; q += heads) {
            rest.Add(LoadDual(d, From(weights, q)), LoadDual(d, From(gradients, q)) - delta);
          }
          delta = delta + rest;
        }
        delta = delta - lse;
        auto total = zero;
        for (int64_t q = begin; q < end; q += heads) {
          const auto d_score =
              LoadDual(d, From(weights, q)) * (LoadDual(d, From(gradients, q)) - delta);
          total = total + d_score;
          StoreDual(d_score, d, From(gradients, q));
        }
        if (!call_.centres) return;
        // Makes the sum of a row's gradients exact, because large slopes would multiply its error.
        HWY_ALIGN Real errors[2 * kLanes];
        const auto seen = most > hn::Zero(d);
        const auto error = total - lse;
        hn::StoreU(hn::IfThenElseZero(seen, error.value), d, errors);
        hn::StoreU(hn::IfThenElseZero(seen, error.tangent), d, errors + kLanes);
        for (int64_t n = 0; n < static_cast<int64_t>(hn::Lanes(d)) && begin < end; ++n) {
          const int64_t q = begin + n + static_cast<int64_t>(to_top[h + n]) * heads;
          gradients.values[q] -= errors[n];
          gradients.tangents[q] -= errors[static_cast<int64_t>(kLanes) + n];
        }
      });
    });
    for (const bool is_tangent : {false, true}) {
      Real* const to = call_.Gradient(is_tangent).edge_bias;
      if (to == nullptr) continue;
      std::copy_n(gradients.Of(is_tangent), task.size(), to + task.first * heads);
    }
  }

  // Computes f and the slopes of the edges with the largest weights.
  void SetTops(const GraphTask& task) const {
    const int64_t heads = call_.n.heads;
    const DualRow g{task.work, task.work + call_.stride};
    call_.ForSteps(task.At(task.end), [&](int64_t first, int64_t count) {
      for (int64_t q = 0; q < count; ++q) {
        const int64_t i = task.begin + (first + q) / heads;
        const int64_t h = (first + q) % heads;
        const int64_t e = TopEdge(task, i, h);
        const int64_t pair = (e - task.first) * heads + h;
        // A row without edges has no key; its numbers are not used.
        const bool has_edges = call_.in.indptr[i] < call_.in.indptr[i + 1];
        g.values[q] = has_edges && call_.has_product() ? task.g.values[pair] : 1.0f;
        g.tangents[q] = has_edges && call_.has_product() ? task.g.tangents[pair] : 0.0f;
        NearDistances(task)[first + q] = g.values[q] * (1.0f / 16);
        if (has_edges) {
          call_.CopyScalars(i, call_.in.indices[e], h, 1, q, task);
        } else {
          for (int s = 0; s < 2 * (call_.row_scalars() + call_.column_scalars()); ++s) {
            task.pairs[s * call_.stride + q] = 0;
          }
        }
      }
      call_.Differentiate(g, count, task);
      for (int n = 0; n < 2 + call_.row_scalars(); ++n) {
        if (n == 1 && !call_.has_product()) continue;
        const Real* const values =
            n == 0 ? task.f : call_.SlopesOf(false, task).g + (n - 1) * call_.stride;
        const Real* const tangents =
            n == 0 ? task.f + call_.stride : call_.SlopesOf(true, task).g + (n - 1) * call_.stride;
        const DualRow to = From(Tops(task, n), first);
        for (int64_t q = 0; q < count; ++q) {
          const bool finite = std::isfinite(values[q]) && std::isfinite(tangents[q]);
          to.values[q] = finite ? values[q] : 0.0f;
          to.tangents[q] = finite ? tangents[q] : 0.0f;
        }
      }
    });
  }

  // Turns the gradients of scores into gradients of g, and sums the gradients of scalars and of the
  // factor.
  void SetProductGradients(const GraphTask& task) {
    const DF d;
    const int64_t row_sums = call_.centres ? 2 * (1 + call_.row_scalars()) * call_.most_tops : 0;
    std::fill_n(task.row_sums, row_sums, 0.0f);
    const DualRow c{call_.HeadNumbers(false, 0), call_.HeadNumbers(true, 0)};
    const DualRow df{task.work, task.work + call_.stride};
    call_.ForSteps(task.size(), [&](int64_t begin, int64_t count) HWY_ATTR {
      const DualRow ds = From(task.d_scores, begin);
      if (call_.function != nullptr) {
        call_.ForEdges(task, begin, count, [&](int64_t e, int64_t i, int64_t q) {
          call_.CopyScalars(i, call_.in.indices[e], 0, call_.n.heads, q, task);
        });
        call_.Differentiate(From(task.g, begin), count, task);
      }
      for (int64_t q = 0; q < count; q += kLaneCount) {
        StoreDual(LoadDual(d, From(ds, q)) * LoadDual(d, From(c, q)), d, From(df, q));
      }
      const DualRow f = call_.ValuesOf(begin, task);
      if (call_.function != nullptr) {
        call_.ForEdges(task, begin, count, [&](int64_t, int64_t i, int64_t q) HWY_ATTR {
          AddCentred(task, i, begin, q, f);
        });
        SetSlopeGradients(task, begin, count);
        return;
      }
      for (int64_t q = 0; call_.wants_heads && q < count; q += call_.n.heads) {
        ForLanes(call_.n.heads, [&](auto part, int64_t h) HWY_ATTR {
          AddProduct(part, LoadDual(part, From(ds, q + h)), LoadDual(part, From(f, q + h)),
                     From(HeadSum(task.number, 0), h));
        });
      }
      std::copy_n(df.values, count, ds.values);
      std::copy_n(df.tangents, count, ds.tangents);
    });
  }

  // Adds the terms of the top edges' slopes to the sums: the gradients of the scores of a row sum
  // to its d_lse. Writes the gradients of row scalars.
  void FinishSums(const GraphTask& task) {
    for (int64_t i = task.begin; i < task.end; ++i) {
      for (int64_t h = 0; h < call_.n.heads; ++h) {
        const int64_t at = task.At(i) + h;
        DualNumber d_lse;
        if (task.largest[at] != -kInfinity) d_lse = call_.DLse(i * call_.n.heads + h);
        const DualNumber df =
            Product({call_.HeadNumbers(false, 0)[h], call_.HeadNumbers(true, 0)[h]}, d_lse);
        AddTo(HeadSum(task.number, 0), h, Product(d_lse, At(Tops(task, 0), at)));
        if (call_.is_distance()) {
          AddTo(RowSums(task, 0), at, Product(df, At(Tops(task, 1), at)));
        }
        for (int s = 0; s < call_.row_scalars(); ++s) {
          const DualRow sums = RowSums(task, 1 + s);
          AddTo(sums, at, Product(df, At(Tops(task, 2 + s), at)));
          for (const bool is_tangent : {false, true}) {
            Real* const to = call_.Gradient(is_tangent).row_scalars;
            if (to == nullptr) continue;
            to[(s * call_.n.heads + h) * call_.n.queries + i] = sums.Of(is_tangent)[at];
          }
        }
      }
    }
  }
  // For distances, an edge contributes a multiple of y_top - y_e, and FinishSums has summed the
  // common multiple of x - y_top. Edges that are much nearer than the top edge contribute x - y_e.
  void WriteQueryGradients(const GraphTask& task) const {
    call_.ForRows(task, [&](const RowEdges& row) {
      const DualRow sums =
          ClearSums(task.sums, call_.n.heads * call_.dim, call_.of.gradient.x.data != nullptr);
      for (int64_t h = 0; h < call_.n.heads && row.begin < row.end; ++h) {
        AddQueryGradients(task, row, h, SumsAt(sums, h * call_.dim));
      }
      WriteSums(call_.of.gradient.x, call_.of.gradient_tangent.x, sums, call_.n.heads, row.i,
                call_.dim);
    });
  }
  // Adds up the sums of the tasks in order.
  void SumHeads() {
    for (const bool is_tangent : {false, true}) {
      const GraphGradient<Real>& gradient = call_.Gradient(is_tangent);
      for (int s = 0; s < call_.head_sums(); ++s) {
        Real* const to = s == 0 ? gradient.factor
                         : gradient.head_scalars == nullptr
                             ? nullptr
                             : gradient.head_scalars + (s - 1) * call_.n.heads;
        for (int64_t h = 0; to != nullptr && h < call_.n.heads; ++h) {
          double sum = 0;
          for (int64_t task = 0; task < call_.tasks.count(); ++task) {
            const DualRow of_task = HeadSum(task, s);
            sum += of_task.Of(is_tangent)[h];
          }
          to[h] = static_cast<Real>(sum);
        }
      }
    }
  }

 private:
  // The numbers of a task's top edges, one per row and head: f (n = 0), the slope with respect to g
  // (n = 1), or the slope with respect to a row scalar (n = 2 + s).
  DualRow Tops(const GraphTask& task, int n) const {
    Real* const values = task.tops + n * call_.most_tops;
    return {values, values + (2 + call_.row_scalars()) * call_.most_tops};
  }
  // Edges with smaller squared distances than this are much nearer than the row's top edge.
  Real* NearDistances(const GraphTask& task) const {
    return task.tops + 2 * (2 + call_.row_scalars()) * call_.most_tops;
  }
  int64_t TopEdge(const GraphTask& task, int64_t i, int64_t h) const {
    return call_.in.indptr[i] + static_cast<int64_t>(task.top_edges[task.At(i) + h]);
  }

  // The sums over the pairs of a task for the gradient of the factor (s = 0) or of a head scalar.
  DualRow HeadSum(int64_t number, int s) {
    const auto at = [&](bool is_tangent) {
      return &d_heads_[Size(((number * 2 + is_tangent) * call_.head_sums() + s) * call_.n.heads)];
    };
    return {at(false), at(true)};
  }
  // The sums over the edges of a row for the gradient of g (n = 0) or of a row scalar (n = 1 + s).
  DualRow RowSums(const GraphTask& task, int n) const {
    return {task.row_sums + n * call_.most_tops,
            task.row_sums + (1 + call_.row_scalars() + n) * call_.most_tops};
  }
  static DualNumber Product(const DualNumber& x, const DualNumber& y) {
    return {x.value * y.value, x.tangent * y.value + x.value * y.tangent};
  }
  static void AddTo(const DualRow& row, int64_t n, const DualNumber& number) {
    row.values[n] += number.value;
    row.tangents[n] += number.tangent;
  }

  // Adds the pairs of an edge of row i, at index q of a step, to the sums of the row and of the
  // heads.
  HWY_INLINE void AddCentred(const GraphTask& task, int64_t i, int64_t begin, int64_t q,
                             const DualRow& f) {
    const SlopeArrays slopes = call_.SlopesOf(false, task);
    const SlopeArrays tangents = call_.SlopesOf(true, task);
    const int64_t row = task.At(i);
    ForLanes(call_.n.heads, [&](auto d, int64_t h) HWY_ATTR {
      const int64_t at = q + h;
      const auto slope_at = [&](Real* SlopeArrays::* of, int s) HWY_ATTR {
        const int64_t n = s * call_.stride + at;
        return LoadDual(d, {slopes.*of + n, tangents.*of + n});
      };
      const auto centred = [&](const auto& slope, int n) HWY_ATTR {
        return slope - LoadDual(d, From(Tops(task, n), row + h));
      };
      const auto ds = LoadDual(d, From(task.d_scores, begin + at));
      const auto df = LoadDual(d, {task.work + at, task.work + call_.stride + at});
      AddProduct(d, ds, centred(LoadDual(d, From(f, at)), 0), From(HeadSum(task.number, 0), h));
      for (int s = 0; s < call_.head_scalars(); ++s) {
        AddProduct(d, df, slope_at(&SlopeArrays::t, s), From(HeadSum(task.number, 1 + s), h));
      }
      for (int s = 0; s < call_.row_scalars(); ++s) {
        AddProduct(d, df, centred(slope_at(&SlopeArrays::a, s), 2 + s),
                   From(RowSums(task, 1 + s), row + h));
      }
      if (!call_.is_distance()) return;
      // Near pairs are not part of the common multiple of x - y_top; see WriteQueryGradients.
      auto slope = slope_at(&SlopeArrays::g, 0);
      const auto near =
          hn::LoadU(d, task.g.values + begin + at) < hn::LoadU(d, NearDistances(task) + row + h);
      slope.value = hn::IfThenZeroElse(near, slope.value);
      slope.tangent = hn::IfThenZeroElse(near, slope.tangent);
      AddProduct(d, df, centred(slope, 1), From(RowSums(task, 0), row + h));
    });
  }
  // Replaces the gradients of scores by those of g, and stores the gradients of column scalars.
  void SetSlopeGradients(const GraphTask& task, int64_t begin, int64_t count) const {
    const SlopeArrays slopes = call_.SlopesOf(false, task);
    const SlopeArrays tangents = call_.SlopesOf(true, task);
    const DualRow df{task.work, task.work + call_.stride};
    const auto multiply = [&](const DualRow& slope, Real scale, const DualRow& to) HWY_ATTR {
      ForLanes(count, [=](auto d, int64_t q) HWY_ATTR {
        const auto factor = hn::Set(d, scale);
        auto scaled = LoadDual(d, From(df, q));
        scaled.value = scaled.value * factor;
        scaled.tangent = scaled.tangent * factor;
        StoreDual(LoadDual(d, From(slope, q)) * scaled, d, From(to, q));
      });
    };
    for (int s = 0; call_.wants_columns && s < call_.column_scalars(); ++s) {
      const int64_t at = s * call_.stride;
      multiply({slopes.b + at, tangents.b + at}, 1.0f, keys_.ColumnGradients(task, s, begin));
    }
    if (!call_.has_product()) return;
    // d|x - y|^2/dx = 2 (x - y).
    multiply({slopes.g, tangents.g}, call_.is_distance() ? 2.0f : 1.0f, From(task.d_scores, begin));
  }

  void AddQueryGradients(const GraphTask& task, const RowEdges& row, int64_t h,
                         const DualRow& to) const {
    const int64_t key_head = h / call_.group;
    int64_t q = row.offset + h;
    if (!call_.is_distance()) {
      for (int64_t e = row.begin; e < row.end; ++e, q += call_.n.heads) {
        AddScaledDual(At(task.d_scores, q), call_.y.Row(key_head, call_.in.indices[e]), call_.dim,
                      to);
      }
      return;
    }
    const DualNumbers x = call_.x.Row(h, row.i);
    const DualNumbers top = call_.y.Row(key_head, call_.in.indices[TopEdge(task, row.i, h)]);
    const int64_t at = task.At(row.i) + h;
    const Real least = NearDistances(task)[at];
    for (int64_t e = row.begin; e < row.end; ++e, q += call_.n.heads) {
      AddScaledDualDifference(At(task.d_scores, q), task.g.values[q] < least ? x : top,
                              call_.y.Row(key_head, call_.in.indices[e]), call_.dim, to);
    }
    const DualNumber common = At(RowSums(task, 0), at);
    AddScaledDualDifference({2 * common.value, 2 * common.tangent}, x, top, call_.dim, to);
  }

  const GraphCall& call_;
  const GraphKeys& keys_;
  std::vector<Real> d_heads_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
