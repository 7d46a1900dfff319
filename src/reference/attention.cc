#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/parallel.h"
#include "reference/problem.h"
#include "reference/reference.h"

namespace gnomon::reference {

void Forward(const Table& table, const AttentionInput<double>& in,
             const AttentionOutput<double>& out, const Executor& executor) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const AttentionShape& n = in.shape;
  const Problem problem(table, in);
  ParallelTasks(executor, n.batch * n.heads, [&](int64_t task, int) {
    const int64_t b = task / n.heads;
    const int64_t h = task % n.heads;
    std::vector<double> score(static_cast<size_t>(n.keys));
    std::vector<double> value;
    for (int64_t i = 0; i < n.queries; ++i) {
      double* o = out.o.row(b, h, i);
      std::fill(o, o + n.value_dim, 0.0);
      const KeyRange keys = problem.Keys(b, i);
      double largest = -kInfinity;
      int64_t top = -1;
      for (int64_t j = keys.begin; j < keys.end; ++j) {
        score[j] = kHidden;
        if (!problem.Sees(b, h, i, j)) continue;
        const PairScalars p = problem.Scalars(b, h, i, j);
        const double f = table.value(problem.Input(b, h, i, j), p.a, p.b, p.t);
        score[j] = problem.Score(b, h, i, j, f) * kLog2E;
        if (!(score[j] > largest)) continue;
        largest = score[j];
        top = j;
      }
      if (largest == -kInfinity) largest = 0;
      double sum = 0;
      for (int64_t j = keys.begin; j < keys.end; ++j) {
        if (score[j] == -kInfinity) continue;
        const double weight = std::exp2(score[j] - largest);
        sum += weight;
        problem.Value(b, h, i, j, &value);
        const double kept = weight * problem.Kept(b, h, i, j);
        for (int64_t d = 0; d < n.value_dim; ++d) o[d] += kept * value[static_cast<size_t>(d)];
      }
      if (sum != 0) {
        for (int64_t d = 0; d < n.value_dim; ++d) o[d] /= sum;
      }
      const int64_t row = problem.row(b, h, i);
      out.lse[row] = sum == 0 ? -kInfinity : (largest + std::log2(sum)) / kLog2E;
      if (out.statistics == nullptr) continue;
      const int64_t rows = n.batch * n.heads * n.queries;
      out.statistics[row] = sum == 0 ? -kInfinity : largest;
      out.statistics[rows + row] = sum;
      out.statistics[2 * rows + row] = static_cast<double>(top);
    }
  });
}

