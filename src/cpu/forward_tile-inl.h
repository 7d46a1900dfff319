// The steps of the forward pass that all plans share: starting a block of query rows, adding a
// tile of keys to it, and writing its results.
//
// One product computes the scores of a tile, which become weights in cache; a second product
// multiplies them by the values. Keys are packed as transposed panels of kPanel columns, so that
// both products use the same microkernel; few rows read keys and values in place. Values that are
// hidden from a row and not finite are removed, because a weight of 0 times NaN or infinity is NaN.
#if defined(GNOMON_SRC_CPU_FORWARD_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_FORWARD_TILE_INL_H_
#undef GNOMON_SRC_CPU_FORWARD_TILE_INL_H_
#else
#define GNOMON_SRC_CPU_FORWARD_TILE_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/visible_keys.h"
#include "cpu/addends-inl.h"
#include "cpu/bfloat16.h"
#include "cpu/gemm-inl.h"
#include "cpu/mask-inl.h"
#include "cpu/packing-inl.h"
#include "cpu/real.h"
#include "cpu/row_products-inl.h"
#include "cpu/rows-inl.h"
#include "cpu/skipping-inl.h"
#include "cpu/vocabulary-inl.h"
#include "cpu/workspace.h"
#include "gnomon/attention.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {

// Whether rows [begin, end) of one head contain a non-finite number.
inline bool HasNonFinite(const Tokens& tokens, int64_t b, int64_t h, int64_t begin, int64_t end,
                         int64_t columns) {
  RowReader rows(tokens, columns);
  Real sum = 0;
  for (int64_t i = begin; i < end; ++i) {
    // This product is 0 for finite numbers and NaN otherwise.
    sum += Sum(columns, [row = rows.Row(b, h, i)](int64_t e) { return row[e] * 0.0f; });
  }
  return sum != 0.0f;
}

// A tile's keys, packed or in place.
struct TileKeys {
  int64_t first;  // a multiple of kWidth
  // Columns [p * kWidth, (p + 1) * kWidth) of the tile start at p * panel_rows * kWidth.
  const Real* panels;
  Rows values;                      // starting at key `first`; floats or bfloat16 pairs
  RowsInPlace values_in_place;      // starting at key `first`, if values are not packed
  ColumnScalars::Pointers scalars;  // starting at key `first`
  std::optional<bool> non_finite;   // whether any value visible to the batch is non-finite
};

// A block of rows: queries [i, i + queries) of `heads` query heads that share a key head. Holds
// the rows' running sums.
struct QueryBlock {
  int64_t b;
  int64_t h;
  int64_t heads;
  int64_t i;
  int64_t queries;
  Strided x;                // the rows' tokens
  Real* sum;                // kRowBlock x value_columns: accumulated weights times values
  Real largest[kRowBlock];  // largest score, in log2 units
  Real weight[kRowBlock];   // sum of 2^(score - largest)
  int64_t top[kRowBlock];   // the key of the largest score
  Real norm[kRowBlock];     // squared norm of the query, for a distance

  int64_t rows() const { return heads * queries; }
  BlockRows range() const { return {b, h, heads, i, queries}; }
  int64_t head(int64_t r) const { return h + r / queries; }
  int64_t query(int64_t r) const { return i + r % queries; }
  // Calls body(row, its head, its query) for every row.
  template <class Body>
  void ForRows(const Body& body) const {
    for (int64_t n = 0; n < heads; ++n) {
      for (int64_t m = 0; m < queries; ++m) body(n * queries + m, h + n, i + m);
    }
  }
  // One past the last row of row r's head, at most `last`.
  int64_t EndOfHead(int64_t r, int64_t last) const {
    return std::min(last, (r / queries + 1) * queries);
  }
};

// The scratch memory of a worker.
struct TileScratch {
  Real* tile;           // kRowBlock x kForwardColumns
  Real* added;          // one row: terms added to its scores
  Real* key_products;   // window of products with the relative keys
  Real* entry_weights;  // window of weights, summed per entry of the relative values
  Real* of_keys;        // the tile's products with relative queries, kForwardColumns per row
  Real* key_parts;      // scratch for of_keys
  std::vector<TableRun> runs;
};

