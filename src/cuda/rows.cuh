// Kernels that compute per-row data: key intervals, norms, dropout hashes and deltas.
#ifndef GNOMON_SRC_CUDA_ROWS_CUH_
#define GNOMON_SRC_CUDA_ROWS_CUH_

#include "cuda/pair.cuh"

namespace gnomon::device {

template <class C>
GNOMON_DEVICE float SquaredNorm(const Head& head, int row, int columns) {
  float sum = 0;
  for (int d = Thread() % 32; d < columns; d += 32) {
    const float x = LoadElement<C>(head.data, row * head.stride + d);
    sum = Fma(x, x, sum);
  }
  return SumOfWarp(sum);
}

GNOMON_DEVICE uint64 Mix(uint64 x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

constexpr Int64 kFar = Int64{1} << 61;

// Indices or positions [low, high).
struct Interval {
  Int64 low, high;
};

// The part of an interval of key positions that the mask allows for a query at `position`
// (base/visible_keys.h).
GNOMON_DEVICE Interval VisiblePart(const Parameters& p, Interval keys, Int64 position) {
  if (p.left < kFar) keys.low = Most(keys.low, position - Most(p.left, -kFar));
  if (p.right < kFar) keys.high = Least(keys.high, position + Most(p.right, -kFar) + 1);
  if (p.chunk_size > 0) {
    const Int64 chunk = position / p.chunk_size - (position % p.chunk_size < 0 ? 1 : 0);
    keys.low = Most(keys.low, (chunk - p.chunks_before) * p.chunk_size);
    keys.high = Least(keys.high, (chunk + p.chunks_after + 1) * p.chunk_size);
  }
  return keys;
}

// The keys of batch element b that any query may attend to.
GNOMON_DEVICE Interval BatchKeys(const Parameters& p, int b) {
  const Int64 keys = p.keys;
  return {p.key_starts != nullptr ? Most<Int64>(0, Least(p.key_starts[b], keys)) : 0,
          p.key_lengths != nullptr ? Most<Int64>(0, Least(p.key_lengths[b], keys)) : keys};
}

// Computes the interval of keys, within [0, Lk), that query i of batch element b attends to.
template <class C>
GNOMON_DEVICE void SetInterval(const Parameters& p, int b, int i) {
  const Int64 keys = p.keys;
  const Int64 position = Near(QueryOffset(p, b) + (C::kPacked != 0 ? 0 : i));
  auto [low, high] = VisiblePart(p, BatchKeys(p, b), position);
  if (p.key_rows != nullptr) {
    low = Most(low, Least(p.key_rows[i], keys));
    high = Least(high, p.key_rows[i + 1]);
  }
  low = Least(low, keys);
  const Int64 at = static_cast<Int64>(b) * p.queries + i;
  p.low[at] = static_cast<int>(low);
  p.high[at] = static_cast<int>(Most(low, high));
}

// This kernel runs one thread per query of each batch element.
template <class C>
GNOMON_DEVICE void PrepareIntervals(const Parameters& p) {
  const Int64 row = static_cast<Int64>(BlockX()) * 32 * C::kWarps + Thread();
  if (row >= static_cast<Int64>(p.batch) * p.queries) return;
  SetInterval<C>(p, static_cast<int>(row / p.queries), static_cast<int>(row % p.queries));
}

// Computes the place of each token and, for queries, the range of places that the mask allows. One
// thread runs for each token of a batch element.
template <class C>
GNOMON_DEVICE void PreparePlaces(const Parameters& p) {
  const int blocks = DivideUp(Most(p.queries, p.keys), 32 * C::kWarps);
  const int n = BlockX() % blocks * 32 * C::kWarps + Thread();
  const int b = BlockX() / blocks;
  const Int64 origin = p.query_positions[static_cast<Int64>(b) * p.queries];
  // Tokens that form visible pairs are less than 2^30 apart.
  const auto place_of = [&](Int64 position) {
    constexpr Int64 kMost = 0x7fffffff;
    return static_cast<int>(Most(-kMost, Least(position - origin, kMost)));
  };
  if (n == 0) p.origins[b] = origin;
  if (n < p.queries) {
    const Int64 at = b * static_cast<Int64>(p.queries) + n;
    const Int64 position = p.query_positions[at];
    const Interval seen = VisiblePart(p, {-2 * kFar, 2 * kFar}, position);
    p.query_places[at] = place_of(position);
    p.first_places[at] = place_of(seen.low);
    p.last_places[at] = place_of(seen.high - 1);
  }
  if (n < p.keys) {
    const Int64 at = b * static_cast<Int64>(p.keys) + n;
    p.key_places[at] = place_of(p.key_positions[at]);
  }
}

GNOMON_DEVICE int LargestOfWarp(int a) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    const float other = ShuffleXor(FromBits(static_cast<uint32>(a)), mask);
    a = Most(a, static_cast<int>(BitsOf(other)));
  }
  return a;
}

