#include <algorithm>
#include <limits>
#include <vector>

#include "base/parallel.h"
#include "reference/problem.h"
#include "reference/reference.h"

namespace gnomon::reference {

Dual Table::Value(Dual g, const Dual* a, const Dual* b, const Dual* t) const {
  double values[3][3];
  for (int s = 0; s < row_scalars; ++s) values[0][s] = a[s].value;
  for (int s = 0; s < column_scalars; ++s) values[1][s] = b[s].value;
  for (int s = 0; s < head_scalars; ++s) values[2][s] = t[s].value;
  PairDerivative<double> d;
  gradient(g.value, values[0], values[1], values[2], d);
  double tangent = input == PairInput::kNone ? 0 : d.g * g.tangent;
  for (int s = 0; s < row_scalars; ++s) tangent += d.a[s] * a[s].tangent;
  for (int s = 0; s < column_scalars; ++s) tangent += d.b[s] * b[s].tangent;
  for (int s = 0; s < head_scalars; ++s) tangent += d.t[s] * t[s].tangent;
  return {value(g.value, values[0], values[1], values[2]), tangent};
}

template <class T>
void Forward(const Table& table, const AttentionInput<T>& in, const AttentionOutput<T>& out,
             const Executor& executor) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const AttentionShape& n = in.shape;
  const Problem<T> problem(table, in);
  ParallelTasks(executor, n.batch * n.heads, [&](int64_t task, int) {
    const int64_t b = task / n.heads;
    const int64_t h = task % n.heads;
    std::vector<T> score(static_cast<size_t>(n.keys));
    std::vector<T> value;
    for (int64_t i = 0; i < n.queries; ++i) {
      T* o = out.o.row(b, h, i);
      std::fill(o, o + n.value_dim, T(0.0));
      const KeyRange keys = problem.Keys(b, i);
      T largest = -kInfinity;
      int64_t top = -1;
      for (int64_t j = keys.begin; j < keys.end; ++j) {
        score[j] = kHidden;
        if (!problem.Sees(b, h, i, j)) continue;
        const PairScalars<T> p = problem.Scalars(b, h, i, j);
        const T f = table.Value(problem.Input(b, h, i, j), p.a, p.b, p.t);
        score[j] = problem.Score(b, h, i, j, f) * kLog2E;
        if (!(score[j] > largest)) continue;
        largest = score[j];
        top = j;
      }
      if (largest == -kInfinity) largest = 0;
      T sum = 0;
      for (int64_t j = keys.begin; j < keys.end; ++j) {
        if (score[j] == -kInfinity) continue;
        const T weight = Exp2(score[j] - largest);
        sum += weight;
        problem.Value(b, h, i, j, &value);
        const T kept = weight * problem.Kept(b, h, i, j);
        for (int64_t d = 0; d < n.value_dim; ++d) o[d] += kept * value[static_cast<size_t>(d)];
      }
      if (sum != 0) {
        for (int64_t d = 0; d < n.value_dim; ++d) o[d] /= sum;
      }
      const int64_t row = problem.row(b, h, i);
      out.lse[row] = sum == 0 ? -kInfinity : (largest + Log2(sum)) / kLog2E;
      if (out.statistics == nullptr) continue;
      const int64_t rows = n.batch * n.heads * n.queries;
      out.statistics[row] = sum == 0 ? -kInfinity : largest;
      out.statistics[rows + row] = sum;
      out.statistics[2 * rows + row] = static_cast<double>(top);
    }
  });
}

