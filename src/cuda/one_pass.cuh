// The backward pass in one pass over the pairs, for 16-bit tokens without terms. A block owns the
// keys of its warps' rows, iterates over the queries that attend to them, and accumulates the
// gradients of its keys and values in registers. It adds its part of the gradients of a tile of
// queries to sums in global memory, which are fp32. A last kernel completes these gradients.
//
// The sums must not depend on the order in which blocks run. The blocks of a head therefore take
// turns at each tile of queries: the one with the last keys adds first, and a counter per tile
// tells how many have added. A block takes a ticket when it starts. It waits only for blocks with
// lower tickets, which have started, so there is always one that waits for none. Under a causal
// mask, blocks that start together arrive at a tile in the order of their turns.
#ifndef GNOMON_SRC_CUDA_ONE_PASS_CUH_
#define GNOMON_SRC_CUDA_ONE_PASS_CUH_

#include "cuda/backward.cuh"
#include "cuda/pair.cuh"
#include "cuda/tiles.cuh"

namespace gnomon::device {

// Rounds the weights of queries 16 k ... of a tile to the element type, as left operands of
// products.
template <class C, int kParts, int kTiles>
GNOMON_DEVICE void RoundWeights(Operand (&rounded)[kParts], const float (&weights)[kTiles][4],
                                int k) {
#pragma unroll
  for (int t = 0; t < C::kRowTiles; ++t) {
    const int n = t * (C::kStep / 16) + k;
    ToLeft<C>(rounded[n], weights, n);
  }
}

// Stores these score gradients of the warp's own rows for the other warps.
template <class C, int kParts>
GNOMON_DEVICE void StoreSlopes(unsigned char* slopes, const Operand (&rounded)[kParts], int k) {
  const int lane = Thread() % 32;
  const int row_bytes = cuda::RowBytes(C::kType, C::kStep);
  const int first = 16 * C::kRowTiles * (Thread() / 32) + lane / 4;
  unsigned char* const to = slopes + first * row_bytes + 4 * (lane % 4);
#pragma unroll
  for (int t = 0; t < C::kRowTiles; ++t) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int row = 16 * t + n % 2 * 8;
      const int column = 16 * k + n / 2 * 8;
      StoreShared<uint32>(to + row * row_bytes + 2 * column,
                          rounded[t * (C::kStep / 16) + k].high[n]);
    }
  }
}

// The 16 x 16 parts of the gradients of a tile of queries that a warp computes: all queries, and
// every kWarps-th group of 16 columns.
template <class C>
GNOMON_DEVICE constexpr int ColumnGroups() {
  return DivideUp(C::kDim / 16, C::kWarps);
}

// Multiplies the transposed score gradients of all own rows by these rows.
template <class C, int kSums>
GNOMON_DEVICE void MultiplySlopes(float (&sums)[kSums][4], const unsigned char* slopes,
                                  const unsigned char* own_x) {
  const int warp = Thread() / 32;
#pragma unroll
  for (int k = 0; k < RowsInBlock<C>() / 16; ++k) {
    Operand left[GNOMON_SIZE(C::kStep / 16, 4)];
#pragma unroll
    for (int q = 0; q < C::kStep / 16; ++q) {
      LoadLeftColumns<C>(left[q], slopes, cuda::RowBytes(C::kType, C::kStep), k, 16 * q);
    }
#pragma unroll
    for (int group = 0; group < ColumnGroups<C>(); ++group) {
      const int column = 16 * (group * C::kWarps + warp);
      if (C::kDim / 16 % C::kWarps != 0 && column >= C::kDim) continue;
      Operand right;
      LoadRightRows<C>(right, own_x, cuda::RowBytes(C::kType, C::kDim), k, column);
#pragma unroll
      for (int q = 0; q < C::kStep / 16; ++q) {
        float (*const of_part)[4] = sums + 2 * (group * (C::kStep / 16) + q);
        MultiplyAdd<C, false>(of_part[0], left[q], right, 0);
        MultiplyAdd<C, false>(of_part[1], left[q], right, 1);
      }
    }
  }
}

// The sums of a tile of queries (cuda::SumsOfTile()).
template <class F, class C>
struct TileSums {
  GNOMON_DEVICE TileSums(const Parameters& p, Int64 tile)
      : first(p.query_sums +
              tile * cuda::SumsOfTile(C::kDim, C::kStep, IsDistance<F>(), TermCount())) {}

