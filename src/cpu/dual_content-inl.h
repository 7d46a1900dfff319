// Position-to-content terms with their tangents, for blocks of rows of one head.
#if defined(GNOMON_SRC_CPU_DUAL_CONTENT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_DUAL_CONTENT_INL_H_
#undef GNOMON_SRC_CPU_DUAL_CONTENT_INL_H_
#else
#define GNOMON_SRC_CPU_DUAL_CONTENT_INL_H_
#endif

#include <algorithm>
#include <vector>

#include "cpu/dual_relative-inl.h"
#include "cpu/dual_scores-inl.h"
#include "cpu/dual_sums-inl.h"
#include "cpu/packing-inl.h"
#include "cpu/position_to_content-inl.h"
#include "cpu/tables-inl.h"
#include "cpu/vocabulary-inl.h"
#include "gnomon/attention.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {

// Computes the terms k_j . F_h(i, j) of a block of queries, and applies the transposed operations.
class DualContent {
 public:
  // Keys first + [begin, end) of a block of queries.
  struct Tile {
    QueryTile queries;
    int64_t key_head;
    int64_t first;
    int64_t begin;
    int64_t end;
  };
  // Rows of numbers, one per query and `stride` apart, indexed by the tile's columns.
  struct Pairs {
    DualRow rows;
    int64_t stride;
  };

  DualContent(const AttentionInput<Real>& in, const AttentionInput<Real>& tangent)
      : in_(in),
        tangent_(tangent),
        reader_(in),
        table_(in.shape, in.relative.queries, tangent.relative.queries, in.relative.query_heads,
               reader_.size(), in.relative.key_dim) {}

  bool exists() const { return table_.exists(); }
  bool has_tangents() const {
    return tangent_.relative.queries != nullptr || tangent_.relative.key.data != nullptr;
  }
  const DualRowTable& table() const { return table_; }
  int64_t tasks() const { return table_.tasks(); }
  void Fill(int64_t task) const { table_.Fill(task); }

  // The number of floats of scratch memory that Products() and Gradients() need.
  int64_t scratch_size() const {
    return exists() ? 3 * reader_.window_size() + 2 * MirroredReader::columns_size() : 0;
  }

  // Stores the terms and, if has_tangents(), their tangents in whole vectors of columns.
  void Products(const Tile& tile, const Pairs& to, Real* memory,
                std::vector<TableRun>* runs) const {
    Real* const columns = Columns(memory);
    Real* const of_part = columns + MirroredReader::columns_size();
    const QueryTile& queries = tile.queries;
    const auto store = [&](const Part& part) HWY_ATTR {
      const DualWindow window = WindowOf(part);
      Multiply(tile, part, window);
      const int64_t count = Width(tile, part);
      for (const bool is_tangent : {false, true}) {
        if (is_tangent && !has_tangents()) break;
        reader_.template Read<kKeys>(queries, part, is_tangent ? window.tangents : window.values,
                                     in_.relative.factor, columns, of_part, runs);
        Real* const rows = (is_tangent ? to.rows.tangents : to.rows.values) + part.column;
        for (int64_t r = 0; r < queries.rows; ++r) {
          std::copy_n(of_part + r * kKeys, count, rows + r * to.stride);
        }
      }
    };
    reader_.ForKeys(queries, tile.first, tile.begin, tile.end, memory, store);
  }

  // The transpose of Products(), applied to gradients of scores. Adds the gradients of the keys to
  // d_keys, and those of the table to the head's part of d_table, with their tangents. `keys` and
  // `key_tangents` contain the rows of the key head; key_tangents.data may be null.
  void Gradients(const Tile& tile, const Pairs& d_scores, const KeySums& d_keys,
                 const KeySums& d_key_tangents, const DualTableGradient& d_table, Rows keys,
                 Rows key_tangents, Real* memory, std::vector<TableRun>* runs) const {
    Real* const columns = Columns(memory);
    const int64_t b = tile.queries.b;
    const int64_t h = tile.queries.h;
    const int64_t head = b * in_.shape.heads + h;
    const auto add = [&](const Part& part) HWY_ATTR {
      const DualWindow window = WindowOf(part);
      for (const bool is_tangent : {false, true}) {
        const Real* const rows = is_tangent ? d_scores.rows.tangents : d_scores.rows.values;
        reader_.Add(tile.queries, part, rows + part.column, d_scores.stride, Width(tile, part),
                    in_.relative.factor, is_tangent ? window.tangents : window.values, columns,
                    runs);
      }
      const int64_t first = part.keys.begin;
      if (d_keys.wanted()) {
        table_.AddProduct(h, part.count(), window, d_keys.row(b, tile.key_head, first),
                          d_keys.stride());
      }
      if (d_key_tangents.wanted()) {
        table_.AddProductTangent(h, part.count(), window,
                                 d_key_tangents.row(b, tile.key_head, first),
                                 d_key_tangents.stride());
      }
      if (d_table.wanted()) d_table.Add(head, part.count(), window, keys, key_tangents, first);
    };
    reader_.ForKeys(tile.queries, tile.first, tile.begin, tile.end, memory, add);
  }

 private:
  using Part = MirroredReader::Part;
  static constexpr int64_t kKeys = MirroredReader::kKeys;
  // A part of a tile fits into the memory of its columns.
  static_assert(kRowBlock * kKeys <= MirroredReader::columns_size());

  // The memory holds the values and tangents of a window, a window of products, two arrays of
  // columns.
  Real* Columns(Real* memory) const { return memory + 3 * reader_.window_size(); }
  DualWindow WindowOf(const Part& part) const {
    DualWindow window{part.window, part.window};
    window.tangents.data += reader_.window_size();
    return window;
  }
  // The number of columns of a part, in whole vectors.
  static int64_t Width(const Tile& tile, const Part& part) {
    return std::min(kKeys, RoundUp(tile.end, kLaneCount) - part.column);
  }

  // Multiplies the part's keys by the table.
  void Multiply(const Tile& tile, const Part& part, const DualWindow& window) const {
    const auto rows_of = [&](const View<const Real>& view) -> Strided {
      if (view.data == nullptr) return {nullptr, 0, 0};
      return {view.row(tile.queries.b, tile.key_head, part.keys.begin), Size(view.stride[2]), 1};
    };
    table_.Multiply(tile.queries.h, part.count(),
                    {rows_of(in_.relative.key), rows_of(tangent_.relative.key)}, window,
                    window.tangents.data + reader_.window_size());
  }

  const AttentionInput<Real>& in_;
  const AttentionInput<Real>& tangent_;
  MirroredReader reader_;
  DualRowTable table_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
