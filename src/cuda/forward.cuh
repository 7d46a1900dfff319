// The forward pass. A block owns 16 or 32 queries per warp, all of one head, and iterates over the
// keys that they attend to. A warp keeps its weights and sums in registers.
#ifndef GNOMON_SRC_CUDA_FORWARD_CUH_
#define GNOMON_SRC_CUDA_FORWARD_CUH_

#include "cuda/pair.cuh"
#include "cuda/relative.cuh"
#include "cuda/tiles.cuh"

namespace gnomon::device {

// Whether a row of values in shared memory contains a non-finite number; the result is the same on
// all lanes.
template <class C>
GNOMON_DEVICE bool IsSpoiled(const unsigned char* row) {
  float spoiled = 0;
  for (int d = Thread() % 32; d < C::kValueDim; d += 32) {
    const float value =
        C::kType == 0 ? LoadShared<float>(row + 4 * d) : Widen<C>(LoadShared<uint16>(row + 2 * d));
    if (!(Abs(value) < Infinity())) spoiled = 1;
  }
  return SumOfWarp(spoiled) != 0;
}

// Adds a tile's non-finite values only to the rows that attend to them, because 0 times such a
// value is not 0. Bit 4 n + e of `hidden` tells whether the thread's pair [n][e] is hidden. The
// pairs are those of 16 rows. `o` holds `count` columns beginning with `first`.
template <class C>
GNOMON_DEVICE void AddSpoiled(const unsigned char* values, const float (*weights)[4], uint32 hidden,
                              float (*o)[4], int first = 0, int count = C::kValueDim) {
  const int lane = Thread() % 32;
  const int row_bytes = cuda::RowBytes(C::kType, C::kValueDim);
#pragma unroll
  for (int n = 0; n < C::kStep / 8; ++n) {
#pragma unroll 1
    for (int c = 0; c < 8; ++c) {
      const unsigned char* const row = values + (8 * n + c) * row_bytes;
      if (!IsSpoiled<C>(row)) continue;
      const int owner = lane / 4 * 4 + c / 2;
      float weight[2];
      bool seen[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        weight[r] = Shuffle(c % 2 == 0 ? weights[n][2 * r] : weights[n][2 * r + 1], owner);
        seen[r] = Shuffle((hidden >> (4 * n + 2 * r + c % 2) & 1) != 0 ? 0.0f : 1.0f, owner) != 0;
      }
#pragma unroll
      for (int d = 0; d < count / 8; ++d) {
        if (first + 8 * d >= C::kValueDim) continue;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int at = first + 8 * d + 2 * (lane % 4) + e;
          const float value = C::kType == 0 ? LoadShared<float>(row + 4 * at)
                                            : Widen<C>(LoadShared<uint16>(row + 2 * at));
          if (seen[0]) o[d][e] += weight[0] * value;
          if (seen[1]) o[d][2 + e] += weight[1] * value;
        }
      }
    }
  }
}

// Replaces a tile's rows of values that contain a non-finite value by zeros.
template <class C>
GNOMON_DEVICE void ClearSpoiled(unsigned char* values) {
  const int lane = Thread() % 32;
  const int row_bytes = cuda::RowBytes(C::kType, C::kValueDim);
  Barrier();
  for (int c = Thread() / 32; c < C::kStep; c += C::kWarps) {
    unsigned char* const row = values + c * row_bytes;
    if (!IsSpoiled<C>(row)) continue;
    // Each lane clears the elements that it has read.
    for (int d = lane; d < C::kValueDim; d += 32) {
      if (C::kType == 0) {
        StoreShared<float>(row + 4 * d, 0.0f);
      } else {
        StoreShared<uint16>(row + 2 * d, uint16{0});
      }
    }
  }
  Barrier();
}

// Whether any of keys [first, last) has a non-finite value; the result is the same on all threads.
template <class C>
GNOMON_DEVICE bool AnySpoiled(const Parameters& p, int b, int key_head, int first, int last) {
  const int groups = DivideUp(p.keys, 16);
  const int* const spoiled = p.spoiled + (static_cast<Int64>(b) * p.key_heads + key_head) * groups;
  float found = 0;
  for (int n = first / 16 + Thread() % 32; n < DivideUp(last, 16); n += 32) {
    if (spoiled[n] != 0) found = 1;
  }
  return SumOfWarp(found) != 0;
}