  // Gradients: the sums of 16 queries and 16 columns are in two fragments of 128 numbers
  // (AddToSums()). Those of the tile's queries follow each other.
  GNOMON_DEVICE float* Gradients(int group, int column) const {
    return first + (column / 16 * (C::kStep / 16) + group) * 256;
  }
  // For each of 16 queries, the sum of the weights of half of a block's keys, in the even columns
  // of a fragment: the first half of each group of queries, then the second half.
  GNOMON_DEVICE float* Weights(int part) const {
    return first + cuda::SumsOfTokens(C::kDim, C::kStep) + part * 128;
  }
  // Number n of cuda::QuerySums() of a query in the tile.
  GNOMON_DEVICE float* Term(int n, int query) const {
    return first + cuda::SumsOfTokens(C::kDim, C::kStep) +
           cuda::SumsOfWeights(C::kStep, IsDistance<F>()) + n * C::kStep + query;
  }
  static constexpr int kSlopeTerms = cuda::SlopeSums(F::kRowScalars, IsDistance<F>());
  // Whether the sum of df is a term.
  static constexpr bool kBalances = IsDistance<F>() && F::kRowScalars == 0;
  GNOMON_DEVICE static constexpr int TermCount() {
    return cuda::QuerySums(F::kRowScalars, F::kHeadScalars, IsDistance<F>(), C::kHeadSums);
  }

  float* first;
};

// Sums numbers over a warp's rows. SumOfHalf() does so for the columns of half of a tile: a
// thread's numbers are those of its columns. JoinHalves() returns the sum for the column
// ColumnOfLane().
GNOMON_DEVICE float SumOfHalf(float (&numbers)[4]) {
#pragma unroll
  for (int count = 2; count > 0; count /= 2) {
    const int mask = 8 * count;
    const bool upper = (Thread() & mask) != 0;
#pragma unroll
    for (int n = 0; n < count; ++n) {
      const float mine = upper ? numbers[count + n] : numbers[n];
      const float theirs = upper ? numbers[n] : numbers[count + n];
      numbers[n] = mine + ShuffleXor(theirs, mask);
    }
  }
  return numbers[0];
}
GNOMON_DEVICE float JoinHalves(float first, float second) {
  const bool upper = (Thread() & 4) != 0;
  return (upper ? second : first) + ShuffleXor(upper ? first : second, 4);
}
GNOMON_DEVICE int ColumnOfLane() {
  const int thread = Thread();
  return (thread & 4) * 4 + (thread & 16) / 2 + (thread & 3) * 2 + (thread & 8) / 8;
}

// A right operand whose product is the sum of the left operand's columns. With two row tiles, it
// is in the even columns for the first one and in the odd columns for the second one; the other
// columns are 0.
template <class C>
GNOMON_DEVICE Operand Ones(int row_tile) {
  const uint32 ones = C::kType == 1 ? 0x3f803f80u : 0x3c003c00u;
  Operand right{};
  right.high[0] = right.high[1] = C::kRowTiles == 1 || (Thread() & 4) / 4 == row_tile ? ones : 0;
  return right;
}

// Adds the sums of these weights of the warp's own rows. That of row tile t and row r (0 or 1) is
// sums[2 r + t].
template <class C, int kParts>
GNOMON_DEVICE void AddWeights(float (&sums)[4], const Operand (&rounded)[kParts], int k) {
#pragma unroll
  for (int t = 0; t < C::kRowTiles; ++t) {
    MultiplyAdd<C, false>(sums, rounded[t * (C::kStep / 16) + k], Ones<C>(t), 0);
  }
}

// The sums of the weights of the first or second half of the block's keys, for 16 queries. Those of
// row r (0 or 1) are in the even columns, sums[2 r].
template <class C>
GNOMON_DEVICE void SumSlopes(float (&sums)[4], const unsigned char* slopes, int group, int half) {
  const int count = RowsInBlock<C>() / 32;
#pragma unroll
  for (int k = 0; k < count; ++k) {
    Operand left;
    LoadLeftColumns<C>(left, slopes, cuda::RowBytes(C::kType, C::kStep), half * count + k,
                       16 * group);
    MultiplyAdd<C, false>(sums, left, Ones<C>(0), 0);
  }
}

// The scale of the block's weights in fp16 products. One scale serves all keys and queries, because
// the products for both sides read the same weights.
template <class C>
class BlockScale {
 public:
  explicit GNOMON_DEVICE BlockScale(unsigned char* memory) : memory_(memory) {}