// With call positions, computes the first visible key of each query and the key after the last
// one, with one warp per query of each batch element. If no key is visible, these are Lk and 0.
template <class C>
GNOMON_DEVICE void FindVisibleKeys(const Parameters& p) {
  const Int64 row = static_cast<Int64>(BlockX()) * C::kWarps + Thread() / 32;
  if (row >= static_cast<Int64>(p.batch) * p.queries) return;
  const int b = static_cast<int>(row / p.queries);
  const Interval keys = BatchKeys(p, b);
  const int* const places = p.key_places + static_cast<Int64>(b) * p.keys;
  const int* const segments =
      p.key_segments != nullptr ? p.key_segments + static_cast<Int64>(b) * p.keys : nullptr;
  const int first = p.first_places[row];
  const int last = p.last_places[row];
  const int segment = segments != nullptr ? p.query_segments[row] : 0;
  int before = -p.keys;
  int after = 0;
  for (int j = static_cast<int>(keys.low) + Thread() % 32; j < keys.high; j += 32) {
    if (places[j] < first || places[j] > last) continue;
    if (segments != nullptr && segments[j] != segment) continue;
    before = Most(before, -j);
    after = j + 1;
  }
  before = LargestOfWarp(before);
  after = LargestOfWarp(after);
  if (Thread() % 32 != 0) return;
  p.low[row] = -before;
  p.high[row] = after;
}

// Widens the intervals [low, high) of the queries of a batch element, or of a head, until both ends
// ascend, as other kernels assume. One warp runs for each of them.
template <class C>
GNOMON_DEVICE void AscendIntervals(const Parameters& p) {
  const int lane = Thread() % 32;
  const Int64 first = static_cast<Int64>(BlockX()) * p.queries;
  // The largest number so far, of this lane and those before it.
  const auto largest = [&](int mine, int so_far) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const float other = Shuffle(FromBits(static_cast<uint32>(mine)), Most(0, lane - distance));
      mine = Most(mine, static_cast<int>(BitsOf(other)));
    }
    return Most(mine, so_far);
  };
  const auto last_lane = [](int a) {
    return static_cast<int>(BitsOf(Shuffle(FromBits(static_cast<uint32>(a)), 31)));
  };
  int least = -p.keys;
  int most = 0;
  for (int n = 0; n < p.queries; n += 32) {
    // The lower ends are processed from the last query to the first.
    const int i = n + lane;
    const int from_end = p.queries - 1 - i;
    const int low = largest(i < p.queries ? -p.low[first + from_end] : -p.keys, least);
    const int high = largest(i < p.queries ? p.high[first + i] : 0, most);
    least = last_lane(low);
    most = last_lane(high);
    if (i < p.queries) {
      p.low[first + from_end] = -low;
      p.high[first + i] = high;
    }
  }
  WarpBarrier();
  for (int i = lane; i < p.queries; i += 32) {
    p.high[first + i] = Most(p.low[first + i], p.high[first + i]);
  }
}

// This kernel runs one warp per query of each head.
template <class C>
GNOMON_DEVICE void PrepareQueries(const Parameters& p) {
  const Int64 rows = static_cast<Int64>(p.batch) * p.heads * p.queries;
  const Int64 row = static_cast<Int64>(BlockX()) * C::kWarps + Thread() / 32;
  if (row >= rows) return;
  const int i = static_cast<int>(row % p.queries);
  const int h = static_cast<int>(row / p.queries % p.heads);
  const int b = static_cast<int>(row / p.queries / p.heads);
  const bool first = Thread() % 32 == 0;
  if (p.norm_x != nullptr) {
    const float norm = SquaredNorm<C>(HeadOf<C>(p.x, b, h), i, p.dim);
    if (first) p.norm_x[row] = norm;
  }
  if (p.drop == nullptr || !first) return;
  constexpr uint64 kStep = 0x9e3779b97f4a7c15ull;
  uint64 hash = Mix(p.seed + kStep);
  hash = Mix(hash + kStep * (static_cast<uint64>(b) + 1));
  hash = Mix(hash + kStep * (static_cast<uint64>(h) + 1));
  hash = Mix(hash + kStep * (static_cast<uint64>(i) + 1));
  p.drop[row] = static_cast<uint32>(hash);
  p.drop[rows + row] = static_cast<uint32>(hash >> 32);
}

