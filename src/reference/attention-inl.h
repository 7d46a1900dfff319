// The operator in double by plain loops: the oracle of the tests, and what fp64 tensors run on. It
// shares nothing with the fused kernels but the definitions and the mask's interval.
//
// Included once for each definition, after its namespace has defined the vocabulary.
#ifndef GNOMON_SRC_REFERENCE_ATTENTION_INL_H_
#define GNOMON_SRC_REFERENCE_ATTENTION_INL_H_

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/dropout.h"
#include "base/parallel.h"
#include "base/visible_keys.h"
#include "gnomon/attention.h"

namespace gnomon::reference {

// Scalars of one pair, and the derivatives of f; one entry where there would be none.
struct PairScalars {
  double a[3];
  double b[3];
  double t[3];
};
struct PairDerivative {
  double g = 0;
  double a[3] = {0, 0, 0};
  double b[3] = {0, 0, 0};
  double t[3] = {0, 0, 0};
};

// 1 / ln 2: statistics of rows are in units of log2, as the fused kernels' are.
constexpr double kLog2E = 1.4426950408889634074;

// Index arithmetic that both directions share.
// The score of what is masked.
inline constexpr double kHidden = -std::numeric_limits<double>::infinity();

template <class Definition>
class Problem {
 public:
  explicit Problem(const AttentionInput<double>& in)
      : in_(in), n_(in.shape), group_(n_.key_heads == 0 ? 1 : n_.heads / n_.key_heads) {}

  int64_t group() const { return group_; }
  int64_t row(int64_t b, int64_t h, int64_t i) const { return (b * n_.heads + h) * n_.queries + i; }
  int64_t column(int64_t b, int64_t h, int64_t j) const {
    return (b * n_.key_heads + h / group_) * n_.keys + j;
  }

  PairScalars Scalars(int64_t b, int64_t h, int64_t i, int64_t j) const {
    PairScalars s{};
    for (int n = 0; n < Definition::kRowScalars; ++n) {
      s.a[n] = in_.row_scalars[n * n_.batch * n_.heads * n_.queries + row(b, h, i)];
    }
    for (int n = 0; n < Definition::kColumnScalars; ++n) {
      s.b[n] = in_.column_scalars[n * n_.batch * n_.key_heads * n_.keys + column(b, h, j)];
    }
    for (int n = 0; n < Definition::kHeadScalars; ++n) s.t[n] = in_.head_scalars[n * n_.heads + h];
    return s;
  }

  // g_ij.
  double Input(int64_t b, int64_t h, int64_t i, int64_t j) const {
    if (Definition::kInput == PairInput::kNone) return 0;
    const double* x = in_.x.row(b, h, i);
    const double* y = in_.y.row(b, h / group_, j);
    if (Definition::kInput == PairInput::kInnerProduct) return Dot(x, y, n_.dim);
    double sum = 0;
    for (int64_t d = 0; d < n_.dim; ++d) sum += (x[d] - y[d]) * (x[d] - y[d]);
    return sum;
  }

  int64_t BiasSize() const {
    if (in_.bias.table == nullptr) return 0;
    return in_.bias.layout != nullptr ? in_.bias.layout->size() : n_.queries + n_.keys - 1;
  }
  int64_t RelativeSize() const {
    return in_.relative.layout == nullptr ? 0 : in_.relative.layout->size();
  }

  // The entries that pair (i, j) reads of a table.
  void Entries(const TableLayout& layout, int64_t b, int64_t i, int64_t j,
               std::vector<int64_t>* entries) const {
    std::vector<TableRun> runs;
    const int64_t key = KeyPosition(in_, b, j);
    layout.AddRuns(QueryPosition(in_, b, i), key, key + 1, &runs);
    entries->clear();
    for (const TableRun& run : runs) entries->push_back(run.entry);
  }
  void BiasEntries(int64_t b, int64_t i, int64_t j, std::vector<int64_t>* entries) const {
    if (in_.bias.layout != nullptr) return Entries(*in_.bias.layout, b, i, j, entries);
    entries->clear();
    if (in_.bias.table != nullptr) entries->push_back(n_.queries - 1 + j - i);
  }
  void RelativeEntries(int64_t b, int64_t i, int64_t j, std::vector<int64_t>* entries) const {
    entries->clear();
    if (in_.relative.layout != nullptr) Entries(*in_.relative.layout, b, i, j, entries);
  }

  int64_t KeyTable(int64_t h) const { return in_.relative.key_heads ? h : 0; }
  int64_t QueryTable(int64_t h) const { return in_.relative.query_heads ? h : 0; }
  int64_t ValueTable(int64_t h) const { return in_.relative.value_heads ? h : 0; }
  const double* RelativeKey(int64_t h, int64_t entry) const {
    return in_.relative.keys + (KeyTable(h) * RelativeSize() + entry) * in_.relative.dim;
  }
  // Where in its table the row of an entry begins.
  int64_t RelativeQueryRow(int64_t entry) const {
    return (RelativeSize() - 1 - entry) * in_.relative.key_dim;
  }
  const double* RelativeQuery(int64_t h, int64_t entry) const {
    return in_.relative.queries + QueryTable(h) * RelativeSize() * in_.relative.key_dim +
           RelativeQueryRow(entry);
  }
  const double* RelativeValue(int64_t h, int64_t entry) const {
    return in_.relative.values + (ValueTable(h) * RelativeSize() + entry) * n_.value_dim;
  }