  // Scales a tile's weights. The sums of earlier tiles must be multiplied by the result.
  template <int kTiles>
  GNOMON_DEVICE float Apply(float (&weights)[kTiles][4]) {
    float largest = 0;
#pragma unroll
    for (int n = 0; n < C::kRowTiles * C::kStep / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) largest = Larger(largest, Abs(weights[n][e]));
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) largest = Larger(largest, ShuffleXor(largest, mask));
    if (Thread() % 32 == 0) StoreShared<float>(memory_ + 4 * (Thread() / 32), largest);
    Barrier();
#pragma unroll
    for (int n = 0; n < C::kWarps; ++n)
      largest = Larger(largest, LoadShared<float>(memory_ + 4 * n));
    const float scale = NextScale(scale_, largest);
    const float shrink = scale * InverseOfScale(scale_);
    scale_ = scale;
#pragma unroll
    for (int n = 0; n < C::kRowTiles * C::kStep / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) weights[n][e] *= scale;
    }
    return shrink;
  }
  GNOMON_DEVICE float Inverse() const { return C::kType == 2 ? InverseOfScale(scale_) : 1.0f; }

 private:
  unsigned char* memory_;
  float scale_ = PowerOfTwo(kFirstScale);
};
// Attention weights, which are at most 1, have a fixed scale.
template <class C>
GNOMON_DEVICE float ValueScale() {
  return C::kType == 2 ? PowerOfTwo(14) : 1.0f;
}
template <int kSums>
GNOMON_DEVICE void MultiplyAll(float (&sums)[kSums][4], int count, float by) {
#pragma unroll
  for (int n = 0; n < count; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[n][e] *= by;
  }
}

// Passes the turn at tiles of queries from block to block. One thread of each block uses it. Its
// variables are in shared memory, because they would occupy a register of every thread.
class Turn {
 public:
  GNOMON_DEVICE explicit Turn(unsigned char* memory) : memory_(memory) {}

  GNOMON_DEVICE void Begin() const { StoreShared<int>(memory_, -1); }
  // Gives up the turn at the last tile, to whose sums all threads have added before a barrier, and
  // looks whether the turn at the next tile has come. `before`: the number of blocks that add
  // before this one.
  GNOMON_DEVICE void Next(int* turns, int tile, int before) const {
    const int seen = LoadCount(turns + tile);
    // Orders the additions before the new count, and the count that was seen before additions.
    Fence();
    Pass(turns);
    StoreShared<int>(memory_, tile);
    StoreShared<int>(memory_ + 4, before);
    StoreShared<int>(memory_ + 8, seen >= before ? 1 : 0);
  }
  GNOMON_DEVICE void Wait(int* turns) const {
    if (LoadShared<int>(memory_ + 8) != 0) return;
    WaitForCount(turns + LoadShared<int>(memory_), LoadShared<int>(memory_ + 4));
  }
  // Gives up the turn at the last tile of all.
  GNOMON_DEVICE void End(int* turns) const {
    Fence();
    Pass(turns);
  }

 private:
  GNOMON_DEVICE void Pass(int* turns) const {
    const int tile = LoadShared<int>(memory_);
    if (tile >= 0) StoreCount(turns + tile, LoadShared<int>(memory_ + 4) + 1);
  }

  unsigned char* memory_;
};

