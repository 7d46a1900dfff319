// The backward pass: one template for two passes. A block owns 16 queries or keys per warp (its
// rows), and iterates over the keys or queries that form pairs with them. In the pass over keys,
// blocks own queries and compute gradients of queries and factors. In the pass over queries, blocks
// own keys and compute gradients of keys, values and biases, for all heads of the group. Each sum
// is accumulated by a single thread in a fixed order.
#ifndef GNOMON_SRC_CUDA_BACKWARD_CUH_
#define GNOMON_SRC_CUDA_BACKWARD_CUH_

#include "cuda/pair.cuh"
#include "cuda/relative.cuh"
#include "cuda/tiles.cuh"

namespace gnomon::device {

// The key whose score is the row's shift; -1 if the row sees no key.
GNOMON_DEVICE int TopKey(const Parameters& p, const HeadInputs& head, int i) {
  if (i >= p.queries) return -1;
  const Int64 rows = static_cast<Int64>(p.batch) * p.heads * p.queries;
  const Int64 row = (static_cast<Int64>(head.b) * p.heads + head.h) * p.queries + i;
  return static_cast<int>(p.statistics[2 * rows + row]);
}

// The slopes of f with respect to g and to the query's scalars, at the pair of a row and its top
// key. A row's ds add up to its dlse, except for rounding. Large and nearly equal slopes would
// amplify that rounding error, so sums over a row use slopes relative to these. The columns of the
// row's token are split among its four lanes.
template <class F, class C>
GNOMON_DEVICE Derivative TopSlopes(const Parameters& p, const HeadInputs& head, const Query& query,
                                   int i) {
  const int top = TopKey(p, head, i);
  float g = 0;
  if (ReadsTokens<F>()) {
    const Head x = HeadOf<C>(p.x, head.b, head.h);
    const Head y = HeadOf<C>(p.y, head.b, head.h / p.group);
    if (top >= 0) {
#pragma unroll 4
      for (int d = Thread() % 4; d < p.dim; d += 4) {
        const float of_query = LoadElement<C>(x.data, i * x.stride + d);
        const float of_key = LoadElement<C>(y.data, top * y.stride + d);
        const float difference = of_query - of_key;
        g = IsDistance<F>() ? Fma(difference, difference, g) : Fma(of_query, of_key, g);
      }
    }
    g = SumOfRow(g);
  }
  Derivative slopes{};
  if (top < 0) return slopes;
  const Key key = LoadKey<F, C>(p, head.b, head.h, top);
  F::Gradient(g, query.a, key.b, head.t, slopes);
  // The slope of a definition may be infinite or NaN at distance 0.
  const auto finite = [](float slope) { return Abs(slope) < Infinity() ? slope : 0.0f; };
  slopes.g = finite(slopes.g);
#pragma unroll
  for (int m = 0; m < F::kRowScalars; ++m) slopes.a[m] = finite(slopes.a[m]);
  return slopes;
}

// Adds the sums over a tile's diagonals to the bias gradients. The tile's rows are keys; thread n
// sums the pairs with row - column = n - kStep + 1.
template <class C>
GNOMON_DEVICE void AddDiagonals(const unsigned char* scores, int rows, float* to, Int64 first,
                                Int64 size) {
  const int width = C::kStep + 1;
  for (int n = Thread(); n < rows + C::kStep - 1; n += 32 * C::kWarps) {
    const Int64 entry = first + n;
    if (entry < 0 || entry >= size) continue;
    const int begin = Most(0, n - C::kStep + 1);
    const int end = Least(rows, n + 1);
    float sum = 0;
    for (int r = begin; r < end; ++r) {
      sum += LoadShared<float>(scores + 4 * (r * width + r - n + C::kStep - 1));
    }
    to[entry] += sum;
  }
}

// Adds a tile's gradients to those of a table with a layout. Each warp adds to its own partial
// sums, one query at a time.
template <class C>
GNOMON_DEVICE void AddEntries(const Parameters& p, const unsigned char* scores, int rows, int b,
                              int first_key, int first_query, float* to) {
  const int width = C::kStep + 1;
  for (int c = Thread() / 32; c < C::kStep && first_query + c < p.queries; c += C::kWarps) {
    AddToEntries<C>(p, p.layout, scores + 4 * c, 4 * width, rows, first_key, b, first_query + c,
                    to);
  }
}

// Removes the weights of the pairs `near` (see RecomputeNear()) from a tile, and adds them to
// `out`, multiplied by differences of tokens. In sums of weighted tokens, the common part of near
// tokens would cancel and leave rounding errors. difference(row, column, d) returns column d of the
// other token minus that of the own one, for a row relative to the lane's first own row and a
// column of the tile. `out` holds columns starting at `first`.
template <class C, class Difference>
GNOMON_DEVICE void AddNear(float (*out)[4], float (*weights)[4], uint32 near, int first, int dim,
                           const Difference& difference_of) {
  // The columns of a row are split among its four lanes, so a warp processes the near pairs of all
  // its lanes.
  uint32 any = near;
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) any |= BitsOf(ShuffleXor(FromBits(any), mask));
  const int lane = Fresh(Thread()) % 32;
  for (int place = 0; any != 0; ++place, any >>= 1) {
    if ((any & 1) == 0) continue;
    float weight = 0;
#pragma unroll
    for (int n = 0; n < C::kStep / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        // Selects instead of branching, because with branches the compiler may move the
        // accumulators to memory.
        const bool is_it = place == 4 * n + e && (near & 1u << (4 * n + e)) != 0;
        weight = is_it ? weights[n][e] : weight;
        weights[n][e] = is_it ? 0.0f : weights[n][e];
      }
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float w = Shuffle(weight, lane / 4 * 4 + n);
      // Hidden tokens may contain any values.
      if (w == 0) continue;
      const bool is_first = RowOf(place) == 0;
#pragma unroll
      for (int d = 0; d < C::kColumns / 8; ++d) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int column = first + 8 * d + 2 * (lane % 4) + c;
          if (column >= dim) continue;
          const float difference = difference_of(RowOf(place), 2 * n + ColumnOf(place), column);
          // Selects for the same reason as above.
          const float sum = Fma(w, difference, is_first ? out[d][c] : out[d][2 + c]);
          out[d][c] = is_first ? sum : out[d][c];
          out[d][2 + c] = is_first ? out[d][2 + c] : sum;
        }
      }
    }
  }
}

