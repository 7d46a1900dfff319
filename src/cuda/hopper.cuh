// The forward pass on GPUs of compute capability 9.0. The first four warps of a block copy keys and
// values. Each other group of four warps owns 64 queries, 16 per warp, and multiplies tiles by
// wgmma. A group starts the scores of a tile, and then the outputs of the previous tile, before it
// computes weights, so that products and exponentials overlap.
//
// mbarriers connect the groups, four for each stage: the keys, or the values, of a tile have been
// copied; and all warps have read them.
#ifndef GNOMON_SRC_CUDA_HOPPER_CUH_
#define GNOMON_SRC_CUDA_HOPPER_CUH_

#include "cuda/forward.cuh"
#include "cuda/wgmma.cuh"

namespace gnomon::device {

GNOMON_DEVICE bool IsFinite(float a) { return Abs(a) < Infinity(); }

// Copies the tiles of an array, one after the other, by the threads of a group: each copies one
// piece of 16 bytes of every at_once-th row.
template <class C>
class SwizzledRows {
 public:
  // `first`: the first row of the first tile; `columns` and `padded`: the columns of the array of
  // keys or values and of the tiles. The array is a kernel argument, so it needs no registers.
  GNOMON_DEVICE SwizzledRows(const Parameters& p, const Array& array, int b, int h, int first,
                             int columns, int padded)
      : p_(p), array_(array), b_(b), h_(h), columns_(columns) {
    const int pieces = padded / 8;
    row_ = Thread() % kGroupThreads / pieces;
    piece_ = Thread() % pieces;
    at_once_ = kGroupThreads / pieces;
    bytes_ = Most(0, Least(2 * columns - 16 * piece_, 16));
    place_ = PlaceOfPiece(C::kStep, row_, piece_);
    from_ = C::kPages != 0 ? nullptr : PieceOf(first + row_);
  }

  // Copies the next tile, whose first row is `first`, with 0 for rows outside [low, high).
  GNOMON_DEVICE void Copy(unsigned char* to, int first, int low, int high) {
    const Int64 step = at_once_ * array_.stride[2] * 2;
    const unsigned char* from = from_;
    if (C::kPages == 0) from_ += C::kStep * array_.stride[2] * 2;
    if (C::kPages == 0 && first >= low && first + C::kStep <= high) {
#pragma unroll
      for (int n = 0; n < C::kStep / at_once_; ++n) {
        CopyAsync16(to + place_ + n * at_once_ * kBlockBytes, from, bytes_);
        from += step;
      }
      return;
    }
#pragma unroll 1
    for (int n = 0; n < C::kStep / at_once_; ++n) {
      const int row = first + row_ + n * at_once_;
      const bool inside = row >= low && row < high;
      if (C::kPages != 0 && inside) from = PieceOf(row);
      CopyAsync16(to + place_ + n * at_once_ * kBlockBytes, inside ? from : array_.data,
                  inside ? bytes_ : 0);
      from += step;
    }
  }

  // Stores the next tile, with 0 for non-finite numbers too.
  GNOMON_DEVICE void StoreFinite(unsigned char* to, int first, int low, int high) {
    if (C::kPages == 0) from_ += C::kStep * array_.stride[2] * 2;
#pragma unroll 1
    for (int n = 0; n < C::kStep / at_once_; ++n) {
      const int row = first + row_ + n * at_once_;
      const bool inside = row >= low && row < high;
      const auto* const from = reinterpret_cast<const uint16*>(inside ? PieceOf(row) : array_.data);
#pragma unroll 1
      for (int e = 0; e < 8; ++e) {
        uint16 bits = 0;
        if (inside && 8 * piece_ + e < columns_) bits = from[e];
        if (!IsFinite(Widen<C>(bits))) bits = 0;
        StoreShared<uint16>(to + place_ + n * at_once_ * kBlockBytes + 2 * e, bits);
      }
    }
  }

 private:
  // The thread's piece of a row or, if the row lacks it, the row's first piece.
  GNOMON_DEVICE const unsigned char* PieceOf(int row) const {
    return KeyRowOf<C>(p_, array_, b_, h_, row).data + (bytes_ > 0 ? 16 * piece_ : 0);
  }

