// Position-to-content terms: products of keys with table rows, which are selected by relative
// position. They are computed like the terms of relative keys, with queries and keys exchanged. A
// few keys of a tile are multiplied by all table rows that they may read. Each key then selects one
// product per query, which gives a column of the tile.
#if defined(GNOMON_SRC_CPU_POSITION_TO_CONTENT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_POSITION_TO_CONTENT_INL_H_
#undef GNOMON_SRC_CPU_POSITION_TO_CONTENT_INL_H_
#else
#define GNOMON_SRC_CPU_POSITION_TO_CONTENT_INL_H_
#endif

#include <algorithm>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/visible_keys.h"
#include "cpu/packing-inl.h"
#include "cpu/tables-inl.h"
#include "gnomon/attention.h"
#include "gnomon/table_layout.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {

// The tile of a head's queries [query, query + rows) and any keys.
struct QueryTile {
  int64_t b;
  int64_t h;
  int64_t query;
  int64_t rows;
};

// Reads tables that are indexed by p_i - p_j, for a few keys at a time: each key is a row of a
// window, and the queries are columns.
class MirroredReader {
 public:
  // The number of keys per part. Smaller parts compute fewer unused products.
  static constexpr int64_t kKeys = 16;

  explicit MirroredReader(const AttentionInput<Real>& in)
      : layout_(MirroredLayout(in)),
        offsets_(MirroredOffsets(in)),
        mirrored_(Mirrored(in, offsets_)),
        reader_(mirrored_, layout_ ? &*layout_ : nullptr) {
    if (layout_) stride_ = reader_.WindowStride(kKeys, kRowBlock);
  }
  // Not copyable, because the reader points into this object.
  MirroredReader(const MirroredReader&) = delete;
  MirroredReader& operator=(const MirroredReader&) = delete;

  // The number of table entries; 0 without a table.
  int64_t size() const { return layout_ ? layout_->size() : 0; }
  // The numbers of floats of a part's window and of its columns.
  int64_t window_size() const { return kKeys * stride_; }
  static constexpr int64_t columns_size() { return kKeys * kRowBlock; }

  // kKeys columns of a tile, the keys in these columns, and the table window that they may read.
  struct Part {
    int64_t column;
    int64_t skipped;  // leading columns without a key
    KeyRange keys;
    TableWindow window;

    int64_t count() const { return keys.end - keys.begin; }
  };

  // Calls body(part) for each part of the columns [begin, end) of a tile; column 0 is key `first`.
  // Parts start at multiples of kKeys. All parts use the same window memory.
  template <class Body>
  void ForKeys(const QueryTile& tile, int64_t first, int64_t begin, int64_t end, Real* memory,
               const Body& body) const {
    for (int64_t column = begin / kKeys * kKeys; column < end; column += kKeys) {
      Part part{};
      part.column = column;
      part.keys = {first + std::max(column, begin), first + std::min(column + kKeys, end)};
      part.skipped = part.keys.begin - first - column;
      part.window = reader_.Window(tile.b, part.keys.begin, part.count(), tile.query,
                                   tile.query + tile.rows, stride_, memory);
      body(part);
    }
  }

  // Stores `factor` times the entries of `window` that the part's pairs read: those of row r and
  // column part.column + n in to[r * kStride + n]. Columns without a key become 0.
  template <int64_t kStride>
  HWY_INLINE void Read(const QueryTile& tile, const Part& part, const TableWindow& window,
                       Real factor, Real* columns, Real* HWY_RESTRICT to,
                       std::vector<TableRun>* runs) const {
    std::fill_n(columns, kKeys * kRowBlock, 0.0f);
    for (int64_t n = 0; n < part.count(); ++n) {
      reader_.Read(RowOf(tile, part.keys.begin + n), window.Row(n), window.origin, window.range,
                   factor, columns + (part.skipped + n) * kRowBlock, runs);
    }
    for (int64_t n = 0; n < kKeys; n += kGroup) {
      const Real* from[kGroup];
      for (int64_t m = 0; m < kGroup; ++m) from[m] = columns + (n + m) * kRowBlock;
      Transpose<kGroup, kStride>(from, tile.rows, to + n);
    }
  }

  // The transpose of Read(), for `width` columns of numbers whose rows start `stride` apart.
  // Overwrites the window.
  template <class Width>
  HWY_INLINE void Add(const QueryTile& tile, const Part& part, const Real* HWY_RESTRICT numbers,
                      int64_t stride, Width width, Real factor, const TableWindow& window,
                      Real* columns, std::vector<TableRun>* runs) const {
    // Whole vectors of rows are read, including any past the last row.
    if (tile.rows % kLaneCount != 0) std::fill_n(columns, kKeys * kRowBlock, 0.0f);
    const auto transpose = [&]<int64_t kRows>(int64_t r) HWY_ATTR {
      const Real* from[kRows];
      for (int64_t n = 0; n < kRows; ++n) from[n] = numbers + (r + n) * stride;
      Transpose<kRows, kRowBlock>(from, width, columns + r);
    };
    int64_t r = 0;
    for (; r + kGroup <= tile.rows; r += kGroup) transpose.template operator()<kGroup>(r);
    for (; r < tile.rows; ++r) transpose.template operator()<1>(r);
    for (int64_t n = 0; n < part.count(); ++n) {
      window.ClearRow(n);
      reader_.Add(RowOf(tile, part.keys.begin + n), columns + (part.skipped + n) * kRowBlock,
                  factor, window.Row(n), window.origin, window.range, runs);
    }
  }

