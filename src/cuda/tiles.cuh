// Tile operations in shared memory: loading tiles, multiplying their rows by the block's own rows,
// and accumulating weighted rows.
#ifndef GNOMON_SRC_CUDA_TILES_CUH_
#define GNOMON_SRC_CUDA_TILES_CUH_

#include "cuda/primitives.cuh"

namespace gnomon::device {

// Waits for the tile at `start`, and for all warps to be done with the previous tile. copy(first
// row, stage) requests a tile. With one stage, this tile is requested first; with two stages, it
// must already have been requested.
template <class C, class Copy>
GNOMON_DEVICE void WaitForTile(const Copy& copy, int start) {
  if (C::kStages == 1) {
    Barrier();
    copy(start, 0);
  }
  CopyWait<0>();
  Barrier();
}
// With two stages, requests the tile after the one at `start`, if it starts before `last`.
template <class C, class Copy>
GNOMON_DEVICE void RequestNextTile(const Copy& copy, int start, int last, int stage) {
  if (C::kStages == 2 && start + C::kStep < last) copy(start + C::kStep, stage ^ 1);
}

// The number of rows that a block owns.
template <class C>
GNOMON_DEVICE constexpr int RowsInBlock() {
  return 16 * C::kRowTiles * (C::kWarps - C::kProducers);
}

// Arrays of the pairs of a warp's rows and a tile contain those of the first 16 rows, then those of
// the second 16 rows if the warp has 32. The same holds for a warp's own rows and its sums.

// Adds to s the products of the warp's own rows with the rows of a tile, over `columns` columns.
// The warp's own rows are in registers or at `own_tile`.
template <class C, bool kSwapped, int kTiles, int kOwned>
GNOMON_DEVICE void MultiplyRows(float (&s)[kTiles][4], const Operand (&own)[kOwned],
                                const unsigned char* own_tile, const unsigned char* tile,
                                int columns) {
  const int row_bytes = cuda::RowBytes(C::kType, columns);
  const int warp = Thread() / 32;
  // Operands in registers require full unrolling. With operands in shared memory, full unrolling
  // would load all of them at once and exhaust the registers. The emulation omits the pragma,
  // because kOwn is not a constant there.
#ifndef GNOMON_CUDA_EMULATION
#pragma unroll(C::kOwn != 0 || (C::kType != 0 && C::kDim <= 128) ? 32 : 4)
#endif
  for (int k = 0; k < columns / Depth<C>(); ++k) {
    Operand left[GNOMON_SIZE(C::kRowTiles, 2)];
    if (C::kOwn == 0) {
#pragma unroll
      for (int t = 0; t < C::kRowTiles; ++t) {
        LoadLeft<C>(left[t], own_tile, row_bytes, 16 * (C::kRowTiles * warp + t), k);
      }
    }
#pragma unroll
    for (int n = 0; n < C::kStep / 16; ++n) {
      Operand right;
      LoadRight<C>(right, tile, row_bytes, 16 * n, k);
#pragma unroll
      for (int t = 0; t < C::kRowTiles; ++t) {
        const Operand& mine = C::kOwn != 0 ? own[t * (columns / Depth<C>()) + k] : left[t];
        MultiplyAdd<C, kSwapped>(s[t * (C::kStep / 8) + 2 * n], mine, right, 0);
        MultiplyAdd<C, kSwapped>(s[t * (C::kStep / 8) + 2 * n + 1], mine, right, 1);
      }
    }
  }
}

// Adds weighted sums of rows k Depth() ... of a tile to out, for `count` columns beginning with
// `first`; columns at or beyond `columns` are skipped. left_of(t) returns the left operand of the
// weights of row tile t and these rows.
template <class C, int kOutputs, class LeftOf>
GNOMON_DEVICE void AddSomeRows(float (&out)[kOutputs][4], const LeftOf& left_of,
                               const unsigned char* tile, int columns, int first, int count,
                               int k) {
  Operand left[GNOMON_SIZE(C::kRowTiles, 2)];
#pragma unroll
  for (int t = 0; t < C::kRowTiles; ++t) left[t] = left_of(t);
#pragma unroll
  for (int d = 0; d < count / 16; ++d) {
    if (first + 16 * d >= columns) continue;
    Operand right;
    LoadRightRows<C>(right, tile, cuda::RowBytes(C::kType, columns), k, first + 16 * d);
#pragma unroll
    for (int t = 0; t < C::kRowTiles; ++t) {
      MultiplyAdd<C, false>(out[t * (count / 8) + 2 * d], left[t], right, 0);
      MultiplyAdd<C, false>(out[t * (count / 8) + 2 * d + 1], left[t], right, 1);
      if (C::kSplit == 0) continue;
      MultiplyAddLow<C>(out[t * (count / 8) + 2 * d], left[t], right, 0);
      MultiplyAddLow<C>(out[t * (count / 8) + 2 * d + 1], left[t], right, 1);
    }
  }
}
// The same for all rows of a tile, with weights that are not rounded.
template <class C, int kOutputs, int kTiles>
GNOMON_DEVICE void AddRows(float (&out)[kOutputs][4], const float (&weights)[kTiles][4],
                           const unsigned char* tile, int columns, int first, int count) {
#pragma unroll
  for (int k = 0; k < C::kStep / Depth<C>(); ++k) {
    const auto left_of = [&](int t) {
      Operand left;
      ToLeft<C>(left, weights, t * (C::kStep / Depth<C>()) + k);
      return left;
    };
    AddSomeRows<C>(out, left_of, tile, columns, first, count, k);
  }
}

// Weights in fp16 products are scaled, because fp16 underflows below 6e-8 and overflows above
// 65504. Scales are powers of two that keep the running maximum of the weights below 2^15 and, if
// it is above 2^-86, at or above 2^14.
constexpr int kFloatBias = 127;  // of exponents
GNOMON_DEVICE float PowerOfTwo(int exponent) {
  return FromBits(static_cast<uint32>(exponent + kFloatBias) << 23);
}
constexpr int kFirstScale = 100;  // an exponent
// The scale for weights with this largest absolute value, after a scale for earlier weights.
GNOMON_DEVICE float NextScale(float scale, float largest) {
  const int exponent = static_cast<int>(BitsOf(largest) >> 23) - kFloatBias;
  return Least(scale, PowerOfTwo(Least(kFirstScale, 14 - exponent)));
}
GNOMON_DEVICE float InverseOfScale(float scale) {
  return PowerOfTwo(kFloatBias - static_cast<int>(BitsOf(scale) >> 23));
}

// The scales for the weights of a thread's two rows. For other types than fp16, they are 1.
template <class C>
class Scales {
 public:
  // Scales a tile's weights. The caller must multiply the sums of earlier tiles by `shrink`;
  // returns whether either factor differs from 1.
  template <int kTiles>
  GNOMON_DEVICE bool Apply(float (&weights)[kTiles][4], float (&shrink)[2]) {
    bool shrinks = false;
    if (C::kType != 2) return shrinks;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = 0;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        largest = Larger(largest, Larger(Abs(weights[n][2 * r]), Abs(weights[n][2 * r + 1])));
      }
      largest = Larger(largest, ShuffleXor(largest, 1));
      largest = Larger(largest, ShuffleXor(largest, 2));
      const float scale = NextScale(scale_[r], largest);
      shrink[r] = scale * Inverse(r);
      shrinks = shrinks || scale != scale_[r];
      scale_[r] = scale;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        weights[n][2 * r] *= scale;
        weights[n][2 * r + 1] *= scale;
      }
    }
    return shrinks;
  }
  GNOMON_DEVICE float Inverse(int r) const {
    return C::kType != 2 ? 1.0f : InverseOfScale(scale_[r]);
  }

 private:
  float scale_[2] = {PowerOfTwo(kFirstScale), PowerOfTwo(kFirstScale)};
};
template <int kSums>
GNOMON_DEVICE void MultiplySums(float (&sums)[kSums][4], const float (&by)[2]) {
#pragma unroll
  for (int n = 0; n < kSums; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[n][e] *= by[e / 2];
  }
}

}  // namespace gnomon::device

#endif  // GNOMON_SRC_CUDA_TILES_CUH_