  const Parameters& p_;
  const Array& array_;
  int b_;
  int h_;
  int columns_;
  int row_;
  int piece_;
  int at_once_;
  int bytes_;
  int place_;
  const unsigned char* from_;
};

// Adds the non-finite values of keys [low, high) of the tile at `start`, which the tile in shared
// memory lacks, to the rows that attend to them. `hidden`: see ScorePairs().
template <class C, int kPairs, int kHidden, int kOutputs>
GNOMON_DEVICE void AddNonFinite(const Parameters& p, int b, int key_head, int start, int low,
                                int high, const float (&weights)[kPairs][4],
                                const uint32 (&hidden)[kHidden], float (&o)[kOutputs][4]) {
  const int lane = Thread() % 32;
#pragma unroll 1
  for (int key = Most(start, low); key < Least(start + C::kStep, high); ++key) {
    const int column = key - start;
    const Head v = KeyRowOf<C>(p, p.v, b, key_head, key);
    float found = 0;
    for (int d = lane; d < p.value_dim; d += 32) {
      if (!IsFinite(LoadElement<C>(v.data, d))) found = 1;
    }
    if (SumOfWarp(found) == 0) continue;
    const int owner = lane / 4 * 4 + column % 8 / 2;
    float weight[2] = {};
    bool seen[2] = {};
#pragma unroll
    for (int n = 0; n < C::kStep / 8; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // Selects by arithmetic: an index that is not constant would need the array in memory.
        const float one = column % 2 == 0 ? weights[n][2 * r] : weights[n][2 * r + 1];
        weight[r] = n == column / 8 ? one : weight[r];
      }
    }
    const uint32 word =
        C::kStep > 64 && column >= 64 ? hidden[GNOMON_SIZE(kHidden - 1, 1)] : hidden[0];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      seen[r] = (word >> (column / 8 % 8 * 4 + 2 * r + column % 2) & 1) == 0;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      weight[r] = Shuffle(weight[r], owner);
      seen[r] = Shuffle(seen[r] ? 1.0f : 0.0f, owner) != 0;
    }
#pragma unroll
    for (int d = 0; d < C::kValueDim / 8; ++d) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int at = 8 * d + 2 * (lane % 4) + e;
        if (at >= p.value_dim) continue;
        const float value = LoadElement<C>(v.data, at);
        if (IsFinite(value)) continue;
        if (seen[0]) o[d][e] += weight[0] * value;
        if (seen[1]) o[d][2 + e] += weight[1] * value;
      }
    }
  }
}