template <class F, class C>
GNOMON_DEVICE void BackwardInOnePass(const Parameters& p) {
  constexpr int kPairs = GNOMON_SIZE(C::kRowTiles * C::kStep / 8, 16);
  constexpr int kRows = GNOMON_SIZE(2 * C::kRowTiles, 4);
  using Sums = TileSums<F, C>;
  constexpr int kMostTerms = 3 + 3 + 2 * 3;
  const int term_count = Sums::TermCount();
  constexpr int kOwnWords = cuda::KeyWords(F::kColumnScalars, IsDistance<F>(), 0, 0, 0);
  const int rows_in_block = RowsInBlock<C>();
  const int x_bytes = cuda::RowBytes(C::kType, C::kDim);
  const int y_bytes = cuda::RowBytes(C::kType, C::kValueDim);
  const int word_count = WordCount<F, C, true>();
  const SharedLayout at =
      cuda::OnePassLayout(C::kType, C::kDim, C::kValueDim, rows_in_block, C::kStep, C::kStages,
                          word_count, kOwnWords, C::kWarps, term_count, IsDistance<F>());
  unsigned char* const memory = SharedMemory();
  const int warp = Thread() / 32;
  const int lane = Thread() % 32;
  const int pair = 2 * (lane % 4);

  const Turn turn(memory + at.bias);
  if (Thread() == 0) {
    turn.Begin();
    StoreShared<int>(memory + at.scores, TakeTicket(p.tickets));
  }
  Barrier();
  const int ticket = LoadShared<int>(memory + at.scores);
  const int blocks = DivideUp(p.keys, rows_in_block);
  const int block = blocks - 1 - ticket % blocks;
  const int b = ticket / blocks / p.key_heads;
  const int key_head = ticket / blocks % p.key_heads;
  const int begin = block * rows_in_block;
  const int end = Least(begin + rows_in_block, p.keys);
  const QueryRange range(p, b, 0, begin, end);
  const SeenKeys seen(p, b, 0, 1);
  const int low = range.low;
  const int high = range.high;
  // A block adds to all tiles with a query that attends to one of its keys or later ones, and one
  // that attends to one of its keys or earlier ones. Every tile thus has consecutive blocks.
  const int first = low < p.queries ? low / C::kStep * C::kStep : high;
  const int* const highs = p.high + static_cast<Int64>(b) * p.queries;
  // Whether all pairs of a tile are within their queries' key intervals.
  const auto sees_all = [&](const unsigned char* words, int start) {
    // Checks the first key of the tile's last query and the last key of its first query. Words of
    // missing queries are 0.
    return end - begin == rows_in_block && start + C::kStep <= high &&
           LoadShared<int>(words + 4 * (C::kStep - 1)) <= begin &&
           LoadShared<int>(words + 4 * C::kStep) >= end;
  };
  CopyRows<C>(memory + at.own_x, HeadOf<C>(p.y, b, key_head), begin, rows_in_block, seen.low,
              seen.high, p.dim, C::kDim);
  CopyRows<C>(memory + at.own_y, HeadOf<C>(p.v, b, key_head), begin, rows_in_block, seen.low,
              seen.high, p.value_dim, C::kValueDim);
  CopyCommit();

  // The thread's rows are this one and every eighth row after it.
  const int first_row = begin + 16 * C::kRowTiles * warp + lane / 4;
  const int tiles = DivideUp(p.queries, C::kStep);
  float dx[GNOMON_SIZE(C::kRowTiles * C::kDim / 8, 32)][4] = {};
  float dy[GNOMON_SIZE(C::kRowTiles * C::kValueDim / 8, 32)][4] = {};
  float d_own[kRows][3] = {};
  BlockScale<C> scale(memory + at.bias + 16);
  // The sums of the weights of the thread's rows, for differences, and the words of the block's own
  // keys are in shared memory, to save registers.
  const auto own_weight = [&](int r) {
    return memory + at.own_weights + 4 * (r * 32 * C::kWarps + Thread());
  };
  if (IsDistance<F>()) {
#pragma unroll
    for (int r = 0; r < 2 * C::kRowTiles; ++r) StoreShared<float>(own_weight(r), 0.0f);
  }
  const auto own_word = [&](int n, int row) {
    return memory + at.own_words + 4 * (n * rows_in_block + row - begin);
  };
  if (kOwnWords > 0) {
    for (int row = begin + Thread(); row < begin + rows_in_block; row += 32 * C::kWarps) {
      Key key{};
      if (row >= seen.low && row < Least(seen.high, p.keys)) {
        key = LoadKey<F, C>(p, b, key_head * p.group, row);
      }
#pragma unroll
      for (int m = 0; m < F::kColumnScalars; ++m) StoreShared<float>(own_word(m, row), key.b[m]);
      if (IsDistance<F>()) StoreShared<float>(own_word(F::kColumnScalars, row), key.norm);
    }
  }
  for (int h = key_head * p.group; h < (key_head + 1) * p.group; ++h) {
    const HeadInputs head = LoadHead<F, C>(p, b, h);
    // With scalars, there are no registers for the addresses.
    const bool advances = C::kRowTiles == 1 || F::kRowScalars + F::kColumnScalars == 0;
    TileRows<C> query_rows(p.x, b, h, first, C::kDim, advances);
    TileRows<C> gradient_rows(p.d_o, b, h, first, C::kValueDim, advances);
    const int first_tile = (b * p.heads + h) * tiles;
    const auto copy = [&](int start, int stage) {
      query_rows.Copy(memory + at.other_x + stage * C::kStep * x_bytes, start, low, high, p.dim,
                      C::kDim);
      gradient_rows.Copy(memory + at.other_y + stage * C::kStep * y_bytes, start, low, high,
                         p.value_dim, C::kValueDim);
      const int words = word_count * C::kStep;
      if (4 * Thread() < words) {
        CopyAsync16(memory + at.words + 4 * stage * words + 16 * Thread(),
                    p.query_words + static_cast<Int64>(first_tile + start / C::kStep) * words +
                        4 * Thread(),
                    16);
      }
      CopyCommit();
    };
    if (C::kStages == 2 && first < high) copy(first, 0);
    int stage = 0;
    for (int start = first; start < high; start += C::kStep) {
      WaitForTile<C>(copy, start);
      const int tile = first_tile + start / C::kStep;
      if (Thread() == 0) {
        // The last block that adds to the tile.
        const int last = (highs[Least(start + C::kStep, p.queries) - 1] - 1) / rows_in_block;
        turn.Next(p.turns, tile, last - block);
      }
      const unsigned char* const x_tile = memory + at.other_x + stage * C::kStep * x_bytes;
      const unsigned char* const y_tile = memory + at.other_y + stage * C::kStep * y_bytes;
      const unsigned char* const words = memory + at.words + stage * word_count * C::kStep * 4;
      float s[kPairs][4] = {};
      float dp[kPairs][4] = {};
      const Operand none[1] = {};
      MultiplyRows<C, true>(s, none, memory + at.own_x, x_tile, C::kDim);
      // This order of products and requests is the fastest in the model (benchmarks/cuda_model.py).
      RequestNextTile<C>(copy, start, high, stage);
      MultiplyRows<C, true>(dp, none, memory + at.own_y, y_tile, C::kValueDim);
      bool any_near = false;
      // Column d of the difference of a query of the tile and an own key.
      const auto difference_of = [&](int row, int column, int d) {
        const auto element = [&](const unsigned char* rows, int r) {
          return Widen<C>(LoadShared<uint16>(rows + r * x_bytes + 2 * d));
        };
        return element(x_tile, column) - element(memory + at.own_x, first_row - begin + row);
      };
      // The near pairs of a row tile. Few tiles have any, so they are in shared memory.
      const auto near_word = [&](int t) {
        return memory + at.near + 4 * (t * 32 * C::kWarps + Thread());
      };
      if constexpr (IsDistance<F>()) {
        float norms[kRows];
#pragma unroll
        for (int r = 0; r < 2 * C::kRowTiles; ++r) {
          norms[r] = LoadShared<float>(own_word(F::kColumnScalars, first_row + 8 * r));
        }
        const auto norms_of = [&](int t) {
          return [&, t](int n, int e) {
            RowSoftmax softmax{};
            float temperature = 1;
            const Query query =
                QueryOf<F, C>(words, 8 * n + pair + e % 2, head, softmax, temperature);
            Key key{};
            key.norm = norms[2 * t + e / 2];
            return NormsOf(query, key);
          };
        };
        bool is_near = false;
#pragma unroll
        for (int t = 0; t < C::kRowTiles; ++t) {
          is_near = ConvertProducts<C>(s + t * (C::kStep / 8), norms_of(t)) || is_near;
        }
        any_near = AnyOfWarp(is_near);
        if (any_near) {
#pragma unroll
          for (int t = 0; t < C::kRowTiles; ++t) {
            const auto distance_of = [&](int row, int column, float& g) {
              const int j = first_row + 16 * t + row;
              const unsigned char* const word = words + 4 * (pair + column);
              if (j < LoadShared<int>(word) || j >= LoadShared<int>(word + 4 * C::kStep)) {
                return false;
              }
              g = SumOfSquares(
                  p.dim, [&](int d) { return difference_of(16 * t + row, pair + column, d); });
              return true;
            };
            StoreShared<uint32>(near_word(t),
                                RecomputeNear<C>(s + t * (C::kStep / 8), norms_of(t), distance_of));
          }
        }
      }
      Operand rounded[GNOMON_SIZE(C::kRowTiles * C::kStep / 16, 8)];
      // Add the products of the rounded weights of queries 16 k ....
      const auto add_values = [&](int k) {
        const auto left_of = [&](int t) {
          Operand left;
          ToLeft<C>(left, s, t * (C::kStep / 16) + k);
          return left;
        };
        AddSomeRows<C>(dy, left_of, y_tile, C::kValueDim, 0, C::kValueDim, k);
      };
      const auto add_tokens = [&](int k) {
        const auto left_of = [&](int t) { return rounded[t * (C::kStep / 16) + k]; };
        AddSomeRows<C>(dx, left_of, x_tile, C::kDim, 0, C::kDim, k);
      };
      const auto store_slopes = [&](int k) {
        RoundWeights<C>(rounded, dp, k);
        StoreSlopes<C>(memory + at.scores, rounded, k);
      };
      // With `plain`, all pairs are visible. In bf16, none is near; in fp16, all warps must make
      // the same choice, because there is a barrier. In this common case, the compiler overlaps the
      // functions of pairs with products, because no branch is between them.
      const auto differentiate_pairs = [&](auto plain) {
        // Whether rounded weights are multiplied as soon as they are known.
        const bool kAtOnce = plain.value && IsDistance<F>() && C::kType != 2;
        float halves[GNOMON_SIZE(Most(1, Sums::TermCount()), kMostTerms)][2];
        float terms[GNOMON_SIZE(Most(1, Sums::TermCount()), kMostTerms)][4] = {};
#pragma unroll
        for (int n = 0; n < C::kStep / 8; ++n) {
          // Stores of slopes keep the compiler from reading them only once, which would take
          // registers.
          float own[kRows][3] = {};
#pragma unroll
          for (int r = 0; r < 2 * C::kRowTiles; ++r) {
#pragma unroll
            for (int m = 0; m < F::kColumnScalars; ++m) {
              own[r][m] = LoadShared<float>(own_word(m, first_row + 8 * r));
            }
          }
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int column = 8 * n + pair + c;
            RowSoftmax softmax{};
            float temperature = 1;
            const Query query = QueryOf<F, C>(words, column, head, softmax, temperature);
            const float scaled_delta = head.factor * softmax.delta;
#pragma unroll
            for (int r = 0; r < 2 * C::kRowTiles; ++r) {
              float& of_product = s[r / 2 * (C::kStep / 8) + n][r % 2 * 2 + c];
              float& of_value = dp[r / 2 * (C::kStep / 8) + n][r % 2 * 2 + c];
              float weight = 0;
              float w = 0;
              if (plain.value ||
                  (first_row + 8 * r >= query.low && first_row + 8 * r < query.high)) {
                Derivative d{};
                const float f = ValueAndSlopes<F>(of_product, query.a, own[r], head.t, d);
                weight = Exp2(Fma(query.factor, f, -softmax.shift));
                const float ds = weight * (of_value - softmax.delta);
                const float df = IsDistance<F>()
                                     ? weight * Fma(of_value, head.factor, -scaled_delta)
                                     : head.factor * ds;
                w = df * d.g;
#pragma unroll
                for (int m = 0; m < F::kColumnScalars; ++m) {
                  d_own[r][m] = Fma(df, d.b[m], d_own[r][m]);
                }
                const auto term = [&](int m) -> float& { return terms[m][n % 2 * 2 + c]; };
                if (Sums::kBalances) term(0) += df;
#pragma unroll
                for (int m = 0; m < F::kRowScalars; ++m) {
                  term(m) = Fma(df, d.a[m], term(m));
                }
                if (C::kHeadSums != 0) {
                  constexpr int kAtDs = Sums::kSlopeTerms;
                  term(kAtDs) += ds;
                  term(kAtDs + 1) = Fma(ds, f, term(kAtDs + 1));
                  term(kAtDs + 2) = Fma(weight, f, term(kAtDs + 2));
#pragma unroll
                  for (int m = 0; m < F::kHeadScalars; ++m) {
                    const int at_t = kAtDs + 3 + 2 * m;
                    term(at_t) = Fma(ds, d.t[m], term(at_t));
                    term(at_t + 1) = Fma(weight, d.t[m], term(at_t + 1));
                  }
                }
                if (C::kType == 2) weight *= ValueScale<C>();
              }
              of_product = weight;
              of_value = w;
            }
          }
          if (n % 2 == 0) continue;
#pragma unroll
          for (int m = 0; m < term_count; ++m) {
            halves[m][n / 2] = SumOfHalf(terms[m]);
#pragma unroll
            for (int e = 0; e < 4; ++e) terms[m][e] = 0;
          }
          if (!kAtOnce) continue;
          store_slopes(n / 2);
          add_values(n / 2);
        }
        if (C::kType == 2) {
          const float shrink = scale.Apply(dp);
          if (shrink != 1.0f) MultiplyAll(dx, C::kRowTiles * C::kDim / 8, shrink);
        }
        if (!kAtOnce) {
#pragma unroll
          for (int k = 0; k < C::kStep / 16; ++k) store_slopes(k);
          if constexpr (IsDistance<F>()) {
            if (any_near) {
#pragma unroll
              for (int t = 0; t < C::kRowTiles; ++t) {
                AddNear<C>(dx + t * (C::kDim / 8), dp + t * (C::kStep / 8),
                           LoadShared<uint32>(near_word(t)), 0, p.dim,
                           [&](int row, int column, int d) {
                             return difference_of(16 * t + row, column, d);
                           });
              }
#pragma unroll
              for (int k = 0; k < C::kStep / 16; ++k) RoundWeights<C>(rounded, dp, k);
            }
          }
#pragma unroll
          for (int k = 0; k < C::kStep / 16; ++k) add_values(k);
        }
#pragma unroll
        for (int m = 0; m < term_count; ++m) {
          StoreShared<float>(
              memory + at.terms + 4 * ((warp * term_count + m) * C::kStep + ColumnOfLane()),
              JoinHalves(halves[m][0], halves[m][1]));
        }
      };
      if (sees_all(words, start) && (C::kType == 2 || !any_near)) {
        differentiate_pairs(Whether<true>{});
      } else {
        differentiate_pairs(Whether<false>{});
      }
      if (Thread() == 0) turn.Wait(p.turns);
      Barrier();
      const Sums to(p, tile);
      float sums[GNOMON_SIZE(2 * ColumnGroups<C>() * (C::kStep / 16), 16)][4] = {};
      MultiplySlopes<C>(sums, memory + at.scores, memory + at.own_x);
      if (C::kType == 2) {
        MultiplyAll(sums, 2 * ColumnGroups<C>() * (C::kStep / 16), scale.Inverse());
      }
      if constexpr (IsDistance<F>()) {
        // Each warp sums half of the weights of 16 queries.
        float of_queries[1][4] = {};
        SumSlopes<C>(of_queries[0], memory + at.scores, (Thread() & 32) / 32, (Thread() & 64) / 64);
        if (C::kType == 2) MultiplyAll(of_queries, 1, scale.Inverse());
        AddToSums(to.Weights(warp), 0, of_queries[0]);
      }
      float* const of_warp = to.Gradients(0, 16 * warp);
#pragma unroll
      for (int group = 0; group < ColumnGroups<C>(); ++group) {
        const int column = 16 * (group * C::kWarps + warp);
        if (C::kDim / 16 % C::kWarps != 0 && column >= C::kDim) continue;
#pragma unroll
        for (int n = 0; n < C::kStep / 8; ++n) {
          AddToSums(of_warp, group * C::kWarps * (C::kStep / 8) + n,
                    sums[group * (C::kStep / 8) + n]);
        }
      }
      for (int m = warp; m < term_count; m += C::kWarps) {
        float sum = 0;
#pragma unroll
        for (int of = 0; of < C::kWarps; ++of) {
          sum +=
              LoadShared<float>(memory + at.terms + 4 * ((of * term_count + m) * C::kStep + lane));
        }
        AddToSum(to.Term(m, lane), sum);
      }
#pragma unroll
      for (int k = 0; k < C::kStep / 16; ++k) add_tokens(k);
      if (IsDistance<F>()) {
        float weights[4] = {};
#pragma unroll
        for (int k = 0; k < C::kStep / 16; ++k) AddWeights<C>(weights, rounded, k);
#pragma unroll
        for (int r = 0; r < 2 * C::kRowTiles; ++r) {
          StoreShared<float>(own_weight(r), Fma(scale.Inverse(), weights[r % 2 * 2 + r / 2],
                                                LoadShared<float>(own_weight(r))));
        }
      }
      if (C::kStages == 2) stage ^= 1;
    }
    // The next head's first tile overwrites the last one.
    CopyWait<0>();
    Barrier();
  }
  if (Thread() == 0) turn.End(p.turns);
  const Head to_x = HeadOf<C>(p.d_y, b, key_head);
  const Head to_y = HeadOf<C>(p.d_v, b, key_head);
  const Head from_x = HeadOf<C>(p.y, b, key_head);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= 2 * C::kRowTiles) continue;
    const int row = first_row + 8 * r;
