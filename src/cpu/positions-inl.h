// Tokens with call positions: the keys that a row sees, and the table entries that pairs read.
#if defined(GNOMON_SRC_CPU_POSITIONS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_POSITIONS_INL_H_
#undef GNOMON_SRC_CPU_POSITIONS_INL_H_
#else
#define GNOMON_SRC_CPU_POSITIONS_INL_H_
#endif

#include <algorithm>
#include <optional>
#include <vector>

#include "base/visible_keys.h"
#include "cpu/packing-inl.h"
#include "gnomon/attention.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {

// The user's positions, relative to the smallest key position of each batch element so that they
// fit into 32 bits. Key positions are padded to whole vectors. The range of positions is stored for
// each panel of keys, and the range of visible positions for each query. Keys that are hidden from
// the whole batch may have any position.
class Positions {
 public:
  // Positions [low, high); empty if low >= high.
  struct Range {
    int32_t low = 0;
    int32_t high = 0;
    bool empty() const { return low >= high; }
    bool Holds(Range other) const { return low <= other.low && other.high <= high; }
    bool Meets(Range other) const {
      return !empty() && !other.empty() && low < other.high && other.low < high;
    }
  };

  explicit Positions(const AttentionInput<Real>& in)
      : exists_(HasPositions(in)),
        queries_(in.shape.queries),
        stride_(RoundUp(in.shape.keys, kWidth)),
        panels_(stride_ / kWidth) {
    if (!exists_) return;
    const AttentionShape& n = in.shape;
    keys_.assign(Size(n.batch * stride_), 0);
    end_of_runs_.assign(Size(n.batch * stride_), 0);
    for (int64_t b = 0; b < n.batch; ++b) {
      const KeyRange batch = BatchKeys(in.mask, n.keys, b);
      const int64_t* of_keys = in.key_positions + b * n.keys;
      const int64_t base =
          batch.empty() ? 0 : *std::min_element(of_keys + batch.begin, of_keys + batch.end);
      int32_t* to = keys_.data() + b * stride_;
      for (int64_t j = batch.begin; j < batch.end; ++j) {
        to[j] = static_cast<int32_t>(of_keys[j] - base);
      }
      for (int64_t p = 0; p < panels_; ++p) AddPanel(batch, to, p);
      int64_t end = batch.end;
      for (int64_t j = batch.end; j-- > batch.begin;) {
        if (j + 1 < batch.end && to[j + 1] < to[j]) end = j + 1;
        end_of_runs_[Size(b * stride_ + j)] = static_cast<int32_t>(end);
      }
      for (int64_t i = 0; i < n.queries; ++i) {
        const KeyRange seen = VisiblePositions(in.mask, QueryPosition(in, b, i));
        rows_.push_back({Clamped(seen.begin - base), Clamped(seen.end - base)});
      }
    }
  }

  bool exists() const { return exists_; }
  const int32_t* Keys(int64_t b, int64_t begin) const { return keys_.data() + b * stride_ + begin; }
  // The positions that query i sees.
  Range SeenBy(int64_t b, int64_t i) const { return rows_[Size(b * queries_ + i)]; }
  // A range that contains all positions that queries [begin, end) see.
  Range SeenBy(int64_t b, int64_t begin, int64_t end) const {
    Range all;
    for (int64_t i = begin; i < end; ++i) all = Union(all, SeenBy(b, i));
    return all;
  }
  // A range that contains the visible positions of keys [begin, end).
  Range OfKeys(int64_t b, int64_t begin, int64_t end) const {
    Range all;
    for (int64_t p = begin / kWidth; p * kWidth < end; ++p) all = Union(all, PanelAt(b, p));
    return all;
  }
  // Whether the positions of keys [begin, end) are in ascending order.
  bool Sorted(int64_t b, int64_t begin, int64_t end) const {
    return end <= begin || end_of_runs_[Size(b * stride_ + begin)] >= end;
  }
  // The number of positions below p in the sorted array [begin, end).
  static int64_t CountBelow(const int32_t* begin, const int32_t* end, int32_t p) {
    // Tries a guess first, because positions are usually consecutive.
    const int64_t guess = std::clamp<int64_t>(int64_t{p} - *begin, 0, end - begin);
    if ((guess == 0 || begin[guess - 1] < p) && (begin + guess == end || begin[guess] >= p)) {
      return guess;
    }
    return std::lower_bound(begin, end, p) - begin;
  }