// Whether any of the keys of the tile at `start` has a non-finite value.
template <class C>
GNOMON_DEVICE bool IsSpoiledTile(const Parameters& p, int b, int key_head, int start) {
  const int groups = DivideUp(p.keys, 16);
  const int* const spoiled = p.spoiled + (static_cast<Int64>(b) * p.key_heads + key_head) * groups;
  bool found = false;
#pragma unroll
  for (int n = 0; n < C::kStep / 16; ++n) {
    if (start / 16 + n < groups) found = found || spoiled[start / 16 + n] != 0;
  }
  return found;
}

// A thread's pairs in a tile: of its row r, which is every eighth row after its first one, and
// columns 8 n and 8 n + 1 after its first one.
template <class C>
GNOMON_DEVICE float& PairAt(float (*pairs)[4], int r, int n, int c) {
  return pairs[r / 2 * (C::kStep / 8) + n][r % 2 * 2 + c];
}

// Computes the scores of a thread's pairs in the tile at `start`, and the largest one of each row.
// Bit 4 n + e of a word of `hidden` tells whether the pair [n][e] of 16 rows and 64 columns is
// hidden; it is set only if the tile may hold hidden keys with non-finite values. `begin`: the
// block's first row.
template <class F, class C, bool kPlain, int kRows, int kHidden>
GNOMON_DEVICE void ScorePairs(const Parameters& p, const HeadInputs& head,
                              const Query (&query)[kRows], const unsigned char* words,
                              const unsigned char* window, int begin, int first_row, int start,
                              float (*s)[4], float (&most)[kRows], uint32 (&hidden)[kHidden]) {
  const int pair = 2 * (Thread() % 4);
#pragma unroll
  for (int r = 0; r < 2 * C::kRowTiles; ++r) most[r] = -Infinity();
#pragma unroll
  for (int n = 0; n < C::kStep / 8; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int column = 8 * n + pair + c;
      const Key key = KeyOf<F, C>(words, column);
#pragma unroll
      for (int r = 0; r < 2 * C::kRowTiles; ++r) {
        const int row = first_row + 8 * r;
        const int diagonal = column - (row - begin) + RowsInBlock<C>() - 1;
        float& cell = PairAt<C>(s, r, n, c);
        const Score score = ScoreOf<F, C, kPlain>(p, head, query[r], key, row, start + column, cell,
                                                  window, diagonal);
        cell = score.value;
        most[r] = Larger(most[r], score.value);
        if (!kPlain && C::kHides != 0 && score.value == -Infinity()) {
          hidden[r / 2 * DivideUp(C::kStep, 64) + n / 8] |= 1u << (4 * (n % 8) + r % 2 * 2 + c);
        }
      }
    }
  }
}

// The softmax of the rows of a thread. Weights are relative to a shift, `top`, the score of
// top_key. It is the largest score or, if the shift is lazy, rises only if a score exceeds it by
// more than kMostExcess or outweighs all earlier keys of its lane: if it is above `limit`. Thus, if
// one key outweighs all others together, it is top_key.
template <class C>
struct RowWeights {
  static constexpr int kSize = GNOMON_SIZE(2 * C::kRowTiles, 4);

  GNOMON_DEVICE static constexpr bool IsLazy() { return C::kRowTiles == 2 || C::kProducers != 0; }

  GNOMON_DEVICE RowWeights() {
#pragma unroll
    for (int r = 0; r < 2 * C::kRowTiles; ++r) {
      limit[r] = top[r] = -Infinity();
      top_key[r] = -1;
    }
  }

  // Whether any of a thread's largest scores in a tile raises a shift.
  GNOMON_DEVICE bool Rises(float (&most)[kSize]) const {
    bool rises = false;
#pragma unroll
    for (int r = 0; r < 2 * C::kRowTiles; ++r) {
      if (!IsLazy()) most[r] = LargestOfRow(most[r]);
      rises = rises || most[r] > (IsLazy() ? limit[r] : top[r]);
    }
    return rises;
  }