  double Temperature(int64_t b, int64_t h, int64_t i) const {
    return in_.temperature == nullptr ? 1 : in_.temperature[row(b, h, i)];
  }
  // s_ij for a value of f.
  double Score(int64_t b, int64_t h, int64_t i, int64_t j, double f) const {
    const double sum = PlainScore(b, h, i, j, f);
    return sum == kHidden ? kHidden : Temperature(b, h, i) * sum;
  }

  // Without the temperature. What is masked is so whatever f is, NaN included.
  double PlainScore(int64_t b, int64_t h, int64_t i, int64_t j, double f) const {
    const Mask& mask = in_.mask;
    if (HasPositions(in_)) {
      const KeyRange seen = VisiblePositions(mask, QueryPosition(in_, b, i));
      const int64_t key = KeyPosition(in_, b, j);
      if (key < seen.begin || key >= seen.end) return kHidden;
    }
    if (mask.key_segments != nullptr &&
        mask.query_segments[b * n_.queries + i] != mask.key_segments[b * n_.keys + j]) {
      return kHidden;
    }
    if (mask.pairs.data != nullptr && mask.pairs.row(b, h, i)[j] == 0) return kHidden;
    double score = in_.factor[h] * f;
    std::vector<int64_t> entries;
    BiasEntries(b, i, j, &entries);
    for (const int64_t entry : entries) {
      const double bias = in_.bias.table[b * in_.bias.batch_stride + h * BiasSize() + entry];
      if (bias == kHidden) return kHidden;
      score += bias;
    }
    if (in_.key_bias != nullptr) {
      const double bias = in_.key_bias[(b * n_.heads + h) * n_.keys + j];
      if (bias == kHidden) return kHidden;
      score += bias;
      if (in_.key_bias_low != nullptr) {
        score += in_.key_bias_low[(b * n_.heads + h) * n_.keys + j];
        score -= in_.key_bias_base[row(b, h, i)];
      }
    }
    if (in_.pair_bias.data != nullptr) {
      const double bias = in_.pair_bias.row(b, h, i)[j];
      if (bias == kHidden) return kHidden;
      score += bias;
    }
    if (in_.relative.keys != nullptr) {
      RelativeEntries(b, i, j, &entries);
      const double* query = in_.relative.query.row(b, h, i);
      for (const int64_t entry : entries) {
        score += in_.relative.factor * Dot(query, RelativeKey(h, entry), in_.relative.dim);
      }
    }
    if (in_.relative.queries != nullptr) {
      RelativeEntries(b, i, j, &entries);
      const double* key = in_.relative.key.row(b, h / group_, j);
      for (const int64_t entry : entries) {
        score += in_.relative.factor * Dot(key, RelativeQuery(h, entry), in_.relative.key_dim);
      }
    }
    return score;
  }

  // v_j + W_ij.
  void Value(int64_t b, int64_t h, int64_t i, int64_t j, std::vector<double>* value) const {
    const double* v = in_.v.row(b, h / group_, j);
    value->assign(v, v + n_.value_dim);
    if (in_.relative.values == nullptr) return;
    std::vector<int64_t> entries;
    RelativeEntries(b, i, j, &entries);
    for (const int64_t entry : entries) {
      const double* w = RelativeValue(h, entry);
      for (int64_t d = 0; d < n_.value_dim; ++d) (*value)[static_cast<size_t>(d)] += w[d];
    }
  }

  // m_ij.
  double Kept(int64_t b, int64_t h, int64_t i, int64_t j) const {
    if (in_.dropout.rate == 0) return 1;
    const uint32_t hash = HashColumn(HashRow(in_.dropout.seed, b, h, i), static_cast<uint32_t>(j));
    return hash < DropoutThreshold(in_.dropout) ? 0 : DropoutScale(in_.dropout);
  }

  // Holds all that query i sees.
  KeyRange Keys(int64_t b, int64_t i) const {
    const KeyRange batch = BatchKeys(in_.mask, n_.keys, b);
    if (HasPositions(in_)) return batch;
    return VisibleKeys(in_.mask, batch, QueryPosition(in_, b, i));
  }

  static double Dot(const double* x, const double* y, int64_t n) {
    double sum = 0;
    for (int64_t d = 0; d < n; ++d) sum += x[d] * y[d];
    return sum;
  }