// Functions is ByTable or Inlined.
template <class Functions>
class ForwardTile {
 public:
  ForwardTile(const PairTable& table, const AttentionInput<Real>& in,
              const AttentionOutput<Real>& out)
      : functions_(table),
        in_(in),
        out_(out),
        n_(in.shape),
        group_(n_.heads / std::max<int64_t>(1, n_.key_heads)),
        dim_(functions_.has_product() ? n_.dim : 0),
        value_columns_(PaddedColumns(n_.value_dim)),
        pairs_(MultipliesPairs(in, dim_)),
        panel_rows_(pairs_ ? DivideUp(dim_, 2) : dim_),
        in_place_(MultipliesInPlace(n_, pairs_)),
        pairs_values_(pairs_ && !in_place_),
        heads_in_block_(std::clamp<int64_t>(kRowBlock / std::max<int64_t>(1, n_.queries), 1,
                                            std::max<int64_t>(1, group_))),
        addends_(in, kForwardColumns, {.multiply = true, .add_product = false},
                 {.multiply = false, .add_product = true}, /*key_gradient=*/false),
        segments_(in.mask, n_),
        positions_(in) {}

  const AttentionInput<Real>& in() const { return in_; }
  // The number of query heads per key head.
  int64_t group() const { return group_; }
  // The number of columns of the tokens; 0 if there is no product.
  int64_t dim() const { return dim_; }
  // The number of columns of the values, padded to whole vectors.
  int64_t value_columns() const { return value_columns_; }
  // Whether tokens are multiplied as bfloat16 pairs.
  bool pairs() const { return pairs_; }
  // The number of columns of a token, or of pairs of columns.
  int64_t panel_rows() const { return panel_rows_; }
  // Whether keys and values are read in place.
  bool in_place() const { return in_place_; }
  Addends& addends() { return addends_; }
  const Segments& segments() const { return segments_; }

  // The number of floats in a worker's scratch memory.
  int64_t scratch_size() const {
    const PositionToContent& of_keys = addends_.position_to_content();
    return (kRowBlock + 1) * kForwardColumns + 2 * addends_.window_size() +
           (of_keys.exists() ? kRowBlock * kForwardColumns : 0) + of_keys.scratch_size();
  }
  TileScratch MakeScratch(Real* memory) const {
    TileScratch scratch{};
    scratch.tile = memory;
    scratch.added = scratch.tile + kRowBlock * kForwardColumns;
    scratch.key_products = scratch.added + kForwardColumns;
    scratch.entry_weights = scratch.key_products + addends_.window_size();
    scratch.of_keys = scratch.entry_weights + addends_.window_size();
    scratch.key_parts = scratch.of_keys;
    if (addends_.position_to_content().exists()) {
      scratch.key_parts += kRowBlock * kForwardColumns;
    }
    return scratch;
  }