  // Raises the shifts. rescale(r, shrink) multiplies the outputs of row r. `column`: the key of the
  // thread's first pair.
  template <class Rescale>
  GNOMON_DEVICE void Raise(float (&most)[kSize], float (*s)[4], int column,
                           const Rescale& rescale) {
#pragma unroll
    for (int r = 0; r < 2 * C::kRowTiles; ++r) {
      if (!IsLazy()) continue;
      const bool exceeds = LargestOfRow(most[r] > limit[r] ? 1.0f : 0.0f) != 0;
      const float largest = LargestOfRow(most[r]);
      most[r] = exceeds ? largest : -Infinity();
    }
#pragma unroll
    for (int r = 0; r < 2 * C::kRowTiles; ++r) {
      if (!(most[r] > top[r])) continue;
      const float shrink = Exp2(top[r] - most[r]);
      top[r] = most[r];
      sum[r] *= shrink;
      rescale(r, shrink);
      top_key[r] = -1;
#pragma unroll
      for (int n = 0; n < C::kStep / 8; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (PairAt<C>(s, r, n, c) == top[r]) top_key[r] = column + 8 * n + c;
        }
      }
    }
    constexpr float kMostExcess = 8;
#pragma unroll
    for (int r = 0; r < 2 * C::kRowTiles; ++r) {
      if (IsLazy()) limit[r] = top[r] + Least(kMostExcess, Log2(sum[r]));
    }
  }

  // Converts scores to weights, with dropout.
  GNOMON_DEVICE void Weigh(const Parameters& p, const Query (&query)[kSize], float (*s)[4],
                           int column) {
#pragma unroll
    for (int r = 0; r < 2 * C::kRowTiles; ++r) {
      // If all scores so far are -inf (or NaN), any finite shift gives weights of 0 (or NaN).
      const float shift = top[r] == -Infinity() ? 0.0f : top[r];
#pragma unroll
      for (int n = 0; n < C::kStep / 8; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& cell = PairAt<C>(s, r, n, c);
          cell = Exp2(cell - shift);
          sum[r] += cell;
          if (C::kDropout != 0) cell *= Kept<C>(p, query[r], column + 8 * n + c);
        }
      }
    }
  }

  float limit[kSize];
  float top[kSize];
  float sum[kSize] = {};
  int top_key[kSize];
};

// Stores the statistics of a row, and its outputs: output(d, c) is the sum for the thread's column
// 8 d + c. `part`: the part of the keys.
template <class C, class Output>
GNOMON_DEVICE void StoreRow(const Parameters& p, int b, int h, int i, int part, float top,
                            float sum, float key, float scale, const Output& output) {
  const int pair = 2 * (Thread() % 4);
  const Int64 all = static_cast<Int64>(p.batch) * p.heads * p.queries;
  const Int64 row = (static_cast<Int64>(b) * p.heads + h) * p.queries + i;
  if (C::kParts != 0) {
    const Int64 to = part * all + row;
#pragma unroll
    for (int d = 0; d < C::kValueDim / 8; ++d) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int column = 8 * d + pair + c;
        if (column < p.value_dim) p.partial[to * p.value_dim + column] = output(d, c);
      }
    }
    if (pair == 0) {
      p.partial_statistics[to] = top;
      p.partial_statistics[p.parts * all + to] = sum;
      p.partial_statistics[2 * p.parts * all + to] = key;
    }
    return;
  }
  const Head out = HeadOf<C>(p.o, b, h);
#pragma unroll
  for (int d = 0; d < C::kValueDim / 8; ++d) {
    const int column = 8 * d + pair;
    const float even = output(d, 0) * scale;
    const float odd = output(d, 1) * scale;
    if (p.o.data != nullptr) {
      StorePair<C>(out.data, i * out.stride + column, even, odd, p.value_dim - column);
    }
    if (p.exact_o != nullptr) {
      if (column < p.value_dim) p.exact_o[row * p.value_dim + column] = even;
      if (column + 1 < p.value_dim) p.exact_o[row * p.value_dim + column + 1] = odd;
    }
  }
  if (pair != 0) return;
  if (p.lse != nullptr) {
    p.lse[row] = sum == 0.0f ? -Infinity() : (top + Log2(sum)) * kLn2;
  }
  if (p.statistics == nullptr) return;
  p.statistics[row] = top;
  p.statistics[all + row] = sum;
  p.statistics[2 * all + row] = key;
}

