// The plan of the forward pass for key heads with many queries: all keys are packed first, and
// each block of queries is a task. If there are many such heads, each head is one task that packs
// its own keys. A block whose rows may skip tiles processes them in the order of a TileQueue.
#if defined(GNOMON_SRC_CPU_FORWARD_BLOCKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_FORWARD_BLOCKS_INL_H_
#undef GNOMON_SRC_CPU_FORWARD_BLOCKS_INL_H_
#else
#define GNOMON_SRC_CPU_FORWARD_BLOCKS_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/pair_count.h"
#include "base/parallel.h"
#include "base/visible_keys.h"
#include "cpu/forward_tile-inl.h"
#include "cpu/head_slots.h"
#include "cpu/mask-inl.h"
#include "cpu/packing-inl.h"
#include "cpu/rows-inl.h"
#include "cpu/skipping-inl.h"
#include "cpu/tile_queue-inl.h"
#include "cpu/vocabulary-inl.h"
#include "cpu/workspace.h"
#include "gnomon/attention.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {

template <class Functions>
class ForwardBlocks {
 public:
  ForwardBlocks(const PairTable& table, ForwardTile<Functions>& tile, Skipping& skipping,
                const Executor& executor)
      : tile_(tile),
        skipping_(skipping),
        executor_(executor),
        in_(tile.in()),
        n_(in_.shape),
        head_tasks_(n_, executor, tile.blocks()),
        keys_(in_.y, head_tasks_.keys(), tile.dim() > 0 ? n_.keys : 0, tile.dim(), tile.pairs()),
        values_(in_.v, head_tasks_.keys(), tile.pairs() ? 0 : n_.keys, n_.value_dim),
        scalars_(in_, table, head_tasks_.keys(), n_.keys) {
    if (tile.pairs()) {
      paired_values_.Reset(head_tasks_.keys().count * keys_.count() * kWidth / 2 *
                           tile.value_columns());
    }
  }

