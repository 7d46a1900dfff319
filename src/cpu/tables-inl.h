// Tables that are read by pairs of tokens: packed table rows, the window of entries that a tile
// reads, and gather and scatter operations.
#if defined(GNOMON_SRC_CPU_TABLES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_TABLES_INL_H_
#undef GNOMON_SRC_CPU_TABLES_INL_H_
#else
#define GNOMON_SRC_CPU_TABLES_INL_H_
#endif

#include <algorithm>
#include <vector>

#include "base/visible_keys.h"
#include "cpu/gemm-inl.h"
#include "cpu/packing-inl.h"
#include "cpu/positions-inl.h"
#include "cpu/row_products-inl.h"
#include "cpu/vocabulary-inl.h"
#include "cpu/workspace.h"
#include "gnomon/attention.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {

// Columns [begin, begin + count) of one row of a tile, in whole vectors. Tables are read only for
// keys [first, last), which a window covers.
struct TileRow {
  int64_t b;
  int64_t h;
  int64_t i;
  int64_t begin;
  int64_t count;
  int64_t first;
  int64_t last;
  bool paired;  // whether the user's pair mask hides some keys
  Real temperature;
  bool placed = false;  // whether positions hide some keys
};

// Adds factor times each entry listed in `runs` to to[column - first]. Entry e is entries[e -
// origin].
inline void Gather(const std::vector<TableRun>& runs, const Real* HWY_RESTRICT entries,
                   int64_t origin, Real factor, int64_t first, Real* HWY_RESTRICT to) {
  for (const TableRun& run : runs) {
    const Real* HWY_RESTRICT from = entries + (run.entry - origin);
    Real* HWY_RESTRICT at = to + (run.column - first);
    if (run.step == 0) {
      const Real term = factor * *from;
      for (int64_t n = 0; n < run.count; ++n) at[n] += term;
    } else {
      for (int64_t n = 0; n < run.count; ++n) at[n] += factor * from[n];
    }
  }
}

// The transpose of Gather(): adds factor * from[column - first] to the entries.
inline void Scatter(const std::vector<TableRun>& runs, const Real* HWY_RESTRICT from, int64_t first,
                    Real factor, Real* HWY_RESTRICT entries, int64_t origin) {
  for (const TableRun& run : runs) {
    const Real* HWY_RESTRICT at = from + (run.column - first);
    Real* HWY_RESTRICT to = entries + (run.entry - origin);
    if (run.step == 0) {
      *to += factor * Sum(run.count, [at](int64_t n) { return at[n]; });
    } else {
      for (int64_t n = 0; n < run.count; ++n) to[n] += factor * at[n];
    }
  }
}

// For each row of a tile, one number per table entry that the tile may read.
struct TableWindow {
  TableRange range{0, 0};
  int64_t origin = 0;  // the entry in column 0: range.begin, rounded down to whole vectors
  int64_t stride = 0;
  Real* data = nullptr;

  Real* Row(int64_t r) const { return data + r * stride; }
  void ClearRow(int64_t r) const { std::fill_n(Row(r), range.end - origin, 0.0f); }
  // The entries as a left operand, in row order or transposed.
  Strided Entries() const { return {data + (range.begin - origin), Size(stride), 1}; }
  Strided Transposed() const { return {data + (range.begin - origin), 1, Size(stride)}; }
};

// Maps pairs of tokens to table entries, according to the table's layout.
class TableReader {
 public:
  // `layout` is null if there is no table.
  TableReader(const AttentionInput<Real>& in, const TableLayout* layout)
      : in_(in), layout_(layout), placed_(in, layout) {}

  const PlacedEntries& placed() const { return placed_; }

  // The number of floats per window row, for tiles of the given size.
  int64_t WindowStride(int64_t rows, int64_t columns) const {
    const int64_t entries =
        HasPositions(in_) ? layout_->size() : layout_->LargestWindow(rows, columns);
    // The row is padded by one vector before the range and one after it.
    return RoundUp(entries, kLaneCount) + 2 * kLaneCount;
  }

