// The visibility mask of a tile.
#if defined(GNOMON_SRC_CPU_MASK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_MASK_INL_H_
#undef GNOMON_SRC_CPU_MASK_INL_H_
#else
#define GNOMON_SRC_CPU_MASK_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/visible_keys.h"
#include "cpu/packing-inl.h"
#include "cpu/pair_table.h"
#include "cpu/positions-inl.h"
#include "gnomon/attention.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {

// For each query, the interval from the first to the last key of its segment. If each segment is
// contiguous (packed documents), its interval contains only its own keys; otherwise, segments are
// compared key by key.
class Segments {
 public:
  Segments(const Mask& mask, const AttentionShape& n)
      : queries_(mask.query_segments), query_count_(n.queries), stride_(RoundUp(n.keys, kWidth)) {
    if (!exists()) return;
    keys_.assign(Size(n.batch * stride_), 0);
    seen_.resize(Size(n.batch * n.queries));
    std::vector<Interval> intervals;
    for (int64_t b = 0; b < n.batch; ++b) {
      const int32_t* keys = mask.key_segments + b * n.keys;
      std::copy_n(keys, n.keys, keys_.data() + b * stride_);
      FindIntervals(keys, n.keys, &intervals);
      for (int64_t begin = 0; begin < n.queries;) {
        const int64_t end = EndOfRun(queries_ + b * n.queries, begin, n.queries);
        Seen seen = KeysOf(intervals, Query(b, begin));
        seen.end_of_rows = end;
        for (; begin < end; ++begin) seen_[Size(b * n.queries + begin)] = seen;
      }
    }
  }

  bool exists() const { return queries_ != nullptr; }
  // The array is padded so that whole vectors can be read.
  const int32_t* Keys(int64_t b, int64_t begin) const {
    return exists() ? keys_.data() + b * stride_ + begin : nullptr;
  }
  int32_t Query(int64_t b, int64_t i) const {
    return exists() ? queries_[b * query_count_ + i] : 0;
  }

  // An interval that contains the keys of query i's segment.
  KeyRange SeenBy(int64_t b, int64_t i) const { return At(b, i).keys; }
  // The keys of `batch` that any of queries [begin, end) may see.
  KeyRange Narrowed(KeyRange batch, int64_t b, int64_t begin, int64_t end) const {
    if (!exists()) return batch;
    KeyRange all;
    for (int64_t i = begin; i < end; i = EndOfRows(b, i)) {
      const KeyRange keys = SeenBy(b, i);
      if (keys.empty()) continue;
      all = all.empty() ? keys
                        : KeyRange{std::min(all.begin, keys.begin), std::max(all.end, keys.end)};
    }
    return {std::max(batch.begin, all.begin), std::min(batch.end, all.end)};
  }
  // Whether query i's interval contains keys of other segments.
  bool Mixed(int64_t b, int64_t i) const { return exists() && At(b, i).mixed; }
  // The first query after i in a different segment, or the number of queries if there is none.
  int64_t EndOfRows(int64_t b, int64_t i) const { return At(b, i).end_of_rows; }

 private:
  struct Seen {
    KeyRange keys;
    int64_t end_of_rows = 0;
    bool mixed = false;
  };
  struct Interval {
    int32_t segment;
    KeyRange keys;
    int64_t count;
  };

