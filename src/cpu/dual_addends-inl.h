// Masks and biases, with the tangents of the biases.
#if defined(GNOMON_SRC_CPU_DUAL_ADDENDS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_DUAL_ADDENDS_INL_H_
#undef GNOMON_SRC_CPU_DUAL_ADDENDS_INL_H_
#else
#define GNOMON_SRC_CPU_DUAL_ADDENDS_INL_H_
#endif

#include <algorithm>
#include <map>
#include <vector>

#include "base/visible_keys.h"
#include "cpu/dual_scores-inl.h"
#include "cpu/packing-inl.h"
#include "cpu/vocabulary-inl.h"
#include "gnomon/attention.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {

// The masks and biases of rows. Columns are relative to the block's first key.
class DualAddends {
 public:
  // A row of a query head, and the columns that it may see; `first` is the key of column 0.
  struct Row {
    int64_t b;
    int64_t h;
    int64_t i;
    int64_t first;
    Columns columns;

    int64_t count() const { return columns.end - columns.begin; }
    int64_t key() const { return first + columns.begin; }
  };

  DualAddends(const AttentionInput<Real>& in, const AttentionInput<Real>& tangent)
      : in_(in), tangent_(tangent), n_(in.shape) {
    if (in.mask.key_segments != nullptr || HasPositions(in)) FindRanges();
  }

  bool hides() const { return !ranges_.empty() || in_.mask.pairs.data != nullptr; }
  bool has_values() const { return HasBias(in_) || hides(); }
  bool has_tangents() const { return HasBias(tangent_); }

  // The range from the first to the last key that a query sees, ignoring pair masks.
  KeyRange Keys(int64_t b, int64_t i) const {
    if (!ranges_.empty()) return ranges_[Size(b * n_.queries + i)];
    KeyRange keys =
        VisibleKeys(in_.mask, BatchKeys(in_.mask, n_.keys, b), QueryPosition(in_, b, i));
    keys.begin = std::clamp<int64_t>(keys.begin, 0, n_.keys);
    keys.end = std::clamp<int64_t>(keys.end, keys.begin, n_.keys);
    return keys;
  }

  // The number of entries in a head's bias table.
  int64_t table_size() const {
    return in_.bias.layout != nullptr ? in_.bias.layout->size() : n_.queries + n_.keys - 1;
  }
  bool has_layout() const { return in_.bias.layout != nullptr; }

  // Adds up the biases, or their tangents. A bias of -inf hides a pair.
  void SumBiases(const Row& row, Real* to) const {
    const Columns& columns = row.columns;
    std::fill(to + columns.first(), to + columns.last(), 0.0f);
    Add(in_, row, to + columns.begin);
    if (in_.key_bias_low != nullptr) AddLow(row, to + columns.begin);
    if (hides()) Hide(row, to + columns.begin);
  }
  void SumTangents(const Row& row, Real* to) const {
    std::fill(to + row.columns.first(), to + row.columns.last(), 0.0f);
    Add(tangent_, row, to + row.columns.begin);
  }

  // Finds the entries that a row reads from a bias table with a layout. Columns are relative to the
  // row's first column.
  void FindRuns(const Row& row, std::vector<TableRun>* runs) const {
    runs->clear();
    const int64_t p = QueryPosition(in_, row.b, row.i);
    for (int64_t n = 0; n < row.count();) {
      const int64_t position = KeyPosition(in_, row.b, row.key() + n);
      int64_t count = 1;
      while (n + count < row.count() &&
             KeyPosition(in_, row.b, row.key() + n + count) == position + count) {
        ++count;
      }
      const size_t old = runs->size();
      in_.bias.layout->AddRuns(p, position, position + count, runs);
      for (size_t m = old; m < runs->size(); ++m) (*runs)[m].column += n - position;
      n += count;
    }
  }

 private:
  static bool HasBias(const AttentionInput<Real>& in) {
    return in.bias.table != nullptr || in.key_bias != nullptr || in.pair_bias.data != nullptr;
  }