#pragma unroll
    for (int m = 0; m < F::kColumnScalars; ++m) d_own[r][m] = SumOfRow(d_own[r][m]);
    if (row >= p.keys) continue;
    if (pair == 0 && p.d_column != nullptr) {
      const Int64 columns = static_cast<Int64>(p.batch) * p.key_heads * p.keys;
#pragma unroll
      for (int m = 0; m < F::kColumnScalars; ++m) {
        p.d_column[m * columns + (static_cast<Int64>(b) * p.key_heads + key_head) * p.keys + row] =
            d_own[r][m];
      }
    }
    const float sum = IsDistance<F>() ? LoadShared<float>(own_weight(r)) : 0.0f;
#pragma unroll
    for (int d = 0; d < C::kDim / 8; ++d) {
      if (p.d_y.data == nullptr) continue;
      const int column = 8 * d + pair;
      float gradient[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        gradient[c] = scale.Inverse() * dx[r / 2 * (C::kDim / 8) + d][r % 2 * 2 + c];
        if (!IsDistance<F>()) continue;
        gradient[c] *= -2.0f;
        // Keys that no query sees may contain any values.
        if (sum != 0 && column + c < p.dim) {
          gradient[c] += 2.0f * sum * LoadElement<C>(from_x.data, row * from_x.stride + column + c);
        }
      }
      StorePair<C>(to_x.data, row * to_x.stride + column, gradient[0], gradient[1], p.dim - column);
    }