  // Packs all keys, then runs the blocks of queries; if each task is a whole head, does both head
  // by head.
  void Run() {
    const int64_t heads = n_.batch * n_.key_heads;
    const int64_t panels = DivideUp(n_.keys, kWidth);
    // Hidden non-finite values must be removed, because a weight of 0 times NaN or infinity is NaN.
    const bool hides = in_.mask.left != kUnbounded || in_.mask.right != kUnbounded ||
                       in_.mask.chunks.size > 0 || tile_.addends().to_scores() ||
                       tile_.segments().exists() || tile_.addends().pair_mask().exists();
    if (hides) non_finite_.assign(Size(heads * panels), 0);
    const int64_t packs = head_tasks_.whole() ? 0 : heads * panels;
    const int64_t packs_and_addends = packs + tile_.addends().tasks();
    ParallelTasks(executor_, packs_and_addends + skipping_.tasks(), [&](int64_t task, int) {
      if (task >= packs_and_addends) return skipping_.Fill(task - packs_and_addends);
      if (task >= packs) return tile_.addends().Fill(task - packs);
      Pack(task / panels, task % panels);
    });
    const int64_t in_head = tile_.blocks();
    const int64_t tasks = head_tasks_.whole() ? heads : heads * in_head;
    const int64_t size = tile_.scratch_size() + tile_.block_size();
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

 private:
  // The bounds for skipping are updated after this many tiles.
  static constexpr int64_t kTilesBeforeUpdate = 4;

  // Runs block `index` of a key head's queries. Each segment runs separately, so that its tiles do
  // not depend on the other segments.
  void RunBlock(int64_t head, int64_t index, Real* memory, TileQueue* queue) const {
    const KeyRange queries = tile_.QueriesOf(index);
    for (int64_t begin = queries.begin; begin < queries.end;) {
      const int64_t end =
          tile_.segments().exists()
              ? std::min(queries.end, tile_.segments().EndOfRows(head / n_.key_heads, begin))
              : queries.end;
      RunRows(head, index, {begin, end}, memory, queue);
      begin = end;
    }
  }
  void RunRows(int64_t head, int64_t index, KeyRange queries, Real* memory,
               TileQueue* queue) const {
    const int64_t b = head / n_.key_heads;
    TileScratch scratch = tile_.MakeScratch(memory);
    QueryBlock block;
    tile_.SetBlock(b, head % n_.key_heads, index, queries, memory + tile_.scratch_size(), block);
    const KeyRange batch =
        tile_.segments().Narrowed(BatchKeys(in_.mask, n_.keys, b), b, queries.begin, queries.end);
    TileMask seen;
    tile_.SetMask(block, batch, 0, n_.keys, &seen);
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
    tile_.Finish(block);
  }

  // Adds a fully packed tile of keys to the rows of a block that do not skip it.
  void AddPackedTile(QueryBlock& block, KeyRange batch, KeyRange tile, uint64_t left_out,
                     TileScratch& scratch) const {
    TileMask mask;
    tile_.SetMask(block, batch, tile.begin, tile.end - tile.begin, &mask);
    if (mask.end <= mask.begin) return;
    mask.LeaveOut(left_out, block.rows());
    TileKeys keys = PackedKeys(block.b, block.h / tile_.group(), tile.begin);
    tile_.AddTile(block, mask, keys, scratch);
  }

  // Sets the bounds of all tiles after the first. The bound is +inf if a row sees only part of a
  // tile. Returns false if no tile can be skipped.
  bool SetBounds(const QueryBlock& block, KeyRange batch, const TileMask& seen, const Real* sums,
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
          !skipping_.PassesGate(range, gate, keys.begin, keys.end) ||
          tile_.HidesPairs(block, keys)) {
        std::fill_n(bound, kRowBlock, kInfinity);
      } else {
        if (!any) skipping_.SetRows(range, &queue.rows);
        any = true;
        skipping_.Bound(queue.rows,
                        skipping_.KeysOf(block.b, block.h / tile_.group(), keys.begin, keys.end),
                        keys.begin, keys.end, queue.top, bound);
      }
    }
    return any;
  }

  void AddTilesInOrder(QueryBlock& block, KeyRange batch, const TileMask& seen, TileQueue& queue,
                       TileScratch& scratch) const {
    if (seen.end <= seen.begin) return;
    queue.SetOrder(in_, skipping_, block.range(), {seen.begin, seen.end}, /*even=*/false);
    const auto tiles = static_cast<int64_t>(queue.order.size());
    int64_t computed = 0;
    bool leaves_out = false;
    for (int64_t n = 0; n < tiles; ++n) {
      const bool updates = n == kTilesBeforeUpdate && tiles > 2 * kTilesBeforeUpdate && leaves_out;
      if (n == 1 || updates) {
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
    if (tile_.dim() > 0) keys_.Fill(b, h, p, keys);
    scalars_.Fill(b, h, p, keys);
    if (tile_.pairs()) {
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

  TileKeys PackedKeys(int64_t b, int64_t key_head, int64_t first) const {
    TileKeys keys{};
    keys.first = first;
    if (tile_.dim() > 0) keys.panels = keys_.panel(b, key_head, first / kWidth);
    if (tile_.pairs()) {
      keys.values = {PairedValues(b, key_head, first), tile_.value_columns()};
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
    return paired_values_.data() +
           (head * keys_.count() * kWidth + first) / 2 * tile_.value_columns();
  }

  ForwardTile<Functions>& tile_;
  Skipping& skipping_;
  const Executor& executor_;
  const AttentionInput<Real>& in_;
  const AttentionShape& n_;
  HeadTasks head_tasks_;
  Panels keys_;
  PaddedRows values_;
  PackedScalars scalars_;
  std::vector<char> non_finite_;  // per panel of values
  Buffer paired_values_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