  // The number of floats per block: its sums and, if it has several heads or its tokens are paired
  // or widened, a contiguous copy of these tokens.
  int64_t block_size() const {
    return kRowBlock * (value_columns_ + (copies_queries() ? panel_rows_ : 0));
  }
  // The number of blocks of queries per key head.
  int64_t blocks() const {
    return DivideUp(group_, heads_in_block_) * DivideUp(n_.queries, kRowBlock);
  }
  // The queries of a block. The first task gets the last block, which has the most work under a
  // causal mask.
  KeyRange QueriesOf(int64_t index) const {
    const int64_t in_head = DivideUp(n_.queries, kRowBlock);
    const int64_t begin = (in_head - 1 - index % in_head) * kRowBlock;
    return {begin, std::min(begin + kRowBlock, n_.queries)};
  }
  // Block `index` of a key head, restricted to `queries`.
  void SetBlock(int64_t b, int64_t key_head, int64_t index, KeyRange queries_of_block, Real* memory,
                QueryBlock& block) const {
    const int64_t first_head = index / DivideUp(n_.queries, kRowBlock) * heads_in_block_;
    block.b = b;
    block.h = key_head * group_ + first_head;
    block.heads = std::min(heads_in_block_, group_ - first_head);
    block.i = queries_of_block.begin;
    block.queries = queries_of_block.end - queries_of_block.begin;
    block.sum = memory;
    block.x = {};
    std::fill_n(block.largest, block.rows(), -kInfinity);
    std::fill_n(block.weight, kRowBlock, 0.0f);
    std::fill_n(block.top, block.rows(), 0);
    std::fill_n(block.norm, block.rows(), 0.0f);
    std::fill_n(block.sum, block.rows() * value_columns_, 0.0f);
    if (dim_ == 0) return;
    RowReader queries(in_.x, dim_);
    if (!copies_queries()) {
      block.x = {queries.Row(b, block.h, block.i), Size(in_.x.stride[2]), 1};
    }
    Real* const copy = memory + kRowBlock * value_columns_;
    block.ForRows([&](int64_t r, int64_t h, int64_t i) HWY_ATTR {
      if (pairs_) PairColumns(in_.x.row(b, h, i), 0, dim_, copy + r * panel_rows_);
      if (pairs_ && !functions_.is_distance()) return;
      const Real* x = queries.Row(b, h, i);
      if (copies_queries() && !pairs_) {
        std::copy_n(x, dim_, copy + r * dim_);
      }
      if (functions_.is_distance()) block.norm[r] = SquaredNorm(x, dim_);
    });
    if (copies_queries()) block.x = {copy, Size(panel_rows_), 1};
  }

  // Whether segments or the user's mask may hide a pair of the block with the keys.
  bool HidesPairs(const QueryBlock& block, KeyRange keys) const {
    if (segments_.exists()) {
      // Bounds of keys are stored per cell.
      constexpr int64_t kKnown = Skipping::kCell;
      const KeyRange of_batch = BatchKeys(in_.mask, n_.keys, block.b);
      const KeyRange own = segments_.SeenBy(block.b, block.i);
      if (segments_.EndOfRows(block.b, block.i) < block.i + block.queries ||
          segments_.Mixed(block.b, block.i) ||
          std::max(of_batch.begin, keys.begin / kKnown * kKnown) < own.begin ||
          std::min(of_batch.end, RoundUp(keys.end, kKnown)) > own.end) {
        return true;
      }
    }
    if (!addends_.pair_mask().exists()) return false;
    constexpr int64_t kCell = PairMask::kCell;
    for (int64_t j = keys.begin; j < keys.end; j = (j / kCell + 1) * kCell) {
      if (addends_.pair_mask().Hides(block.b, block.h, block.heads, block.i, j)) return true;
    }
    return false;
  }

  // Sets the mask of a block and `width` keys starting at `first`.
  void SetMask(const QueryBlock& block, KeyRange batch, int64_t first, int64_t width,
               TileMask* mask) const {
    width = std::min(width, n_.keys - first);
    batch = segments_.Narrowed(batch, block.b, block.i, block.i + block.queries);
    if (positions_.exists()) {
      mask->Set(positions_, batch, block.b, block.i, block.queries, first, width);
    } else {
      mask->Set(in_.mask, batch, QueryOffset(in_, block.b) + block.i, block.queries, first, width);
    }
    mask->SetSegments(segments_, block.b, block.i, block.queries, first);
    mask->Repeat(block.queries, block.heads);
    mask->SetPairs(addends_.pair_mask(), block.b, block.h, block.heads, block.i, block.queries,
                   first);
  }

  // Adds a tile's keys to all rows of a block.
  void AddTile(QueryBlock& block, const TileMask& mask, TileKeys& keys,
               TileScratch& scratch) const {
    const PositionToContent& of_keys = addends_.position_to_content();
    for (int64_t n = 0; of_keys.exists() && n < block.heads; ++n) {
      of_keys.Products<kForwardColumns>(
          block.b, block.h + n, block.i, block.queries, keys.first, mask.begin, mask.end,
          scratch.of_keys + n * block.queries * kForwardColumns, scratch.key_parts, &scratch.runs);
    }
    // Rows with different visible ranges are processed in small groups, each over its own range.
    const bool groups = mask.partial && !in_place_;
    const int64_t step = groups ? static_cast<int64_t>(kMicroRows) : block.rows();
    for (int64_t r = 0; r < block.rows(); r += step) {
      AddKeys(block, mask, r, std::min(r + step, block.rows()), keys, scratch);
    }
  }

