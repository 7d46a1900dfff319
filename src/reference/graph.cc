// Attention over a graph. Pairs have the same scores as in the dense reference.
#include <algorithm>
#include <limits>
#include <vector>

#include "base/parallel.h"
#include "reference/problem.h"
#include "reference/reference.h"

namespace gnomon::reference {
namespace {

// Converts the input to a single batch of the dense operator.
template <class T>
AttentionInput<T> DenseInput(const GraphInput<T>& in) {
  AttentionInput<T> dense;
  dense.shape = {1,
                 in.shape.heads,
                 in.shape.key_heads,
                 in.shape.queries,
                 in.shape.keys,
                 in.shape.dim,
                 in.shape.value_dim};
  dense.x = in.x;
  dense.y = in.y;
  dense.v = in.v;
  dense.row_scalars = in.row_scalars;
  dense.column_scalars = in.column_scalars;
  dense.head_scalars = in.head_scalars;
  dense.factor = in.factor;
  dense.dropout = in.dropout;
  return dense;
}

// The score of edge e in log2 units, given f. An edge with bias -inf has zero weight even if f is
// NaN.
template <class T>
T EdgeScore(const Problem<T>& problem, const GraphInput<T>& in, int64_t h, int64_t i, int64_t e,
            T f) {
  T score = problem.Score(0, h, i, in.indices[e], f);
  if (in.edge_bias != nullptr) {
    const T bias = in.edge_bias[e * in.shape.heads + h];
    score = bias == kHidden ? kHidden : score + bias;
  }
  return score * kLog2E;
}

}  // namespace

template <class T>
void GraphForward(const Table& table, const GraphInput<T>& in, const GraphOutput<T>& out,
                  const Executor& executor) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const GraphShape& n = in.shape;
  const AttentionInput<T> dense = DenseInput(in);
  const Problem<T> problem(table, dense);
  ParallelTasks(executor, n.heads, [&](int64_t h, int) {
    std::vector<T> score;
    for (int64_t i = 0; i < n.queries; ++i) {
      const int64_t begin = in.indptr[i];
      const int64_t degree = in.indptr[i + 1] - begin;
      score.resize(static_cast<size_t>(degree));
      T largest = -kInfinity;
      int64_t top = -1;
      for (int64_t e = 0; e < degree; ++e) {
        const int64_t j = in.indices[begin + e];
        const PairScalars<T> p = problem.Scalars(0, h, i, j);
        const T f = table.Value(problem.Input(0, h, i, j), p.a, p.b, p.t);
        score[e] = EdgeScore(problem, in, h, i, begin + e, f);
        if (!(score[e] > largest)) continue;
        largest = score[e];
        top = e;
      }
      if (largest == -kInfinity) largest = 0;
      T* o = out.o.row(0, h, i);
      std::fill_n(o, n.value_dim, T(0.0));
      T sum = 0;
      for (int64_t e = 0; e < degree; ++e) {
        // An edge without weight adds nothing, even if its value is not finite.
        if (score[e] == -kInfinity) continue;
        const T weight = Exp2(score[e] - largest);
        sum += weight;
        const T kept = weight * problem.Kept(0, h, i, begin + e);
        const T* v = in.v.row(0, h / problem.group(), in.indices[begin + e]);
        for (int64_t d = 0; d < n.value_dim; ++d) o[d] += kept * v[d];
      }
      if (sum != 0) {
        for (int64_t d = 0; d < n.value_dim; ++d) o[d] /= sum;
      }
      const int64_t row = i * n.heads + h;
      out.lse[row] = sum == 0 ? -kInfinity : (largest + Log2(sum)) / kLog2E;
      if (out.statistics == nullptr) continue;
      const int64_t rows = n.queries * n.heads;
      out.statistics[row] = sum == 0 ? -kInfinity : largest;
      out.statistics[rows + row] = sum;
      out.statistics[2 * rows + row] = static_cast<double>(top);
    }
  });
}