  static int64_t EndOfRun(const int32_t* segments, int64_t begin, int64_t count) {
    int64_t end = begin + 1;
    while (end < count && segments[end] == segments[begin]) ++end;
    return end;
  }
  // Finds the interval of each segment.
  static void FindIntervals(const int32_t* keys, int64_t count, std::vector<Interval>* intervals) {
    intervals->clear();
    bool sorted = true;
    for (int64_t begin = 0; begin < count;) {
      const int64_t end = EndOfRun(keys, begin, count);
      sorted = sorted && (intervals->empty() || intervals->back().segment < keys[begin]);
      intervals->push_back({keys[begin], {begin, end}, end - begin});
      begin = end;
    }
    if (sorted) return;
    std::sort(intervals->begin(), intervals->end(), [](const Interval& a, const Interval& b) {
      return a.segment != b.segment ? a.segment < b.segment : a.keys.begin < b.keys.begin;
    });
    size_t last = 0;
    for (size_t n = 1; n < intervals->size(); ++n) {
      const Interval& next = (*intervals)[n];
      Interval& known = (*intervals)[last];
      if (next.segment != known.segment) {
        (*intervals)[++last] = next;
      } else {
        known.keys.end = next.keys.end;
        known.count += next.count;
      }
    }
    intervals->resize(last + 1);
  }
  static Seen KeysOf(const std::vector<Interval>& intervals, int32_t segment) {
    const auto found = std::lower_bound(
        intervals.begin(), intervals.end(), segment,
        [](const Interval& interval, int32_t wanted) { return interval.segment < wanted; });
    if (found == intervals.end() || found->segment != segment) return {};
    return {found->keys, 0, found->keys.end - found->keys.begin != found->count};
  }
  const Seen& At(int64_t b, int64_t i) const { return seen_[Size(b * query_count_ + i)]; }

  const int32_t* queries_;
  int64_t query_count_;
  int64_t stride_;
  std::vector<int32_t> keys_;
  std::vector<Seen> seen_;
};

// The user's pair mask, summarised in cells of kRowBlock queries by kCell keys: whether each cell
// has visible pairs, and whether it has hidden ones.
class PairMask {
 public:
  static constexpr int64_t kCell = 64;

  PairMask(const Mask& mask, const AttentionShape& n)
      : pairs_(mask.pairs),
        heads_(n.heads),
        queries_(n.queries),
        keys_(n.keys),
        row_blocks_(DivideUp(n.queries, kRowBlock)),
        columns_(DivideUp(n.keys, kCell)),
        batch_step_(exists() && pairs_.stride[0] != 0 ? 1 : 0),
        head_step_(exists() && pairs_.stride[1] != 0 ? 1 : 0) {
    if (!exists()) return;
    tables_ = (batch_step_ != 0 ? n.batch : 1) * OfBatch();
    cells_.resize(Size(tables_ * row_blocks_ * columns_));
  }

  bool exists() const { return pairs_.data != nullptr; }
  const uint8_t* Row(int64_t b, int64_t h, int64_t i) const { return pairs_.row(b, h, i); }

  int64_t tasks() const { return exists() ? tables_ * row_blocks_ : 0; }
  void Fill(int64_t task) {
    const int64_t table = task / row_blocks_;
    const int64_t b = table / OfBatch();
    const int64_t h = table % OfBatch();
    const int64_t begin = task % row_blocks_ * kRowBlock;
    const int64_t end = std::min(begin + kRowBlock, queries_);
    Cell* cells = cells_.data() + task * columns_;
    for (int64_t i = begin; i < end; ++i) {
      const uint8_t* row = pairs_.row(b, h, i);
      for (int64_t c = 0; c < columns_; ++c) {
        const uint8_t* HWY_RESTRICT at = row + c * kCell;
        const int64_t count = std::min(kCell, keys_ - c * kCell);
        uint8_t some = 0;
        uint8_t all = 1;
        for (int64_t n = 0; n < count; ++n) {
          some |= at[n];
          all &= at[n] != 0 ? 1 : 0;
        }
        cells[c].sees |= some != 0;
        cells[c].hides |= all == 0;
      }
    }
  }

  // Sees() returns whether any of the heads [h, h + heads) sees a pair in the cell of this query
  // block and key. Hides() returns whether any of them hides a pair.
  bool Sees(int64_t b, int64_t h, int64_t heads, int64_t query, int64_t key) const {
    return Any(b, h, heads, query, key, [](Cell cell) { return cell.sees; });
  }
  bool Hides(int64_t b, int64_t h, int64_t heads, int64_t query, int64_t key) const {
    return Any(b, h, heads, query, key, [](Cell cell) { return cell.hides; });
  }

 private:
  struct Cell {
    bool sees = false;
    bool hides = false;
  };