 private:
  // The number of rows that are transposed together.
  static constexpr int64_t kGroup = std::max<int64_t>(kLaneCount, 4);
  static_assert(kKeys % kGroup == 0 && kForwardColumns % kKeys == 0 &&
                kBackwardColumns % kKeys == 0 && kRowBlock % kLaneCount == 0);

  // Key j as a row of a tile whose columns are the queries.
  static TileRow RowOf(const QueryTile& tile, int64_t j) {
    const int64_t end = tile.query + tile.rows;
    return {tile.b,     tile.h, j,     tile.query, RoundUp(tile.rows, kLaneCount),
            tile.query, end,    false, 1.0f};
  }

  // The mirrored layout of the table, which is indexed by p_i - p_j.
  static std::optional<OffsetLayout> MirroredLayout(const AttentionInput<Real>& in) {
    if (in.relative.queries == nullptr) return std::nullopt;
    const auto& layout = dynamic_cast<const OffsetLayout&>(*in.relative.layout);
    return OffsetLayout(layout.future(), layout.past(), layout.far());
  }
  // The position of the first key of each batch element, relative to query 0.
  static std::vector<int64_t> MirroredOffsets(const AttentionInput<Real>& in) {
    std::vector<int64_t> offsets;
    if (in.relative.queries == nullptr) return offsets;
    for (int64_t b = 0; b < in.shape.batch; ++b) offsets.push_back(-QueryOffset(in, b));
    return offsets;
  }
  static AttentionInput<Real> Mirrored(const AttentionInput<Real>& in,
                                       const std::vector<int64_t>& offsets) {
    AttentionInput<Real> mirrored;
    mirrored.shape = in.shape;
    std::swap(mirrored.shape.queries, mirrored.shape.keys);
    mirrored.query_offsets = offsets.data();
    mirrored.query_positions = in.key_positions;
    mirrored.key_positions = in.query_positions;
    return mirrored;
  }

  std::optional<OffsetLayout> layout_;
  std::vector<int64_t> offsets_;
  AttentionInput<Real> mirrored_;
  TableReader reader_;
  int64_t stride_ = 0;
};

class PositionToContent {
 public:
  // `add_product`: whether Gradients() computes the gradients of the keys.
  PositionToContent(const AttentionInput<Real>& in, bool add_product)
      : in_(in),
        reader_(in),
        table_(in.relative.queries, in.relative.query_heads, in.shape, reader_.size(),
               in.relative.key_dim, {.multiply = true, .add_product = add_product}) {}

  bool exists() const { return table_.exists(); }
  const RowTable& table() const { return table_; }
  int64_t tasks() const { return exists() ? table_.tasks() : 0; }
  void Fill(int64_t task) const { table_.Fill(task); }

  // The number of floats of scratch memory that Products() and Gradients() need.
  int64_t scratch_size() const {
    return exists() ? reader_.window_size() + MirroredReader::columns_size() : 0;
  }

  // Computes the terms of queries [query, query + rows) with keys first + [begin, end), in log2
  // units. The term of row r and column c is stored in tile[r * kStride + c]; other columns of the
  // same vectors become 0.
  template <int64_t kStride>
  void Products(int64_t b, int64_t h, int64_t query, int64_t rows, int64_t first, int64_t begin,
                int64_t end, Real* HWY_RESTRICT tile, Real* memory,
                std::vector<TableRun>* runs) const {
    Real* const columns = memory + reader_.window_size();
    const Real factor = in_.relative.factor * kLog2E;
    const QueryTile queries{b, h, query, rows};
    reader_.ForKeys(queries, first, begin, end, memory, [&](const Part& part) HWY_ATTR {
      if (part.count() > 0) {
        const View<const Real>& k = in_.relative.key;
        table_.Multiply(h, part.count(),
                        {k.row(b, KeyHead(h), part.keys.begin), Size(k.stride[2]), 1}, part.window);
      }
      reader_.template Read<kStride>(queries, part, part.window, factor, columns,
                                     tile + part.column, runs);
    });
  }

  // The transpose of Products(), applied to a tile's score gradients. Adds the gradients of the
  // tile's keys to d_keys, whose rows have table().padded() columns and start at key `first`. If
  // requested, adds the gradients of the table to a part of `d_table`. `keys` contains the rows of
  // the key head.
  template <int64_t kStride>
  void Gradients(int64_t b, int64_t h, int64_t query, int64_t rows, int64_t first, int64_t begin,
                 int64_t end, const Real* HWY_RESTRICT d_scores, Real* d_keys,
                 const RowTableGradient& d_table, int64_t table_part, Rows keys, Real* memory,
                 std::vector<TableRun>* runs) const {
    Real* const columns = memory + reader_.window_size();
    const QueryTile queries{b, h, query, rows};
    reader_.ForKeys(queries, first, begin, end, memory, [&](const Part& part) HWY_ATTR {
      if (part.count() == 0) return;
      reader_.Add(queries, part, d_scores + part.column, kStride,
                  std::integral_constant<int64_t, MirroredReader::kKeys>(), in_.relative.factor,
                  part.window, columns, runs);
      if (d_keys != nullptr) {
        table_.AddProduct(h, part.count(), part.window,
                          d_keys + (part.keys.begin - first) * table_.padded());
      }
      if (d_table.wanted()) {
        d_table.Add(table_part, part.count(), part.window, keys, part.keys.begin);
      }
    });
  }

 private:
  using Part = MirroredReader::Part;

  int64_t KeyHead(int64_t h) const { return h / (in_.shape.heads / in_.shape.key_heads); }

  const AttentionInput<Real>& in_;
  MirroredReader reader_;
  RowTable table_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
