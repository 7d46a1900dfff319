// The backward pass of plain inner products in bf16, in one pass over the pairs. A block owns the
// keys of its warps' rows, iterates over the queries that attend to them, and accumulates the
// gradients of its keys and values in registers. It adds its part of the gradients of a tile of
// queries to sums in global memory, which are fp32.
//
// The sums must not depend on the order in which blocks run. The blocks of a head therefore take
// turns at each tile of queries: the one with the last keys adds first, and a counter per tile
// tells how many have added. A block takes a ticket when it starts. It waits only for blocks with
// lower tickets, which have started, so there is always one that waits for none. Under a causal
// mask, blocks that start together arrive at a tile in the order of their turns.
#ifndef GNOMON_SRC_CUDA_ONE_PASS_CUH_
#define GNOMON_SRC_CUDA_ONE_PASS_CUH_

#include "cuda/pair.cuh"
#include "cuda/tiles.cuh"

namespace gnomon::device {

// Stores the score gradients of the warp's own rows for the other warps, rounded to the element
// type.
template <class C, int kTiles>
GNOMON_DEVICE void StoreSlopes(unsigned char* slopes, const float (&w)[kTiles][4]) {
  const int lane = Thread() % 32;
  const int row_bytes = cuda::RowBytes(C::kType, C::kStep);
  const int first = 16 * C::kRowTiles * (Thread() / 32) + lane / 4;
#pragma unroll
  for (int t = 0; t < C::kRowTiles; ++t) {
#pragma unroll
    for (int n = 0; n < C::kStep / 8; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float (&pairs)[4] = w[t * (C::kStep / 8) + n];
        StoreShared<uint32>(
            slopes + (first + 16 * t + 8 * r) * row_bytes + 2 * (8 * n + 2 * (lane % 4)),
            Pack<C>(pairs[2 * r], pairs[2 * r + 1]));
      }
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

// The sums of 16 queries and 16 columns are in two fragments of 128 numbers (AddToSums()).
template <class C>
GNOMON_DEVICE Int64 PlaceOfPart(Int64 tile, int column) {
  return (tile * (C::kDim / 16) + column / 16) * 256;
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
  const int rows_in_block = RowsInBlock<C>();
  const int x_bytes = cuda::RowBytes(C::kType, C::kDim);
  const int y_bytes = cuda::RowBytes(C::kType, C::kValueDim);
  const int word_count = WordCount<F, C, true>();
  const SharedLayout at = cuda::OnePassLayout(C::kType, C::kDim, C::kValueDim, rows_in_block,
                                              C::kStep, C::kStages, word_count);
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
  const QueryRange range(p, b, begin, end);
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
  CopyRows<C>(memory + at.own_x, HeadOf<C>(p.y, b, key_head), begin, rows_in_block, range.own_low,
              range.own_high, p.dim, C::kDim);
  CopyRows<C>(memory + at.own_y, HeadOf<C>(p.v, b, key_head), begin, rows_in_block, range.own_low,
              range.own_high, p.value_dim, C::kValueDim);
  CopyCommit();

  // The thread's rows are this one and every eighth row after it.
  const int first_row = begin + 16 * C::kRowTiles * warp + lane / 4;
  const int tiles = DivideUp(p.queries, C::kStep);
  float dx[GNOMON_SIZE(C::kRowTiles * C::kDim / 8, 32)][4] = {};
  float dy[GNOMON_SIZE(C::kRowTiles * C::kValueDim / 8, 32)][4] = {};
  for (int h = key_head * p.group; h < (key_head + 1) * p.group; ++h) {
    const HeadTerms head = LoadHead<F, C>(p, b, h);
    const TileWords<F, C, true> query_words(p, b, h);
    TileRows<C> query_rows(p.x, b, h, first, C::kDim);
    TileRows<C> gradient_rows(p.d_o, b, h, first, C::kValueDim);
    const auto copy = [&](int start, int stage) {
      query_rows.Copy(memory + at.other_x + stage * C::kStep * x_bytes, start, low, high, p.dim,
                      C::kDim);
      gradient_rows.Copy(memory + at.other_y + stage * C::kStep * y_bytes, start, low, high,
                         p.value_dim, C::kValueDim);
      query_words.Copy(memory + at.words + stage * word_count * C::kStep * 4, start, low, high);
      CopyCommit();
    };
    const int first_tile = (b * p.heads + h) * tiles;
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
      RequestNextTile<C>(copy, start, high, stage);
      MultiplyRows<C, true>(dp, none, memory + at.own_y, y_tile, C::kValueDim);
      const auto differentiate_pairs = [&](auto inside) {
#pragma unroll
        for (int n = 0; n < C::kStep / 8; ++n) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int column = 8 * n + pair + c;
            RowSoftmax softmax{};
            float temperature = 1;
            const Query query = QueryOf<F, C>(words, column, head, softmax, temperature);
#pragma unroll
            for (int r = 0; r < 2 * C::kRowTiles; ++r) {
              float& of_product = s[r / 2 * (C::kStep / 8) + n][r % 2 * 2 + c];
              float& of_value = dp[r / 2 * (C::kStep / 8) + n][r % 2 * 2 + c];
              const Score score = ScoreOf<F, C, inside.value>(
                  p, head, query, Key{}, start + column, first_row + 8 * r, of_product, nullptr, 0);
              float weight = 0;
              float w = 0;
              if (score.seen) {
                weight = Exp2(Fma(query.factor, score.f, -softmax.shift));
                const float df = head.factor * (weight * (of_value - softmax.delta));
                Derivative d{};
                F::Gradient(score.g, query.a, Key{}.b, head.t, d);
                w = df * d.g;
              }
              of_product = weight;
              of_value = w;
            }
          }
        }
      };
      if (sees_all(words, start)) {
        differentiate_pairs(Whether<true>{});
      } else {
        differentiate_pairs(Whether<false>{});
      }
      StoreSlopes<C>(memory + at.scores, dp);
      AddRows<C>(dy, s, y_tile, C::kValueDim, 0, C::kValueDim);
      if (Thread() == 0) turn.Wait(p.turns);
      Barrier();
      float sums[GNOMON_SIZE(2 * ColumnGroups<C>() * (C::kStep / 16), 16)][4] = {};
      MultiplySlopes<C>(sums, memory + at.scores, memory + at.own_x);
#pragma unroll
      for (int group = 0; group < ColumnGroups<C>(); ++group) {
        const int column = 16 * (group * C::kWarps + warp);
        if (C::kDim / 16 % C::kWarps != 0 && column >= C::kDim) continue;
#pragma unroll
        for (int q = 0; q < C::kStep / 16; ++q) {
          float* const to =
              p.query_sums + PlaceOfPart<C>(static_cast<Int64>(tile) * (C::kStep / 16) + q, column);
          AddToSums(to, sums[2 * (group * (C::kStep / 16) + q)]);
          AddToSums(to + 128, sums[2 * (group * (C::kStep / 16) + q) + 1]);
        }
      }
      AddRows<C>(dx, dp, x_tile, C::kDim, 0, C::kDim);
      if (C::kStages == 2) stage ^= 1;
    }
    // The next head's first tile overwrites the last one.
    CopyWait<0>();
    Barrier();
  }
  if (Thread() == 0) turn.End(p.turns);
  const Head to_x = HeadOf<C>(p.d_y, b, key_head);
  const Head to_y = HeadOf<C>(p.d_v, b, key_head);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = first_row + 8 * r;
    if (r >= 2 * C::kRowTiles || row >= p.keys) continue;
#pragma unroll
    for (int d = 0; d < C::kDim / 8; ++d) {
      if (p.d_y.data == nullptr) continue;
      const float (&of_row)[4] = dx[r / 2 * (C::kDim / 8) + d];
      const int column = 8 * d + pair;
      StorePair<C>(to_x.data, row * to_x.stride + column, of_row[r % 2 * 2], of_row[r % 2 * 2 + 1],
                   p.dim - column);
    }
#pragma unroll
    for (int d = 0; d < C::kValueDim / 8; ++d) {
      if (p.d_v.data == nullptr) continue;
      const float (&of_row)[4] = dy[r / 2 * (C::kValueDim / 8) + d];
      const int column = 8 * d + pair;
      StorePair<C>(to_y.data, row * to_y.stride + column, of_row[r % 2 * 2], of_row[r % 2 * 2 + 1],
                   p.value_dim - column);
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

// Rounds the gradients of queries, with one warp per 16 queries of each head.
template <class C>
GNOMON_DEVICE void RoundSums(const Parameters& p) {
  const int tiles = DivideUp(p.queries, 16);
  const Int64 index = static_cast<Int64>(BlockX()) * C::kWarps + Thread() / 32;
  const Int64 of_batch = index / tiles;
  if (of_batch >= static_cast<Int64>(p.batch) * p.heads) return;
  const int lane = Thread() % 32;
  const int begin = static_cast<int>(index % tiles) * 16;
  const Head to =
      HeadOf<C>(p.d_x, static_cast<int>(of_batch / p.heads), static_cast<int>(of_batch % p.heads));
  const Int64 tile = of_batch * (DivideUp(p.queries, C::kStep) * (C::kStep / 16)) + begin / 16;
#pragma unroll 2
  for (int d = 0; d < C::kDim / 8; ++d) {
    float sums[4];
    LoadSums(sums, p.query_sums + PlaceOfPart<C>(tile, 8 * d) + d % 2 * 128);
    const int column = 8 * d + 2 * (lane % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = begin + lane / 4 + 8 * r;
      if (row >= p.queries) continue;
      StorePair<C>(to.data, row * to.stride + column, sums[2 * r], sums[2 * r + 1], p.dim - column);
    }
  }
}

}  // namespace gnomon::device

#endif  // GNOMON_SRC_CUDA_ONE_PASS_CUH_