  int64_t OfBatch() const { return head_step_ != 0 ? heads_ : 1; }

  template <class Flag>
  bool Any(int64_t b, int64_t h, int64_t heads, int64_t query, int64_t key,
           const Flag& flag) const {
    for (int64_t n = 0; n < (head_step_ != 0 ? heads : 1); ++n) {
      const int64_t table = b * batch_step_ * OfBatch() + (h + n) * head_step_;
      const int64_t row = table * row_blocks_ + query / kRowBlock;
      if (flag(cells_[Size(row * columns_ + key / kCell)])) return true;
    }
    return false;
  }

  View<const uint8_t> pairs_;
  int64_t heads_;
  int64_t queries_;
  int64_t keys_;
  int64_t row_blocks_;
  int64_t columns_;
  int64_t batch_step_;  // 1, or 0 if the batch shares the mask
  int64_t head_step_;
  int64_t tables_ = 0;
  std::vector<Cell> cells_;
};

// The mask of one tile: each row's span, and the columns that any row sees.
struct TileMask {
  RowSpan rows[kRowBlock];
  int64_t begin = 0;  // first column that any row sees
  int64_t end = 0;    // one past the last column; end <= begin: nothing is visible
  bool partial = false;
  bool segmented = false;  // segments may hide keys within a row's span
  bool paired = false;     // the user's pair mask may hide keys too
  bool placed = false;     // positions may hide keys too

  // Sets the spans of `count` queries starting at `position`, for columns [first, first + width).
  void Set(const Mask& mask, KeyRange batch, int64_t position, int64_t count, int64_t first,
           int64_t width) {
    const auto span = [&](int64_t r) {
      const KeyRange keys = VisibleKeys(mask, batch, position + r);
      RowSpan row;
      row.begin = std::clamp<int64_t>(keys.begin - first, 0, width);
      row.end = std::clamp<int64_t>(keys.end - first, row.begin, width);
      return row;
    };
    const RowSpan top = span(0);
    const RowSpan bottom = span(count - 1);
    // Both ends are monotonic in the position, so equal first and last spans imply equal spans.
    if (top.begin == bottom.begin && top.end == bottom.end) {
      std::fill_n(rows, count, top);
      begin = top.begin == top.end ? width : top.begin;
      end = top.begin == top.end ? 0 : top.end;
      partial = false;
      return;
    }
    begin = width;
    end = 0;
    for (int64_t r = 0; r < count; ++r) {
      rows[r] = span(r);
      if (rows[r].begin == rows[r].end) continue;
      begin = std::min(begin, rows[r].begin);
      end = std::max(end, rows[r].end);
    }
    partial = HidesWithin({begin, end}, 0, count);
  }

  // Sets the spans of `count` queries of batch b, starting at `query`, with call positions.
  void Set(const Positions& positions, KeyRange batch, int64_t b, int64_t query, int64_t count,
           int64_t first, int64_t width) {
    const KeyRange columns{std::max(batch.begin, first), std::min(batch.end, first + width)};
    const KeyRange near = positions.Trimmed(b, positions.SeenBy(b, query, query + count), columns);
    begin = width;
    end = 0;
    std::fill_n(rows, count, RowSpan{});
    if (near.empty()) return;
    const Positions::Range keys = positions.OfKeys(b, near.begin, near.end);
    const bool sorted = positions.Sorted(b, near.begin, near.end);
    const int32_t* from = positions.Keys(b, near.begin);
    const int32_t* to = positions.Keys(b, near.end);
    for (int64_t r = 0; r < count; ++r) {
      const Positions::Range seen = positions.SeenBy(b, query + r);
      if (!seen.Meets(keys)) continue;
      rows[r] = {near.begin - first, near.end - first};
      if (!seen.Holds(keys)) {
        placed = placed || !sorted;
        if (sorted) {
          rows[r].end = near.begin - first + Positions::CountBelow(from, to, seen.high);
          rows[r].begin = near.begin - first + Positions::CountBelow(from, to, seen.low);
          if (rows[r].begin >= rows[r].end) rows[r] = {};
        }
      }
      if (rows[r].begin == rows[r].end) continue;
      begin = std::min(begin, rows[r].begin);
      end = std::max(end, rows[r].end);
    }
    partial = HidesWithin({begin, end}, 0, count);
  }

