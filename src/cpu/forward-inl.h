// The forward pass of the fused operator, for one instruction set.
//
// A tile is a block of query rows by a block of keys. One product computes its scores, which become
// weights in cache; a second product multiplies them by the values. Keys are packed as transposed
// panels of kPanel columns, so that both products use the same microkernel. The shape selects the
// schedule:
//
//   Key heads with many queries: all keys are packed first, and each block of queries is a task.
//   If there are many such heads, each head is one task that packs its own keys.
//
//   Key heads with few queries (short sequences, decoding): a task is a range of keys with all
//   queries. It packs its keys one tile at a time, in cache. Partial results are merged at the end.
//
//   Key heads with so few queries that packing would cost as much as the products: keys and values
//   are read in place.
//
// The shape alone determines how row sums are split into parts, and the parts are merged in a fixed
// order. Results therefore do not depend on the number of workers.
#if defined(GNOMON_SRC_CPU_FORWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_FORWARD_INL_H_
#undef GNOMON_SRC_CPU_FORWARD_INL_H_
#else
#define GNOMON_SRC_CPU_FORWARD_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <vector>

#include "base/call_log.h"
#include "base/pair_count.h"
#include "base/parallel.h"
#include "base/visible_keys.h"
#include "cpu/bfloat16.h"
#include "cpu/gemm-inl.h"
#include "cpu/mask-inl.h"
#include "cpu/packing-inl.h"
#include "cpu/row_products-inl.h"
#include "cpu/rows-inl.h"
#include "cpu/skipping-inl.h"
#include "cpu/terms-inl.h"
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

// Functions is ByTable or Inlined.
template <class Functions>
class ForwardPass {
 public:
  ForwardPass(const PairTable& table, const AttentionInput<Real>& in,
              const AttentionOutput<Real>& out, const Executor& executor)
      : functions_(table),
        in_(in),
        out_(out),
        executor_(executor),
        n_(in.shape),
        group_(n_.heads / std::max<int64_t>(1, n_.key_heads)),
        dim_(functions_.has_product() ? n_.dim : 0),
        value_columns_(PaddedColumns(n_.value_dim)),
        pairs_(MultipliesPairs(in, dim_)),
        panel_rows_(pairs_ ? DivideUp(dim_, 2) : dim_),
        packs_all_(group_ * n_.queries > kFewRows),
        in_place_(MultipliesInPlace(n_, pairs_)),
        pairs_values_(pairs_ && !in_place_),
        heads_in_block_(std::clamp<int64_t>(kRowBlock / std::max<int64_t>(1, n_.queries), 1,
                                            std::max<int64_t>(1, group_))),
        head_tasks_(n_, executor_, packs_all_ ? blocks() : 0),
        keys_(in.y, head_tasks_.keys(), packs_all_ && dim_ > 0 ? n_.keys : 0, dim_, pairs_),
        values_(in.v, head_tasks_.keys(), packs_all_ && !pairs_ ? n_.keys : 0, n_.value_dim),
        scalars_(in, table, head_tasks_.keys(), packs_all_ ? n_.keys : 0),
        terms_(in, kForwardColumns, {.multiply = true, .add_product = false},
               {.multiply = false, .add_product = true}, /*key_gradient=*/false),
        segments_(in.mask, n_),
        skipping_(in, table),
        positions_(in) {
    if (pairs_ && packs_all_) {
      paired_values_.Reset(head_tasks_.keys().count * keys_.count() * kWidth / 2 * value_columns_);
    }
  }

  void Run() {
    if (call_plan != nullptr) *call_plan = plan();
    if (packs_all_) {
      RunBlocks();
    } else {
      RunParts();
    }
  }

 private:
  CallPlan plan() const {
    const char* const keys = packs_all_  ? "packs all keys first"
                             : in_place_ ? "reads keys and values in place"
                                         : "packs keys within each task";
    return {keys, pairs_, skipping_.active()};
  }

  // With at most this many rows per key head, tasks pack their own keys.
  static constexpr int64_t kFewRows = 256;
  // The bounds for skipping are updated after this many tiles.
  static constexpr int64_t kSumsAnew = 4;

  // A tile's keys, packed or in place.
  struct Keys {
    int64_t first;  // a multiple of kWidth
    // Columns [p * kWidth, (p + 1) * kWidth) of the tile start at p * panel_rows_ * kWidth.
    const Real* panels;
    Rows values;                      // starting at key `first`; floats or bfloat16 pairs
    RowsInPlace values_in_place;      // starting at key `first`, if values are not packed
    ColumnScalars::Pointers scalars;  // starting at key `first`
    std::optional<bool> non_finite;   // whether any value visible to the batch is non-finite
  };

  // A block of rows: queries [i, i + queries) of `heads` query heads that share a key head. Holds
  // the rows' running sums.
  struct Block {
    int64_t b;
    int64_t h;
    int64_t heads;
    int64_t i;
    int64_t queries;
    Strided x;                // the rows' tokens
    Real* sum;                // kRowBlock x value_columns_: accumulated weights times values
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