  // Removes fully hidden panels from both ends of a range of columns.
  KeyRange Trimmed(int64_t b, Range seen, KeyRange columns) const {
    while (!columns.empty() && !seen.Meets(PanelAt(b, columns.begin / kWidth))) {
      columns.begin = (columns.begin / kWidth + 1) * kWidth;
    }
    while (!columns.empty() && !seen.Meets(PanelAt(b, (columns.end - 1) / kWidth))) {
      columns.end = (columns.end - 1) / kWidth * kWidth;
    }
    return columns;
  }

 private:
  static int32_t Clamped(int64_t p) {
    return static_cast<int32_t>(std::clamp<int64_t>(p, 0, kMostApart));
  }
  static Range Union(Range a, Range b) {
    if (a.empty()) return b;
    if (b.empty()) return a;
    return {std::min(a.low, b.low), std::max(a.high, b.high)};
  }
  Range PanelAt(int64_t b, int64_t p) const { return panel_ranges_[Size(b * panels_ + p)]; }

  void AddPanel(KeyRange batch, const int32_t* keys, int64_t p) {
    const int64_t begin = std::max(batch.begin, p * kWidth);
    const int64_t end = std::min(batch.end, (p + 1) * kWidth);
    if (end <= begin) {
      panel_ranges_.push_back({});
      return;
    }
    const auto [low, high] = std::minmax_element(keys + begin, keys + end);
    panel_ranges_.push_back({*low, *high + 1});
  }

  bool exists_;
  int64_t queries_;
  int64_t stride_;
  int64_t panels_;
  std::vector<int32_t> keys_;
  std::vector<int32_t> end_of_runs_;  // per key: the end of the ascending run that contains it
  std::vector<Range> panel_ranges_;
  std::vector<Range> rows_;
};

// The table entries that pairs with call positions read. An entry is a key's code minus a
// query's code.
class PlacedEntries {
  // The codes of tokens that read no entries: differences with them lie outside any table.
  static constexpr int32_t kNoKey = -(1 << 30);
  static constexpr int32_t kNoQuery = (1 << 30) - 1;

  // The entries that a vector of columns reads.
  struct VectorEntries {
    bool consecutive;  // lanes read consecutive entries, starting with `first`
    bool clip;
    int64_t first;
    VI entry;       // per lane, within the window
    VI difference;  // per lane, unclamped
    VI before;      // exclusive bounds of the term's range
    VI end;

    HWY_INLINE auto Reads() const { return hn::And(difference > before, difference < end); }
  };

 public:
  // `layout` is null if there is no table. The object is empty if tokens are consecutive, or if the
  // layout is not indexed by differences.
  PlacedEntries(const AttentionInput<Real>& in, const TableLayout* layout)
      : queries_(in.shape.queries), stride_(RoundUp(in.shape.keys, kWidth)) {
    if (layout == nullptr || !HasPositions(in) || layout->size() >= kMostApart) return;
    terms_ = layout->Differences();
    const AttentionShape& n = in.shape;
    for (int64_t b = 0; b < n.batch; ++b) {
      for (size_t term = 0; term < terms_.size(); ++term) AddCodes(in, *layout, b, term);
    }
  }

  bool exists() const { return !terms_.empty(); }

  // If query i reads consecutive entries for `count` columns starting at `begin` (whole vectors),
  // returns the first entry; otherwise nullopt. The table has `size` entries and memory for `room`
  // entries. Only the first `seen` columns must have valid entries.
  std::optional<int64_t> FirstEntry(int64_t b, int64_t i, int64_t begin, int64_t count,
                                    int64_t seen, int64_t size, int64_t room) const {
    const int64_t vectors = count / kLaneCount;
    if (terms_.size() != 1 || count == 0 || Run(b, 0, begin) < vectors) return std::nullopt;
    const int64_t first = int64_t{Keys(b, 0, begin)[0]} - Query(b, 0, i);
    if (first < 0 || first + seen > size || first + count > room) return std::nullopt;
    return first;
  }