  // Writes a row's results from its sums. log2_weight is ignored if the weight is 0.
  void WriteRow(int64_t b, int64_t h, int64_t i, const Real* sum, Real weight, Real log2_weight,
                Real largest, int64_t top) const {
    const Real scale = weight == 0.0f ? 0.0f : 1.0f / weight;
    Real* o = out_.o.row(b, h, i);
    for (int64_t e = 0; e < n_.value_dim; ++e) o[e] = sum[e] * scale;
    const int64_t row = (b * n_.heads + h) * n_.queries + i;
    out_.lse[row] = weight == 0.0f ? -kInfinity : (largest + log2_weight) * kLn2;
    if (out_.statistics == nullptr) return;
    const int64_t rows = n_.batch * n_.heads * n_.queries;
    out_.statistics[row] = largest;
    out_.statistics[rows + row] = weight;
    out_.statistics[2 * rows + row] = TopKey(weight, top);
  }

  // Writes the results of a block that has received all keys.
  void Finish(const QueryBlock& block) const {
    const DF d;
    HWY_ALIGN Real log2_weight[kRowBlock];
    for (int64_t r = 0; r < block.rows(); r += kLaneCount) {
      hn::Store(Log(hn::LoadU(d, block.weight + r)) * hn::Set(d, kLog2E), d, log2_weight + r);
    }
    block.ForRows([&](int64_t r, int64_t h, int64_t i) {
      WriteRow(block.b, h, i, block.sum + r * value_columns_, block.weight[r], log2_weight[r],
               block.largest[r], block.top[r]);
    });
  }

 private:
  bool copies_queries() const { return pairs_ || heads_in_block_ > 1 || TypeOf(in_.x) != kOwnType; }

  // Adds a tile's keys to rows [first_row, last_row) of a block.
  void AddKeys(QueryBlock& block, const TileMask& mask, int64_t first_row, int64_t last_row,
               TileKeys& keys, TileScratch& scratch) const {
    const RowSpan seen = mask.Seen(first_row, last_row);
    if (seen.end <= seen.begin) return;
    const size_t rows = Size(last_row - first_row);
    Real* tile = scratch.tile + first_row * kForwardColumns;
    Real* sum = block.sum + first_row * value_columns_;
    const Real* x = block.x.data + first_row * static_cast<int64_t>(block.x.row);
    // The span is rounded to whole vectors.
    const RowSpan span{seen.begin / kLaneCount * kLaneCount, RoundUp(seen.end, kLaneCount)};
    if (dim_ > 0 && in_place_) {
      MultiplyKeys(in_.y, block.b, block.h / group_, BatchKeys(in_.mask, n_.keys, block.b), dim_,
                   pairs_, keys.first, span.begin, span.end, rows, x, block.x.row, tile,
                   Size(kForwardColumns));
    }
    for (int64_t c = span.begin; keys.panels != nullptr && c < span.end;) {
      const size_t vectors = VectorsOfPanel(c, span.end);
      const Real* panel = keys.panels + c / kWidth * kWidth * panel_rows_ + c % kWidth;
      if (pairs_) {
        MultiplyPairs(rows, vectors, Size(panel_rows_), x, block.x.row, panel, kPanel, tile + c,
                      Size(kForwardColumns));
      } else {
        Multiply(rows, vectors, Size(dim_), {x, block.x.row, 1}, panel, kPanel, tile + c,
                 Size(kForwardColumns));
      }
      c += static_cast<int64_t>(vectors) * kLaneCount;
    }
    const bool hidden = mask.segmented || mask.paired || mask.placed;
    bool masked = mask.HidesWithin(span, first_row, last_row) || hidden;
    // Only values that some row sees are read; pairs are read in whole vectors.
    bool hides_values =
        pairs_values_ ? masked : mask.HidesWithin(seen, first_row, last_row) || hidden;
    for (int64_t r = first_row; r < last_row;) {
      const int64_t end = block.EndOfHead(r, last_row);
      const bool masks = addends_.masks(block.b, block.head(r));
      masked = masks || masked;
      hides_values = masks || hides_values;
      AddHead(block, mask, r, end, seen, span, masked, keys, scratch);
      r = end;
    }
    if (hides_values && HoldsNonFinite(block, keys)) {
      return AddVisibleValues(block, mask, first_row, last_row, seen, span, keys, scratch);
    }
    AddValues(tile, rows, seen, span, keys, sum);
  }