// Whether any of `count` rows of a Head or a PagedHead contains a non-finite number; the result is
// the same on all lanes of a warp.
template <class C, class Rows>
GNOMON_DEVICE bool HoldsNoNumber(const Rows& head, int first, int count, int columns) {
  float found = 0;
  if (C::kAligned != 0 && columns * Bytes<C>() % 4 == 0) {
    const int words = columns * Bytes<C>() / 4;
    // A number is non-finite if all of its exponent bits are set.
    const uint32 exponent = C::kType == 2 ? 0x7c00u : 0x7f80u;
#pragma unroll 4
    for (int r = 0; r < count; ++r) {
      const auto* const row =
          reinterpret_cast<const uint32*>(head.data + head.Offset(first + r) * Bytes<C>());
      for (int n = Thread() % 32; n < words; n += 32) {
        const uint32 high = row[n] >> 16;
        const uint32 low = row[n] & 0xffffu;
        if ((high & exponent) == exponent) found = 1;
        if (C::kType != 0 && (low & exponent) == exponent) found = 1;
      }
    }
    return SumOfWarp(found) != 0;
  }
  for (int r = 0; r < count; ++r) {
    for (int d = Thread() % 32; d < columns; d += 32) {
      if (!(Abs(LoadElement<C>(head.data, head.Offset(first + r) + d)) < Infinity())) found = 1;
    }
  }
  return SumOfWarp(found) != 0;
}

// This kernel runs one warp per 16 keys of each key head.
template <class C>
GNOMON_DEVICE void PrepareKeys(const Parameters& p) {
  const int groups = DivideUp(p.keys, 16);
  const Int64 index = static_cast<Int64>(BlockX()) * C::kWarps + Thread() / 32;
  const Int64 key_head = index / groups;
  if (key_head >= static_cast<Int64>(p.batch) * p.key_heads) return;
  const int group = static_cast<int>(index % groups);
  const int b = static_cast<int>(key_head / p.key_heads);
  const int h = static_cast<int>(key_head % p.key_heads);
  const int lane = Thread() % 32;
  const int last = Least(16 * group + 16, p.keys);
  if (p.norm_y != nullptr) {
    for (int j = 16 * group; j < last; ++j) {
      const float norm = SquaredNorm<C>(KeyRowOf<C>(p, p.y, b, h, j), 0, p.dim);
      if (lane == 0) p.norm_y[key_head * p.keys + j] = norm;
    }
  }
  if (p.spoiled == nullptr) return;
  // Tiles do not contain keys that the bounds of the batch element hide.
  const Interval seen = BatchKeys(p, b);
  const int begin = static_cast<int>(Most<Int64>(16 * group, seen.low));
  const int count = static_cast<int>(Least<Int64>(last, seen.high)) - begin;
  bool spoiled = false;
  if (count > 0 && C::kPages != 0) {
    spoiled = HoldsNoNumber<C>(PagedHeadOf<C>(p, p.v, b, h), begin, count, p.value_dim);
  } else if (count > 0) {
    spoiled = HoldsNoNumber<C>(HeadOf<C>(p.v, b, h), begin, count, p.value_dim);
  }
  if (lane == 0) p.spoiled[index] = spoiled ? 1 : 0;
}

// Stores the words of a query, as QueryOf() reads them in the backward pass in one pass. The words
// of a tile follow each other, so that they can be copied 16 bytes at a time.
GNOMON_DEVICE void StoreQueryWords(const Parameters& p, int b, int h, int i) {
  const int step = cuda::kOnePassStep;
  const Int64 head = static_cast<Int64>(b) * p.heads + h;
  const Int64 row = head * p.queries + i;
  const Int64 in_batch = static_cast<Int64>(b) * p.queries + i;
  float* to = p.query_words +
              (head * DivideUp(p.queries, step) + i / step) * (p.query_word_count * step) +
              i % step;
  const auto store = [&](float word) {
    *to = word;
    to += step;
  };
  store(FromBits(static_cast<uint32>(p.low[in_batch])));
  store(FromBits(static_cast<uint32>(p.high[in_batch])));
  store(p.shift[row]);
  store(p.delta[row]);
  const bool is_distance = p.norm_x != nullptr;
  const int scalars = p.query_word_count - (is_distance ? 6 : 4);
  for (int s = 0; s < scalars; ++s) {
    store(p.row_scalars[s * static_cast<Int64>(p.batch) * p.heads * p.queries + row]);
  }
  if (!is_distance) return;
  store(p.norm_x[row]);
  store(NearShare(p.factor[h] * kLog2E * kLn2, p.norm_x[row]));
}