  struct TileQueue;

  // The scratch memory of a worker.
  struct Scratch {
    Real* tile;           // kRowBlock x kForwardColumns
    Real* added;          // one row: terms added to its scores
    Real* key_products;   // window of products with the relative keys
    Real* entry_weights;  // window of weights, summed per entry of the relative values
    Real* of_keys;        // the tile's products with relative queries, kForwardColumns per row
    Real* key_parts;      // scratch for of_keys
    std::vector<TableRun> runs;
  };
  int64_t scratch_size() const {
    const PositionToContent& of_keys = terms_.position_to_content();
    return (kRowBlock + 1) * kForwardColumns + 2 * terms_.window_size() +
           (of_keys.exists() ? kRowBlock * kForwardColumns : 0) + of_keys.scratch_size();
  }
  Scratch MakeScratch(Real* memory) const {
    Scratch scratch{};
    scratch.tile = memory;
    scratch.added = scratch.tile + kRowBlock * kForwardColumns;
    scratch.key_products = scratch.added + kForwardColumns;
    scratch.entry_weights = scratch.key_products + terms_.window_size();
    scratch.of_keys = scratch.entry_weights + terms_.window_size();
    scratch.key_parts = scratch.of_keys;
    if (terms_.position_to_content().exists()) {
      scratch.key_parts += kRowBlock * kForwardColumns;
    }
    return scratch;
  }