template <class F, class C>
GNOMON_DEVICE void Forward(const Parameters& p) {
  constexpr bool kReads = ReadsTokens<F>();
  constexpr int kPairs = GNOMON_SIZE(C::kRowTiles * C::kStep / 8, 16);
  constexpr int kRows = GNOMON_SIZE(2 * C::kRowTiles, 4);
  const int rows_in_block = RowsInBlock<C>();
  const int x_bytes = cuda::RowBytes(C::kType, C::kDim);
  const int v_bytes = cuda::RowBytes(C::kType, C::kValueDim);
  const int word_count = WordCount<F, C, false>();
  const SharedLayout at =
      cuda::ForwardLayout(C::kType, C::kDim, C::kValueDim, rows_in_block, C::kStep, C::kStages,
                          C::kOwn, word_count, C::kBias, C::kRelativeValues);
  unsigned char* const memory = SharedMemory();
  const int warp = Thread() / 32;
  const int lane = Thread() % 32;
  const int pair = 2 * (lane % 4);

  // The last rows are processed first, because they have the most work under a causal mask.
  const int blocks = DivideUp(p.queries, rows_in_block);
  const int begin = (blocks - 1 - BlockX() % blocks) * rows_in_block;
  int index = BlockX() / blocks;
  int part = 0;
  if (C::kParts != 0) {
    part = index % p.parts;
    index /= p.parts;
  }
  index += p.first_head;
  const int b = index / p.heads;
  const int h = index % p.heads;
  const int key_head = h / p.group;
  const HeadInputs head = LoadHead<F, C>(p, b, h);

  // Both ends of a query's range are monotonic in its position.
  const int* const lows = p.low + IntervalsOf(p, b, h);
  const int* const highs = p.high + IntervalsOf(p, b, h);
  const int end = Least(begin + rows_in_block, p.queries);
  const int low = lows[begin];
  const int high = highs[end - 1];
  // Between these bounds, all rows see all keys.
  const int low_of_all = lows[end - 1];
  const int high_of_all = end - begin == rows_in_block ? highs[begin] : 0;
  int first = low / C::kStep * C::kStep;
  int last = high;
  if (C::kParts != 0) {
    const int of_part = p.tiles_in_part * C::kStep;
    first = Most(first, part * of_part);
    last = Least(last, (part + 1) * of_part);
  }

  Operand q[GNOMON_SIZE(C::kOwn != 0 ? C::kRowTiles * C::kDim / Depth<C>() : 1, 32)];
  if (kReads) {
    const Head queries = HeadOf<C>(p.x, b, h);
    CopyRows<C>(memory + at.own_x, queries, begin, rows_in_block, 0, p.queries, p.dim, C::kDim);
    CopyCommit();
    if (C::kOwn != 0) {
      CopyWait<0>();
      Barrier();
#pragma unroll
      for (int t = 0; t < C::kRowTiles; ++t) {
#pragma unroll
        for (int k = 0; k < C::kDim / Depth<C>(); ++k) {
          LoadLeft<C>(q[t * (C::kDim / Depth<C>()) + k], memory + at.own_x, x_bytes,
                      16 * (C::kRowTiles * warp + t), k);
        }
      }
      Barrier();
    }
  }
  KeyTileRows<C> key_rows(p, p.y, b, key_head, first, C::kDim);
  KeyTileRows<C> value_rows(p, p.v, b, key_head, first, C::kValueDim);
  const TileWords<F, C, false> key_words(p, b, h);
  const auto copy = [&](int start, int stage) {
    if (kReads) {
      key_rows.Copy(memory + at.other_x + stage * C::kStep * x_bytes, start, low, high, p.dim,
                    C::kDim);
    }
    value_rows.Copy(memory + at.other_y + stage * C::kStep * v_bytes, start, low, high, p.value_dim,
                    C::kValueDim);
    key_words.Copy(memory + at.words + stage * word_count * C::kStep * 4, start, low, high);
    if (C::kBias == 1) {
      CopyWords<C>(memory + at.bias + stage * (rows_in_block + C::kStep) * 4, head.bias,
                   start - begin - rows_in_block + p.queries, rows_in_block + C::kStep - 1, 0,
                   p.bias_size);
    }
    CopyCommit();
  };

  // The thread's rows are this one and every eighth row after it.
  const int first_row = begin + 16 * C::kRowTiles * warp + lane / 4;
  Query query[kRows] = {};
  float o[GNOMON_SIZE(C::kRowTiles * C::kValueDim / 8, 32)][4] = {};
  RowWeights<C> rows;
#pragma unroll
  for (int r = 0; r < 2 * C::kRowTiles; ++r) {
    if (first_row + 8 * r < p.queries) query[r] = LoadQuery<F, C>(p, head, first_row + 8 * r);
  }
  // The element of row r and output column 8 n + pair + c.
  const auto output_at = [&o](int r, int n, int c) -> float& {
    return o[r / 2 * (C::kValueDim / 8) + n][r % 2 * 2 + c];
  };
  if (C::kRelativeValues != 0) ClearTables<C>(p, p.relative_weights, b, h, begin + 16 * warp);
  const bool any_spoiled =
      C::kHides != 0 && first < last && AnySpoiled<C>(p, b, key_head, first, last);
  // Whether the tile at `start` has a non-finite value.
  const auto is_spoiled = [&](int start) {
    return any_spoiled && IsSpoiledTile<C>(p, b, key_head, start);
  };
  // Adds the tile of keys at `start`. With `plain`, every query attends to every key in the tile,
  // and the values are finite. This common case is separate, and its only branch is before the
  // weights, so that the compiler can overlap roots, exponentials and products. It fails and
  // returns false if one of the warp's distances is near.
  const auto add_tile = [&](auto plain, int start, int stage) {
    const unsigned char* const key_tile = memory + at.other_x + stage * C::kStep * x_bytes;
    unsigned char* const value_tile = memory + at.other_y + stage * C::kStep * v_bytes;
    const unsigned char* const words = memory + at.words + stage * word_count * C::kStep * 4;
    const unsigned char* const window = memory + at.bias + stage * (rows_in_block + C::kStep) * 4;

    float s[kPairs][4] = {};
    if (kReads) MultiplyRows<C, false>(s, q, memory + at.own_x, key_tile, C::kDim);
    bool is_near = false;
    if constexpr (IsDistance<F>()) {
#pragma unroll
      for (int t = 0; t < C::kRowTiles; ++t) {
        float (*const pairs)[4] = s + t * (C::kStep / 8);
        const auto norms = [&](int n, int e) {
          return NormsOf(query[2 * t + e / 2], KeyOf<F, C>(words, 8 * n + pair + e % 2));
        };
        if (plain.value) {
          is_near = ConvertProducts<C>(pairs, norms) || is_near;
        } else {
          ToDistances<C, false>(pairs, p, head, first_row + 16 * t, start + pair, norms);
        }
      }
    }
    float most[kRows];
    uint32 hidden[GNOMON_SIZE(C::kRowTiles, 2)] = {};
    ScorePairs<F, C, plain.value>(p, head, query, words, window, begin, first_row, start, s, most,
                                  hidden);
    const bool rises = rows.Rises(most);
    float shrunk[2] = {1.0f, 1.0f};
    // Most tiles of a long row do not raise the shift.
    if (AnyOfWarp(rises || is_near)) {
      if (IsDistance<F>() && plain.value && AnyOfWarp(is_near)) return false;
      rows.Raise(most, s, start + pair, [&](int r, float shrink) {
        if (C::kRelativeValues != 0) shrunk[r % 2] = shrink;
#pragma unroll
        for (int d = 0; d < C::kValueDim / 8; ++d) {
#pragma unroll
          for (int c = 0; c < 2; ++c) output_at(r, d, c) *= shrink;
        }
      });
    }
    rows.Weigh(p, query, s, start + pair);
    if (!plain.value && C::kHides != 0) {
      if (is_spoiled(start)) {
#pragma unroll
        for (int t = 0; t < C::kRowTiles; ++t) {
          AddSpoiled<C>(value_tile, s + t * (C::kStep / 8), hidden[t], o + t * (C::kValueDim / 8));
        }
        ClearSpoiled<C>(value_tile);
      }
    }
    AddRows<C>(o, s, value_tile, C::kValueDim, 0, C::kValueDim);
    if (C::kRelativeValues != 0) {
#pragma unroll
      for (int n = 0; n < C::kStep / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = 16 * warp + lane / 4 + e / 2 * 8;
          StoreShared<float>(memory + at.scores + 4 * (row * (C::kStep + 1) + 8 * n + pair + e % 2),
                             s[n][e]);
        }
      }
      Barrier();
      ScaleTables<C>(p, p.relative_weights, b, h, begin + 16 * warp, shrunk);
      WarpBarrier();
      AddToTables<C>(p, p.relative_weights, memory + at.scores, b, h, begin + 16 * warp, start);
    }
    return true;
  };
  if (C::kStages == 2 && first < last) copy(first, 0);
  int stage = 0;
  for (int start = first; start < last; start += C::kStep) {
    WaitForTile<C>(copy, start);
    RequestNextTile<C>(copy, start, last, stage);
    bool is_plain = start >= low_of_all && start + C::kStep <= high_of_all && !is_spoiled(start);
    // With relative values, all warps must reach the same barriers, so none may fail.
    if (C::kRelativeValues != 0 && IsDistance<F>()) is_plain = false;
    if (!is_plain || !add_tile(Whether<true>{}, start, stage)) {
      add_tile(Whether<false>{}, start, stage);
    }
    if (C::kStages == 2) stage ^= 1;
  }
  // No copy may be in flight when the block ends.
  CopyWait<0>();

  float scales[2] = {};