#pragma unroll
    for (int d = 0; d < C::kValueDim / 8; ++d) {
      if (p.d_v.data == nullptr) continue;
      const float (&of_row)[4] = dy[r / 2 * (C::kValueDim / 8) + d];
      const int column = 8 * d + pair;
      const float unscaled = 1.0f / ValueScale<C>();
      StorePair<C>(to_y.data, row * to_y.stride + column, unscaled * of_row[r % 2 * 2],
                   unscaled * of_row[r % 2 * 2 + 1], p.value_dim - column);
    }
  }
}

// Clears the sums, counters and tickets of BackwardInOnePass(), kClearedWords per thread.
template <class C>
GNOMON_DEVICE void ClearSums(const Parameters& p) {
  const int threads = 32 * C::kWarps;
  const Int64 first = static_cast<Int64>(BlockX()) * cuda::kClearedWords * threads + Thread();
#pragma unroll
  for (int e = 0; e < cuda::kClearedWords; ++e) {
    const Int64 n = first + e * threads;
    if (n < p.query_sums_size) p.query_sums[n] = 0;
  }
}

// Computes the gradients of queries, their scalars and factors from the sums, with one warp per 16
// queries of each head. A row's ds add up to its dlse, except for the rounding error of delta. For
// distances without scalars, this excess is assigned to the row's top key, so that it is not
// multiplied by the slope that all keys share. With scalars, deltas are precise (kSplit).
template <class F, class C>
GNOMON_DEVICE void FinishQueries(const Parameters& p) {
  using Sums = TileSums<F, C>;
  const int groups = DivideUp(p.queries, 16);
  const Int64 index = static_cast<Int64>(BlockX()) * C::kWarps + Thread() / 32;
  const Int64 of_batch = index / groups;
  if (of_batch >= static_cast<Int64>(p.batch) * p.heads) return;
  const int b = static_cast<int>(of_batch / p.heads);
  const int h = static_cast<int>(of_batch % p.heads);
  const int lane = Thread() % 32;
  const int begin = static_cast<int>(index % groups) * 16;
  const Sums sums(p, of_batch * DivideUp(p.queries, C::kStep) + begin / C::kStep);
  const int group = begin / 16 % (C::kStep / 16);
  float weights[2] = {};
  float excess[2] = {};
  int top[2] = {-1, -1};
  if constexpr (IsDistance<F>()) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float of_half[4];
      LoadSums(of_half, sums.Weights(half * (C::kStep / 16) + group));
#pragma unroll
      for (int r = 0; r < 2; ++r) weights[r] += of_half[2 * r];
    }
  }
  if (Sums::TermCount() > 0) {
    const HeadInputs head = LoadHead<F, C>(p, b, h);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = begin + lane / 4 + 8 * r;
      const bool exists = i < p.queries;
      Derivative slopes{};
      if constexpr (Sums::kBalances) {
        const Query query = exists ? LoadQuery<F, C>(p, head, i) : Query{};
        slopes = TopSlopes<F, C>(p, head, query, i);
      }
      if (!exists) continue;
      const Int64 row = of_batch * p.queries + i;
      const auto term = [&](int n) { return *sums.Term(n, i % C::kStep); };
      const bool sees = p.inverse[row] != 0;
      const float d_lse = sees && p.d_lse != nullptr ? p.d_lse[row] : 0.0f;
      if (Sums::kBalances) {
        excess[r] = (term(0) - head.factor * d_lse) * slopes.g;
        top[r] = TopKey(p, head, i);
      }
      if (lane % 4 != 0) continue;
      const Int64 rows = static_cast<Int64>(p.batch) * p.heads * p.queries;
      if (p.d_row != nullptr) {
#pragma unroll
        for (int m = 0; m < F::kRowScalars; ++m) {
          p.d_row[m * rows + row] = term(m);
        }
      }
      if (C::kHeadSums == 0 || p.d_factor_rows == nullptr) continue;
      constexpr int kAtDs = Sums::kSlopeTerms;
      const float unscaled = term(kAtDs) - d_lse;
      p.d_factor_rows[row] = term(kAtDs + 1) - unscaled * term(kAtDs + 2);
#pragma unroll
      for (int m = 0; m < F::kHeadScalars; ++m) {
        const int at_t = kAtDs + 3 + 2 * m;
        p.d_factor_rows[(1 + m) * rows + row] =
            head.factor * (term(at_t) - unscaled * term(at_t + 1));
      }
    }
  }
  if (p.d_x.data == nullptr) return;
  const Head to = HeadOf<C>(p.d_x, b, h);
  const Head from = HeadOf<C>(p.x, b, h);
  const Head keys = HeadOf<C>(p.y, b, h / p.group);
#pragma unroll 2
  for (int d = 0; d < C::kDim / 8; ++d) {
    float of_tokens[4];
    LoadSums(of_tokens, sums.Gradients(group, 8 * d) + d % 2 * 128);
    const int column = 8 * d + 2 * (lane % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = begin + lane / 4 + 8 * r;
      if (row >= p.queries) continue;
      float gradient[2] = {of_tokens[2 * r], of_tokens[2 * r + 1]};
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (!IsDistance<F>()) continue;
        gradient[c] *= -2.0f;
        // Queries without visible keys may contain any values.
        if (column + c >= p.dim || (weights[r] == 0 && excess[r] == 0)) continue;
        const float x = LoadElement<C>(from.data, row * from.stride + column + c);
        gradient[c] += 2.0f * weights[r] * x;
        if (excess[r] != 0 && top[r] >= 0) {
          const float y = LoadElement<C>(keys.data, top[r] * keys.stride + column + c);
          gradient[c] -= 2.0f * excess[r] * (x - y);
        }
      }
      StorePair<C>(to.data, row * to.stride + column, gradient[0], gradient[1], p.dim - column);
    }
  }
}

}  // namespace gnomon::device

#endif  // GNOMON_SRC_CUDA_ONE_PASS_CUH_