  // Creates, in `memory`, the window for `rows` queries starting at `query` and keys [begin, end).
  TableWindow Window(int64_t b, int64_t query, int64_t rows, int64_t begin, int64_t end,
                     int64_t stride, Real* memory) const {
    TableWindow window;
    if (placed_.exists()) {
      window.range = placed_.Window(b, query, rows, begin, end, layout_->size());
    } else if (HasPositions(in_)) {
      window.range = {0, layout_->size()};
    } else {
      const int64_t p = QueryOffset(in_, b) + query;
      window.range = layout_->Window(p, p + rows, begin, end);
    }
    window.origin = window.range.begin / kLaneCount * kLaneCount;
    window.stride = stride;
    window.data = memory;
    return window;
  }

  // to[n] += factor times the entries that column n of the row reads. All entries must be within
  // the window.
  void Read(const TileRow& row, const Real* entries, int64_t origin, TableRange window, Real factor,
            Real* to, std::vector<TableRun>* runs) const {
    if (placed_.exists()) {
      return placed_.Gather(row.b, row.i, row.begin, row.count, entries, origin, window, factor,
                            to);
    }
    FindRuns(row, runs);
    Gather(*runs, entries, origin, factor, row.begin, to);
  }
  // The transpose of Read().
  void Add(const TileRow& row, const Real* from, Real factor, Real* entries, int64_t origin,
           TableRange window, std::vector<TableRun>* runs) const {
    if (placed_.exists()) {
      return placed_.Scatter(row.b, row.i, row.begin, row.count, from, factor, entries, origin,
                             window);
    }
    FindRuns(row, runs);
    Scatter(*runs, from, row.begin, factor, entries, origin);
  }

  void FindRuns(const TileRow& row, std::vector<TableRun>* runs) const {
    runs->clear();
    const int64_t p = QueryPosition(in_, row.b, row.i);
    if (!HasPositions(in_)) return layout_->AddRuns(p, row.first, row.last, runs);
    // Runs are given in positions and must be converted to columns.
    const int64_t* keys = in_.key_positions + row.b * in_.shape.keys;
    for (int64_t begin = row.first; begin < row.last;) {
      int64_t end = begin + 1;
      while (end < row.last && keys[end] == keys[end - 1] + 1) ++end;
      const size_t known = runs->size();
      layout_->AddRuns(p, keys[begin], keys[begin] + end - begin, runs);
      for (size_t n = known; n < runs->size(); ++n) (*runs)[n].column += begin - keys[begin];
      begin = end;
    }
  }

 private:
  const AttentionInput<Real>& in_;
  const TableLayout* layout_;
  PlacedEntries placed_;
};

// A table of rows, (1 or H, size, columns). It is packed for Multiply() unless rows are multiplied
// in place, and padded for AddProduct() if needed.
class RowTable {
 public:
  struct Uses {
    bool multiply;
    bool add_product;
    bool in_place = false;
  };

  RowTable(const Real* table, bool heads, const AttentionShape& n, int64_t size, int64_t columns,
           Uses uses)
      : heads_(heads),
        size_(table != nullptr ? size : 0),
        tables_(heads ? n.heads : 1),
        uses_(uses),
        table_(table),
        panels_({table, {0, size * columns, columns}}, {tables_, 1, tables_}, packs() ? size_ : 0,
                columns),
        rows_({table, {0, size * columns, columns}}, {tables_, 1, tables_},
              uses.add_product ? size_ : 0, columns),
        columns_(columns),
        padded_(PaddedColumns(columns)),
        exists_(table != nullptr) {}

  bool exists() const { return exists_; }
  bool heads() const { return heads_; }
  int64_t size() const { return size_; }
  int64_t columns() const { return columns_; }
  int64_t padded() const { return padded_; }
  int64_t tables() const { return tables_; }
  int64_t Index(int64_t h) const { return heads_ ? h : 0; }

  int64_t tasks() const { return tables_ * DivideUp(size_, kWidth); }
  void Fill(int64_t task) const {
    const int64_t h = task / DivideUp(size_, kWidth);
    const int64_t p = task % DivideUp(size_, kWidth);
    if (packs()) panels_.Fill(0, h, p, {0, size_});
    if (uses_.add_product) rows_.Fill(0, h, p * kWidth, std::min((p + 1) * kWidth, size_));
  }

