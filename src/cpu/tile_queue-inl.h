// The tiles of a block in processing order, if some may be skipped. The order starts at the largest
// offset biases and moves outwards, so that rows accumulate most of their weight early. One tile
// ends at the block's own positions, or half a tile later, so that all rows see most of that tile.
#if defined(GNOMON_SRC_CPU_TILE_QUEUE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_TILE_QUEUE_INL_H_
#undef GNOMON_SRC_CPU_TILE_QUEUE_INL_H_
#else
#define GNOMON_SRC_CPU_TILE_QUEUE_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/visible_keys.h"
#include "cpu/packing-inl.h"
#include "cpu/skipping-inl.h"
#include "cpu/vocabulary-inl.h"
#include "cpu/workspace.h"
#include "gnomon/attention.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {

struct TileQueue {
  RowBounds rows;
  std::vector<KeyRange> tiles;
  std::vector<Real> largest;  // largest bias per tile
  std::vector<int64_t> order;
  std::vector<Real> bounds;  // kRowBlock per tile, in processing order
  Real top[kRowBlock];       // largest bias per head
  // If the first tiles form a separate part: their number (0: nothing is skipped), and the range
  // of keys visible to all rows.
  int64_t first_tiles = 0;
  KeyRange open;

  // Sets the tiles and their order from the range of keys that any row of a block sees. With
  // `even`, tiles start at multiples of their width.
  void SetOrder(const AttentionInput<Real>& in, const Skipping& skipping, const BlockRows& range,
                KeyRange seen, bool even) {
    constexpr int64_t kAlign = Skipping::kCell;
    const int64_t begin = seen.begin / kAlign * kAlign;
    const int64_t end = RoundUp(seen.end, kAlign);
    const int64_t position =
        std::clamp(QueryOffset(in, range.b) + range.i, begin - kRowBlock, end) + range.queries;
    int64_t own_end = RoundUp(position + (kForwardColumns - kRowBlock) / 2, kAlign);
    own_end = std::clamp(own_end, begin + kAlign, end);
    if (even) own_end = RoundUp(std::clamp(position, begin + 1, seen.end), kForwardColumns);
    int64_t first = own_end - DivideUp(own_end - begin, kForwardColumns) * kForwardColumns;
    const int64_t own = (own_end - first) / kForwardColumns - 1;
    tiles.clear();
    largest.clear();
    std::fill_n(top, range.heads, -kInfinity);
    for (; first < end; first += kForwardColumns) {
      const KeyRange tile{std::max(first, begin), std::min(first + kForwardColumns, end)};
      Real most = -kInfinity;
      for (int64_t h = 0; h < range.heads; ++h) {
        const Real bias =
            skipping.OffsetBias(range, h, tile.begin, std::min(tile.end, in.shape.keys));
        top[h] = std::max(top[h], bias);
        most = std::max(most, bias);
      }
      tiles.push_back(tile);
      largest.push_back(most);
    }
    const auto count = static_cast<int64_t>(tiles.size());
    const auto distance = [own](int64_t n) { return n < own ? own - n : n - own; };
    // Whether tile n precedes tile m.
    const auto before = [&](int64_t n, int64_t m) {
      const Real of_n = largest[Size(n)];
      const Real of_m = largest[Size(m)];
      return of_n != of_m ? of_n > of_m : distance(n) < distance(m);
    };
    int64_t low = 0;
    for (int64_t n = 1; n < count; ++n) low = before(n, low) ? n : low;
    order.assign(1, low);
    for (int64_t high = low + 1; low > 0 || high < count;) {
      const bool past = high == count || (low > 0 && !before(high, low - 1));
      order.push_back(past ? --low : high++);
    }
  }

  bool IsFirst(int64_t key) const {
    return std::any_of(order.begin(), order.begin() + first_tiles, [&](int64_t n) {
      return key / kForwardColumns == tiles[Size(n)].begin / kForwardColumns;
    });
  }
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