  // Adds weights (0 where masked) times values. `tile` points to the weight of the tile's first
  // key.
  void AddValues(Real* tile, size_t rows, RowSpan seen, RowSpan span, const TileKeys& keys,
                 Real* sum) const {
    if (pairs_values_) return AddPairedValues(tile, rows, span, keys.values, sum);
    const size_t count = Size(seen.end - seen.begin);
    if (in_place_) {
      RowsInPlace values = keys.values_in_place;
      values.data = values.row(seen.begin);
      return AddInPlace(rows, count, tile + seen.begin, values, sum);
    }
    MultiplyAdd(rows, Size(value_columns_) / kLanes, count,
                {tile + seen.begin, Size(kForwardColumns), 1}, keys.values.row(seen.begin),
                Size(keys.values.stride), sum, Size(value_columns_));
  }

  void AddInPlace(size_t rows, size_t count, const Real* weights, RowsInPlace values,
                  Real* sum) const {
    if constexpr (kMostRowsInPlace > 0) {
      MultiplyAddRows(rows, count, Size(n_.value_dim), weights, Size(kForwardColumns), values, sum,
                      Size(value_columns_));
    }
  }

  // Like AddValues, with weights and values as bfloat16 pairs. Rounds the weights in place.
  void AddPairedValues(Real* tile, size_t rows, RowSpan span, Rows values, Real* sum) const {
    // Each step reads two vectors before it writes one, so weights that have not been read yet are
    // never overwritten.
    const int64_t begin = span.begin / (2 * kLaneCount) * (2 * kLaneCount);
    const int64_t end = RoundUp(span.end, 2 * kLaneCount);
    for (int64_t r = 0; r < static_cast<int64_t>(rows); ++r) {
      Real* row = tile + r * kForwardColumns;
      RoundToPairs(row + begin, Size(end - begin), row + begin / 2);
    }
    MultiplyAddPairs(rows, Size(value_columns_) / kLanes, Size(span.end - span.begin) / 2,
                     tile + span.begin / 2, Size(kForwardColumns), values.row(span.begin / 2),
                     Size(values.stride), sum, Size(value_columns_));
  }

  // Turns the inner products of rows [first_row, last_row), all of one head, into weights, and adds
  // relative values.
  void AddHead(QueryBlock& block, const TileMask& mask, int64_t first_row, int64_t last_row,
               RowSpan seen, RowSpan span, bool masked, const TileKeys& keys,
               TileScratch& scratch) const {
    const int64_t h = block.head(first_row);
    const int64_t query = block.query(first_row);
    const int64_t rows = last_row - first_row;
    TableWindow products = addends_.Window(block.b, query, rows, keys.first + seen.begin,
                                           keys.first + seen.end, scratch.key_products);
    if (addends_.keys().exists()) addends_.MultiplyKeys(block.b, h, query, rows, products);
    TableWindow weights = products;
    weights.data = scratch.entry_weights;
    PairRow pairs = LoadHead(functions_, in_, block.b, h, h / group_, keys.first + span.begin,
                             {pairs_ ? nullptr : keys.panels, dim_, span.begin});
    for (int64_t r = first_row; r < last_row; ++r) {
      const TileRow row{block.b,
                        h,
                        query + r - first_row,
                        keys.first + span.begin,
                        span.end - span.begin,
                        keys.first + seen.begin,
                        keys.first + seen.end,
                        mask.paired,
                        addends_.Temperature(block.b, h, query + r - first_row),
                        mask.placed};
      Real* const tile = scratch.tile + r * kForwardColumns + span.begin;
      AddWeights(block, r, row, pairs, masked, mask.rows[r], span.begin,
                 addends_.keys().exists() ? products.Row(r - first_row) : nullptr, products, keys,
                 scratch);
      if (addends_.drops()) addends_.Drop(row, tile);
      if (addends_.values().exists()) {
        weights.ClearRow(r - first_row);
        addends_.AddWeights(row, tile, weights.Row(r - first_row), weights, &scratch.runs);
      }
    }
    if (addends_.values().exists()) {
      addends_.values().AddProduct(h, rows, weights, block.sum + first_row * value_columns_);
    }
  }