template <class F, class C>
GNOMON_DEVICE void ForwardOnHopper(const Parameters& p) {
  const int groups = (C::kWarps - C::kProducers) / 4;
  const int rows_in_block = RowsInBlock<C>();
  const int word_count = WordCount<F, C, false>();
  const cuda::HopperLayout at =
      cuda::LayoutOnHopper(C::kDim, C::kValueDim, rows_in_block, C::kStep, C::kStages, word_count);
  const int key_bytes = C::kStep * C::kDim * 2;
  const int value_bytes = C::kStep * C::kValueDim * 2;
  const int query_bytes = kGroupRows * C::kDim * 2;
  unsigned char* const memory =
      SharedMemory() + (0u - Address(SharedMemory())) % static_cast<uint32>(kSwizzleBytes);
  const auto mbarrier = [&](int which, int stage) {
    return memory + at.barriers + 8 * (which * C::kStages + stage);
  };
  const auto copied_keys = [&](int stage) { return mbarrier(0, stage); };
  const auto copied_values = [&](int stage) { return mbarrier(1, stage); };
  const auto read_keys = [&](int stage) { return mbarrier(2, stage); };
  const auto read_values = [&](int stage) { return mbarrier(3, stage); };

  // As in Forward(), the last rows are processed first.
  const int blocks = DivideUp(p.queries, rows_in_block);
  const int begin = (blocks - 1 - BlockX() % blocks) * rows_in_block;
  const int index = p.first_head + BlockX() / blocks;
  const int b = index / p.heads;
  const int h = index % p.heads;
  const int key_head = h / p.group;
  const int* const lows = p.low + static_cast<Int64>(b) * p.queries;
  const int* const highs = p.high + static_cast<Int64>(b) * p.queries;
  const int low = lows[begin];
  const int high = highs[Least(begin + rows_in_block, p.queries) - 1];
  const int first = low / C::kStep * C::kStep;
  const bool any_spoiled =
      C::kHides != 0 && first < high && AnySpoiled<C>(p, b, key_head, first, high);
  const auto is_spoiled = [&](int start) {
    return any_spoiled && IsSpoiledTile<C>(p, b, key_head, start);
  };

  if (Thread() == 0) {
    for (int stage = 0; stage < C::kStages; ++stage) {
      InitMbarrier(copied_keys(stage), kGroupThreads);
      InitMbarrier(copied_values(stage), kGroupThreads);
      InitMbarrier(read_keys(stage), 4 * groups);
      InitMbarrier(read_values(stage), 4 * groups);
    }
  }
  const Head x = HeadOf<C>(p.x, b, h);
  const int pieces = C::kDim / 8;
#pragma unroll 1
  for (int n = Thread(); n < rows_in_block * pieces; n += 32 * C::kWarps) {
    const int r = n / pieces;
    const int piece = n % pieces;
    const int bytes = begin + r < p.queries ? Most(0, Least(2 * p.dim - 16 * piece, 16)) : 0;
    CopyAsync16(memory + at.queries + r / kGroupRows * query_bytes +
                    PlaceOfPiece(kGroupRows, r % kGroupRows, piece),
                x.data + (bytes > 0 ? (begin + r) * x.stride * 2 + 16 * piece : 0), bytes);
  }
  CopyCommit();
  CopyWait<0>();
  ProxyFence();
  Barrier();

  if (Thread() < kGroupThreads) {
    LowerRegisters();
    SwizzledRows<C> key_rows(p, p.y, b, key_head, first, p.dim, C::kDim);
    SwizzledRows<C> value_rows(p, p.v, b, key_head, first, p.value_dim, C::kValueDim);
    const TileWords<F, C, false> key_words(p, b, h);
    int stage = 0;
    int parity = 0;
    for (int start = first; start < high; start += C::kStep) {
      WaitForPhase(read_keys(stage), parity ^ 1);
      key_rows.Copy(memory + at.keys + stage * key_bytes, start, low, high);
      key_words.Copy(memory + at.words + stage * word_count * C::kStep * 4, start, low, high);
      ArriveWithCopies(copied_keys(stage));
      WaitForPhase(read_values(stage), parity ^ 1);
      unsigned char* const value_tile = memory + at.values + stage * value_bytes;
      if (is_spoiled(start)) {
        value_rows.StoreFinite(value_tile, start, low, high);
        ArriveAt(copied_values(stage));
      } else {
        value_rows.Copy(value_tile, start, low, high);
        ArriveWithCopies(copied_values(stage));
      }
      if (++stage == C::kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
    // No copy may be in flight when the block ends.
    CopyCommit();
    CopyWait<0>();
    return;
  }

  RaiseRegisters();
  const int group = Thread() / kGroupThreads - 1;
  const int warp = Thread() / 32 % 4;
  const int lane = Thread() % 32;
  const int pair = 2 * (lane % 4);
  const HeadInputs head = LoadHead<F, C>(p, b, h);
  const int group_begin = begin + kGroupRows * group;
  const int group_end = Least(group_begin + kGroupRows, p.queries);
  // Between these bounds, all rows of the group see all keys.
  const bool is_whole = group_end - group_begin == kGroupRows;
  const int low_of_all = is_whole ? lows[group_end - 1] : 0;
  const int high_of_all = is_whole ? highs[group_begin] : 0;
  // The thread's rows are this one and the eighth row after it.
  const int first_row = group_begin + 16 * warp + lane / 4;
  constexpr int kRows = RowWeights<C>::kSize;
  Query query[kRows] = {};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (first_row + 8 * r < p.queries) query[r] = LoadQuery<F, C>(p, head, first_row + 8 * r);
  }
  RowWeights<C> rows;
  float o[GNOMON_SIZE(C::kValueDim / 8, 16)][4];
  float s[GNOMON_SIZE(C::kStep / 8, 16)][4];
  // Initializers would become loops, which need the arrays in memory.
  Clear(o);
  Clear(s);
  // Operands of 16 keys each; with kSplit, their lower halves follow.
  const int operands = C::kStep / 16;
  uint32 weights[GNOMON_SIZE((1 + C::kSplit) * C::kStep / 16, 8)][4];
  float shrunk[kRows];
  uint32 hidden[GNOMON_SIZE(DivideUp(C::kStep, 64), 2)];

  const unsigned char* const own = memory + at.queries + group * query_bytes;
  const auto start_scores = [&](int stage) {
    const unsigned char* const tile = memory + at.keys + stage * key_bytes;
#pragma unroll
    for (int k = 0; k < C::kDim / 16; ++k) {
      // Products ignore the distance between blocks of an operand's depth.
      MultiplyShared<C>(s, C::kStep,
                        Describe(own, 16, k / 4 * kGroupRows * kBlockBytes + k % 4 * 32),
                        Describe(tile, 16, k / 4 * C::kStep * kBlockBytes + k % 4 * 32), k > 0);
    }
    WgmmaCommit();
  };
  const auto start_outputs = [&](int stage) {
    const unsigned char* const tile = memory + at.values + stage * value_bytes;
#pragma unroll
    for (int n = 0; n < (1 + C::kSplit) * operands; ++n) {
      const int k = n % operands;
      MultiplyWeights<C>(o, C::kValueDim, weights[n],
                         Describe(tile, C::kStep * kBlockBytes, k * 16 * kBlockBytes));
    }
    WgmmaCommit();
  };
  // Tells the producers that the warp has read a tile.
  const auto release = [&](unsigned char* mbarrier_of_tile) {
    WarpBarrier();
    if (lane == 0) ArriveAt(mbarrier_of_tile);
  };
  // Converts the products of the tile at `start` to weights. Outputs of earlier tiles must then be
  // multiplied by `shrunk` if the result is true, which is the same on all lanes.
  const auto weigh = [&](auto plain, int start, int stage) {
    const unsigned char* const words = memory + at.words + stage * word_count * C::kStep * 4;
    if constexpr (IsDistance<F>()) {
      ToDistances<C, false>(s, p, head, first_row, start + pair, [&](int n, int e) {
        return NormsOf(query[e / 2], KeyOf<F, C>(words, 8 * n + pair + e % 2));
      });
    }
    float most[kRows];
#pragma unroll
    for (int n = 0; n < DivideUp(C::kStep, 64); ++n) hidden[n] = 0;
    ScorePairs<F, C, plain.value>(p, head, query, words, nullptr, begin, first_row, start, s, most,
                                  hidden);
#pragma unroll
    for (int r = 0; r < 2; ++r) shrunk[r] = 1;
    const bool rises = AnyOfWarp(rows.Rises(most));
    if (rises) {
      rows.Raise(most, s, start + pair, [&](int r, float shrink) { shrunk[r] = shrink; });
    }
    rows.Weigh(p, query, s, start + pair);
    return rises;
  };
  const auto weigh_tile = [&](int start, int stage) {
    const bool is_plain =
        start >= low_of_all && start + C::kStep <= high_of_all && !is_spoiled(start);
    return is_plain ? weigh(Whether<true>{}, start, stage) : weigh(Whether<false>{}, start, stage);
  };
  // Makes the weights of the tile at `start` the operand of the next product. No product may be in
  // flight.
  const auto finish_weights = [&](int start) {
    if (C::kHides != 0 && is_spoiled(start)) {
      AddNonFinite<C>(p, b, key_head, start, low, high, s, hidden, o);
    }
#pragma unroll
    for (int k = 0; k < C::kStep / 16; ++k) {
      Operand left;
      ToLeft<C>(left, s, k);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        weights[k][e] = left.high[e];
        if (C::kSplit != 0) weights[C::kSplit * operands + k][e] = left.low[e];
      }
    }
  };

  if (first < high) {
    // Groups take turns at starting products: while one starts them, the others compute weights.
    // Named barrier 1 + n tells group n that it is its turn.
    const auto wait_for_turn = [&] { NamedSync(1 + group, 2 * kGroupThreads); };
    const auto pass_turn = [&] { NamedArrive(1 + (group + 1) % groups, 2 * kGroupThreads); };
    int stage = 0;
    int parity = 0;
    WaitForPhase(copied_keys(0), 0);
    ProxyFence();
    Pin(s);
    WgmmaFence();
    start_scores(0);
    WgmmaWait<0>();
    Pin(s);
    weigh_tile(first, 0);
    release(read_keys(0));
    finish_weights(first);
    if (group == groups - 1 && first + C::kStep < high) pass_turn();
#pragma unroll 1
    for (int start = first + C::kStep; start < high; start += C::kStep) {
      const int next = stage + 1 == C::kStages ? 0 : stage + 1;
      const int next_parity = next == 0 ? parity ^ 1 : parity;
      WaitForPhase(copied_values(stage), parity);
      WaitForPhase(copied_keys(next), next_parity);
      ProxyFence();
      wait_for_turn();
      Pin(s);
      Pin(o);
      Pin(weights);
      WgmmaFence();
      start_scores(next);
      start_outputs(stage);
      if (group < groups - 1 || start + C::kStep < high) pass_turn();
      WgmmaWait<1>();
      Pin(s);
      if (word_count == 0) release(read_keys(next));
      const bool shrinks = weigh_tile(start, next);
      if (word_count != 0) release(read_keys(next));
      WgmmaWait<0>();
      Pin(o);
      Pin(weights);
      release(read_values(stage));
      if (shrinks) {
#pragma unroll
        for (int d = 0; d < C::kValueDim / 8; ++d) {
#pragma unroll
          for (int e = 0; e < 4; ++e) o[d][e] *= shrunk[e / 2];
        }
      }
      finish_weights(start);
      stage = next;
      parity = next_parity;
    }
    WaitForPhase(copied_values(stage), parity);
    ProxyFence();
    Pin(o);
    Pin(weights);
    WgmmaFence();
    start_outputs(stage);
    WgmmaWait<0>();
    Pin(o);
  }

#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = SumOfRow(rows.sum[r]);
    const float key = LargestOfRow(static_cast<float>(rows.top_key[r]));
    if (first_row + 8 * r >= p.queries) continue;
    StoreRow<C>(p, b, h, first_row + 8 * r, 0, rows.top[r], sum, key,
                sum == 0.0f ? 0.0f : 1.0f / sum, [&](int d, int c) { return o[d][2 * r + c]; });
  }
}

}  // namespace gnomon::device

#endif  // GNOMON_SRC_CUDA_HOPPER_CUH_