// The same with tokens in global memory. The thread's pairs are those of rows `own` and own + 8.
// With `kKeys`, the block's own rows are keys.
template <class C, bool kKeys, int kOutputs, int kTiles>
GNOMON_DEVICE void AddDifferences(float (&out)[kOutputs][4], float (&weights)[kTiles][4],
                                  uint32 near, const Parameters& p, int b, int own_head, int head,
                                  int own, int other, int first) {
  if (!AnyOfWarp(near != 0)) return;
  // These addresses are the same for all tiles, but are recomputed because keeping them would
  // occupy registers.
  const Head from = HeadOf<C>(kKeys ? p.y : p.x, b, Fresh(own_head));
  const Head others = HeadOf<C>(kKeys ? p.x : p.y, b, Fresh(head));
  AddNear<C>(out, weights, near, first, p.dim, [&](int row, int column, int d) {
    return LoadElement<C>(others.data, (other + column) * others.stride + d) -
           LoadElement<C>(from.data, (own + row) * from.stride + d);
  });
}

template <class F, class C, bool kKeys>
GNOMON_DEVICE void Backward(const Parameters& p) {
  constexpr bool kReads = ReadsTokens<F>();
  constexpr int kOwnScalars = kKeys ? F::kColumnScalars : F::kRowScalars;
  const int rows_in_block = RowsInBlock<C>();
  const int x_bytes = cuda::RowBytes(C::kType, C::kDim);
  const int y_bytes = cuda::RowBytes(C::kType, C::kValueDim);
  const int word_count = WordCount<F, C, kKeys>();
  const bool sums_bias = kKeys && C::kBiasGradient != 0;
  const bool sums_tables = !kKeys && C::kRelativeSums != 0;
  const bool sums_key_tables = kKeys && C::kRelativeSums != 0;
  const int score_count = kKeys                   ? Most(C::kBiasGradient, C::kRelativeSums)
                          : C::kRelativeSums != 0 ? C::kRelativeKeys + C::kRelativeValues
                                                  : 0;
  const SharedLayout at =
      cuda::BackwardLayout(C::kType, C::kDim, C::kValueDim, rows_in_block, C::kStep, C::kStages,
                           C::kOwn, word_count, C::kBias, score_count);
  // In shared memory, the weights follow the score gradients.
  const int weights = at.scores + C::kRelativeKeys * cuda::ScoreBytes(rows_in_block, C::kStep);
  unsigned char* const memory = SharedMemory();
  const int warp = Thread() / 32;
  const int lane = Thread() % 32;
  const int pair = 2 * (lane % 4);

  const int own_count = kKeys ? p.keys : p.queries;
  const int blocks = DivideUp(own_count, rows_in_block);
  // The gradient columns that this block accumulates.
  const int chunk = BlockX() % p.chunks;
  const int first_column = chunk * C::kColumns;
  int index = BlockX() / p.chunks;
  // The row blocks of a part add to the same sums in sequence; with a layout, each warp has its own
  // sums.
  const int sums = C::kBias == 2 ? C::kWarps : 1;
  const int parts = sums_bias ? p.bias_parts / sums : blocks;
  const int part = index % parts;
  index = p.first_head + index / parts * p.head_step;
  const int b = index / (kKeys ? p.key_heads : p.heads);
  const int own_head = index % (kKeys ? p.key_heads : p.heads);
  const int key_head = kKeys ? own_head : own_head / p.group;
  const int first_h = kKeys ? own_head * p.group : own_head;
  const int last_h = kKeys ? first_h + p.group : first_h + 1;
  // Only for a block that owns queries, all of the same head.
  const int* const lows = p.low + IntervalsOf(p, b, first_h);
  const int* const highs = p.high + IntervalsOf(p, b, first_h);
  const Int64 query_rows = static_cast<Int64>(p.batch) * p.heads * p.queries;
  const Int64 key_columns = static_cast<Int64>(p.batch) * p.key_heads * p.keys;

  // The sums of this block's part; those of head first_h come first.
  const Int64 part_step = static_cast<Int64>(parts) * sums * p.bias_size;
  float* bias_sums = nullptr;
  if (sums_bias && chunk == 0) {
    bias_sums = p.d_bias_parts + (static_cast<Int64>(b) * p.heads + first_h) * part_step +
                static_cast<Int64>(part) * sums * p.bias_size;
    for (int h = first_h; h < last_h; ++h) {
      for (int n = Thread(); n < sums * p.bias_size; n += 32 * C::kWarps) {
        bias_sums[(h - first_h) * part_step + n] = 0;
      }
    }
    Barrier();
  }

  for (int block = part; block < blocks; block += parts) {
    const int begin = block * rows_in_block;
    const int end = Least(begin + rows_in_block, own_count);
    // The other rows that may form pairs with the head's rows are in [low, high). Keys hidden from
    // the whole batch, which may contain any values, are outside this range or, if the block owns
    // keys, outside [own_low, own_high).
    int low = 0;
    int high = 0;
    int own_low = 0;
    int own_high = own_count;
    if (kKeys) {
      const SeenKeys seen(p, b, first_h, last_h);
      own_low = seen.low;
      own_high = seen.high;
    } else {
      low = lows[begin];
      high = highs[end - 1];
    }
    // Whether all pairs of a tile are within their queries' key intervals.
    const int low_of_all = kKeys ? 0 : lows[end - 1];
    const int high_of_all = kKeys ? 0 : highs[begin];
    const auto sees_all = [&](const unsigned char* words, int start) {
      if (end - begin < rows_in_block) return false;
      if (!kKeys) return start >= low_of_all && start + C::kStep <= high_of_all;
      // Checks the first key of the tile's last query and the last key of its first query. Words of
      // missing queries are 0.
      return start + C::kStep <= high && LoadShared<int>(words + 4 * (C::kStep - 1)) <= begin &&
             LoadShared<int>(words + 4 * C::kStep) >= end;
    };

    const int rows[2] = {begin + 16 * warp + lane / 4, begin + 16 * warp + lane / 4 + 8};
    float dx[GNOMON_SIZE(C::kColumns / 8, 32)][4] = {};
    float dy[GNOMON_SIZE(kKeys ? C::kColumns / 8 : 1, 32)][4] = {};
    float sum_w[2] = {};
    // The excess in the summed weights of a row's token differences. It is subtracted from the
    // weight of the row's top key.
    float excess_w[2] = {};
    int top_key[2] = {-1, -1};
    Scales<C> x_scales;
    Scales<C> y_scales;
    float d_own[2][3] = {};
    const Head from_x = HeadOf<C>(kKeys ? p.y : p.x, b, own_head);
    const Head from_y = HeadOf<C>(kKeys ? p.v : p.d_o, b, own_head);
    Operand x[GNOMON_SIZE(C::kOwn != 0 ? C::kDim / Depth<C>() : 1, 32)];
    Operand y[GNOMON_SIZE(C::kOwn != 0 ? C::kValueDim / Depth<C>() : 1, 32)];
    if (kReads) {
      CopyRows<C>(memory + at.own_x, from_x, begin, rows_in_block, own_low, own_high, p.dim,
                  C::kDim);
    }
    CopyRows<C>(memory + at.own_y, from_y, begin, rows_in_block, own_low, own_high, p.value_dim,
                C::kValueDim);
    CopyCommit();
    if (C::kOwn != 0) {
      CopyWait<0>();
      Barrier();
      if (kReads) {
#pragma unroll
        for (int k = 0; k < C::kDim / Depth<C>(); ++k) {
          LoadLeft<C>(x[k], memory + at.own_x, x_bytes, 16 * warp, k);
        }
      }
#pragma unroll
      for (int k = 0; k < C::kValueDim / Depth<C>(); ++k) {
        LoadLeft<C>(y[k], memory + at.own_y, y_bytes, 16 * warp, k);
      }
      Barrier();
    }

    if (sums_key_tables && chunk == 0) {
      ClearKeyTables<C>(p, p.d_relative_key_scores, b, own_head, begin + 16 * warp);
    }
    for (int h = first_h; h < last_h; ++h) {
      const HeadInputs head = LoadHead<F, C>(p, b, h);
      const TileWords<F, C, kKeys> other_words(p, b, h);
      if (kKeys && (h == first_h || p.interval_heads > 1)) {
        const QueryRange range(p, b, h, begin, end);
        low = range.low;
        high = range.high;
      }
      const int first = low / C::kStep * C::kStep;
      const int other_head = kKeys ? h : key_head;
      // Wide heads leave no registers for the addresses.
      const bool advances = kKeys ? C::kDim <= 64 : C::kDim <= 128;
      TileRows<C> other_x(kKeys ? p.x : p.y, b, other_head, first, C::kDim, advances);
      TileRows<C> other_y(kKeys ? p.d_o : p.v, b, other_head, first, C::kValueDim, advances);
      const auto copy = [&](int start, int stage) {
        if (kReads) {
          other_x.Copy(memory + at.other_x + stage * C::kStep * x_bytes, start, low, high, p.dim,
                       C::kDim);
        }
        other_y.Copy(memory + at.other_y + stage * C::kStep * y_bytes, start, low, high,
                     p.value_dim, C::kValueDim);
        other_words.Copy(memory + at.words + stage * word_count * C::kStep * 4, start, low, high);
        if (C::kBias == 1) {
          // Entry 0 of the window is that of the tile's last query and first key.
          const int query = kKeys ? start + C::kStep - 1 : begin + rows_in_block - 1;
          const int key = kKeys ? begin : start;
          CopyWords<C>(memory + at.bias + stage * (rows_in_block + C::kStep) * 4, head.bias,
                       key - query + p.queries - 1, rows_in_block + C::kStep - 1, 0, p.bias_size);
        }
        CopyCommit();
      };

      Query own_query[2] = {};
      Key own_key[2] = {};
      RowSoftmax own_softmax[2] = {};
      float own_temperature[2] = {};
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (rows[r] >= own_count) continue;
        if (kKeys) {
          if (rows[r] >= own_low && rows[r] < own_high) {
            own_key[r] = LoadKey<F, C>(p, b, h, rows[r]);
          }
          continue;
        }
        own_query[r] = LoadQuery<F, C>(p, head, rows[r]);
        const Int64 row = (static_cast<Int64>(b) * p.heads + h) * p.queries + rows[r];
        own_softmax[r] = {p.shift[row], p.inverse[row], p.delta[row]};
        // A row without keys has zero gradients at any temperature.
        own_temperature[r] =
            C::kTemperature != 0 && own_softmax[r].inverse != 0 ? p.temperature[row] : 1.0f;
      }
      float top_own[2][3] = {};
      if constexpr (!kKeys && F::kRowScalars > 0) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const Derivative top = TopSlopes<F, C>(p, head, own_query[r], rows[r]);
#pragma unroll
          for (int m = 0; m < F::kRowScalars; ++m) top_own[r][m] = top.a[m];
        }
      }
      // by_*: sums of ds times the named quantity. mean_*: sums of weights times the same quantity.
      float sum_ds[2] = {};
      float by_f[2] = {}, mean_f[2] = {};
      float by_added[2] = {}, mean_added[2] = {};
      float sum_tempered[2] = {}, sum_share[2] = {};
      float mean_own[2][3] = {};
      float by_t[2][3] = {}, mean_t[2][3] = {};
      float d_key_bias[2] = {};

      if (sums_tables && chunk == 0) {
        const int own = begin + 16 * warp;
        if (C::kRelativeKeys != 0) ClearTables<C>(p, p.d_relative_scores, b, h, own);
        if (C::kRelativeValues != 0) ClearTables<C>(p, p.relative_weights, b, h, own);
      }
      if (C::kStages == 2 && first < high) copy(first, 0);
      int stage = 0;
      for (int start = first; start < high; start += C::kStep) {
        WaitForTile<C>(copy, start);
        const unsigned char* const x_tile = memory + at.other_x + stage * C::kStep * x_bytes;
        const unsigned char* const y_tile = memory + at.other_y + stage * C::kStep * y_bytes;
        const unsigned char* const words = memory + at.words + stage * word_count * C::kStep * 4;
        const unsigned char* const window =
            memory + at.bias + stage * (rows_in_block + C::kStep) * 4;
        float s[GNOMON_SIZE(C::kStep / 8, 8)][4] = {};
        float dp[GNOMON_SIZE(C::kStep / 8, 8)][4] = {};
        if (kReads) MultiplyRows<C, kKeys>(s, x, memory + at.own_x, x_tile, C::kDim);
        MultiplyRows<C, kKeys>(dp, y, memory + at.own_y, y_tile, C::kValueDim);
        RequestNextTile<C>(copy, start, high, stage);
        uint32 near = 0;
        if constexpr (IsDistance<F>()) {
          near = ToDistances<C, kKeys>(s, p, head, rows[0], start + pair, [&](int n, int e) {
            const int column = 8 * n + pair + e % 2;
            if constexpr (kKeys) {
              RowSoftmax softmax{};
              float temperature = 1;
              const Query query = QueryOf<F, C>(words, column, head, softmax, temperature);
              return NormsOf(query, own_key[e / 2]);
            } else {
              return NormsOf(own_query[e / 2], KeyOf<F, C>(words, column));
            }
          });
        }
        const auto differentiate_pairs = [&](auto inside) {
#pragma unroll
          for (int n = 0; n < C::kStep / 8; ++n) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              const int column = 8 * n + pair + c;
              Query their_query{};
              Key their_key{};
              RowSoftmax their_softmax{};
              float their_temperature = 1;
              if (kKeys) {
                their_query = QueryOf<F, C>(words, column, head, their_softmax, their_temperature);
              } else {
                their_key = KeyOf<F, C>(words, column);
              }
#pragma unroll
              for (int r = 0; r < 2; ++r) {
                const int e = 2 * r + c;
                const Query& query = kKeys ? their_query : own_query[r];
                const Key& key = kKeys ? own_key[r] : their_key;
                const RowSoftmax& softmax = kKeys ? their_softmax : own_softmax[r];
                const float temperature = kKeys ? their_temperature : own_temperature[r];
                const int i = kKeys ? start + column : rows[r];
                const int j = kKeys ? rows[r] : start + column;
                const int diagonal = kKeys ? rows[r] - begin - column + C::kStep - 1
                                           : column - (rows[r] - begin) + rows_in_block - 1;
                const Score score = ScoreOf<F, C, inside.value>(p, head, query, key, i, j, s[n][e],
                                                                window, diagonal);
                float ds = 0;
                float weight = 0;
                float w = 0;
                if (score.seen) {
                  // Scores are bitwise equal to those of the forward pass.
                  const float p_ij = Exp2(score.value - softmax.shift) * softmax.inverse;
                  const float kept = Kept<C>(p, query, j);
                  if (C::kRelativeValues != 0) {
                    dp[n][e] += SumOfPair<C>(
                        p, p.relative_layout,
                        head.relative_products + static_cast<Int64>(i) * p.relative_size, head, i,
                        j);
                  }
                  weight = p_ij * kept;
                  const float of_score = p_ij * (kept * dp[n][e] - softmax.delta);
                  // The gradient without the soft cap, and the share of the row's excess.
                  const float tempered = C::kSoftcap != 0 ? of_score * score.slope : of_score;
                  const float share = C::kSoftcap != 0 ? p_ij * score.slope : p_ij;
                  ds = C::kTemperature != 0 ? temperature * tempered : tempered;
                  const float df = head.factor * ds;
                  Derivative d{};
                  F::Gradient(score.g, query.a, key.b, head.t, d);
                  if (kReads) w = df * d.g;
#pragma unroll
                  for (int m = 0; m < kOwnScalars; ++m) {
                    const float slope = kKeys ? d.b[m] : d.a[m] - top_own[r][m];
                    d_own[r][m] = Fma(df, slope, d_own[r][m]);
                  }
                  if (kKeys) {
                    if (C::kKeyBias != 0) d_key_bias[r] += ds;
                    if (C::kPairBias != 0 && chunk == 0 && p.d_pair_bias.data != nullptr) {
                      const Array& to = p.d_pair_bias;
                      static_cast<float*>(
                          to.data)[b * to.stride[0] + h * to.stride[1] + i * to.stride[2] + j] +=
                          ds;
                    }
                  } else {
                    sum_ds[r] += of_score;
                    if (C::kSoftcap != 0) {
                      sum_tempered[r] += tempered;
                      sum_share[r] += share;
                    }
                    if (C::kHeadSums != 0) {
                      by_f[r] = Fma(tempered, score.f, by_f[r]);
                      mean_f[r] = Fma(share, score.f, mean_f[r]);
                    }
#pragma unroll
                    for (int m = 0; m < F::kRowScalars; ++m) {
                      mean_own[r][m] = Fma(share, d.a[m] - top_own[r][m], mean_own[r][m]);
                    }
#pragma unroll
                    for (int m = 0; m < F::kHeadScalars; ++m) {
                      by_t[r][m] = Fma(tempered, d.t[m], by_t[r][m]);
                      mean_t[r][m] = Fma(share, d.t[m], mean_t[r][m]);
                    }
                    if (C::kTemperature != 0) {
                      by_added[r] = Fma(tempered, score.added, by_added[r]);
                      mean_added[r] = Fma(share, score.added, mean_added[r]);
                    }
                  }
                }
                s[n][e] = weight;
                dp[n][e] = w;
                if (sums_tables) {
                  const int place = 4 * ((rows[r] - begin) * (C::kStep + 1) + column);
                  if (C::kRelativeKeys != 0) StoreShared<float>(memory + at.scores + place, ds);
                  if (C::kRelativeValues != 0) StoreShared<float>(memory + weights + place, weight);
                }
                if (sums_bias || sums_key_tables) {
                  StoreShared<float>(
                      memory + at.scores + 4 * ((rows[r] - begin) * (C::kStep + 1) + column), ds);
                }
              }
            }
          }
        };
        if (sees_all(words, start)) {
          differentiate_pairs(Whether<true>{});
        } else {
          differentiate_pairs(Whether<false>{});
        }
        float shrink[2];
        if (kReads && x_scales.Apply(dp, shrink)) {
          MultiplySums(dx, shrink);
#pragma unroll
          for (int r = 0; r < 2; ++r) sum_w[r] *= shrink[r];
        }
        if (kKeys && y_scales.Apply(s, shrink)) MultiplySums(dy, shrink);
        if constexpr (IsDistance<F>()) {
          AddDifferences<C, kKeys>(dx, dp, near, p, b, own_head, kKeys ? h : key_head, rows[0],
                                   start, first_column);
          // Rounds the weights as AddRows() does.
#pragma unroll
          for (int n = 0; n < C::kStep / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) sum_w[e / 2] += Round<C>(dp[n][e]);
          }
        }
        if (kReads) AddRows<C>(dx, dp, x_tile, C::kDim, first_column, C::kColumns);
        if constexpr (kKeys) AddRows<C>(dy, s, y_tile, C::kValueDim, first_column, C::kColumns);
        // Other threads read this thread's scores.
        if (sums_tables || sums_bias || sums_key_tables) Barrier();
        if (sums_key_tables && chunk == 0) {
          AddToKeyTables<C>(p, p.d_relative_key_scores, memory + at.scores, b, h, begin + 16 * warp,
                            start);
        }
        if (sums_tables && chunk == 0) {
          const int own = begin + 16 * warp;
          if (C::kRelativeKeys != 0) {
            AddToTables<C>(p, p.d_relative_scores, memory + at.scores, b, h, own, start);
          }
          if (C::kRelativeValues != 0) {
            AddToTables<C>(p, p.relative_weights, memory + weights, b, h, own, start);
          }
        }
        if (sums_bias && bias_sums != nullptr) {
          float* const of_head = bias_sums + (h - first_h) * part_step;
          if (C::kBias == 2) {
            AddEntries<C>(p, memory + at.scores, rows_in_block, b, begin, start,
                          of_head + warp * p.bias_size);
          } else {
            AddDiagonals<C>(memory + at.scores, rows_in_block, of_head,
                            static_cast<Int64>(begin) - start - C::kStep + p.queries, p.bias_size);
          }
        }
        if (C::kStages == 2) stage ^= 1;
      }
      CopyWait<0>();
      Barrier();

      // These sums are for this head only.
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (kKeys) {
          d_key_bias[r] = SumOfRow(d_key_bias[r]);
          if (rows[r] < own_count && pair == 0 && chunk == 0 && p.d_key_bias != nullptr) {
            p.d_key_bias[(static_cast<Int64>(b) * p.heads + h) * p.keys + rows[r]] = d_key_bias[r];
          }
          continue;
        }
        sum_ds[r] = SumOfRow(sum_ds[r]);
        by_f[r] = SumOfRow(by_f[r]);
        mean_f[r] = SumOfRow(mean_f[r]);
        by_added[r] = SumOfRow(by_added[r]);
        mean_added[r] = SumOfRow(mean_added[r]);
        sum_tempered[r] = SumOfRow(sum_tempered[r]);
        sum_share[r] = SumOfRow(sum_share[r]);