  // The number of floats per block: its sums and, if it has several heads or its tokens are paired
  // or widened, a contiguous copy of these tokens.
  int64_t block_size() const {
    return kRowBlock * (value_columns_ + (copies_queries() ? panel_rows_ : 0));
  }
  bool copies_queries() const { return pairs_ || heads_in_block_ > 1 || TypeOf(in_.x) != kOwnType; }
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
                Block& block) const {
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

  // Packs all keys, then runs the blocks of queries; if each task is a whole head, does both head
  // by head.
  void RunBlocks() {
    const int64_t heads = n_.batch * n_.key_heads;
    const int64_t panels = DivideUp(n_.keys, kWidth);
    // Hidden non-finite values must be removed, because a weight of 0 times NaN or infinity is NaN.
    const bool hides = in_.mask.left != kUnbounded || in_.mask.right != kUnbounded ||
                       in_.mask.chunks.size > 0 || terms_.to_scores() || segments_.exists() ||
                       terms_.pair_mask().exists();
    if (hides) non_finite_.assign(Size(heads * panels), 0);
    const int64_t packs = head_tasks_.whole() ? 0 : heads * panels;
    const int64_t packs_and_terms = packs + terms_.tasks();
    ParallelTasks(executor_, packs_and_terms + skipping_.tasks(), [&](int64_t task, int) {
      if (task >= packs_and_terms) return skipping_.Fill(task - packs_and_terms);
      if (task >= packs) return terms_.Fill(task - packs);
      Pack(task / panels, task % panels);
    });
    const int64_t in_head = blocks();
    const int64_t tasks = head_tasks_.whole() ? heads : heads * in_head;
    const int64_t size = scratch_size() + block_size();
    const Buffer memory(size * WorkersFor(executor_, tasks));
    std::vector<TileQueue> queues(skipping_.active() ? Size(WorkersFor(executor_, tasks)) : 0);
    ParallelTasks(executor_, tasks, [&](int64_t task, int worker) {
      Real* const own = memory.data() + worker * size;
      TileQueue* const queue = queues.empty() ? nullptr : &queues[Size(worker)];
      if (!head_tasks_.whole()) return RunBlock(task / in_head, task % in_head, own, queue);
      head_tasks_.Assign(task, worker);
      for (int64_t p = 0; p < panels; ++p) Pack(task, p);
      for (int64_t n = 0; n < in_head; ++n) RunBlock(task, n, own, queue);
    });
  }

  // Runs block `index` of a key head's queries. Each segment runs separately, so that its tiles do
  // not depend on the other segments.
  void RunBlock(int64_t head, int64_t index, Real* memory, TileQueue* queue) const {
    const KeyRange queries = QueriesOf(index);
    for (int64_t begin = queries.begin; begin < queries.end;) {
      const int64_t end =
          segments_.exists()
              ? std::min(queries.end, segments_.EndOfRows(head / n_.key_heads, begin))
              : queries.end;
      RunRows(head, index, {begin, end}, memory, queue);
      begin = end;
    }
  }
  void RunRows(int64_t head, int64_t index, KeyRange queries, Real* memory,
               TileQueue* queue) const {
    const int64_t b = head / n_.key_heads;
    Scratch scratch = MakeScratch(memory);
    Block block;
    SetBlock(b, head % n_.key_heads, index, queries, memory + scratch_size(), block);
    const KeyRange batch =
        segments_.Narrowed(BatchKeys(in_.mask, n_.keys, b), b, queries.begin, queries.end);
    TileMask seen;
    SetMask(block, batch, 0, n_.keys, &seen);
    if (skipping_.Active(block.range())) {
      AddTilesInOrder(block, batch, seen, *queue, scratch);
    } else {
      for (int64_t first = seen.begin / kWidth * kWidth; first < seen.end;
           first += kForwardColumns) {
        AddPackedTile(block, batch, {first, first + kForwardColumns}, 0, scratch);
      }
      const int64_t pairs = block.rows() * std::max<int64_t>(0, seen.end - seen.begin);
      AddPairs(pairs, pairs);
    }
    Finish(block);
  }

  // Adds a fully packed tile of keys to the rows of a block that do not skip it.
  void AddPackedTile(Block& block, KeyRange batch, KeyRange tile, uint64_t left_out,
                     Scratch& scratch) const {
    TileMask mask;
    SetMask(block, batch, tile.begin, tile.end - tile.begin, &mask);
    if (mask.end <= mask.begin) return;
    mask.LeaveOut(left_out, block.rows());
    Keys keys = PackedKeys(block.b, block.h / group_, tile.begin);
    AddTile(block, mask, keys, scratch);
  }

  // The tiles of a block in processing order, if some may be skipped. The order starts at the
  // largest offset biases and moves outwards, so that rows accumulate most of their weight early.
  // One tile ends at the block's own positions, or half a tile later, so that all rows see most of
  // that tile.
  struct TileQueue {
    std::vector<KeyRange> tiles;
    std::vector<Real> largest;  // largest bias per tile
    std::vector<int64_t> order;
    std::vector<Real> bounds;  // kRowBlock per tile, in processing order
    Real top[kRowBlock];       // largest bias per head
    RowBounds rows;
    // If the first tiles form a separate part: their number (0: nothing is skipped), and the range
    // of keys visible to all rows.
    int64_t first_tiles = 0;
    KeyRange open;

    bool IsFirst(int64_t key) const {
      return std::any_of(order.begin(), order.begin() + first_tiles, [&](int64_t n) {
        return key / kForwardColumns == tiles[Size(n)].begin / kForwardColumns;
      });
    }
  };

  // With `even`, tiles start at multiples of their width.
  void SetOrder(const Block& block, const TileMask& seen, bool even, TileQueue& queue) const {
    constexpr int64_t kAlign = Skipping::kCell;
    const BlockRows range = block.range();
    const int64_t begin = seen.begin / kAlign * kAlign;
    const int64_t end = RoundUp(seen.end, kAlign);
    const int64_t position =
        std::clamp(QueryOffset(in_, block.b) + block.i, begin - kRowBlock, end) + block.queries;
    int64_t own_end = RoundUp(position + (kForwardColumns - kRowBlock) / 2, kAlign);
    own_end = std::clamp(own_end, begin + kAlign, end);
    if (even) own_end = RoundUp(std::clamp(position, begin + 1, seen.end), kForwardColumns);
    int64_t first = own_end - DivideUp(own_end - begin, kForwardColumns) * kForwardColumns;
    const int64_t own = (own_end - first) / kForwardColumns - 1;
    queue.tiles.clear();
    queue.largest.clear();
    std::fill_n(queue.top, block.heads, -kInfinity);
    for (; first < end; first += kForwardColumns) {
      const KeyRange tile{std::max(first, begin), std::min(first + kForwardColumns, end)};
      Real largest = -kInfinity;
      for (int64_t h = 0; h < block.heads; ++h) {
        const Real bias = skipping_.OffsetBias(range, h, tile.begin, std::min(tile.end, n_.keys));
        queue.top[h] = std::max(queue.top[h], bias);
        largest = std::max(largest, bias);
      }
      queue.tiles.push_back(tile);
      queue.largest.push_back(largest);
    }
    const auto count = static_cast<int64_t>(queue.tiles.size());
    const auto distance = [own](int64_t n) { return n < own ? own - n : n - own; };
    // Whether tile n precedes tile m.
    const auto before = [&](int64_t n, int64_t m) {
      const Real of_n = queue.largest[Size(n)];
      const Real of_m = queue.largest[Size(m)];
      return of_n != of_m ? of_n > of_m : distance(n) < distance(m);
    };
    int64_t low = 0;
    for (int64_t n = 1; n < count; ++n) low = before(n, low) ? n : low;
    queue.order.assign(1, low);
    for (int64_t high = low + 1; low > 0 || high < count;) {
      const bool past = high == count || (low > 0 && !before(high, low - 1));
      queue.order.push_back(past ? --low : high++);
    }
  }

  // Sets the bounds of all tiles after the first. The bound is +inf if a row sees only part of a
  // tile. Returns false if no tile can be skipped.
  bool SetBounds(const Block& block, KeyRange batch, const TileMask& seen, const Real* sums,
                 TileQueue& queue) const {
    bool any = false;
    const BlockRows range = block.range();
    const Real gate = skipping_.Gate(range, sums);
    // Both ends of a row's range are monotonic in its position.
    const KeyRange open{seen.rows[block.queries - 1].begin, seen.rows[0].end};
    queue.bounds.resize(queue.order.size() * kRowBlock);
    for (size_t n = 1; n < queue.order.size(); ++n) {
      Real* const bound = queue.bounds.data() + n * kRowBlock;
      const KeyRange tile = queue.tiles[Size(queue.order[n])];
      const KeyRange keys{std::max(tile.begin, batch.begin), std::min(tile.end, batch.end)};
      if (keys.begin < open.begin || keys.end > open.end ||
          !skipping_.PassesGate(range, gate, keys.begin, keys.end) || HidesPairs(block, keys)) {
        std::fill_n(bound, kRowBlock, kInfinity);
      } else {
        if (!any) skipping_.SetRows(range, &queue.rows);
        any = true;
        skipping_.Bound(queue.rows,
                        skipping_.KeysOf(block.b, block.h / group_, keys.begin, keys.end),
                        keys.begin, keys.end, queue.top, bound);
      }
    }
    return any;
  }

  // Whether segments or the user's mask may hide a pair of the block with the keys.
  bool HidesPairs(const Block& block, KeyRange keys) const {
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
    if (!terms_.pair_mask().exists()) return false;
    constexpr int64_t kCell = PairMask::kCell;
    for (int64_t j = keys.begin; j < keys.end; j = (j / kCell + 1) * kCell) {
      if (terms_.pair_mask().Hides(block.b, block.h, block.heads, block.i, j)) return true;
    }
    return false;
  }

  void AddTilesInOrder(Block& block, KeyRange batch, const TileMask& seen, TileQueue& queue,
                       Scratch& scratch) const {
    if (seen.end <= seen.begin) return;
    SetOrder(block, seen, /*even=*/false, queue);
    const auto tiles = static_cast<int64_t>(queue.order.size());
    int64_t computed = 0;
    bool leaves_out = false;
    for (int64_t n = 0; n < tiles; ++n) {
      const bool anew = n == kSumsAnew && tiles > 2 * kSumsAnew && leaves_out;
      if (n == 1 || anew) {
        HWY_ALIGN Real sums[kRowBlock] = {};
        Skipping::SumsOf(block.largest, block.weight, block.rows(), -kInfinity, sums);
        if (n == 1) leaves_out = SetBounds(block, batch, seen, sums, queue);
        if (leaves_out) {
          skipping_.SetLimits(queue.bounds.data() + kRowBlock, tiles - 1, sums, &queue.rows);
        }
      }
      uint64_t left_out = 0;
      if (leaves_out) {
        left_out = Skipping::LeftOut(queue.rows, queue.bounds.data() + n * kRowBlock);
        if (left_out == Skipping::AllRows(queue.rows.range)) continue;
      }
      const KeyRange tile = queue.tiles[Size(queue.order[Size(n)])];
      AddPackedTile(block, batch, tile, left_out, scratch);
      computed += std::min(tile.end, seen.end) - std::max(tile.begin, seen.begin);
    }
    AddPairs(block.rows() * (seen.end - seen.begin), block.rows() * computed);
  }

  // Packs panel p of a key head's keys, and the corresponding values.
  void Pack(int64_t head, int64_t p) {
    const int64_t b = head / n_.key_heads;
    const int64_t h = head % n_.key_heads;
    const KeyRange keys = BatchKeys(in_.mask, n_.keys, b);
    const int64_t begin = std::max(keys.begin, p * kWidth);
    const int64_t end = std::min(keys.end, (p + 1) * kWidth);
    if (dim_ > 0) keys_.Fill(b, h, p, keys);
    scalars_.Fill(b, h, p, keys);
    if (pairs_) {
      PairRows(in_.v, b, h, p * kWidth, (p + 1) * kWidth, keys, n_.value_dim,
               PairedValues(b, h, p * kWidth));
    } else {
      values_.Fill(b, h, begin, end);
    }
    if (!non_finite_.empty()) {
      non_finite_[Size(head * DivideUp(n_.keys, kWidth) + p)] =
          HasNonFinite(in_.v, b, h, begin, end, n_.value_dim) ? 1 : 0;
    }
  }

  Keys PackedKeys(int64_t b, int64_t key_head, int64_t first) const {
    Keys keys{};
    keys.first = first;
    if (dim_ > 0) keys.panels = keys_.panel(b, key_head, first / kWidth);
    if (pairs_) {
      keys.values = {PairedValues(b, key_head, first), value_columns_};
    } else {
      const Rows values = values_.Head(b, key_head);
      keys.values = {values.row(first), values.stride};
    }
    keys.scalars = scalars_.At(b, key_head, first);
    const int64_t panels = DivideUp(n_.keys, kWidth);
    const int64_t last = std::min(panels, (first + kForwardColumns) / kWidth);
    const auto of_head = non_finite_.begin() + (b * n_.key_heads + key_head) * panels;
    keys.non_finite = !non_finite_.empty() && std::any_of(of_head + first / kWidth, of_head + last,
                                                          [](char flag) { return flag != 0; });
    return keys;
  }

  Real* PairedValues(int64_t b, int64_t key_head, int64_t first) const {
    const int64_t head = head_tasks_.keys().Of(b, key_head);
    return paired_values_.data() + (head * keys_.count() * kWidth + first) / 2 * value_columns_;
  }

  // Each task packs and processes a range of a key head's keys with all its queries; the results
  // are merged. If tiles may be skipped, the tiles with the largest biases form a separate first
  // part. Its weights determine which tiles the other parts can skip.
  void RunParts() {
    const int64_t tasks = terms_.tasks();
    ParallelTasks(executor_, tasks + skipping_.tasks(), [&](int64_t task, int) {
      if (task >= tasks) return skipping_.Fill(task - tasks);
      terms_.Fill(task);
    });
    const int64_t tiles = DivideUp(n_.keys, kForwardColumns);
    const int64_t heads = n_.batch * n_.key_heads;
    constexpr int64_t kTasks = 64;
    const int64_t most = std::clamp<int64_t>(DivideUp(kTasks, std::max<int64_t>(1, heads)), 1,
                                             std::max<int64_t>(1, tiles));
    const int64_t tiles_in_part = DivideUp(tiles, most);
    const int64_t even_parts =
        std::max<int64_t>(1, DivideUp(tiles, std::max<int64_t>(1, tiles_in_part)));
    const int64_t first_parts = LeavesOutParts(tiles) ? 1 : 0;
    parts_ = first_parts + even_parts;
    if (parts_ > 1)
      partial_.Reset(parts_ * n_.batch * n_.heads * n_.queries * (value_columns_ + 3));
    const int64_t size = scratch_size() + packed_size() + blocks() * block_size();
    const Buffer memory(size * WorkersFor(executor_, heads * even_parts));
    if (first_parts > 0) {
      queues_.resize(Size(heads * blocks()));
      ParallelTasks(executor_, heads, [&](int64_t head, int worker) {
        AddFirstPart(head / n_.key_heads, head % n_.key_heads, memory.data() + worker * size);
      });
    }
    ParallelTasks(executor_, heads * even_parts, [&](int64_t task, int worker) {
      const int64_t head = task / even_parts;
      const int64_t part = task % even_parts;
      AddPart(head / n_.key_heads, head % n_.key_heads, first_parts + part, part * tiles_in_part,
              std::min(tiles, (part + 1) * tiles_in_part), memory.data() + worker * size);
    });
    if (parts_ > 1) Merge();
  }

  // Whether parts with this many tiles benefit from skipping. For few rows, checking a tile takes
  // as long as computing it.
  bool LeavesOutParts(int64_t tiles) const {
    constexpr int64_t kLeastTiles = 8;
    constexpr int64_t kLeastRows = 16;
    if (tiles < kLeastTiles || group_ * n_.queries < kLeastRows) return false;
    if (!skipping_.active()) return false;
    for (int64_t head = 0; head < n_.batch * n_.heads; ++head) {
      if (skipping_.Active(head / n_.heads, head % n_.heads)) return true;
    }
    return false;
  }

  // Returns all blocks of a key head, with their sums in `memory`.
  std::unique_ptr<Block[]> AllBlocks(int64_t b, int64_t key_head, Real* memory) const {
    // The blocks are left uninitialised, because for few rows, clearing them would take as long as
    // the computation.
    std::unique_ptr<Block[]> all(new Block[Size(blocks())]);
    for (int64_t n = 0; n < blocks(); ++n) {
      SetBlock(b, key_head, n, QueriesOf(n), memory + n * block_size(), all[Size(n)]);
    }
    return all;
  }
  // The number of floats in a packed tile of keys.
  int64_t packed_size() const {
    return kForwardColumns * ((in_place_ ? 0 : panel_rows_ + value_columns_) + column_numbers());
  }
  Real* SumsIn(Real* packed) const { return packed + packed_size(); }

  // Adds the first tile of each block of a key head, or the first two if the first holds few keys.
  // The weights of these tiles determine which tiles rows can skip in the other parts.
  void AddFirstPart(int64_t b, int64_t key_head, Real* memory) {
    Scratch scratch = MakeScratch(memory);
    Real* const packed = memory + scratch_size();
    const std::unique_ptr<Block[]> all = AllBlocks(b, key_head, SumsIn(packed));
    const KeyRange batch = BatchKeys(in_.mask, n_.keys, b);
    for (int64_t n = 0; n < blocks(); ++n) {
      Block& block = all[Size(n)];
      TileQueue& queue = queues_[Size((b * n_.key_heads + key_head) * blocks() + n)];
      TileMask seen;
      SetMask(block, batch, 0, n_.keys, &seen);
      if (seen.begin < seen.end && skipping_.Active(block.range())) {
        SetOrder(block, seen, /*even=*/true, queue);
        const auto tiles = static_cast<int64_t>(queue.order.size());
        int64_t keys_seen = 0;
        queue.first_tiles = 0;
        while (queue.first_tiles < tiles && keys_seen < kForwardColumns / 2) {
          const KeyRange tile = queue.tiles[Size(queue.order[Size(queue.first_tiles++)])];
          keys_seen += std::min(tile.end, seen.end) - std::max(tile.begin, seen.begin);
          TileMask mask;
          SetMask(block, batch, tile.begin, tile.end - tile.begin, &mask);
          if (mask.end <= mask.begin) continue;
          const int64_t pairs = block.rows() * (mask.end - mask.begin);
          AddPairs(pairs, pairs);
          Keys keys = PackTile(b, key_head, tile.begin, batch, packed);
          AddTile(block, mask, keys, scratch);
        }
        HWY_ALIGN Real sums[kRowBlock] = {};
        Skipping::SumsOf(block.largest, block.weight, block.rows(), -kInfinity, sums);
        skipping_.SetRows(block.range(), &queue.rows);
        skipping_.SetEqualLimits(tiles, sums, &queue.rows);
        queue.open = {seen.rows[block.queries - 1].begin, seen.rows[0].end};
      }
      Save(block, 0);
    }
  }

  // Bounds for a tile of a part, computed on demand.
  struct TileBounds {
    std::optional<KeyBounds> keys;
    std::optional<bool> finite_values;
  };

  // The rows of a block that skip a tile of a part. The tile's keys are [tile.begin, tile.end).
  uint64_t LeftOutOfPart(const Block& block, const TileQueue& queue, KeyRange tile,
                         TileBounds& bounds) const {
    if (tile.begin < queue.open.begin || tile.end > queue.open.end || HidesPairs(block, tile) ||
        !skipping_.MayLeaveOut(queue.rows, tile.begin, tile.end)) {
      return 0;
    }
    const int64_t key_head = block.h / group_;
    if (!bounds.keys) {
      bounds.keys = skipping_.BoundKeys(block.b, key_head, tile, /*values=*/false);
    }
    HWY_ALIGN Real bound[kRowBlock] = {};
    skipping_.Bound(queue.rows, *bounds.keys, tile.begin, tile.end, queue.top, bound);
    const uint64_t left_out = Skipping::LeftOut(queue.rows, bound);
    if (left_out == 0) return 0;
    if (!bounds.finite_values) {
      bounds.finite_values =
          !HasNonFinite(in_.v, block.b, key_head, tile.begin, tile.end, n_.value_dim);
    }
    return *bounds.finite_values ? left_out : 0;
  }

  void AddPart(int64_t b, int64_t key_head, int64_t part, int64_t first_tile, int64_t last_tile,
               Real* memory) const {
    Scratch scratch = MakeScratch(memory);
    Real* const packed = memory + scratch_size();
    const std::unique_ptr<Block[]> all = AllBlocks(b, key_head, SumsIn(packed));
    const TileQueue* const queues =
        queues_.empty() ? nullptr : queues_.data() + (b * n_.key_heads + key_head) * blocks();
    const KeyRange batch = BatchKeys(in_.mask, n_.keys, b);
    for (int64_t tile = first_tile; tile < last_tile; ++tile) {
      const int64_t first = tile * kForwardColumns;
      const KeyRange in_tile{std::max(first, batch.begin),
                             std::min(first + kForwardColumns, batch.end)};
      std::optional<Keys> keys;
      TileBounds bounds;
      for (int64_t n = 0; n < blocks(); ++n) {
        Block& block = all[Size(n)];
        uint64_t left_out = 0;
        if (queues != nullptr && queues[n].first_tiles > 0) {
          if (queues[n].IsFirst(first)) continue;
          if (!in_tile.empty()) left_out = LeftOutOfPart(block, queues[n], in_tile, bounds);
        }
        TileMask mask;
        SetMask(block, batch, first, kForwardColumns, &mask);
        if (mask.end <= mask.begin) continue;
        const int64_t pairs = block.rows() * (mask.end - mask.begin);
        const bool computes = left_out != Skipping::AllRows(block.range());
        AddPairs(pairs, computes ? pairs : 0);
        if (!computes) continue;
        mask.LeaveOut(left_out, block.rows());
        if (!keys) keys = PackTile(b, key_head, first, batch, packed);
        AddTile(block, mask, *keys, scratch);
      }
    }
    for (int64_t n = 0; n < blocks(); ++n) {
      const Block& block = all[Size(n)];
      if (parts_ > 1) {
        Save(block, part);
      } else {
        Finish(block);
      }
    }
  }

  Keys PackTile(int64_t b, int64_t key_head, int64_t first, KeyRange batch, Real* packed) const {
    Keys keys{};
    keys.first = first;
    const int64_t end = std::min(first + kForwardColumns, n_.keys);
    if (in_place_) {
      keys.values_in_place = {in_.v, b, key_head, first};
    } else {
      PackTokens(b, key_head, first, end, batch, packed, &keys);
    }
    if (column_numbers() > 0) {
      Real* const scalars = packed + packed_size() - kForwardColumns * column_numbers();
      scalars_.scalars().Pack(b, key_head, batch, first, first + RoundUp(end - first, kLaneCount),
                              scalars, kForwardColumns);
      keys.scalars = scalars_.scalars().At(scalars, kForwardColumns);
    }
    return keys;
  }

  // Packs keys [first, end) and their values.
  void PackTokens(int64_t b, int64_t key_head, int64_t first, int64_t end, KeyRange batch,
                  Real* packed, Keys* keys) const {
    const auto pack = pairs_ ? PackPairs : PackPanel;
    for (int64_t p = 0; dim_ > 0 && first + p * kWidth < end; ++p) {
      pack(in_.y, b, key_head, first + p * kWidth, batch, dim_, packed + p * panel_rows_ * kWidth);
    }
    if (dim_ > 0) keys->panels = packed;
    Real* const values = packed + kForwardColumns * panel_rows_;
    const KeyRange seen{std::max(first, batch.begin), std::min(end, batch.end)};
    if (pairs_) {
      PairRows(in_.v, b, key_head, first, first + RoundUp(end - first, kLaneCount), batch,
               n_.value_dim, values);
      keys->values = {values, value_columns_};
    } else if (value_columns_ == n_.value_dim && TypeOf(in_.v) == kOwnType) {
      keys->values = {static_cast<const Real*>(in_.v.row(b, key_head, first)), in_.v.stride[2]};
    } else {
      CopyPadded(in_.v, b, key_head, seen.begin, seen.end, n_.value_dim,
                 values + (seen.begin - first) * value_columns_);
      keys->values = {values, value_columns_};
    }
  }

  void SetMask(const Block& block, KeyRange batch, int64_t first, int64_t width,
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
    mask->SetPairs(terms_.pair_mask(), block.b, block.h, block.heads, block.i, block.queries,
                   first);
  }

  void AddTile(Block& block, const TileMask& mask, Keys& keys, Scratch& scratch) const {
    const PositionToContent& of_keys = terms_.position_to_content();
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

  // Adds a tile's keys to rows [first_row, last_row) of a block.
  void AddKeys(Block& block, const TileMask& mask, int64_t first_row, int64_t last_row, Keys& keys,
               Scratch& scratch) const {
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
      const bool masks = terms_.masks(block.b, block.head(r));
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
  void AddValues(Real* tile, size_t rows, RowSpan seen, RowSpan span, const Keys& keys,
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
  void AddHead(Block& block, const TileMask& mask, int64_t first_row, int64_t last_row,
               RowSpan seen, RowSpan span, bool masked, const Keys& keys, Scratch& scratch) const {
    const int64_t h = block.head(first_row);
    const int64_t query = block.query(first_row);
    const int64_t rows = last_row - first_row;
    TableWindow products = terms_.Window(block.b, query, rows, keys.first + seen.begin,
                                         keys.first + seen.end, scratch.key_products);
    if (terms_.keys().exists()) terms_.MultiplyKeys(block.b, h, query, rows, products);
    TableWindow weights = products;
    weights.data = scratch.entry_weights;
    for (int64_t r = first_row; r < last_row; ++r) {
      const TileRow row{block.b,
                        h,
                        query + r - first_row,
                        keys.first + span.begin,
                        span.end - span.begin,
                        keys.first + seen.begin,
                        keys.first + seen.end,
                        mask.paired,
                        terms_.Temperature(block.b, h, query + r - first_row),
                        mask.placed};
      Real* const tile = scratch.tile + r * kForwardColumns + span.begin;
      AddWeights(block, r, row, masked, mask.rows[r], span.begin,
                 terms_.keys().exists() ? products.Row(r - first_row) : nullptr, products, keys,
                 scratch);
      if (terms_.drops()) terms_.Drop(row, tile);
      if (terms_.values().exists()) {
        weights.ClearRow(r - first_row);
        terms_.AddWeights(row, tile, weights.Row(r - first_row), weights, &scratch.runs);
      }
    }
    if (terms_.values().exists()) {
      terms_.values().AddProduct(h, rows, weights, block.sum + first_row * value_columns_);
    }
  }

  // Turns the inner products of row r, starting at tile column `begin`, into weights. The function
  // is flattened, because the compiler may consider the definition too large to inline, and a
  // function call per vector would be slow.
  HWY_FLATTEN void AddWeights(Block& block, int64_t r, const TileRow& at, bool masked,
                              RowSpan visible, int64_t begin, const Real* key_products,
                              const TableWindow& window, const Keys& keys, Scratch& scratch) const {
    const int64_t columns = at.count;
    Real* tile = scratch.tile + r * kForwardColumns + begin;
    const Real row_factor = in_.factor[at.h] * at.temperature;
    const PairRow row =
        LoadRow(functions_, in_, block.b, at.h, at.h / group_, at.i, at.begin, row_factor,
                block.norm[r], {pairs_ ? nullptr : keys.panels, dim_, begin});
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
    const bool masks_any = at.paired || terms_.masks(block.b, at.h);
    const int64_t open = !masked ? columns : masks_any ? 0 : OpenColumns(view, columns);
    Real top;
    if (terms_.to_scores() || at.paired) {
      const Real* const of_keys = terms_.position_to_content().exists()
                                      ? scratch.of_keys + r * kForwardColumns + begin
                                      : nullptr;
      const Real* bias =
          terms_.ScoreRow(at, key_products, window, of_keys, scratch.added, &scratch.runs);
      top = functions_.template Scores<true>(tile, columns, open, row, scalars.data(), factor, bias,
                                             view);
    } else {
      top = functions_.template Scores<false>(tile, columns, open, row, scalars.data(), factor,
                                              nullptr, view);
    }
    if (terms_.caps()) top = terms_.CapScores(columns, tile);
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

  bool HoldsNonFinite(const Block& block, Keys& keys) const {
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
  void AddVisibleValues(Block& block, const TileMask& mask, int64_t first_row, int64_t last_row,
                        RowSpan seen, RowSpan span, const Keys& keys, Scratch& scratch) const {
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
    Keys copied = keys;
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
  bool Sees(const Block& block, const TileMask& mask, int64_t r, int64_t j, const Keys& keys,
            Scratch& scratch) const {
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
    if (!terms_.masks(block.b, h) && !mask.paired) return true;
    const int64_t begin = keys.first + j / kLaneCount * kLaneCount;
    const TileRow row{block.b,     h,   i, begin, kLaneCount, keys.first + j, keys.first + j + 1,
                      mask.paired, 1.0f};
    const Real* bias = terms_.ScoreRow(row, nullptr, {}, nullptr, scratch.added, &scratch.runs);
    return bias[j % kLaneCount] != -kInfinity;
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

  void Finish(const Block& block) const {
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

  // A row's partial result for one part of the keys: its sums, weight, largest score and the key
  // with that score.
  Real* Partial(int64_t part, int64_t b, int64_t h, int64_t i) const {
    return partial_.data() +
           (((part * n_.batch + b) * n_.heads + h) * n_.queries + i) * (value_columns_ + 3);
  }

  void Save(const Block& block, int64_t part) const {
    block.ForRows([&](int64_t r, int64_t h, int64_t i) {
      Real* to = Partial(part, block.b, h, i);
      std::copy_n(block.sum + r * value_columns_, value_columns_, to);
      to[value_columns_] = block.weight[r];
      to[value_columns_ + 1] = block.largest[r];
      to[value_columns_ + 2] = TopKey(block.weight[r], block.top[r]);
    });
  }

  // Merges the parts of each row in order.
  void Merge() const {
    ParallelTasks(executor_, n_.batch * n_.heads, [&](int64_t head, int) {
      const int64_t b = head / n_.heads;
      const int64_t h = head % n_.heads;
      for (int64_t i = 0; i < n_.queries; ++i) {
        Real largest = -kInfinity;
        Real top = -1;
        for (int64_t part = 0; part < parts_; ++part) {
          const Real* from = Partial(part, b, h, i) + value_columns_;
          if (!(from[1] > largest)) continue;
          largest = from[1];
          top = from[2];
        }
        const Real shift = largest == -kInfinity ? 0.0f : largest;
        Real* const sum = Partial(0, b, h, i);
        Real weight = 0;
        for (int64_t part = 0; part < parts_; ++part) {
          const Real* from = Partial(part, b, h, i);
          const Real shrink = std::exp2(from[value_columns_ + 1] - shift);
          weight += shrink * from[value_columns_];
          for (int64_t e = 0; e < n_.value_dim; ++e) {
            sum[e] = (part == 0 ? 0.0f : sum[e]) + shrink * from[e];
          }
        }
        WriteRow(b, h, i, sum, weight, std::log2(weight), largest, static_cast<int64_t>(top));
      }
    });
  }

  // The number of column scalars, plus one for the squared norm of a distance.
  int column_numbers() const {
    return functions_.column_scalars() + (functions_.is_distance() ? 1 : 0);
  }

  Functions functions_;
  const AttentionInput<Real>& in_;
  const AttentionOutput<Real>& out_;
  const Executor& executor_;
  const AttentionShape& n_;
  int64_t group_;
  int64_t dim_;
  int64_t value_columns_;
  bool pairs_;          // whether tokens are multiplied as bfloat16 pairs
  int64_t panel_rows_;  // columns of a token, or pairs of columns
  bool packs_all_;
  bool in_place_;      // whether keys and values are read in place
  bool pairs_values_;  // whether values are packed as pairs
  int64_t heads_in_block_;
  int64_t parts_ = 1;
  HeadTasks head_tasks_;
  Panels keys_;
  PaddedRows values_;
  PackedScalars scalars_;
  Terms terms_;
  Segments segments_;
  Skipping skipping_;
  std::vector<TileQueue> queues_;  // per block, if tasks are parts of the keys
  Positions positions_;
  std::vector<char> non_finite_;  // per panel of values
  Buffer partial_;
  Buffer paired_values_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
