// Index arithmetic and scores shared by the forward and backward references.
#ifndef GNOMON_SRC_REFERENCE_PROBLEM_H_
#define GNOMON_SRC_REFERENCE_PROBLEM_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <vector>

#include "base/dropout.h"
#include "base/visible_keys.h"
#include "gnomon/attention.h"
#include "reference/dual.h"
#include "reference/reference.h"
#include "reference/vocabulary.h"

namespace gnomon::reference {

// The scalars of one pair.
template <class T>
struct PairScalars {
  T a[3];
  T b[3];
  T t[3];
};

// 1 / ln 2. Row statistics are in log2 units, as in the fused kernels.
constexpr double kLog2E = 1.4426950408889634074;

// The score of a masked pair.
inline constexpr double kHidden = -std::numeric_limits<double>::infinity();

// Clamps finite biases, so that scores stay finite in log2 units and in sums. A bias near
// numeric_limits<double>::lowest() hides a key, unless all keys of the row have such a bias; then
// none is hidden.
template <class T>
T FiniteBias(T bias) {
  constexpr double kMost = 1e306;
  return std::isinf(ValueOf(bias)) ? bias : std::clamp<T>(bias, -kMost, kMost);
}

// T is double or Dual.
template <class T>
class Problem {
 public:
  Problem(const Table& table, const AttentionInput<T>& in)
      : table_(table),
        in_(in),
        n_(in.shape),
        group_(n_.key_heads == 0 ? 1 : n_.heads / n_.key_heads),
        segment_keys_(SegmentKeys(in)) {}

  int64_t group() const { return group_; }
  int64_t row(int64_t b, int64_t h, int64_t i) const { return (b * n_.heads + h) * n_.queries + i; }
  int64_t column(int64_t b, int64_t h, int64_t j) const {
    return (b * n_.key_heads + h / group_) * n_.keys + j;
  }

  PairScalars<T> Scalars(int64_t b, int64_t h, int64_t i, int64_t j) const {
    PairScalars<T> s{};
    for (int n = 0; n < table_.row_scalars; ++n) {
      s.a[n] = in_.row_scalars[n * n_.batch * n_.heads * n_.queries + row(b, h, i)];
    }
    for (int n = 0; n < table_.column_scalars; ++n) {
      s.b[n] = in_.column_scalars[n * n_.batch * n_.key_heads * n_.keys + column(b, h, j)];
    }
    for (int n = 0; n < table_.head_scalars; ++n) s.t[n] = in_.head_scalars[n * n_.heads + h];
    return s;
  }