#pragma unroll
        for (int m = 0; m < F::kRowScalars; ++m) mean_own[r][m] = SumOfRow(mean_own[r][m]);
#pragma unroll
        for (int m = 0; m < F::kHeadScalars; ++m) {
          by_t[r][m] = SumOfRow(by_t[r][m]);
          mean_t[r][m] = SumOfRow(mean_t[r][m]);
        }
      }
      if (!kKeys) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float d_scalars[3] = {SumOfRow(d_own[r][0]), SumOfRow(d_own[r][1]),
                                      SumOfRow(d_own[r][2])};
          Derivative top_slopes{};
          if constexpr (IsDistance<F>()) {
            top_slopes = TopSlopes<F, C>(p, head, own_query[r], rows[r]);
          }
          if (rows[r] >= own_count) continue;
          const Int64 row = (static_cast<Int64>(b) * p.heads + h) * p.queries + rows[r];
          // A row's ds add up to its dlse, except for the rounding error of delta. This excess is
          // distributed over the keys in proportion to their weights. Otherwise, the rounding error
          // of o times the mean of f would dominate sums over a row.
          const bool sees = own_softmax[r].inverse != 0;
          const float d_lse = sees && p.d_lse != nullptr ? p.d_lse[row] : 0.0f;
          const float beyond = sees ? sum_ds[r] - d_lse : 0.0f;
          const float temperature = own_temperature[r];
          // The sum of the gradients without the soft cap.
          const float d_row_sum =
              C::kSoftcap != 0 ? sum_tempered[r] - beyond * sum_share[r] : d_lse;
          if constexpr (IsDistance<F>()) {
            excess_w[r] = head.factor * temperature * beyond * top_slopes.g;
            if (C::kSoftcap != 0) {
              const float top = own_softmax[r].shift * p.softcap_inverse;
              excess_w[r] *= 1 - top * top;
            }
            top_key[r] = TopKey(p, head, rows[r]);
          }
          if (pair != 0 || chunk != 0) continue;
          if (p.d_row != nullptr) {
#pragma unroll
            for (int m = 0; m < F::kRowScalars; ++m) {
              // The common part of the slopes contributes through the sum of the gradients.
              p.d_row[m * query_rows + row] =
                  d_scalars[m] +
                  head.factor * temperature * (d_row_sum * top_own[r][m] - beyond * mean_own[r][m]);
            }
          }
          const float d_factor = by_f[r] - beyond * mean_f[r];
          if (p.d_factor_rows != nullptr) {
            p.d_factor_rows[row] = temperature * d_factor;
#pragma unroll
            for (int m = 0; m < F::kHeadScalars; ++m) {
              p.d_factor_rows[(1 + m) * query_rows + row] =
                  head.factor * temperature * (by_t[r][m] - beyond * mean_t[r][m]);
            }
          }
          if (C::kTemperature != 0 && p.d_temperature != nullptr) {
            p.d_temperature[row] = head.factor * d_factor + by_added[r] - beyond * mean_added[r];
          }
          // The pass over queries reads this. The pass with kRelativeSums must not write it,
          // because blocks for other columns read it as their delta.
          if (C::kRelativeSums == 0) p.balanced_delta[row] = own_softmax[r].delta + beyond;
        }
      }
    }

    const Head to_x = HeadOf<C>(kKeys ? p.d_y : p.d_x, b, own_head);
    const Head to_y = HeadOf<C>(p.d_v, b, own_head);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum_w[r] = SumOfRow(sum_w[r]);
      if (kKeys) {
#pragma unroll
        for (int m = 0; m < kOwnScalars; ++m) d_own[r][m] = SumOfRow(d_own[r][m]);
      }
      if (rows[r] >= own_count) continue;
      if (kReads && (kKeys ? p.d_y : p.d_x).data != nullptr) {
        const float unscaled = x_scales.Inverse(r);
        sum_w[r] *= unscaled;
#pragma unroll
        for (int d = 0; d < C::kColumns / 8; ++d) {
          const int column = first_column + 8 * d + pair;
          float gradient[2] = {unscaled * dx[d][2 * r], unscaled * dx[d][2 * r + 1]};
          if (IsDistance<F>()) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              gradient[c] *= -2.0f;
              // Queries without visible keys, and keys that no query sees, may contain any values.
              if (sum_w[r] != 0 && column + c < p.dim) {
                gradient[c] += 2.0f * sum_w[r] *
                               LoadElement<C>(from_x.data, rows[r] * from_x.stride + column + c);
              }
              if (excess_w[r] != 0 && top_key[r] >= 0 && column + c < p.dim) {
                const Head keys = HeadOf<C>(p.y, b, key_head);
                const float difference =
                    LoadElement<C>(from_x.data, rows[r] * from_x.stride + column + c) -
                    LoadElement<C>(keys.data, top_key[r] * keys.stride + column + c);
                gradient[c] -= 2.0f * excess_w[r] * difference;
              }
            }
          }
          StorePair<C>(to_x.data, rows[r] * to_x.stride + column, gradient[0], gradient[1],
                       p.dim - column);
        }
      }
      if constexpr (kKeys) {
        if (p.d_v.data != nullptr) {
          const float unscaled = y_scales.Inverse(r);
#pragma unroll
          for (int d = 0; d < C::kColumns / 8; ++d) {
            const int column = first_column + 8 * d + pair;
            StorePair<C>(to_y.data, rows[r] * to_y.stride + column, unscaled * dy[d][2 * r],
                         unscaled * dy[d][2 * r + 1], p.value_dim - column);
          }
        }
        if (pair == 0 && chunk == 0 && p.d_column != nullptr) {
#pragma unroll
          for (int m = 0; m < kOwnScalars; ++m) {
            p.d_column[m * key_columns + (static_cast<Int64>(b) * p.key_heads + own_head) * p.keys +
                       rows[r]] = d_own[r][m];
          }
        }
      }
    }
  }
}

}  // namespace gnomon::device

#endif  // GNOMON_SRC_CUDA_BACKWARD_CUH_