  // Multiplies a (rows x columns) by the table rows, and stores the products in the window.
  void Multiply(int64_t h, int64_t rows, Strided a, const TableWindow& window) const {
    if (uses_.in_place) return MultiplyInPlace(h, rows, a, window);
    for (int64_t e = window.origin; e < window.range.end;) {
      const int64_t within = e % kWidth;
      const size_t vectors =
          std::min(Vectors(window.range.end - e), kMicroVectors - Size(within) / kLanes);
      GNOMON_KERNELS::Multiply(Size(rows), vectors, Size(columns_), a,
                               panels_.panel(0, Index(h), e / kWidth) + within, kPanel,
                               window.data + (e - window.origin), Size(window.stride));
      e += static_cast<int64_t>(vectors) * kLaneCount;
    }
  }

  // Computes to (rows x padded()) += the window times the table rows. Rows of `to` start `stride`
  // apart.
  void AddProduct(int64_t h, int64_t rows, const TableWindow& window, Real* to) const {
    AddProduct(h, rows, window, to, padded_);
  }
  void AddProduct(int64_t h, int64_t rows, const TableWindow& window, Real* to,
                  int64_t stride) const {
    const Rows table = rows_.Head(0, Index(h));
    MultiplyAdd(Size(rows), Size(padded_) / kLanes, Size(window.range.end - window.range.begin),
                window.Entries(), table.row(window.range.begin), Size(table.stride), to,
                Size(stride));
  }

 private:
  bool packs() const { return uses_.multiply && !uses_.in_place; }

  // Sets entries of the window outside its range to 0.
  void MultiplyInPlace(int64_t h, int64_t rows, Strided a, const TableWindow& window) const {
    if (window.range.end <= window.origin) return;
    const Tokens table(View<const Real>{table_, {0, size_ * columns_, columns_}});
    GNOMON_KERNELS::MultiplyKeys(
        table, 0, Index(h), {window.range.begin, window.range.end}, columns_,
        /*pairs=*/false, window.origin, 0, RoundUp(window.range.end - window.origin, kLaneCount),
        Size(rows), a.data, a.row, window.data, Size(window.stride));
  }

  bool heads_;
  int64_t size_;
  int64_t tables_;
  Uses uses_;
  const Real* table_;
  Panels panels_;
  PaddedRows rows_;
  int64_t columns_;
  int64_t padded_;
  bool exists_;
};

// Gradients of a RowTable: one partial sum per part of the work, and the total.
class RowTableGradient {
 public:
  RowTableGradient(const RowTable& table, Real* to, int64_t parts)
      : table_(table), to_(to), parts_(parts) {
    if (to != nullptr) partial_.Reset(parts * table.size() * table.padded());
  }

  bool wanted() const { return to_ != nullptr; }
  Real* Part(int64_t part) const {
    return partial_.data() + part * table_.size() * table_.padded();
  }
  void ClearPart(int64_t part) const {
    if (wanted()) std::fill_n(Part(part), table_.size() * table_.padded(), 0.0f);
  }
  // Adds the product of the transposed window and `rows` rows of `right`, of padded() columns, to a
  // part.
  void Add(int64_t part, int64_t rows, const TableWindow& window, Rows right,
           int64_t first_row) const {
    MultiplyAdd(Size(window.range.end - window.range.begin), Size(table_.padded()) / kLanes,
                Size(rows), window.Transposed(), right.row(first_row), Size(right.stride),
                Part(part) + window.range.begin * table_.padded(), Size(table_.padded()));
  }
  // Adds the parts in order. `belongs` tells whether a part contributes to table h. Calls with
  // different h may run concurrently.
  template <class Belongs>
  void Merge(int64_t h, const Belongs& belongs) const {
    const int64_t columns = table_.columns();
    Real* to = to_ + h * table_.size() * columns;
    std::fill_n(to, table_.size() * columns, 0.0f);
    for (int64_t part = 0; part < parts_; ++part) {
      if (!belongs(part)) continue;
      const Real* from = Part(part);
      for (int64_t e = 0; e < table_.size(); ++e) {
        for (int64_t d = 0; d < columns; ++d) {
          to[e * columns + d] += from[e * table_.padded() + d];
        }
      }
    }
  }

 private:
  const RowTable& table_;
  Real* to_;
  int64_t parts_;
  Buffer partial_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