#pragma unroll
  for (int r = 0; r < 2 * C::kRowTiles; ++r) {
    const int i = first_row + 8 * r;
    const float sum = SumOfRow(rows.sum[r]);
    const float scale = sum == 0.0f ? 0.0f : 1.0f / sum;
    if (C::kRelativeValues != 0) scales[r % 2] = scale;
    const float key = LargestOfRow(static_cast<float>(rows.top_key[r]));
    if (i >= p.queries) continue;
    StoreRow<C>(p, b, h, i, part, rows.top[r], sum, key, scale,
                [&](int d, int c) { return output_at(r, d, c); });
  }
  if (C::kRelativeValues != 0) {
    ScaleTables<C>(p, p.relative_weights, b, h, begin + 16 * warp, scales);
  }
}

// Merges the results of the parts of the keys in order, with one warp per row.
template <class C>
GNOMON_DEVICE void Merge(const Parameters& p) {
  const Int64 all = static_cast<Int64>(p.batch) * p.heads * p.queries;
  const Int64 row = static_cast<Int64>(BlockX()) * C::kWarps + Thread() / 32;
  if (row >= all) return;
  const int lane = Thread() % 32;
  float top = -Infinity();
  float key = -1;
  for (int part = 0; part < p.parts; ++part) {
    const float score = p.partial_statistics[part * all + row];
    if (!(score > top)) continue;
    top = score;
    key = p.partial_statistics[(2 * p.parts + part) * all + row];
  }
  const float shift = top == -Infinity() ? 0.0f : top;
  float sum = 0;
  for (int part = 0; part < p.parts; ++part) {
    sum += Exp2(p.partial_statistics[part * all + row] - shift) *
           p.partial_statistics[(p.parts + part) * all + row];
  }
  const float scale = sum == 0.0f ? 0.0f : 1.0f / sum;
  const int i = static_cast<int>(row % p.queries);
  const int h = static_cast<int>(row / p.queries % p.heads);
  const Head out = HeadOf<C>(p.o, static_cast<int>(row / p.queries / p.heads), h);
  for (int d = lane; d < p.value_dim; d += 32) {
    float o = 0;
    for (int part = 0; part < p.parts; ++part) {
      const Int64 from = part * all + row;
      o += Exp2(p.partial_statistics[from] - shift) * p.partial[from * p.value_dim + d];
    }
    o *= scale;
    if (p.o.data != nullptr) StorePair<C>(out.data, i * out.stride + d, o, 0.0f, 1);
    if (p.exact_o != nullptr) p.exact_o[row * p.value_dim + d] = o;
  }
  if (lane != 0) return;
  if (p.lse != nullptr) p.lse[row] = sum == 0.0f ? -Infinity() : (top + Log2(sum)) * kLn2;
  if (p.statistics == nullptr) return;
  p.statistics[row] = top;
  p.statistics[all + row] = sum;
  p.statistics[2 * all + row] = key;
}

}  // namespace gnomon::device

#endif  // GNOMON_SRC_CUDA_FORWARD_CUH_