  // Turns the inner products of row r, starting at tile column `begin`, into weights. `row` comes
  // from LoadHead.
  GNOMON_FLATTEN void AddWeights(QueryBlock& block, int64_t r, const TileRow& at, PairRow& row,
                                 bool masked, RowSpan visible, int64_t begin,
                                 const Real* key_products, const TableWindow& window,
                                 const TileKeys& keys, TileScratch& scratch) const {
    const int64_t columns = at.count;
    Real* tile = scratch.tile + r * kForwardColumns + begin;
    const Real row_factor = in_.factor[at.h] * at.temperature;
    LoadRow(functions_, in_, block.b, at.h, at.i, row_factor, block.norm[r], row);
    ColumnScalars::Pointers scalars = keys.scalars;
    for (int s = 0; s < column_numbers(); ++s) scalars[Size(s)] += begin;
    const Real factor = row_factor * kLog2E;
    RowView view;
    view.span = {visible.begin - begin, visible.end - begin};
    if (segments_.Mixed(block.b, at.i)) {
      view.segments = segments_.Keys(block.b, at.begin);
      view.segment = segments_.Query(block.b, at.i);
    }
    if (at.placed) {
      view.positions = positions_.Keys(block.b, at.begin);
      const Positions::Range sees = positions_.SeenBy(block.b, at.i);
      view.low = sees.low;
      view.high = sees.high;
    }
    view.FindOpen(kLaneCount);
    const bool masks_any = at.paired || addends_.masks(block.b, at.h);
    const int64_t open = !masked ? columns : masks_any ? 0 : OpenColumns(view, columns);
    Real top;
    if (addends_.to_scores() || at.paired) {
      const Real* const of_keys = addends_.position_to_content().exists()
                                      ? scratch.of_keys + r * kForwardColumns + begin
                                      : nullptr;
      const Real* bias =
          addends_.ScoreRow(at, key_products, window, of_keys, scratch.added, &scratch.runs);
      top = functions_.template Scores<true>(tile, columns, open, row, scalars.data(), factor, bias,
                                             view);
    } else {
      top = functions_.template Scores<false>(tile, columns, open, row, scalars.data(), factor,
                                              nullptr, view);
    }
    if (addends_.caps()) top = addends_.CapScores(columns, tile);
    const bool rises = top > block.largest[r];
    // For the first tile, the sums are still 0.
    if (rises && block.largest[r] != -kInfinity) {
      const Real shrink = std::exp2(block.largest[r] - top);
      block.weight[r] *= shrink;
      ScaleRow(block.sum + r * value_columns_, value_columns_, shrink);
    }
    if (rises) block.largest[r] = top;
    // If all scores so far are -inf (or NaN), any finite shift gives weights of 0 (or NaN).
    const Real shift = block.largest[r] == -kInfinity ? 0.0f : block.largest[r];
    block.weight[r] += RowWeights(tile, columns, shift);
    // The backward pass needs the key of the largest score.
    if (rises && out_.statistics != nullptr) block.top[r] = at.begin + FindOne(tile, columns);
  }

  bool HoldsNonFinite(const QueryBlock& block, TileKeys& keys) const {
    if (!keys.non_finite) {
      const KeyRange batch = BatchKeys(in_.mask, n_.keys, block.b);
      keys.non_finite =
          HasNonFinite(in_.v, block.b, block.h / group_, std::max(keys.first, batch.begin),
                       std::min(keys.first + kForwardColumns, batch.end), n_.value_dim);
    }
    return *keys.non_finite;
  }