// Computes each row's softmax statistics for the backward pass, and
// delta_i = sum_j p_ij dP_ij - dlse_i, which equals dO_i . o_i - dlse_i. If one key dominates, its
// dP_ij - delta_i nearly cancels, and the rounding errors must cancel as well. Delta is therefore
// computed as that key's dP, exactly as in the tiles, plus a correction for the difference between
// o_i and the key's value. Each block is a single warp, which processes 16 rows.
template <class C>
GNOMON_DEVICE void PrepareDelta(const Parameters& p) {
  const int row_bytes = cuda::RowBytes(C::kType, C::kValueDim);
  unsigned char* const d_o_tile = SharedMemory();
  unsigned char* const value_tile = d_o_tile + 16 * row_bytes;
  const int lane = Thread();
  const int blocks = DivideUp(p.queries, 16);
  const int begin = BlockX() % blocks * 16;
  const int head = p.first_head + BlockX() / blocks;
  const int b = head / p.heads;
  const int h = head % p.heads;
  const Int64 rows = static_cast<Int64>(p.batch) * p.heads * p.queries;
  const Int64 first = static_cast<Int64>(head) * p.queries + begin;
  const Head d_o = HeadOf<C>(p.d_o, b, h);
  const Head o = HeadOf<C>(p.o, b, h);
  const Head v = HeadOf<C>(p.v, b, h / p.group);
  CopyRows<C>(d_o_tile, d_o, begin, 16, 0, p.queries, p.value_dim, C::kValueDim);
  // Row r of value_tile is the value of the key whose score is the shift of row r.
  for (int r = 0; r < 16; ++r) {
    const float top = begin + r < p.queries ? p.statistics[2 * rows + first + r] : -1.0f;
    const int key = static_cast<int>(top);
    const Head row = {v.data, v.stride};
    CopyRows<C>(value_tile + r * row_bytes, row, key, 1, 0, p.keys, p.value_dim, C::kValueDim);
  }
  CopyCommit();
  CopyWait<0>();
  Barrier();
  float product[2][4] = {};
#pragma unroll
  for (int k = 0; k < C::kValueDim / Depth<C>(); ++k) {
    Operand left;
    Operand right;
    LoadLeft<C>(left, d_o_tile, row_bytes, 0, k);
    LoadRight<C>(right, value_tile, row_bytes, 0, k);
    MultiplyAdd<C, false>(product[0], left, right, 0);
    MultiplyAdd<C, false>(product[1], left, right, 1);
  }
  // Reads row r of d_o_tile times row r of value_tile, a diagonal element of the product: for r < 8
  // it is in the first half of product[0], otherwise in the second half of product[1].
  for (int r = 0; r < 16; ++r) {
    const int column = r % 8;
    const float mine = r < 8 ? (column % 2 == 0 ? product[0][0] : product[0][1])
                             : (column % 2 == 0 ? product[1][2] : product[1][3]);
    float shift_product = Shuffle(mine, 4 * column + column / 2);
    const int i = begin + r;
    if (i >= p.queries) break;
    const Int64 row = first + r;
    const float sum = p.statistics[rows + row];
    const float top = p.statistics[2 * rows + row];
    // The dropout factor of the key that outweighs all other keys; 0 if there is no such key.
    float kept = top >= 0 && sum < 2.0f ? 1.0f : 0.0f;
    if (C::kDropout != 0 && kept != 0) {
      Query q{};
      q.drop_first = p.drop[row];
      q.drop_second = p.drop[rows + row];
      kept = Kept<C>(p, q, static_cast<int>(top));
    }
    // Adds the product with the key's relative value.
    const int key = static_cast<int>(top);
    const Int64 origin = C::kRelativeValues != 0 ? QueryOffset(p, b) : 0;
    Int64 position = 0;
    Int64 key_position = 0;
    if (C::kRelativeValues != 0 && kept != 0) {
      position = QueryPosition<C>(p, b, origin, i);
      key_position = KeyPosition<C>(p, b, origin, key);
    }
    if (C::kRelativeValues != 0 && kept != 0) {
      shift_product += SumOfEntries(p.relative_layout,
                                    p.relative_products + (row - p.relative_row) * p.relative_size,
                                    position, key_position);
    }
    float others = 0;
    for (int d = lane; d < p.value_dim; d += 32) {
      const float out = p.exact_o != nullptr ? p.exact_o[row * p.value_dim + d]
                                             : LoadElement<C>(o.data, i * o.stride + d);
      const float by = LoadElement<C>(d_o.data, i * d_o.stride + d);
      float value = 0;
      if (kept != 0) value = LoadElement<C>(v.data, key * v.stride + d);
      if (C::kRelativeValues != 0 && kept != 0) {
        const float* const values = p.relative_values + h * p.relative_values_stride + d;
        for (int n = 0; n < EntriesOf(p.relative_layout); ++n) {
          const int entry = LayoutEntry(p.relative_layout, n, position, key_position);
          if (entry >= 0) value += values[static_cast<Int64>(entry) * p.value_dim];
        }
      }
      value *= kept;
      others = Fma(by, out - value, others);
    }
    others = SumOfWarp(others);
    if (lane != 0) continue;
    const float d_lse = p.d_lse != nullptr ? p.d_lse[row] : 0.0f;
    if (sum == 0.0f) {
      // 2^(s - inf) = 0: a row without keys gets no weights and no gradients.
      p.shift[row] = Infinity();
      p.inverse[row] = 0;
      p.delta[row] = 0;
      if (C::kOnePass != 0) StoreQueryWords(p, b, h, i);
      continue;
    }
    p.shift[row] = p.statistics[row] + (C::kOnePass != 0 ? Log2(sum) : 0.0f);
    p.inverse[row] = 1.0f / sum;
    // A sum of 1 means that all other weights are below the rounding error.
    if (kept != 0) others = kept * shift_product + (sum == 1.0f ? 0.0f : others);
    p.delta[row] = others - d_lse;
    if (C::kOnePass != 0) StoreQueryWords(p, b, h, i);
  }
}