  // A range that contains all entries that queries [query, query + rows) read for keys [begin,
  // end).
  TableRange Window(int64_t b, int64_t query, int64_t rows, int64_t begin, int64_t end,
                    int64_t size) const {
    if (terms_.size() != 1) return {0, size};
    const auto [first, last] = std::minmax_element(Keys(b, 0, begin), Keys(b, 0, end));
    const int32_t* of_rows = queries_of(b, 0) + query;
    const auto [low, high] = std::minmax_element(of_rows, of_rows + rows);
    const auto entry = [&](int64_t e) { return std::clamp(e, terms_[0].begin, terms_[0].end - 1); };
    return {entry(int64_t{*first} - *high), entry(int64_t{*last} - *low) + 1};
  }

  // to[n] += factor times the entries that query i reads for column begin + n, where n = 0 ...
  // count - 1, in whole vectors. Entry e is entries[e - origin]; only the window's entries are in
  // memory.
  void Gather(int64_t b, int64_t i, int64_t begin, int64_t count, const Real* HWY_RESTRICT entries,
              int64_t origin, TableRange window, Real factor, Real* HWY_RESTRICT to) const {
    const DF d;
    const VF f = hn::Set(d, factor);
    ForVectors(b, i, begin, count, window, [&](int64_t n, const VectorEntries& at) HWY_ATTR {
      VF read;
      if (at.consecutive) {
        read = hn::LoadU(d, entries + (at.first - origin));
      } else {
        const auto offset = hn::Set(DI(), static_cast<int32_t>(origin));
        read = hn::GatherIndex(d, entries, at.entry - offset);
        if (!at.clip) read = hn::IfThenElseZero(hn::RebindMask(d, at.Reads()), read);
      }
      hn::StoreU(hn::MulAdd(f, read, hn::LoadU(d, to + n)), d, to + n);
    });
  }

  // The transpose of Gather(): adds factor * from[n] to the entries.
  void Scatter(int64_t b, int64_t i, int64_t begin, int64_t count, const Real* HWY_RESTRICT from,
               Real factor, Real* HWY_RESTRICT entries, int64_t origin, TableRange window) const {
    const DF d;
    const DI di;
    const VF f = hn::Set(d, factor);
    ForVectors(b, i, begin, count, window, [&](int64_t n, const VectorEntries& at) HWY_ATTR {
      VF terms = hn::LoadU(d, from + n) * f;
      if (at.consecutive) {
        Real* const row = entries + (at.first - origin);
        hn::StoreU(hn::LoadU(d, row) + terms, d, row);
        return;
      }
      if (!at.clip) {
        terms = hn::IfThenElseZero(hn::RebindMask(d, at.Reads()), terms);
      }
      const auto one = hn::GetLane(at.entry);
      if (hn::AllTrue(di, at.entry == hn::Set(di, one))) {
        // If all tokens are distant, all lanes read the same entry at an end of the table.
        entries[one - origin] += hn::GetLane(hn::SumOfLanes(d, terms));
        return;
      }
      HWY_ALIGN hn::TFromD<DI> entry[kLanes];
      HWY_ALIGN Real term[kLanes];
      hn::Store(at.entry - hn::Set(di, static_cast<int32_t>(origin)), di, entry);
      hn::Store(terms, d, term);
      // Entries are updated lane by lane, because several lanes may share an entry.
      for (size_t lane = 0; lane < kLanes; ++lane) entries[entry[lane]] += term[lane];
    });
  }

 private:
  template <class Body>
  HWY_INLINE void ForVectors(int64_t b, int64_t i, int64_t begin, int64_t count, TableRange window,
                             const Body& body) const {
    const DI di;
    if (window.end <= window.begin) return;
    const VI lowest = hn::Set(di, static_cast<int32_t>(window.begin));
    const VI highest = hn::Set(di, static_cast<int32_t>(window.end - 1));
    for (size_t term = 0; term < terms_.size(); ++term) {
      const int32_t query = Query(b, term, i);
      const int32_t* keys = Keys(b, term, begin);
      const VI of_query = hn::Set(di, query);
      VectorEntries at{};
      at.clip = terms_[term].clip;
      at.before = hn::Set(di, static_cast<int32_t>(terms_[term].begin - 1));
      at.end = hn::Set(di, static_cast<int32_t>(terms_[term].end));
      for (int64_t n = 0; n < count; n += kLaneCount) {
        at.first = int64_t{keys[n]} - query;
        at.consecutive = Run(b, term, begin + n) > 0 &&
                         at.first >= std::max(window.begin, terms_[term].begin) &&
                         at.first + kLaneCount <= std::min(window.end, terms_[term].end);
        if (!at.consecutive) {
          at.difference = LoadInts(keys + n) - of_query;
          at.entry = hn::Min(hn::Max(at.difference, lowest), highest);
        }
        body(n, at);
      }
    }
  }