template <class T>
void Backward(const Table& table, const AttentionInput<T>& in,
              const AttentionBackwardInput<T>& saved, const AttentionGradient<T>& grad,
              const Executor& executor) {
  const AttentionShape& n = in.shape;
  const Problem<T> problem(table, in);
  const int64_t group = problem.group();
  const int64_t bias_size = problem.BiasSize();
  const int64_t rows = n.batch * n.heads * n.queries;
  const int64_t columns = n.batch * n.key_heads * n.keys;
  // Sums over the batch have one part per batch element. The parts are added in order at the end.
  std::vector<T> d_factor(static_cast<size_t>(n.batch * n.heads));
  std::vector<T> d_head(static_cast<size_t>(n.batch * n.heads * 3));
  std::vector<T> d_bias(static_cast<size_t>(grad.bias.table ? n.batch * n.heads * bias_size : 0));
  const int64_t key_table = problem.RelativeSize() * in.relative.dim;
  const int64_t value_table = problem.RelativeSize() * n.value_dim;
  std::vector<T> d_keys(
      static_cast<size_t>(grad.relative_keys ? n.batch * n.heads * key_table : 0));
  const int64_t query_table = problem.RelativeSize() * in.relative.key_dim;
  std::vector<T> d_queries(
      static_cast<size_t>(grad.relative_queries ? n.batch * n.heads * query_table : 0));
  std::vector<T> d_values(
      static_cast<size_t>(grad.relative_values ? n.batch * n.heads * value_table : 0));

  const View<T>& d_pairs = grad.pair_bias;
  for (int64_t row = 0; d_pairs.data && row < rows; ++row) {
    const int64_t head = row / n.queries;
    std::fill_n(d_pairs.row(head / n.heads, head % n.heads, row % n.queries), n.keys, T(0.0));
  }
  // Heads that share a bias gradient accumulate into it sequentially.
  const bool shares = d_pairs.data && (d_pairs.stride[0] == 0 || d_pairs.stride[1] == 0);
  const Executor& workers = shares ? SerialExecutor() : executor;

  ParallelTasks(workers, n.batch * n.key_heads, [&](int64_t task, int) {
    const int64_t b = task / n.key_heads;
    const int64_t key_head = task % n.key_heads;
    for (int64_t j = 0; j < n.keys; ++j) {
      if (grad.y.data) std::fill_n(grad.y.row(b, key_head, j), n.dim, T(0.0));
      if (grad.v.data) std::fill_n(grad.v.row(b, key_head, j), n.value_dim, T(0.0));
      if (grad.relative_key.data) {
        std::fill_n(grad.relative_key.row(b, key_head, j), in.relative.key_dim, T(0.0));
      }
      for (int s = 0; grad.column_scalars && s < table.column_scalars; ++s) {
        grad.column_scalars[s * columns + task * n.keys + j] = 0;
      }
    }
    std::vector<T> value;
    std::vector<int64_t> entries;
    for (int64_t h = key_head * group; h < (key_head + 1) * group; ++h) {
      const int64_t head = b * n.heads + h;
      if (grad.key_bias) std::fill_n(grad.key_bias + head * n.keys, n.keys, T(0.0));
      for (int64_t i = 0; i < n.queries; ++i) {
        const int64_t row = problem.row(b, h, i);
        if (grad.relative_query.data) {
          std::fill_n(grad.relative_query.row(b, h, i), in.relative.dim, T(0.0));
        }
        if (grad.x.data) std::fill_n(grad.x.row(b, h, i), n.dim, T(0.0));
        if (grad.temperature) grad.temperature[row] = 0;
        for (int s = 0; grad.row_scalars && s < table.row_scalars; ++s) {
          grad.row_scalars[s * rows + row] = 0;
        }
        const T sum = saved.statistics[rows + row];
        if (sum == 0) continue;
        const T* d_o = saved.d_o.row(b, h, i);
        const T d_lse = saved.d_lse ? saved.d_lse[row] : 0;
        const T delta = problem.Dot(d_o, saved.o.row(b, h, i), n.value_dim) - d_lse;
        const KeyRange keys = problem.Keys(b, i);
        for (int64_t j = keys.begin; j < keys.end; ++j) {
          if (!problem.Sees(b, h, i, j)) continue;
          const PairScalars<T> p = problem.Scalars(b, h, i, j);
          PairDerivative<T> d;
          const T g = problem.Input(b, h, i, j);
          const T f = table.Value(g, p.a, p.b, p.t);
          table.Gradient(g, p.a, p.b, p.t, d);
          const T score = problem.Score(b, h, i, j, f) * kLog2E;
          if (score == kHidden) continue;
          const T weight = Exp2(score - saved.statistics[row]) / sum;
          problem.Value(b, h, i, j, &value);
          const T kept = problem.Kept(b, h, i, j);
          const T d_weight = kept * problem.Dot(d_o, value.data(), n.value_dim);
          // If a row has a single key, this is exactly d_lse, regardless of rounding in d_weight
          // and delta.
          const T d_capped = sum == 1 && weight == 1 ? d_lse : weight * (d_weight - delta);
          const T d_tempered = problem.CapSlope(score / kLog2E) * d_capped;
          if (grad.temperature) {
            grad.temperature[row] += d_tempered * problem.PlainScore(b, h, i, j, f);
          }
          const T d_score = problem.Temperature(b, h, i) * d_tempered;
          const T d_f = in.factor[h] * d_score;
          if (grad.v.data) {
            T* d_v = grad.v.row(b, key_head, j);
            for (int64_t e = 0; e < n.value_dim; ++e) d_v[e] += weight * kept * d_o[e];
          }
          if (table.input != PairInput::kNone) {
            // dg/dx is y (inner product) or 2 (x - y) (distance); dg/dy is x or 2 (y - x).
            const bool is_distance = table.input == PairInput::kSquaredDistance;
            const T d_g = d_f * d.g;
            const T* x = in.x.row(b, h, i);
            const T* y = in.y.row(b, key_head, j);
            for (int64_t e = 0; grad.x.data && e < n.dim; ++e) {
              grad.x.row(b, h, i)[e] += d_g * (is_distance ? 2 * (x[e] - y[e]) : y[e]);
            }
            for (int64_t e = 0; grad.y.data && e < n.dim; ++e) {
              grad.y.row(b, key_head, j)[e] += d_g * (is_distance ? 2 * (y[e] - x[e]) : x[e]);
            }
          }
          for (int s = 0; grad.row_scalars && s < table.row_scalars; ++s) {
            grad.row_scalars[s * rows + row] += d_f * d.a[s];
          }
          for (int s = 0; grad.column_scalars && s < table.column_scalars; ++s) {
            grad.column_scalars[s * columns + task * n.keys + j] += d_f * d.b[s];
          }
          for (int s = 0; s < table.head_scalars; ++s) d_head[head * 3 + s] += d_f * d.t[s];
          d_factor[head] += d_score * f;
          if (grad.bias.table) {
            problem.BiasEntries(b, i, j, &entries);
            for (const int64_t entry : entries) d_bias[head * bias_size + entry] += d_score;
          }
          if (grad.key_bias) grad.key_bias[head * n.keys + j] += d_score;
          if (d_pairs.data) d_pairs.row(b, h, i)[j] += d_score;
          problem.RelativeEntries(b, i, j, &entries);
          for (const int64_t entry : entries) {
            const T d_product = in.relative.factor * d_score;
            for (int64_t e = 0; grad.relative_query.data && e < in.relative.dim; ++e) {
              grad.relative_query.row(b, h, i)[e] += d_product * problem.RelativeKey(h, entry)[e];
            }
            for (int64_t e = 0; grad.relative_keys && e < in.relative.dim; ++e) {
              d_keys[head * key_table + entry * in.relative.dim + e] +=
                  d_product * in.relative.query.row(b, h, i)[e];
            }
            for (int64_t e = 0; grad.relative_key.data && e < in.relative.key_dim; ++e) {
              grad.relative_key.row(b, key_head, j)[e] +=
                  d_product * problem.RelativeQuery(h, entry)[e];
            }
            for (int64_t e = 0; grad.relative_queries && e < in.relative.key_dim; ++e) {
              d_queries[head * query_table + problem.RelativeQueryRow(entry) + e] +=
                  d_product * in.relative.key.row(b, key_head, j)[e];
            }
            for (int64_t e = 0; grad.relative_values && e < n.value_dim; ++e) {
              d_values[head * value_table + entry * n.value_dim + e] += weight * kept * d_o[e];
            }
          }
        }
      }
    }
  });

  for (int64_t h = 0; h < n.heads; ++h) {
    if (grad.factor) grad.factor[h] = 0;
    for (int s = 0; grad.head_scalars && s < table.head_scalars; ++s) {
      grad.head_scalars[s * n.heads + h] = 0;
    }
    for (int64_t b = 0; b < n.batch; ++b) {
      if (grad.factor) grad.factor[h] += d_factor[b * n.heads + h];
      for (int s = 0; grad.head_scalars && s < table.head_scalars; ++s) {
        grad.head_scalars[s * n.heads + h] += d_head[(b * n.heads + h) * 3 + s];
      }
    }
  }
  // A table's gradient is the sum over the batch and, if heads share it, over the heads.
  const auto add_up = [&](T* to, const std::vector<T>& parts, int64_t size, bool heads) {
    if (to == nullptr) return;
    std::fill_n(to, (heads ? n.heads : 1) * size, T(0.0));
    for (int64_t head = 0; head < n.batch * n.heads; ++head) {
      T* its = to + (heads ? head % n.heads * size : 0);
      for (int64_t e = 0; e < size; ++e) its[e] += parts[head * size + e];
    }
  };
  add_up(grad.relative_keys, d_keys, key_table, in.relative.key_heads);
  add_up(grad.relative_queries, d_queries, query_table, in.relative.query_heads);
  add_up(grad.relative_values, d_values, value_table, in.relative.value_heads);
  if (grad.bias.table) {
    const int64_t tables = grad.bias.batch_stride == 0 ? 1 : n.batch;
    std::fill_n(grad.bias.table, tables * n.heads * bias_size, T(0.0));
    for (int64_t b = 0; b < n.batch; ++b) {
      T* to = grad.bias.table + b * grad.bias.batch_stride;
      for (int64_t e = 0; e < n.heads * bias_size; ++e) {
        to[e] += d_bias[b * n.heads * bias_size + e];
      }
    }
  }
}

template void Forward(const Table&, const AttentionInput<double>&, const AttentionOutput<double>&,
                      const Executor&);
template void Backward(const Table&, const AttentionInput<double>&,
                       const AttentionBackwardInput<double>&, const AttentionGradient<double>&,
                       const Executor&);
template void Forward(const Table&, const AttentionInput<Dual>&, const AttentionOutput<Dual>&,
                      const Executor&);
template void Backward(const Table&, const AttentionInput<Dual>&,
                       const AttentionBackwardInput<Dual>&, const AttentionGradient<Dual>&,
                       const Executor&);

}  // namespace gnomon::reference