void Backward(const Table& table, const AttentionInput<double>& in,
              const AttentionBackwardInput<double>& saved, const AttentionGradient<double>& grad,
              const Executor& executor) {
  const AttentionShape& n = in.shape;
  const Problem problem(table, in);
  const int64_t group = problem.group();
  const int64_t bias_size = problem.BiasSize();
  const int64_t rows = n.batch * n.heads * n.queries;
  const int64_t columns = n.batch * n.key_heads * n.keys;
  // Partial sums over the batch, one per batch element, added in order at the end.
  std::vector<double> d_factor(static_cast<size_t>(n.batch * n.heads));
  std::vector<double> d_head(static_cast<size_t>(n.batch * n.heads * 3));
  std::vector<double> d_bias(
      static_cast<size_t>(grad.bias.table ? n.batch * n.heads * bias_size : 0));
  const int64_t key_table = problem.RelativeSize() * in.relative.dim;
  const int64_t value_table = problem.RelativeSize() * n.value_dim;
  std::vector<double> d_keys(
      static_cast<size_t>(grad.relative_keys ? n.batch * n.heads * key_table : 0));
  const int64_t query_table = problem.RelativeSize() * in.relative.key_dim;
  std::vector<double> d_queries(
      static_cast<size_t>(grad.relative_queries ? n.batch * n.heads * query_table : 0));
  std::vector<double> d_values(
      static_cast<size_t>(grad.relative_values ? n.batch * n.heads * value_table : 0));

  const View<double>& d_pairs = grad.pair_bias;
  for (int64_t row = 0; d_pairs.data && row < rows; ++row) {
    const int64_t head = row / n.queries;
    std::fill_n(d_pairs.row(head / n.heads, head % n.heads, row % n.queries), n.keys, 0.0);
  }
  // Heads that share a bias gradient accumulate into it sequentially.
  const bool shares = d_pairs.data && (d_pairs.stride[0] == 0 || d_pairs.stride[1] == 0);
  const Executor& workers = shares ? SerialExecutor() : executor;

  ParallelTasks(workers, n.batch * n.key_heads, [&](int64_t task, int) {
    const int64_t b = task / n.key_heads;
    const int64_t key_head = task % n.key_heads;
    for (int64_t j = 0; j < n.keys; ++j) {
      if (grad.y.data) std::fill_n(grad.y.row(b, key_head, j), n.dim, 0.0);
      if (grad.v.data) std::fill_n(grad.v.row(b, key_head, j), n.value_dim, 0.0);
      if (grad.relative_key.data) {
        std::fill_n(grad.relative_key.row(b, key_head, j), in.relative.key_dim, 0.0);
      }
      for (int s = 0; grad.column_scalars && s < table.column_scalars; ++s) {
        grad.column_scalars[s * columns + task * n.keys + j] = 0;
      }
    }
    std::vector<double> value;
    std::vector<int64_t> entries;
    for (int64_t h = key_head * group; h < (key_head + 1) * group; ++h) {
      const int64_t head = b * n.heads + h;
      if (grad.key_bias) std::fill_n(grad.key_bias + head * n.keys, n.keys, 0.0);
      for (int64_t i = 0; i < n.queries; ++i) {
        const int64_t row = problem.row(b, h, i);
        if (grad.relative_query.data) {
          std::fill_n(grad.relative_query.row(b, h, i), in.relative.dim, 0.0);
        }
        if (grad.x.data) std::fill_n(grad.x.row(b, h, i), n.dim, 0.0);
        if (grad.temperature) grad.temperature[row] = 0;
        for (int s = 0; grad.row_scalars && s < table.row_scalars; ++s) {
          grad.row_scalars[s * rows + row] = 0;
        }
        const double sum = saved.statistics[rows + row];
        if (sum == 0) continue;
        const double* d_o = saved.d_o.row(b, h, i);
        const double d_lse = saved.d_lse ? saved.d_lse[row] : 0;
        const double delta = problem.Dot(d_o, saved.o.row(b, h, i), n.value_dim) - d_lse;
        const KeyRange keys = problem.Keys(b, i);
        for (int64_t j = keys.begin; j < keys.end; ++j) {
          if (!problem.Sees(b, h, i, j)) continue;
          const PairScalars p = problem.Scalars(b, h, i, j);
          PairDerivative d;
          const double g = problem.Input(b, h, i, j);
          const double f = table.value(g, p.a, p.b, p.t);
          table.gradient(g, p.a, p.b, p.t, d);
          const double score = problem.Score(b, h, i, j, f) * kLog2E;
          if (score == kHidden) continue;
          const double weight = std::exp2(score - saved.statistics[row]) / sum;
          problem.Value(b, h, i, j, &value);
          const double kept = problem.Kept(b, h, i, j);
          const double d_weight = kept * problem.Dot(d_o, value.data(), n.value_dim);
          // For a row with a single key this is exactly the gradient of lse, however dP and delta
          // round.
          const double d_capped = sum == 1 && weight == 1 ? d_lse : weight * (d_weight - delta);
          const double d_tempered = problem.CapSlope(score / kLog2E) * d_capped;
          if (grad.temperature) {
            grad.temperature[row] += d_tempered * problem.PlainScore(b, h, i, j, f);
          }
          const double d_score = problem.Temperature(b, h, i) * d_tempered;
          const double d_f = in.factor[h] * d_score;
          if (grad.v.data) {
            double* d_v = grad.v.row(b, key_head, j);
            for (int64_t e = 0; e < n.value_dim; ++e) d_v[e] += weight * kept * d_o[e];
          }
          if (table.input != PairInput::kNone) {
            // dg/dx is y, or 2 (x - y); dg/dy is x, or 2 (y - x).
            const bool is_distance = table.input == PairInput::kSquaredDistance;
            const double d_g = d_f * d.g;
            const double* x = in.x.row(b, h, i);
            const double* y = in.y.row(b, key_head, j);
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
            const double d_product = in.relative.factor * d_score;
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
  // A table's gradient sums over the batch and, where heads share the table, over the heads.
  const auto add_up = [&](double* to, const std::vector<double>& parts, int64_t size, bool heads) {
    if (to == nullptr) return;
    std::fill_n(to, (heads ? n.heads : 1) * size, 0.0);
    for (int64_t head = 0; head < n.batch * n.heads; ++head) {
      double* its = to + (heads ? head % n.heads * size : 0);
      for (int64_t e = 0; e < size; ++e) its[e] += parts[head * size + e];
    }
  };
  add_up(grad.relative_keys, d_keys, key_table, in.relative.key_heads);
  add_up(grad.relative_queries, d_queries, query_table, in.relative.query_heads);
  add_up(grad.relative_values, d_values, value_table, in.relative.value_heads);
  if (grad.bias.table) {
    const int64_t tables = grad.bias.batch_stride == 0 ? 1 : n.batch;
    std::fill_n(grad.bias.table, tables * n.heads * bias_size, 0.0);
    for (int64_t b = 0; b < n.batch; ++b) {
      double* to = grad.bias.table + b * grad.bias.batch_stride;
      for (int64_t e = 0; e < n.heads * bias_size; ++e) {
        to[e] += d_bias[b * n.heads * bias_size + e];
      }
    }
  }
}

}  // namespace gnomon::reference