  void AddCodes(const AttentionInput<Real>& in, const TableLayout& layout, int64_t b, size_t term) {
    const AttentionShape& n = in.shape;
    const KeyRange batch = BatchKeys(in.mask, n.keys, b);
    std::vector<std::optional<int64_t>> codes;
    int64_t least = kMostApart;
    bool any = false;
    for (int64_t j = batch.begin; j < batch.end; ++j) {
      const std::optional<int64_t> code = layout.KeyCode(term, KeyPosition(in, b, j));
      codes.push_back(code);
      if (!code) continue;
      least = any ? std::min(least, *code) : *code;
      any = true;
    }
    if (!any) least = 0;
    const size_t row = keys_.size();
    keys_.resize(row + Size(stride_), kNoKey);
    int32_t* to = keys_.data() + row;
    for (int64_t j = batch.begin; j < batch.end; ++j) {
      const std::optional<int64_t>& code = codes[Size(j - batch.begin)];
      if (code) to[j] = static_cast<int32_t>(*code - least);
    }
    // Hidden keys get extrapolated codes, because whole-vector loads also read them.
    for (int64_t j = batch.begin; !batch.empty() && j-- > 0;) to[j] = Next(to[j + 1], -1);
    for (int64_t j = std::max<int64_t>(batch.end, 1); !batch.empty() && j < stride_; ++j) {
      to[j] = Next(to[j - 1], 1);
    }
    AddRuns(to);
    for (int64_t i = 0; i < n.queries; ++i) {
      const std::optional<int64_t> code = layout.QueryCode(term, QueryPosition(in, b, i));
      of_queries_.push_back(
          code ? static_cast<int32_t>(std::clamp<int64_t>(*code - least, kNoKey, kNoQuery))
               : kNoQuery);
    }
  }
  static int32_t Next(int32_t code, int32_t step) {
    return code == kNoKey ? kNoKey : std::clamp(code + step, kNoKey + 1, kNoQuery);
  }

  // For each vector of codes, counts the consecutive vectors, starting with this one, whose codes
  // increase by one per key.
  void AddRuns(const int32_t* codes) {
    const int64_t vectors = stride_ / kLaneCount;
    const size_t row = runs_.size();
    runs_.resize(row + Size(vectors), 0);
    const auto follows = [codes](int64_t j) {
      return codes[j] != kNoKey && codes[j] == codes[j - 1] + 1;
    };
    for (int64_t v = vectors; v-- > 0;) {
      const int64_t first = v * kLaneCount;
      bool grows = codes[first] != kNoKey;
      for (int64_t j = first + 1; grows && j < first + kLaneCount; ++j) grows = follows(j);
      if (!grows) continue;
      const bool joins = v + 1 < vectors && follows(first + kLaneCount);
      runs_[row + Size(v)] = 1 + (joins ? runs_[row + Size(v + 1)] : 0);
    }
  }

  int64_t Index(int64_t b, size_t term) const {
    return b * static_cast<int64_t>(terms_.size()) + static_cast<int64_t>(term);
  }
  const int32_t* Keys(int64_t b, size_t term, int64_t j) const {
    return keys_.data() + Index(b, term) * stride_ + j;
  }
  int64_t Run(int64_t b, size_t term, int64_t j) const {
    return runs_[Size((Index(b, term) * stride_ + j) / kLaneCount)];
  }
  const int32_t* queries_of(int64_t b, size_t term) const {
    return of_queries_.data() + Index(b, term) * queries_;
  }
  int32_t Query(int64_t b, size_t term, int64_t i) const { return queries_of(b, term)[i]; }

  int64_t queries_;
  int64_t stride_;
  std::vector<EntryDifference> terms_;
  std::vector<int32_t> keys_;
  std::vector<int32_t> of_queries_;
  std::vector<int32_t> runs_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
