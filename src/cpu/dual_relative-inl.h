// Relative keys and values with their tangents, for blocks of rows of one head.
#if defined(GNOMON_SRC_CPU_DUAL_RELATIVE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_DUAL_RELATIVE_INL_H_
#undef GNOMON_SRC_CPU_DUAL_RELATIVE_INL_H_
#else
#define GNOMON_SRC_CPU_DUAL_RELATIVE_INL_H_
#endif

#include <algorithm>
#include <vector>

#include "cpu/columns-inl.h"
#include "cpu/dual_addends-inl.h"
#include "cpu/dual_scores-inl.h"
#include "cpu/packing-inl.h"
#include "cpu/tables-inl.h"
#include "cpu/vocabulary-inl.h"
#include "gnomon/attention.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {

// Rows of numbers and rows of their tangents; tangents.data is null if all tangents are 0.
struct DualOperand {
  Strided values;
  Strided tangents;
};

// A window of table entries per row, and the window of their tangents.
struct DualWindow {
  TableWindow values;
  TableWindow tangents;

  void ClearRow(int64_t r) const {
    values.ClearRow(r);
    tangents.ClearRow(r);
  }
};

// A RowTable and its tangent.
class DualRowTable {
 public:
  DualRowTable(const AttentionShape& n, const Real* table, const Real* tangent, bool heads,
               int64_t size, int64_t columns)
      : values_(table, heads, n, size, columns, {.multiply = true, .add_product = true}),
        tangents_(tangent, heads, n, size, columns, {.multiply = true, .add_product = true}) {}

  bool exists() const { return values_.exists(); }
  const RowTable& values() const { return values_; }

  int64_t tasks() const { return Tasks(values_) + Tasks(tangents_); }
  void Fill(int64_t task) const {
    if (task < Tasks(values_)) return values_.Fill(task);
    tangents_.Fill(task - Tasks(values_));
  }

  // Computes the products of rows with the window's entries. Overwrites `scratch`, which has the
  // size of a window.
  void Multiply(int64_t h, int64_t rows, const DualOperand& x, const DualWindow& window,
                Real* scratch) const {
    values_.Multiply(h, rows, x.values, window.values);
    if (x.tangents.data != nullptr) {
      values_.Multiply(h, rows, x.tangents, window.tangents);
    } else {
      for (int64_t r = 0; r < rows; ++r) window.tangents.ClearRow(r);
    }
    if (!tangents_.exists()) return;
    TableWindow more = window.tangents;
    more.data = scratch;
    tangents_.Multiply(h, rows, x.values, more);
    const int64_t count = window.tangents.range.end - window.tangents.origin;
    for (int64_t r = 0; r < rows; ++r) AddNumbers(more.Row(r), count, window.tangents.Row(r));
  }

  // Adds the products of a window with the table to rows of `to`, or their tangents. Rows start
  // `stride` apart and have values().padded() columns.
  void AddProduct(int64_t h, int64_t rows, const DualWindow& window, Real* to,
                  int64_t stride) const {
    values_.AddProduct(h, rows, window.values, to, stride);
  }
  void AddProductTangent(int64_t h, int64_t rows, const DualWindow& window, Real* to,
                         int64_t stride) const {
    values_.AddProduct(h, rows, window.tangents, to, stride);
    if (tangents_.exists()) tangents_.AddProduct(h, rows, window.values, to, stride);
  }
  // Computes both, for rows without gaps; either may be null.
  void AddProducts(int64_t h, int64_t rows, const DualWindow& window, Real* to,
                   Real* to_tangents) const {
    if (to != nullptr) AddProduct(h, rows, window, to, values_.padded());
    if (to_tangents != nullptr) AddProductTangent(h, rows, window, to_tangents, values_.padded());
  }

 private:
  static int64_t Tasks(const RowTable& table) { return table.exists() ? table.tasks() : 0; }

  RowTable values_;
  RowTable tangents_;
};

// The gradients of a DualRowTable and their tangents: sums per query head, and their totals.
class DualTableGradient {
 public:
  DualTableGradient(const AttentionShape& n, const DualRowTable& table, Real* to, Real* to_tangent)
      : n_(n),
        table_(table.values()),
        values_(table.values(), to, n.batch * n.heads),
        tangents_(table.values(), to_tangent, n.batch * n.heads) {}

