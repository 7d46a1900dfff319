// Tables that query-key pairs read through a layout (gnomon/table_layout.h).
#ifndef GNOMON_SRC_CUDA_TABLES_CUH_
#define GNOMON_SRC_CUDA_TABLES_CUH_

#include "cuda/primitives.cuh"

namespace gnomon::device {

GNOMON_DEVICE Int64 Near(Int64 p) {
  constexpr Int64 kFar = Int64{1} << 61;
  return Most(-kFar, Least(p, kFar));
}
GNOMON_DEVICE Int64 QueryOffset(const Parameters& p, int b) {
  return Near(p.query_offsets != nullptr ? p.query_offsets[b] : p.query_offset);
}

// The index of the interval of query 0 of a head in p.low and p.high.
GNOMON_DEVICE Int64 IntervalsOf(const Parameters& p, int b, int h) {
  const int of_head = p.interval_heads > 1 ? h : 0;
  return (static_cast<Int64>(b) * p.interval_heads + of_head) * p.queries;
}

// The positions of query i and key j of batch element b. `origin`: QueryOffset(p, b).
template <class C>
GNOMON_DEVICE Int64 QueryPosition(const Parameters& p, int b, Int64 origin, int i) {
  return origin + (C::kPositions != 0 ? p.query_places[static_cast<Int64>(b) * p.queries + i] : i);
}
template <class C>
GNOMON_DEVICE Int64 KeyPosition(const Parameters& p, int b, Int64 origin, int j) {
  if (C::kPositions == 0) return j;
  return origin + p.key_places[static_cast<Int64>(b) * p.keys + j];
}

// The number of table entries that a pair reads.
GNOMON_DEVICE int EntriesOf(const LayoutParameters& layout) {
  return layout.sums != 0 ? layout.axes : 1;
}
// The n-th entry that the query at `position` and the key at position j read; -1 if there is none.
GNOMON_DEVICE int LayoutEntry(const LayoutParameters& layout, int n, Int64 position, Int64 j) {
  if (layout.kind == LayoutParameters::kByOffset) {
    Int64 offset = j - position;
    if (layout.clips == 0 && (offset < -layout.past || offset > layout.future)) return -1;
    offset = Most(-layout.past, Least(offset, layout.future));
    return static_cast<int>(offset + layout.past);
  }
  if (layout.kind == LayoutParameters::kByKey) {
    return j >= 0 && j < layout.size ? static_cast<int>(j) : -1;
  }
  if (position < layout.prefix || position >= layout.tokens || j < layout.prefix ||
      j >= layout.tokens) {
    return -1;
  }
  int query = static_cast<int>(position) - layout.prefix;
  int key = static_cast<int>(j) - layout.prefix;
  int entry = 0;
#pragma unroll 1
  for (int axis = layout.axes - 1; axis >= 0; --axis) {
    const int length = layout.shape[axis];
    const int at =
        layout.first[axis] + (key % length - query % length + length - 1) * layout.step[axis];
    if (layout.sums != 0 && axis == n) return at;
    entry += at;
    key /= length;
    query /= length;
  }
  return entry;
}

// Adds up the entries that a pair reads.
GNOMON_DEVICE float SumOfEntries(const LayoutParameters& layout, const float* table, Int64 position,
                                 Int64 j) {
  float sum = 0;
#pragma unroll 1
  for (int n = 0; n < EntriesOf(layout); ++n) {
    const int entry = LayoutEntry(layout, n, position, j);
    if (entry >= 0) sum += table[entry];
  }
  return sum;
}

// Adds each of `count` numbers to the entries entry_of(r, n) of number r, for n <
// EntriesOf(layout). The numbers are in shared memory, `step` bytes apart. All lanes of a warp must
// call this function. If several lanes have the same entry, the first of them adds all their
// numbers.
template <class C, class EntryOf>
GNOMON_DEVICE void AddNumbers(const LayoutParameters& layout, const unsigned char* numbers,
                              int step, int count, const EntryOf& entry_of, float* to) {
  const int lane = Thread() % 32;
  // Two tokens may share an entry if they have the same position, if offsets are clipped, or if
  // entries belong to single axes of a grid.
  const bool meet = C::kPositions != 0 || layout.sums != 0 ||
                    (layout.kind == LayoutParameters::kByOffset && layout.clips != 0);
  for (int r = lane; r < count + lane; r += 32) {
    const float mine = r < count ? LoadShared<float>(numbers + r * step) : 0.0f;
#pragma unroll 1
    for (int n = 0; n < EntriesOf(layout); ++n) {
      const int entry = r < count ? entry_of(r, n) : -1;
      float sum = mine;
      bool first = entry >= 0;
      if (meet) {
        sum = 0;
        for (int other = 0; other < 32; ++other) {
          const float number = Shuffle(mine, other);
          const auto its =
              static_cast<int>(BitsOf(Shuffle(FromBits(static_cast<uint32>(entry)), other)));
          if (its != entry) continue;
          if (other < lane) first = false;
          sum += number;
        }
      }
      // All lanes read before any lane writes, also in an emulator that runs them in sequence.
      const float before = first ? to[entry] : 0.0f;
      WarpBarrier();
      if (first) to[entry] = before + sum;
      // The next numbers may belong to an entry that a different lane has written.
      WarpBarrier();
    }
  }
}

// For each of `count` keys, adds a number to the entries that query i of batch element b reads for
// that key, like AddNumbers(). The numbers of keys beyond Lk are 0.
template <class C>
GNOMON_DEVICE void AddToEntries(const Parameters& p, const LayoutParameters& layout,
                                const unsigned char* numbers, int step, int count, int first_key,
                                int b, int i, float* to) {
  const Int64 origin = QueryOffset(p, b);
  const Int64 position = QueryPosition<C>(p, b, origin, i);
  if (C::kPositions != 0) count = Least(count, p.keys - first_key);
  const auto entry_of = [&](int r, int n) {
    return LayoutEntry(layout, n, position, KeyPosition<C>(p, b, origin, first_key + r));
  };
  AddNumbers<C>(layout, numbers, step, count, entry_of, to);
}

// The tables of keys (Parameters::relative_key_tables): the numbers of a key, the index of the
// first number of a head's table of key 0, and the index in this table of the number that query i
// and key j read, or -1 if there is none.
GNOMON_DEVICE Int64 KeyTableStep(const Parameters& p) {
  return static_cast<Int64>(p.relative_key_tables) * p.relative_size;
}
GNOMON_DEVICE Int64 KeyTableOf(const Parameters& p, int b, int h) {
  const Int64 row = (static_cast<Int64>(b) * p.key_heads + h / p.group) * p.keys;
  return (row - p.relative_key_row) * KeyTableStep(p) +
         static_cast<Int64>(h % p.relative_key_tables) * p.relative_size;
}
template <class C>
GNOMON_DEVICE int NumberInKeyTable(const Parameters& p, int b, Int64 origin, int i, int j) {
  const int entry = LayoutEntry(p.relative_layout, 0, QueryPosition<C>(p, b, origin, i),
                                KeyPosition<C>(p, b, origin, j));
  return entry < 0 ? -1 : p.relative_size - 1 - entry;
}

}  // namespace gnomon::device

#endif  // GNOMON_SRC_CUDA_TABLES_CUH_