 private:
  const AttentionInput<double>& in_;
  const AttentionShape& n_;
  int64_t group_;
};

template <class Definition>
void Forward(const AttentionInput<double>& in, const AttentionOutput<double>& out,
             const Executor& executor) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const AttentionShape& n = in.shape;
  const Problem<Definition> problem(in);
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
        const PairScalars p = problem.Scalars(b, h, i, j);
        const double f = Definition::Value(problem.Input(b, h, i, j), p.a, p.b, p.t);
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

template <class Definition>
void Backward(const AttentionInput<double>& in, const AttentionBackwardInput<double>& saved,
              const AttentionGradient<double>& grad, const Executor& executor) {
  const AttentionShape& n = in.shape;
  const Problem<Definition> problem(in);
  const int64_t group = problem.group();
  const int64_t bias_size = problem.BiasSize();
  const int64_t rows = n.batch * n.heads * n.queries;
  const int64_t columns = n.batch * n.key_heads * n.keys;
  // Sums over the batch: a part for each element of it, added up in order at the end.
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
  // Heads that share a sum add to it one after the other.
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
      for (int s = 0; grad.column_scalars && s < Definition::kColumnScalars; ++s) {
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
        for (int s = 0; grad.row_scalars && s < Definition::kRowScalars; ++s) {
          grad.row_scalars[s * rows + row] = 0;
        }
        const double sum = saved.statistics[rows + row];
        if (sum == 0) continue;
        const double* d_o = saved.d_o.row(b, h, i);
        const double d_lse = saved.d_lse ? saved.d_lse[row] : 0;
        const double delta = problem.Dot(d_o, saved.o.row(b, h, i), n.value_dim) - d_lse;
        const KeyRange keys = problem.Keys(b, i);
        for (int64_t j = keys.begin; j < keys.end; ++j) {
          const PairScalars p = problem.Scalars(b, h, i, j);
          PairDerivative d;
          const double g = problem.Input(b, h, i, j);
          const double f = Definition::Value(g, p.a, p.b, p.t);
          Definition::Gradient(g, p.a, p.b, p.t, d);
          const double score = problem.Score(b, h, i, j, f) * kLog2E;
          if (score == kHidden) continue;
          const double weight = std::exp2(score - saved.statistics[row]) / sum;
          problem.Value(b, h, i, j, &value);
          const double kept = problem.Kept(b, h, i, j);
          const double d_weight = kept * problem.Dot(d_o, value.data(), n.value_dim);
          // Of a row's only key exactly the gradient of lse, however dP and delta are rounded.
          const double d_tempered = sum == 1 && weight == 1 ? d_lse : weight * (d_weight - delta);
          if (grad.temperature) {
            grad.temperature[row] += d_tempered * problem.PlainScore(b, h, i, j, f);
          }
          const double d_score = problem.Temperature(b, h, i) * d_tempered;
          const double d_f = in.factor[h] * d_score;
          if (grad.v.data) {
            double* d_v = grad.v.row(b, key_head, j);
            for (int64_t e = 0; e < n.value_dim; ++e) d_v[e] += weight * kept * d_o[e];
          }
          if (Definition::kInput != PairInput::kNone) {
            // dg/dx is y, or 2 (x - y); dg/dy is x, or 2 (y - x).
            constexpr bool kDistance = Definition::kInput == PairInput::kSquaredDistance;
            const double d_g = d_f * d.g;
            const double* x = in.x.row(b, h, i);
            const double* y = in.y.row(b, key_head, j);
            for (int64_t e = 0; grad.x.data && e < n.dim; ++e) {
              grad.x.row(b, h, i)[e] += d_g * (kDistance ? 2 * (x[e] - y[e]) : y[e]);
            }
            for (int64_t e = 0; grad.y.data && e < n.dim; ++e) {
              grad.y.row(b, key_head, j)[e] += d_g * (kDistance ? 2 * (y[e] - x[e]) : x[e]);
            }
          }
          for (int s = 0; grad.row_scalars && s < Definition::kRowScalars; ++s) {
            grad.row_scalars[s * rows + row] += d_f * d.a[s];
          }
          for (int s = 0; grad.column_scalars && s < Definition::kColumnScalars; ++s) {
            grad.column_scalars[s * columns + task * n.keys + j] += d_f * d.b[s];
          }
          for (int s = 0; s < Definition::kHeadScalars; ++s) d_head[head * 3 + s] += d_f * d.t[s];
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
    for (int s = 0; grad.head_scalars && s < Definition::kHeadScalars; ++s) {
      grad.head_scalars[s * n.heads + h] = 0;
    }
    for (int64_t b = 0; b < n.batch; ++b) {
      if (grad.factor) grad.factor[h] += d_factor[b * n.heads + h];
      for (int s = 0; grad.head_scalars && s < Definition::kHeadScalars; ++s) {
        grad.head_scalars[s * n.heads + h] += d_head[(b * n.heads + h) * 3 + s];
      }
    }
  }
  // A table's gradient is the sum over the batch and, where heads share it, over these.
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
      double* table = grad.bias.table + b * grad.bias.batch_stride;
      for (int64_t e = 0; e < n.heads * bias_size; ++e) {
        table[e] += d_bias[b * n.heads * bias_size + e];
      }
    }
  }
}

}  // namespace gnomon::reference

#endif  // GNOMON_SRC_REFERENCE_ATTENTION_INL_H_