  bool wanted() const { return values_.wanted() || tangents_.wanted(); }
  // `head` is counted across the batch.
  void Clear(int64_t head) const {
    values_.ClearPart(head);
    tangents_.ClearPart(head);
  }
  // Adds the product of the transposed window and `rows` rows of x, starting at row `first`.
  void Add(int64_t head, int64_t rows, const DualWindow& window, Rows x, Rows x_tangents,
           int64_t first) const {
    if (values_.wanted()) values_.Add(head, rows, window.values, x, first);
    if (!tangents_.wanted()) return;
    tangents_.Add(head, rows, window.tangents, x, first);
    if (x_tangents.data != nullptr) tangents_.Add(head, rows, window.values, x_tangents, first);
  }
  void Merge() const {
    for (const RowTableGradient* gradient : {&values_, &tangents_}) {
      for (int64_t h = 0; gradient->wanted() && h < table_.tables(); ++h) {
        gradient->Merge(h, [&](int64_t head) { return !table_.heads() || head % n_.heads == h; });
      }
    }
  }

 private:
  const AttentionShape& n_;
  const RowTable& table_;
  RowTableGradient values_;
  RowTableGradient tangents_;
};

// Computes the terms that a block's rows read from the relative tables, and applies the transposed
// operations.
class DualRelative {
 public:
  // Blocks have at most `rows` rows and `columns` columns.
  DualRelative(const AttentionInput<Real>& in, const AttentionInput<Real>& tangent, int64_t rows,
               int64_t columns)
      : in_(in),
        tangent_(tangent),
        reader_(in, in.relative.layout),
        keys_(in.shape, in.relative.keys, tangent.relative.keys, in.relative.key_heads, Size(in),
              in.relative.dim),
        values_(in.shape, in.relative.values, tangent.relative.values, in.relative.value_heads,
                Size(in), in.shape.value_dim) {
    if (exists()) stride_ = reader_.WindowStride(rows, columns);
  }

  bool exists() const { return keys_.exists() || values_.exists(); }
  bool has_key_tangents() const {
    return tangent_.relative.keys != nullptr || tangent_.relative.query.data != nullptr;
  }
  const DualRowTable& keys() const { return keys_; }
  const DualRowTable& values() const { return values_; }
  // The number of floats per row of a window.
  int64_t stride() const { return stride_; }

  int64_t tasks() const { return keys_.tasks() + values_.tasks(); }
  void Fill(int64_t task) const {
    if (task < keys_.tasks()) return keys_.Fill(task);
    values_.Fill(task - keys_.tasks());
  }

  // Creates the window of queries [begin, end) and `keys` in `memory`, which holds two rows per
  // query: the values and the tangents.
  DualWindow Window(int64_t b, int64_t begin, int64_t end, KeyRange keys, Real* memory) const {
    const int64_t rows = end - begin;
    DualWindow window;
    window.values = reader_.Window(b, begin, rows, keys.begin, keys.end, stride_, memory);
    window.tangents = window.values;
    window.tangents.data = memory + rows * stride_;
    return window;
  }

  // Multiplies `rows` queries, starting at `query`, by the relative keys.
  void MultiplyKeys(int64_t b, int64_t h, int64_t query, int64_t rows, const DualWindow& window,
                    Real* scratch) const {
    const auto rows_of = [&](const View<const Real>& view) -> Strided {
      if (view.data == nullptr) return {nullptr, 0, 0};
      return {view.row(b, h, query), GNOMON_KERNELS::Size(view.stride[2]), 1};
    };
    keys_.Multiply(h, rows, {rows_of(in_.relative.query), rows_of(tangent_.relative.query)}, window,
                   scratch);
  }

  // Adds `factor` times the table entries of a row's pairs to `to`, which is indexed by the block's
  // columns. Add() is the transposed operation: it adds `factor` times each pair's number to the
  // pair's table entry.
  void Read(const DualAddends::Row& row, const TableWindow& window, int64_t r, Real factor,
            Real* to, std::vector<TableRun>* runs) const {
    if (row.count() <= 0) return;
    reader_.Read(TileRowOf(row), window.Row(r), window.origin, window.range, factor,
                 to + row.columns.first(), runs);
  }
  void Add(const DualAddends::Row& row, const Real* from, Real factor, const TableWindow& window,
           int64_t r, std::vector<TableRun>* runs) const {
    if (row.count() <= 0) return;
    reader_.Add(TileRowOf(row), from + row.columns.first(), factor, window.Row(r), window.origin,
                window.range, runs);
  }

 private:
  static int64_t Size(const AttentionInput<Real>& in) {
    return in.relative.layout != nullptr ? in.relative.layout->size() : 0;
  }
  static TileRow TileRowOf(const DualAddends::Row& row) {
    const Columns& columns = row.columns;
    return {row.b,
            row.h,
            row.i,
            row.first + columns.first(),
            columns.last() - columns.first(),
            row.first + columns.begin,
            row.first + columns.end,
            false,
            1.0f};
  }

  const AttentionInput<Real>& in_;
  const AttentionInput<Real>& tangent_;
  TableReader reader_;
  DualRowTable keys_;
  DualRowTable values_;
  int64_t stride_ = 0;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
