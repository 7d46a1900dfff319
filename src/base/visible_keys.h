// The interval of keys visible to a query.
#ifndef GNOMON_SRC_BASE_VISIBLE_KEYS_H_
#define GNOMON_SRC_BASE_VISIBLE_KEYS_H_

#include <algorithm>
#include <cstdint>

#include "gnomon/attention.h"

namespace gnomon {

// Keys [begin, end); empty if end <= begin.
struct KeyRange {
  int64_t begin = 0;
  int64_t end = 0;
  bool empty() const { return end <= begin; }
};

// Keys of batch b to which any query may attend, according to key_starts and key_lengths only.
inline KeyRange BatchKeys(const Mask& mask, int64_t keys, int64_t b) {
  KeyRange range{0, keys};
  if (mask.key_starts != nullptr) {
    range.begin = std::clamp<int64_t>(mask.key_starts[b], 0, keys);
  }
  if (mask.key_lengths != nullptr) {
    range.end = std::clamp<int64_t>(mask.key_lengths[b], 0, keys);
  }
  return range;
}

// Larger positions and widths have the same effect as no limit; clamping to this number prevents
// overflow in sums.
inline constexpr int64_t kFar = int64_t{1} << 61;

// The position of the first query of batch b.
template <class T>
int64_t QueryOffset(const AttentionInput<T>& in, int64_t b) {
  const int64_t offset = in.query_offsets != nullptr ? in.query_offsets[b] : in.query_offset;
  return std::clamp(offset, -kFar, kFar);
}

// Keys within the batch's range that are visible to the query at position p, ignoring segments.
// Both ends are monotonic in p.
inline KeyRange VisibleKeys(const Mask& mask, KeyRange batch, int64_t p) {
  p = std::clamp(p, -kFar, kFar);
  KeyRange range = batch;
  if (mask.left < kFar) range.begin = std::max(batch.begin, p - std::max(mask.left, -kFar));
  if (mask.right < kFar) range.end = std::min(batch.end, p + std::max(mask.right, -kFar) + 1);
  if (const Chunks& chunks = mask.chunks; chunks.size > 0) {
    const int64_t chunk = p / chunks.size - (p % chunks.size < 0 ? 1 : 0);
    range.begin = std::max(range.begin, (chunk - chunks.before) * chunks.size);
    range.end = std::min(range.end, (chunk + chunks.after + 1) * chunks.size);
  }
  return range;
}

// Whether queries and keys have call positions.
template <class T>
bool HasPositions(const AttentionInput<T>& in) {
  return in.query_positions != nullptr;
}

// The positions of query i and key j of batch b.
template <class T>
int64_t QueryPosition(const AttentionInput<T>& in, int64_t b, int64_t i) {
  if (HasPositions(in)) return in.query_positions[b * in.shape.queries + i];
  return QueryOffset(in, b) + i;
}
template <class T>
int64_t KeyPosition(const AttentionInput<T>& in, int64_t b, int64_t j) {
  return HasPositions(in) ? in.key_positions[b * in.shape.keys + j] : j;
}

// The key positions visible to a query at position p, ignoring the batch's key range and segments.
inline KeyRange VisiblePositions(const Mask& mask, int64_t p) {
  return VisibleKeys(mask, {-2 * kFar, 2 * kFar}, p);
}

// Positions within a batch must differ by less than this.
inline constexpr int64_t kMostApart = int64_t{1} << 30;

}  // namespace gnomon

#endif  // GNOMON_SRC_BASE_VISIBLE_KEYS_H_