  // Narrows the spans to the segments of `count` queries of batch b, starting at `query`, for
  // columns starting at `first`. Call this after Set.
  void SetSegments(const Segments& segments, int64_t b, int64_t query, int64_t count,
                   int64_t first) {
    if (!segments.exists() || end <= begin) return;
    RowSpan seen{end, begin};
    for (int64_t r = 0; r < count; ++r) {
      const KeyRange keys = segments.SeenBy(b, query + r);
      rows[r].begin = std::clamp(keys.begin - first, rows[r].begin, rows[r].end);
      rows[r].end = std::clamp(keys.end - first, rows[r].begin, rows[r].end);
      if (rows[r].begin == rows[r].end) continue;
      segmented = segmented || segments.Mixed(b, query + r);
      seen = {std::min(seen.begin, rows[r].begin), std::max(seen.end, rows[r].end)};
    }
    begin = seen.begin;
    end = seen.end;
    partial = HidesWithin({begin, end}, 0, count);
  }

  // Repeats the spans of `count` queries for all `heads` heads, whose rows are the same queries.
  // Call this after Set and SetSegments.
  void Repeat(int64_t count, int64_t heads) {
    for (int64_t h = 1; h < heads; ++h) std::copy_n(rows, count, rows + h * count);
  }

  // Applies the user's pair mask. Call this after Set and Repeat. The rows are `count` queries of
  // each of `heads` heads; `query` is the first query and must be the start of a block.
  void SetPairs(const PairMask& pairs, int64_t b, int64_t h, int64_t heads, int64_t query,
                int64_t count, int64_t first) {
    if (!pairs.exists()) return;
    constexpr int64_t kCell = PairMask::kCell;
    // Removes cells without visible pairs from both ends.
    const int64_t before = begin;
    const int64_t after = end;
    while (begin < end && !pairs.Sees(b, h, heads, query, first + begin)) {
      begin = (first + begin) / kCell * kCell + kCell - first;
    }
    while (begin < end && !pairs.Sees(b, h, heads, query, first + end - 1)) {
      end = (first + end - 1) / kCell * kCell - first;
    }
    if (end <= begin) return;
    for (int64_t j = begin; j < end; j = (first + j) / kCell * kCell + kCell - first) {
      paired = paired || pairs.Hides(b, h, heads, query, first + j);
    }
    if (begin == before && end == after) return;
    for (int64_t r = 0; r < heads * count; ++r) {
      rows[r].begin = std::clamp(rows[r].begin, begin, end);
      rows[r].end = std::clamp(rows[r].end, rows[r].begin, end);
    }
    partial = HidesWithin({begin, end}, 0, heads * count);
  }

  // Hides everything from row r if bit r of `left_out` is set.
  void LeaveOut(uint64_t left_out, int64_t count) {
    for (int64_t r = 0; r < count; ++r) {
      if ((left_out >> r & 1) != 0) rows[r].end = rows[r].begin;
    }
    partial = partial || left_out != 0;
  }

  // The columns that any of rows [first_row, last_row) sees.
  RowSpan Seen(int64_t first_row, int64_t last_row) const {
    RowSpan seen{end, begin};
    for (int64_t r = first_row; r < last_row; ++r) {
      if (rows[r].begin == rows[r].end) continue;
      seen.begin = std::min(seen.begin, rows[r].begin);
      seen.end = std::max(seen.end, rows[r].end);
    }
    return seen;
  }

  // Whether any of rows [first_row, last_row) sees only part of the span.
  bool HidesWithin(RowSpan span, int64_t first_row, int64_t last_row) const {
    bool hides = false;
    for (int64_t r = first_row; r < last_row; ++r) {
      hides |= rows[r].begin > span.begin || rows[r].end < span.end;
    }
    return hides;
  }
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