// Computes to[n] = sum over outer and m of from[outer * outer_stride + m * stride + n], in this
// order, with one thread for each n and BlockY().
template <class C>
GNOMON_DEVICE void AddUp(const Parameters& p) {
  const Int64 n = static_cast<Int64>(BlockX()) * 32 * C::kWarps + Thread();
  if (n >= p.sum_size) return;
  const float* const from = p.sum_from + BlockY() * p.sum_from_step + n;
  float sum = 0;
  for (Int64 outer = 0; outer < p.sum_outer; ++outer) {
    for (Int64 m = 0; m < p.sum_count; ++m) {
      sum += from[outer * p.sum_outer_stride + m * p.sum_stride];
    }
  }
  p.sum_to[BlockY() * p.sum_to_step + n] = sum;
}

// Computes the same sum for n = 0 only, in double precision and with all threads of a block. Each
// thread adds up every `threads`-th number, beginning with its own index.
template <class C>
GNOMON_DEVICE void AddUpAll(const Parameters& p) {
  const int threads = 32 * C::kWarps;
  const float* const from = p.sum_from + BlockY() * p.sum_from_step;
  double sum = 0;
  const Int64 numbers = p.sum_outer * p.sum_count;
  for (Int64 n = Thread(); n < numbers; n += threads) {
    sum += from[n / p.sum_count * p.sum_outer_stride + n % p.sum_count * p.sum_stride];
  }
  unsigned char* const sums = SharedMemory();
  StoreShared<double>(sums + 8 * Thread(), sum);
  Barrier();
  if (Thread() != 0) return;
  double total = 0;
  for (int t = 0; t < threads; ++t) total += LoadShared<double>(sums + 8 * t);
  p.sum_to[BlockY() * p.sum_to_step] = static_cast<float>(total);
}

// Clears the gradient of the pair bias.
template <class C>
GNOMON_DEVICE void ClearPairs(const Parameters& p) {
  const Int64 row = BlockX();
  const int i = static_cast<int>(row % p.queries);
  const int h = static_cast<int>(row / p.queries % p.heads);
  const int b = static_cast<int>(row / p.queries / p.heads);
  const Array& to = p.d_pair_bias;
  float* const out =
      static_cast<float*>(to.data) + b * to.stride[0] + h * to.stride[1] + i * to.stride[2];
  for (int j = Thread(); j < p.keys; j += 32 * C::kWarps) out[j] = 0;
}

}  // namespace gnomon::device

#endif  // GNOMON_SRC_CUDA_ROWS_CUH_