template <class T>
void GraphBackward(const Table& table, const GraphInput<T>& in, const GraphBackwardInput<T>& saved,
                   const GraphGradient<T>& grad, const Executor& executor) {
  const GraphShape& n = in.shape;
  const AttentionInput<T> dense = DenseInput(in);
  const Problem<T> problem(table, dense);
  const int64_t group = problem.group();
  ParallelTasks(executor, n.key_heads, [&](int64_t key_head, int) {
    for (int64_t j = 0; j < n.keys; ++j) {
      if (grad.y.data) std::fill_n(grad.y.row(0, key_head, j), n.dim, T(0.0));
      if (grad.v.data) std::fill_n(grad.v.row(0, key_head, j), n.value_dim, T(0.0));
      for (int s = 0; grad.column_scalars && s < table.column_scalars; ++s) {
        grad.column_scalars[(s * n.key_heads + key_head) * n.keys + j] = 0;
      }
    }
    for (int64_t h = key_head * group; h < (key_head + 1) * group; ++h) {
      T d_factor = 0;
      T d_head[3] = {0, 0, 0};
      for (int64_t i = 0; i < n.queries; ++i) {
        if (grad.x.data) std::fill_n(grad.x.row(0, h, i), n.dim, T(0.0));
        for (int s = 0; grad.row_scalars && s < table.row_scalars; ++s) {
          grad.row_scalars[(s * n.heads + h) * n.queries + i] = 0;
        }
        const int64_t row = i * n.heads + h;
        const T largest = saved.statistics[row];
        const T sum = saved.statistics[n.queries * n.heads + row];
        if (sum == 0) {
          for (int64_t e = in.indptr[i]; grad.edge_bias && e < in.indptr[i + 1]; ++e) {
            grad.edge_bias[e * n.heads + h] = 0;
          }
          continue;
        }
        const T* d_o = saved.d_o.row(0, h, i);
        const T delta = problem.Dot(d_o, saved.o.row(0, h, i), n.value_dim) -
                        (saved.d_lse ? saved.d_lse[row] : 0);
        for (int64_t e = in.indptr[i]; e < in.indptr[i + 1]; ++e) {
          const int64_t j = in.indices[e];
          const PairScalars<T> p = problem.Scalars(0, h, i, j);
          PairDerivative<T> d;
          const T g = problem.Input(0, h, i, j);
          const T f = table.Value(g, p.a, p.b, p.t);
          table.Gradient(g, p.a, p.b, p.t, d);
          const T score = EdgeScore(problem, in, h, i, e, f);
          const T weight = Exp2(score - largest) / sum;
          const T kept = problem.Kept(0, h, i, e);
          const T* v = in.v.row(0, key_head, j);
          const T d_score = weight * (kept * problem.Dot(d_o, v, n.value_dim) - delta);
          if (grad.edge_bias) grad.edge_bias[e * n.heads + h] = d_score;
          const T d_f = in.factor[h] * d_score;
          if (grad.v.data) {
            T* d_v = grad.v.row(0, key_head, j);
            for (int64_t k = 0; k < n.value_dim; ++k) d_v[k] += weight * kept * d_o[k];
          }
          if (table.input != PairInput::kNone) {
            // dg/dx is y (inner product) or 2 (x - y) (distance); dg/dy is x or 2 (y - x).
            const bool is_distance = table.input == PairInput::kSquaredDistance;
            const T d_g = d_f * d.g;
            const T* x = in.x.row(0, h, i);
            const T* y = in.y.row(0, key_head, j);
            for (int64_t k = 0; grad.x.data && k < n.dim; ++k) {
              grad.x.row(0, h, i)[k] += d_g * (is_distance ? 2 * (x[k] - y[k]) : y[k]);
            }
            for (int64_t k = 0; grad.y.data && k < n.dim; ++k) {
              grad.y.row(0, key_head, j)[k] += d_g * (is_distance ? 2 * (y[k] - x[k]) : x[k]);
            }
          }
          for (int s = 0; grad.row_scalars && s < table.row_scalars; ++s) {
            grad.row_scalars[(s * n.heads + h) * n.queries + i] += d_f * d.a[s];
          }
          for (int s = 0; grad.column_scalars && s < table.column_scalars; ++s) {
            grad.column_scalars[(s * n.key_heads + key_head) * n.keys + j] += d_f * d.b[s];
          }
          for (int s = 0; s < table.head_scalars; ++s) d_head[s] += d_f * d.t[s];
          d_factor += d_score * f;
        }
      }
      if (grad.factor) grad.factor[h] = d_factor;
      for (int s = 0; grad.head_scalars && s < table.head_scalars; ++s) {
        grad.head_scalars[s * n.heads + h] = d_head[s];
      }
    }
  });
}

template void GraphForward(const Table&, const GraphInput<double>&, const GraphOutput<double>&,
                           const Executor&);
template void GraphBackward(const Table&, const GraphInput<double>&,
                            const GraphBackwardInput<double>&, const GraphGradient<double>&,
                            const Executor&);
template void GraphForward(const Table&, const GraphInput<Dual>&, const GraphOutput<Dual>&,
                           const Executor&);
template void GraphBackward(const Table&, const GraphInput<Dual>&, const GraphBackwardInput<Dual>&,
                            const GraphGradient<Dual>&, const Executor&);

}  // namespace gnomon::reference