  // Returns g_ij.
  T Input(int64_t b, int64_t h, int64_t i, int64_t j) const {
    if (table_.input == PairInput::kNone) return 0;
    const T* x = in_.x.row(b, h, i);
    const T* y = in_.y.row(b, h / group_, j);
    if (table_.input == PairInput::kInnerProduct) return Dot(x, y, n_.dim);
    T sum = 0;
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

  // The table entries that pair (i, j) reads.
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
  const T* RelativeKey(int64_t h, int64_t entry) const {
    return in_.relative.keys + (KeyTable(h) * RelativeSize() + entry) * in_.relative.dim;
  }
  // The offset of an entry's row; the rows are in reverse order.
  int64_t RelativeQueryRow(int64_t entry) const {
    return (RelativeSize() - 1 - entry) * in_.relative.key_dim;
  }
  const T* RelativeQuery(int64_t h, int64_t entry) const {
    return in_.relative.queries + QueryTable(h) * RelativeSize() * in_.relative.key_dim +
           RelativeQueryRow(entry);
  }
  const T* RelativeValue(int64_t h, int64_t entry) const {
    return in_.relative.values + (ValueTable(h) * RelativeSize() + entry) * n_.value_dim;
  }

  T Temperature(int64_t b, int64_t h, int64_t i) const {
    return in_.temperature == nullptr ? 1 : in_.temperature[row(b, h, i)];
  }
  // s_ij for a value of f.
  T Score(int64_t b, int64_t h, int64_t i, int64_t j, T f) const {
    const T sum = PlainScore(b, h, i, j, f);
    if (sum == kHidden) return kHidden;
    const T score = Temperature(b, h, i) * sum;
    return in_.softcap == 0 ? score : in_.softcap * Tanh(score / in_.softcap);
  }
  // Returns the derivative of a score with respect to the uncapped score.
  T CapSlope(T score) const {
    if (in_.softcap == 0) return 1;
    const T share = score / in_.softcap;
    return 1 - share * share;
  }

  // The score without the temperature. A bias of -inf hides a pair for any f, even NaN.
  T PlainScore(int64_t b, int64_t h, int64_t i, int64_t j, T f) const {
    T score = in_.factor[h] * f;
    std::vector<int64_t> entries;
    BiasEntries(b, i, j, &entries);
    for (const int64_t entry : entries) {
      const T bias = in_.bias.table[b * in_.bias.batch_stride + h * BiasSize() + entry];
      if (bias == kHidden) return kHidden;
      score += FiniteBias(bias);
    }
    if (in_.key_bias != nullptr) {
      const T bias = in_.key_bias[(b * n_.heads + h) * n_.keys + j];
      if (bias == kHidden) return kHidden;
      score += FiniteBias(bias);
      if (in_.key_bias_low != nullptr) {
        score += in_.key_bias_low[(b * n_.heads + h) * n_.keys + j];
        score -= in_.key_bias_base[row(b, h, i)];
      }
    }
    if (in_.pair_bias.data != nullptr) {
      const T bias = in_.pair_bias.row(b, h, i)[j];
      if (bias == kHidden) return kHidden;
      score += FiniteBias(bias);
    }
    if (in_.relative.keys != nullptr) {
      RelativeEntries(b, i, j, &entries);
      const T* query = in_.relative.query.row(b, h, i);
      for (const int64_t entry : entries) {
        score += in_.relative.factor * Dot(query, RelativeKey(h, entry), in_.relative.dim);
      }
    }
    if (in_.relative.queries != nullptr) {
      RelativeEntries(b, i, j, &entries);
      const T* key = in_.relative.key.row(b, h / group_, j);
      for (const int64_t entry : entries) {
        score += in_.relative.factor * Dot(key, RelativeQuery(h, entry), in_.relative.key_dim);
      }
    }
    return score;
  }

  // Computes v_j + W_ij.
  void Value(int64_t b, int64_t h, int64_t i, int64_t j, std::vector<T>* value) const {
    const T* v = in_.v.row(b, h / group_, j);
    value->assign(v, v + n_.value_dim);
    if (in_.relative.values == nullptr) return;
    std::vector<int64_t> entries;
    RelativeEntries(b, i, j, &entries);
    for (const int64_t entry : entries) {
      const T* w = RelativeValue(h, entry);
      for (int64_t d = 0; d < n_.value_dim; ++d) (*value)[static_cast<size_t>(d)] += w[d];
    }
  }

  // Returns m_ij.
  double Kept(int64_t b, int64_t h, int64_t i, int64_t j) const {
    if (in_.dropout.rate == 0) return 1;
    const uint32_t hash = HashColumn(HashRow(in_.dropout.seed, b, h, i), static_cast<uint32_t>(j));
    return hash < DropoutThreshold(in_.dropout) ? 0 : DropoutScale(in_.dropout);
  }

  // Whether query i attends to key j, which must be in Keys(b, i); ignores biases of -inf.
  bool Sees(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const Mask& mask = in_.mask;
    if (HasPositions(in_)) {
      const KeyRange seen = VisiblePositions(mask, QueryPosition(in_, b, i));
      const int64_t key = KeyPosition(in_, b, j);
      if (key < seen.begin || key >= seen.end) return false;
    }
    if (mask.key_segments != nullptr &&
        mask.query_segments[b * n_.queries + i] != mask.key_segments[b * n_.keys + j]) {
      return false;
    }
    return mask.pairs.data == nullptr || mask.pairs.row(b, h, i)[j] != 0;
  }

  // An interval that contains all keys to which query i attends.
  KeyRange Keys(int64_t b, int64_t i) const {
    KeyRange keys = BatchKeys(in_.mask, n_.keys, b);
    if (!HasPositions(in_)) keys = VisibleKeys(in_.mask, keys, QueryPosition(in_, b, i));
    if (segment_keys_.empty()) return keys;
    const KeyRange& segment = segment_keys_[static_cast<size_t>(b * n_.queries + i)];
    return {std::max(keys.begin, segment.begin), std::min(keys.end, segment.end)};
  }

  static T Dot(const T* x, const T* y, int64_t n) {
    T sum = 0;
    for (int64_t d = 0; d < n; ++d) sum += x[d] * y[d];
    return sum;
  }

 private:
  // The range from the first to the last key of each query's segment; empty without segments.
  static std::vector<KeyRange> SegmentKeys(const AttentionInput<T>& in) {
    const AttentionShape& n = in.shape;
    std::vector<KeyRange> of_queries;
    if (in.mask.key_segments == nullptr) return of_queries;
    for (int64_t b = 0; b < n.batch; ++b) {
      std::map<int32_t, KeyRange> of_segments;
      for (int64_t j = 0; j < n.keys; ++j) {
        const int32_t segment = in.mask.key_segments[b * n.keys + j];
        of_segments.try_emplace(segment, KeyRange{j, j}).first->second.end = j + 1;
      }
      for (int64_t i = 0; i < n.queries; ++i) {
        const auto found = of_segments.find(in.mask.query_segments[b * n.queries + i]);
        of_queries.push_back(found == of_segments.end() ? KeyRange{} : found->second);
      }
    }
    return of_queries;
  }

  const Table& table_;
  const AttentionInput<T>& in_;
  const AttentionShape& n_;
  int64_t group_;
  std::vector<KeyRange> segment_keys_;
};

}  // namespace gnomon::reference

#endif  // GNOMON_SRC_REFERENCE_PROBLEM_H_
