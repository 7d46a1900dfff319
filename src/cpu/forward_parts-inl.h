// The plan of the forward pass for key heads with few queries (short sequences, decoding): a task
// is a range of a key head's keys with all its queries. It packs its keys one tile at a time, in
// cache, or reads them in place (ForwardTile::in_place). Partial results are merged at the end, in
// a fixed order.
//
// If tiles may be skipped, the tiles with the largest biases form a separate first part. Its
// weights determine which tiles the other parts can skip.
#if defined(GNOMON_SRC_CPU_FORWARD_PARTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_FORWARD_PARTS_INL_H_
#undef GNOMON_SRC_CPU_FORWARD_PARTS_INL_H_
#else
#define GNOMON_SRC_CPU_FORWARD_PARTS_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/pair_count.h"
#include "base/parallel.h"
#include "base/visible_keys.h"
#include "cpu/forward_tile-inl.h"
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
class ForwardParts {
 public:
  ForwardParts(const PairTable& table, ForwardTile<Functions>& tile, Skipping& skipping,
               const Executor& executor)
      : tile_(tile),
        skipping_(skipping),
        executor_(executor),
        in_(tile.in()),
        n_(in_.shape),
        scalars_(in_, table) {}

  void Run() {
    const int64_t tasks = tile_.addends().tasks();
    ParallelTasks(executor_, tasks + skipping_.tasks(), [&](int64_t task, int) {
      if (task >= tasks) return skipping_.Fill(task - tasks);
      tile_.addends().Fill(task);
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
    if (parts_ > 1) {
      partial_.Reset(parts_ * n_.batch * n_.heads * n_.queries * (tile_.value_columns() + 3));
    }
    const int64_t size = tile_.scratch_size() + packed_size() + tile_.blocks() * tile_.block_size();
    const Buffer memory(size * WorkersFor(executor_, heads * even_parts));
    if (first_parts > 0) {
      queues_.resize(Size(heads * tile_.blocks()));
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

 private:
  // Whether parts with this many tiles benefit from skipping. For few rows, checking a tile takes
  // as long as computing it.
  bool LeavesOutParts(int64_t tiles) const {
    constexpr int64_t kLeastTiles = 8;
    constexpr int64_t kLeastRows = 16;
    if (tiles < kLeastTiles || tile_.group() * n_.queries < kLeastRows) return false;
    if (!skipping_.active()) return false;
    for (int64_t head = 0; head < n_.batch * n_.heads; ++head) {
      if (skipping_.Active(head / n_.heads, head % n_.heads)) return true;
    }
    return false;
  }

  // Returns all blocks of a key head, with their sums in `memory`.
  std::unique_ptr<QueryBlock[]> AllBlocks(int64_t b, int64_t key_head, Real* memory) const {
    // The blocks are left uninitialised, because for few rows, clearing them would take as long as
    // the computation.
    std::unique_ptr<QueryBlock[]> all(new QueryBlock[Size(tile_.blocks())]);
    for (int64_t n = 0; n < tile_.blocks(); ++n) {
      tile_.SetBlock(b, key_head, n, tile_.QueriesOf(n), memory + n * tile_.block_size(),
                     all[Size(n)]);
    }
    return all;
  }
  // The number of floats in a packed tile of keys.
  int64_t packed_size() const {
    return kForwardColumns *
           ((tile_.in_place() ? 0 : tile_.panel_rows() + tile_.value_columns()) + scalars_.count());
  }
  Real* SumsIn(Real* packed) const { return packed + packed_size(); }

  // Adds the first tile of each block of a key head, or the first two if the first holds few keys.
  // The weights of these tiles determine which tiles rows can skip in the other parts.
  void AddFirstPart(int64_t b, int64_t key_head, Real* memory) {
    TileScratch scratch = tile_.MakeScratch(memory);
    Real* const packed = memory + tile_.scratch_size();
    const std::unique_ptr<QueryBlock[]> all = AllBlocks(b, key_head, SumsIn(packed));
    const KeyRange batch = BatchKeys(in_.mask, n_.keys, b);
    for (int64_t n = 0; n < tile_.blocks(); ++n) {
      QueryBlock& block = all[Size(n)];
      TileQueue& queue = queues_[Size((b * n_.key_heads + key_head) * tile_.blocks() + n)];
      TileMask seen;
      tile_.SetMask(block, batch, 0, n_.keys, &seen);
      if (seen.begin < seen.end && skipping_.Active(block.range())) {
        queue.SetOrder(in_, skipping_, block.range(), {seen.begin, seen.end}, /*even=*/true);
        const auto tiles = static_cast<int64_t>(queue.order.size());
        int64_t keys_seen = 0;
        queue.first_tiles = 0;
        while (queue.first_tiles < tiles && keys_seen < kForwardColumns / 2) {
          const KeyRange tile = queue.tiles[Size(queue.order[Size(queue.first_tiles++)])];
          keys_seen += std::min(tile.end, seen.end) - std::max(tile.begin, seen.begin);
          TileMask mask;
          tile_.SetMask(block, batch, tile.begin, tile.end - tile.begin, &mask);
          if (mask.end <= mask.begin) continue;
          const int64_t pairs = block.rows() * (mask.end - mask.begin);
          AddPairs(pairs, pairs);
          TileKeys keys = PackTile(b, key_head, tile.begin, batch, packed);
          tile_.AddTile(block, mask, keys, scratch);
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
  uint64_t LeftOutOfPart(const QueryBlock& block, const TileQueue& queue, KeyRange tile,
                         TileBounds& bounds) const {
    if (tile.begin < queue.open.begin || tile.end > queue.open.end ||
        tile_.HidesPairs(block, tile) || !skipping_.MayLeaveOut(queue.rows, tile.begin, tile.end)) {
      return 0;
    }
    const int64_t key_head = block.h / tile_.group();
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
    TileScratch scratch = tile_.MakeScratch(memory);
    Real* const packed = memory + tile_.scratch_size();
    const std::unique_ptr<QueryBlock[]> all = AllBlocks(b, key_head, SumsIn(packed));
    const TileQueue* const queues =
        queues_.empty() ? nullptr : queues_.data() + (b * n_.key_heads + key_head) * tile_.blocks();
    const KeyRange batch = BatchKeys(in_.mask, n_.keys, b);
    for (int64_t tile = first_tile; tile < last_tile; ++tile) {
      const int64_t first = tile * kForwardColumns;
      const KeyRange in_tile{std::max(first, batch.begin),
                             std::min(first + kForwardColumns, batch.end)};
      std::optional<TileKeys> keys;
      TileBounds bounds;
      for (int64_t n = 0; n < tile_.blocks(); ++n) {
        QueryBlock& block = all[Size(n)];
        uint64_t left_out = 0;
        if (queues != nullptr && queues[n].first_tiles > 0) {
          if (queues[n].IsFirst(first)) continue;
          if (!in_tile.empty()) left_out = LeftOutOfPart(block, queues[n], in_tile, bounds);
        }
        TileMask mask;
        tile_.SetMask(block, batch, first, kForwardColumns, &mask);
        if (mask.end <= mask.begin) continue;
        const int64_t pairs = block.rows() * (mask.end - mask.begin);
        const bool computes = left_out != Skipping::AllRows(block.range());
        AddPairs(pairs, computes ? pairs : 0);
        if (!computes) continue;
        mask.LeaveOut(left_out, block.rows());
        if (!keys) keys = PackTile(b, key_head, first, batch, packed);
        tile_.AddTile(block, mask, *keys, scratch);
      }
    }
    for (int64_t n = 0; n < tile_.blocks(); ++n) {
      const QueryBlock& block = all[Size(n)];
      if (parts_ > 1) {
        Save(block, part);
      } else {
        tile_.Finish(block);
      }
    }
  }

  TileKeys PackTile(int64_t b, int64_t key_head, int64_t first, KeyRange batch,
                    Real* packed) const {
    TileKeys keys{};
    keys.first = first;
    const int64_t end = std::min(first + kForwardColumns, n_.keys);
    if (tile_.in_place()) {
      keys.values_in_place = {in_.v, b, key_head, first};
    } else {
      PackTokens(b, key_head, first, end, batch, packed, &keys);
    }
    if (scalars_.count() > 0) {
      Real* const scalars = packed + packed_size() - kForwardColumns * scalars_.count();
      scalars_.Pack(b, key_head, batch, first, first + RoundUp(end - first, kLaneCount), scalars,
                    kForwardColumns);
      keys.scalars = scalars_.At(scalars, kForwardColumns);
    }
    return keys;
  }

  // Packs keys [first, end) and their values.
  void PackTokens(int64_t b, int64_t key_head, int64_t first, int64_t end, KeyRange batch,
                  Real* packed, TileKeys* keys) const {
    const auto pack = tile_.pairs() ? PackPairs : PackPanel;
    for (int64_t p = 0; tile_.dim() > 0 && first + p * kWidth < end; ++p) {
      pack(in_.y, b, key_head, first + p * kWidth, batch, tile_.dim(),
           packed + p * tile_.panel_rows() * kWidth);
    }
    if (tile_.dim() > 0) keys->panels = packed;
    Real* const values = packed + kForwardColumns * tile_.panel_rows();
    const KeyRange seen{std::max(first, batch.begin), std::min(end, batch.end)};
    if (tile_.pairs()) {
      PairRows(in_.v, b, key_head, first, first + RoundUp(end - first, kLaneCount), batch,
               n_.value_dim, values);
      keys->values = {values, tile_.value_columns()};
    } else if (tile_.value_columns() == n_.value_dim && TypeOf(in_.v) == kOwnType) {
      keys->values = {static_cast<const Real*>(in_.v.row(b, key_head, first)), in_.v.stride[2]};
    } else {
      CopyPadded(in_.v, b, key_head, seen.begin, seen.end, n_.value_dim,
                 values + (seen.begin - first) * tile_.value_columns());
      keys->values = {values, tile_.value_columns()};
    }
  }

  // A row's partial result for one part of the keys: its sums, weight, largest score and the key
  // with that score.
  Real* Partial(int64_t part, int64_t b, int64_t h, int64_t i) const {
    return partial_.data() +
           (((part * n_.batch + b) * n_.heads + h) * n_.queries + i) * (tile_.value_columns() + 3);
  }

  void Save(const QueryBlock& block, int64_t part) const {
    const int64_t columns = tile_.value_columns();
    block.ForRows([&](int64_t r, int64_t h, int64_t i) {
      Real* to = Partial(part, block.b, h, i);
      std::copy_n(block.sum + r * columns, columns, to);
      to[columns] = block.weight[r];
      to[columns + 1] = block.largest[r];
      to[columns + 2] = TopKey(block.weight[r], block.top[r]);
    });
  }

  // Merges the parts of each row in order.
  void Merge() const {
    const int64_t columns = tile_.value_columns();
    ParallelTasks(executor_, n_.batch * n_.heads, [&](int64_t head, int) {
      const int64_t b = head / n_.heads;
      const int64_t h = head % n_.heads;
      for (int64_t i = 0; i < n_.queries; ++i) {
        Real largest = -kInfinity;
        Real top = -1;
        for (int64_t part = 0; part < parts_; ++part) {
          const Real* from = Partial(part, b, h, i) + columns;
          if (!(from[1] > largest)) continue;
          largest = from[1];
          top = from[2];
        }
        const Real shift = largest == -kInfinity ? 0.0f : largest;
        Real* const sum = Partial(0, b, h, i);
        Real weight = 0;
        for (int64_t part = 0; part < parts_; ++part) {
          const Real* from = Partial(part, b, h, i);
          const Real shrink = std::exp2(from[columns + 1] - shift);
          weight += shrink * from[columns];
          for (int64_t e = 0; e < n_.value_dim; ++e) {
            sum[e] = (part == 0 ? 0.0f : sum[e]) + shrink * from[e];
          }
        }
        tile_.WriteRow(b, h, i, sum, weight, std::log2(weight), largest, static_cast<int64_t>(top));
      }
    });
  }

  ForwardTile<Functions>& tile_;
  Skipping& skipping_;
  const Executor& executor_;
  const AttentionInput<Real>& in_;
  const AttentionShape& n_;
  ColumnScalars scalars_;
  std::vector<TileQueue> queues_;  // per block, if there is a first part
  int64_t parts_ = 1;
  Buffer partial_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