  void Add(const AttentionInput<Real>& from, const Row& row, Real* to) const {
    if (from.bias.table != nullptr) {
      const Real* const table =
          from.bias.table + row.b * from.bias.batch_stride + row.h * table_size();
      if (has_layout()) {
        AddTable(table, row, to);
      } else {
        AddRow(table + n_.queries - 1 + row.key() - row.i, row.count(), to);
      }
    }
    if (from.key_bias != nullptr) AddRow(from.key_bias + KeyAt(row), row.count(), to);
    if (from.pair_bias.data != nullptr) {
      AddRow(from.pair_bias.row(row.b, row.h, row.i) + row.key(), row.count(), to);
    }
  }
  int64_t KeyAt(const Row& row) const { return (row.b * n_.heads + row.h) * n_.keys + row.key(); }
  void AddTable(const Real* table, const Row& row, Real* to) const {
    std::vector<TableRun> runs;
    FindRuns(row, &runs);
    for (const TableRun& run : runs) {
      for (int64_t n = 0; n < run.count; ++n) to[run.column + n] += table[run.entry + n * run.step];
    }
  }
  void AddLow(const Row& row, Real* to) const {
    const Real base = in_.key_bias_base[(row.b * n_.heads + row.h) * n_.queries + row.i];
    const Real* const low = in_.key_bias_low + KeyAt(row);
    for (int64_t n = 0; n < row.count(); ++n) to[n] = (to[n] - base) + low[n];
  }
  void Hide(const Row& row, Real* to) const {
    const auto hide_unless = [&](const auto& sees) {
      for (int64_t n = 0; n < row.count(); ++n) {
        if (!sees(n)) to[n] = -kInfinity;
      }
    };
    const Mask& mask = in_.mask;
    if (mask.key_segments != nullptr) {
      const int32_t segment = mask.query_segments[row.b * n_.queries + row.i];
      const int32_t* const segments = mask.key_segments + row.b * n_.keys + row.key();
      hide_unless([=](int64_t n) { return segments[n] == segment; });
    }
    if (HasPositions(in_)) {
      const KeyRange seen = VisiblePositions(mask, QueryPosition(in_, row.b, row.i));
      const int64_t* const positions = in_.key_positions + row.b * n_.keys + row.key();
      hide_unless([=](int64_t n) { return positions[n] >= seen.begin && positions[n] < seen.end; });
    }
    if (mask.pairs.data != nullptr) {
      const uint8_t* const pairs = mask.pairs.row(row.b, row.h, row.i) + row.key();
      hide_unless([=](int64_t n) { return pairs[n] != 0; });
    }
  }

  // Sets ranges_ from segments and positions.
  void FindRanges() {
    ranges_.reserve(Size(n_.batch * n_.queries));
    for (int64_t b = 0; b < n_.batch; ++b) {
      std::map<int32_t, KeyRange> of_segments;
      const int32_t* const segments = in_.mask.key_segments;
      for (int64_t j = 0; segments != nullptr && j < n_.keys; ++j) {
        of_segments.try_emplace(segments[b * n_.keys + j], KeyRange{j, j}).first->second.end =
            j + 1;
      }
      for (int64_t i = 0; i < n_.queries; ++i) {
        KeyRange keys = BatchKeys(in_.mask, n_.keys, b);
        if (!HasPositions(in_)) keys = VisibleKeys(in_.mask, keys, QueryPosition(in_, b, i));
        if (segments != nullptr) {
          const auto found = of_segments.find(in_.mask.query_segments[b * n_.queries + i]);
          const KeyRange own = found == of_segments.end() ? KeyRange{} : found->second;
          keys = {std::max(keys.begin, own.begin), std::min(keys.end, own.end)};
        }
        if (HasPositions(in_)) NarrowByPosition(b, i, &keys);
        keys.begin = std::clamp<int64_t>(keys.begin, 0, n_.keys);
        keys.end = std::clamp<int64_t>(keys.end, keys.begin, n_.keys);
        ranges_.push_back(keys);
      }
    }
  }
  void NarrowByPosition(int64_t b, int64_t i, KeyRange* keys) const {
    const KeyRange seen = VisiblePositions(in_.mask, QueryPosition(in_, b, i));
    const auto hides = [&](int64_t j) {
      const int64_t p = KeyPosition(in_, b, j);
      return p < seen.begin || p >= seen.end;
    };
    while (keys->begin < keys->end && hides(keys->begin)) ++keys->begin;
    while (keys->begin < keys->end && hides(keys->end - 1)) --keys->end;
  }

  const AttentionInput<Real>& in_;
  const AttentionInput<Real>& tangent_;
  const AttentionShape& n_;
  std::vector<KeyRange> ranges_;  // per query; empty without segments and positions
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