  // Like AddValues, for tiles with non-finite values: processes each row separately, with hidden
  // non-finite values replaced by 0. The result is bitwise identical to the result for finite
  // hidden values.
  void AddVisibleValues(QueryBlock& block, const TileMask& mask, int64_t first_row,
                        int64_t last_row, RowSpan seen, RowSpan span, const TileKeys& keys,
                        TileScratch& scratch) const {
    const int64_t key_head = block.h / group_;
    std::vector<int64_t> spoiled;
    const int64_t end = std::min(span.end, n_.keys - keys.first);
    for (int64_t j = span.begin; j < end; ++j) {
      if (HasNonFinite(in_.v, block.b, key_head, keys.first + j, keys.first + j + 1,
                       n_.value_dim)) {
        spoiled.push_back(j);
      }
    }
    // With pairs, each row of the copy holds two values.
    const int64_t in_row = pairs_values_ ? 2 : 1;
    const auto rows = Size(DivideUp(kForwardColumns, in_row));
    std::vector<Real> copy(rows * Size(value_columns_));
    TileKeys copied = keys;
    copied.values = {copy.data(), value_columns_};
    copied.values_in_place = {copy.data(), value_columns_};
    const auto copy_row = [&](int64_t row) {
      Real* const to = copy.data() + row * value_columns_;
      if (in_place_) {
        Widen(keys.values_in_place.row(row), TypeOf(in_.v), 0, n_.value_dim, to);
      } else {
        std::copy_n(keys.values.row(row), value_columns_, to);
      }
    };
    // With floats, no row past the last key may be read.
    const RowSpan read = pairs_values_ ? span : seen;
    for (int64_t row = read.begin / in_row; row < DivideUp(read.end, in_row); ++row) copy_row(row);
    for (int64_t r = first_row; r < last_row; ++r) {
      for (const int64_t j : spoiled) copy_row(j / in_row);
      for (const int64_t j : spoiled) {
        if (Sees(block, mask, r, j, keys, scratch)) continue;
        Real* hidden = copy.data() + j / in_row * value_columns_;
        for (int64_t e = 0; e < value_columns_; ++e) {
          hidden[e] = pairs_values_ ? WithoutHalf(hidden[e], j % 2 != 0) : 0.0f;
        }
      }
      AddValues(scratch.tile + r * kForwardColumns, 1, seen, span, copied,
                block.sum + r * value_columns_);
    }
  }

  // Whether row r of a block sees column j of a tile.
  bool Sees(const QueryBlock& block, const TileMask& mask, int64_t r, int64_t j,
            const TileKeys& keys, TileScratch& scratch) const {
    if (j < mask.rows[r].begin || j >= mask.rows[r].end) return false;
    const int64_t h = block.head(r);
    const int64_t i = block.query(r);
    if (segments_.exists() &&
        *segments_.Keys(block.b, keys.first + j) != segments_.Query(block.b, i)) {
      return false;
    }
    if (mask.placed) {
      const int32_t at = *positions_.Keys(block.b, keys.first + j);
      const Positions::Range seen = positions_.SeenBy(block.b, i);
      if (at < seen.low || at >= seen.high) return false;
    }
    if (!addends_.masks(block.b, h) && !mask.paired) return true;
    const int64_t begin = keys.first + j / kLaneCount * kLaneCount;
    const TileRow row{block.b,     h,   i, begin, kLaneCount, keys.first + j, keys.first + j + 1,
                      mask.paired, 1.0f};
    const Real* bias = addends_.ScoreRow(row, nullptr, {}, nullptr, scratch.added, &scratch.runs);
    return bias[j % kLaneCount] != -kInfinity;
  }

  // The number of column scalars, plus one for the squared norm of a distance.
  int column_numbers() const {
    return functions_.column_scalars() + (functions_.is_distance() ? 1 : 0);
  }

  Functions functions_;
  const AttentionInput<Real>& in_;
  const AttentionOutput<Real>& out_;
  const AttentionShape& n_;
  int64_t group_;
  int64_t dim_;
  int64_t value_columns_;
  bool pairs_;
  int64_t panel_rows_;
  bool in_place_;
  bool pairs_values_;  // whether values are packed as pairs
  int64_t heads_in_block_;
  Addends addends_;
  Segments segments_;
  Positions positions_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
