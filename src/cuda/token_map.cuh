// The token maps: kernels that rotate pairs of columns (RoPE), apply the maps of cones, and compute
// the gradients of both. All arithmetic is in fp32, and tokens are rounded once. A few lanes share
// a token; each of them reads and writes pieces of eight columns.
#ifndef GNOMON_SRC_CUDA_TOKEN_MAP_CUH_
#define GNOMON_SRC_CUDA_TOKEN_MAP_CUH_

#include "cuda/primitives.cuh"

namespace gnomon::device {

#include "base/cone_heights-inl.h"

using cuda::TokenMap;
using cuda::TokenMapSide;

constexpr int kPiece = 8;

// Selects an element type in the primitives.
template <int type>
struct OfType {
  static constexpr int kType = type;
};

GNOMON_DEVICE float LoadNumber(int type, const unsigned char* row, int column) {
  if (type == 0) return reinterpret_cast<const float*>(row)[column];
  const uint16 bits = reinterpret_cast<const uint16*>(row)[column];
  return type == 1 ? Widen<OfType<1>>(bits) : Widen<OfType<2>>(bits);
}
GNOMON_DEVICE uint32 PackAs(int type, float low, float high) {
  return type == 1 ? Pack<OfType<1>>(low, high) : Pack<OfType<2>>(low, high);
}
GNOMON_DEVICE void StoreNumber(int type, unsigned char* row, int column, float value) {
  if (type == 0) {
    reinterpret_cast<float*>(row)[column] = value;
    return;
  }
  reinterpret_cast<uint16*>(row)[column] = static_cast<uint16>(PackAs(type, value, 0.0f));
}

// 16 bytes, which one instruction loads or stores.
struct alignas(16) Words {
  uint32 word[4];
};

// Loads `count` floats, a multiple of four.
template <int count>
GNOMON_DEVICE void LoadFloats(float* to, const float* from, bool aligned) {
#pragma unroll
  for (int n = 0; n < count; n += 4) {
    if (aligned) {
      const Words words = *reinterpret_cast<const Words*>(from + n);
#pragma unroll
      for (int e = 0; e < 4; ++e) to[n + e] = FromBits(words.word[e]);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) to[n + e] = from[n + e];
    }
  }
}

// Loads a piece of a row that has `columns` columns; the piece's other columns are 0.
template <class C>
GNOMON_DEVICE void LoadPiece(float (&x)[kPiece], int type, const unsigned char* row, int column,
                             int columns) {
  if (C::kAligned != 0 && column + kPiece <= columns) {
    if (type == 0) {
      LoadFloats<kPiece>(x, reinterpret_cast<const float*>(row) + column, true);
      return;
    }
    const Words words = *reinterpret_cast<const Words*>(row + 2 * column);
#pragma unroll
    for (int n = 0; n < kPiece; ++n) {
      const auto bits = static_cast<uint16>(words.word[n / 2] >> (16 * (n % 2)));
      x[n] = type == 1 ? Widen<OfType<1>>(bits) : Widen<OfType<2>>(bits);
    }
    return;
  }
#pragma unroll
  for (int n = 0; n < kPiece; ++n) {
    x[n] = column + n < columns ? LoadNumber(type, row, column + n) : 0.0f;
  }
}

template <class C>
GNOMON_DEVICE void StorePiece(const float (&x)[kPiece], int type, unsigned char* row, int column,
                              int columns) {
  if (C::kAligned != 0 && column + kPiece <= columns) {
    auto* const to = reinterpret_cast<Words*>(row + column * cuda::BytesOf(type));
    Words words;
    if (type == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int e = 0; e < 4; ++e) words.word[e] = BitsOf(x[4 * half + e]);
        to[half] = words;
      }
      return;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) words.word[e] = PackAs(type, x[2 * e], x[2 * e + 1]);
    *to = words;
    return;
  }
#pragma unroll
  for (int n = 0; n < kPiece; ++n) {
    if (column + n < columns) StoreNumber(type, row, column + n, x[n]);
  }
}

// A lane's token.
struct MapPlace {
  const TokenMapSide* side;
  int b, h, row;
  Int64 index;  // in (B, heads, rows) order
  Int64 count;  // B x heads x rows
  int lane;     // among the lanes of the token
};

// The first blocks process q, the others k. The last tokens of a head may not exist.
template <class C>
GNOMON_DEVICE MapPlace PlaceOf(const Parameters& p) {
  const int lanes = cuda::LanesOfToken(C::kDim);
  const TokenMapSide& q = p.map.sides[0];
  const int of_queries = p.batch * q.heads * q.blocks;
  const bool is_key = BlockX() >= of_queries;
  const int block = is_key ? BlockX() - of_queries : BlockX();
  MapPlace at;
  at.side = &p.map.sides[is_key ? 1 : 0];
  const int head = block / at.side->blocks;
  at.b = head / at.side->heads;
  at.h = head % at.side->heads;
  at.row = block % at.side->blocks * (32 * C::kWarps / lanes) + Thread() / lanes;
  at.index = static_cast<Int64>(head) * at.side->rows + at.row;
  at.count = static_cast<Int64>(p.batch) * at.side->heads * at.side->rows;
  at.lane = Thread() % lanes;
  return at;
}

GNOMON_DEVICE unsigned char* RowOf(const Array& array, int type, const MapPlace& at, int row) {
  return static_cast<unsigned char*>(array.data) +
         (at.b * array.stride[0] + at.h * array.stride[1] + row * array.stride[2]) *
             cuda::BytesOf(type);
}

// Loads a piece of a row with `columns` columns, and rotates its pairs. The products are rounded
// separately, as on the CPU.
template <class C>
GNOMON_DEVICE void LoadTurned(float (&x)[kPiece], const TokenMap& map, const MapPlace& at,
                              int token, int type, const unsigned char* row, int column,
                              int columns, bool back) {
  LoadPiece<C>(x, type, row, column, columns);
  const TokenMapSide& side = *at.side;
  if (C::kTurns == 0 || column >= side.turned) return;
  const auto* const cosines = reinterpret_cast<const float*>(RowOf(side.cosines, 0, at, token));
  const auto* const sines = reinterpret_cast<const float*>(RowOf(side.sines, 0, at, token));
  const float sign = back ? -1.0f : 1.0f;
  float c[kPiece];
  float s[kPiece];
  if (C::kTurns == 1) {
    if (column + kPiece <= side.turned) {
      LoadFloats<kPiece / 2>(c, cosines + column / 2, map.turns_aligned != 0);
      LoadFloats<kPiece / 2>(s, sines + column / 2, map.turns_aligned != 0);
    } else {
#pragma unroll
      for (int n = 0; n < kPiece / 2; ++n) {
        const bool turns = column + 2 * n < side.turned;
        c[n] = turns ? cosines[column / 2 + n] : 1.0f;
        s[n] = turns ? sines[column / 2 + n] : 0.0f;
      }
    }
#pragma unroll
    for (int n = 0; n < kPiece / 2; ++n) {
      if (column + 2 * n >= side.turned) break;
      const float a = x[2 * n];
      const float b = x[2 * n + 1];
      x[2 * n] = a * c[n] - b * (sign * s[n]);
      x[2 * n + 1] = b * c[n] + a * (sign * s[n]);
    }
    return;
  }
  const int half = side.turn_block / 2;
  float other[kPiece];
  bool first[kPiece];
  if (half % kPiece == 0) {
    // The partners of a piece are a piece, and so are their pairs.
    const int within = column % side.turn_block;
    const bool is_first = within < half;
    LoadPiece<C>(other, type, row, is_first ? column + half : column - half, columns);
    const int pair = column / side.turn_block * half + within % half;
    LoadFloats<kPiece>(c, cosines + pair, map.turns_aligned != 0);
    LoadFloats<kPiece>(s, sines + pair, map.turns_aligned != 0);
#pragma unroll
    for (int n = 0; n < kPiece; ++n) first[n] = is_first;
  } else {
#pragma unroll
    for (int n = 0; n < kPiece; ++n) {
      const int own = column + n;
      const int within = own % side.turn_block;
      const bool turns = own < side.turned;
      first[n] = within < half;
      const int pair = own / side.turn_block * half + within % half;
      other[n] = turns ? LoadNumber(type, row, first[n] ? own + half : own - half) : 0.0f;
      c[n] = turns ? cosines[pair] : 1.0f;
      s[n] = turns ? sines[pair] : 0.0f;
    }
  }
#pragma unroll
  for (int n = 0; n < kPiece; ++n) {
    const float by_sine = other[n] * (sign * s[n]);
    x[n] = first[n] ? x[n] * c[n] - by_sine : x[n] * c[n] + by_sine;
  }
}

// The values of a token whose last column is z.
template <class C>
GNOMON_DEVICE void FindValues(const TokenMap& map, float z, HeightValues<float>& values) {
  if (C::kMap == 1) UmbralValues<false>(map.number, map.farthest, z, values);
  if (C::kMap == 2) UmbralValues<true>(map.number, map.farthest, z, values);
  if (C::kMap == 3) PenumbralValues<false>(map.number, z, values);
  if (C::kMap == 4) PenumbralValues<true>(map.number, z, values);
}
template <class C>
GNOMON_DEVICE int ScalarsOfMap() {
  return C::kMap == 0 ? 0 : C::kMap <= 2 ? 1 : 2;
}

// Rotates the tokens of q and k, and maps the result. The last column of a cone's token is z.
template <class C>
GNOMON_DEVICE void MapTokens(const Parameters& p) {
  const TokenMap& map = p.map;
  const MapPlace at = PlaceOf<C>(p);
  const TokenMapSide& side = *at.side;
  if (at.row >= side.rows) return;
  const unsigned char* const token = RowOf(side.tokens, C::kTokenType, at, at.row);
  unsigned char* const mapped = RowOf(side.mapped, C::kType, at, at.row);
  HeightValues<float> values;
  int columns = side.columns;
  if (C::kMap != 0) {
    --columns;
    FindValues<C>(map, LoadNumber(C::kTokenType, token, columns), values);
  }
  for (int column = kPiece * at.lane; column < side.width;
       column += kPiece * cuda::LanesOfToken(C::kDim)) {
    float x[kPiece];
    LoadTurned<C>(x, map, at, at.row, C::kTokenType, token, column, side.columns, map.back != 0);
    if (C::kMap != 0) {
#pragma unroll
      for (int n = 0; n < kPiece; ++n) x[n] = column + n < columns ? values.m * x[n] : 0.0f;
    }
    StorePiece<C>(x, C::kType, mapped, column, side.width);
  }
  if (at.lane != 0) return;
#pragma unroll
  for (int n = 0; n < ScalarsOfMap<C>(); ++n) {
    side.scalars[n * at.count + at.index] = values.scalar[n];
  }
}

// Stores the gradients of the cosines and sines of the pairs whose first column is in a piece.
template <class C>
GNOMON_DEVICE void StoreTurnGradients(const TokenMap& map, const MapPlace& at,
                                      const unsigned char* token, const unsigned char* d_mapped,
                                      int column) {
  const TokenMapSide& side = *at.side;
  const int half = side.turn_block / 2;
  const Int64 first_pair = at.index * (side.turned / 2);
  for (int own = column; own < Least(column + kPiece, side.turned); ++own) {
    int pair = own / 2;
    int partner = own + 1;
    bool is_first = own % 2 == 0;
    if (C::kTurns == 2) {
      const int within = own % side.turn_block;
      pair = own / side.turn_block * half + within;
      partner = own + half;
      is_first = within < half;
    }
    if (!is_first) continue;
    const float a = LoadNumber(C::kTokenType, token, own);
    const float b = LoadNumber(C::kTokenType, token, partner);
    const float d_a = LoadNumber(C::kType, d_mapped, own);
    const float d_b = LoadNumber(C::kType, d_mapped, partner);
    const float d_sine = Fma(d_b, a, -(d_a * b));
    side.d_cosines[first_pair + pair] = Fma(d_a, a, d_b * b);
    side.d_sines[first_pair + pair] = map.back != 0 ? -d_sine : d_sine;
  }
}

// Computes the gradients of tokens, from those of the mapped tokens and of the scalars of cones.
// Without a cone, also computes those of the turns of each token.
template <class C>
GNOMON_DEVICE void MapTokensBackward(const Parameters& p) {
  const TokenMap& map = p.map;
  const MapPlace at = PlaceOf<C>(p);
  const TokenMapSide& side = *at.side;
  // All lanes of a warp take part in the sums.
  const bool exists = at.row < side.rows;
  const int row = exists ? at.row : side.rows - 1;
  const int lanes = cuda::LanesOfToken(C::kDim);
  const int columns = C::kMap != 0 ? side.columns - 1 : side.columns;
  const unsigned char* const token = RowOf(side.tokens, C::kTokenType, at, row);
  unsigned char* const d_token = RowOf(side.d_tokens, C::kTokenType, at, row);
  const bool has_mapped = side.mapped.data != nullptr;
  const unsigned char* const d_mapped = RowOf(side.mapped, C::kType, at, row);
  HeightValues<float> values;
  if (C::kMap != 0) FindValues<C>(map, LoadNumber(C::kTokenType, token, columns), values);
  // A piece that is stored later, because it may contain the height.
  float last[kPiece] = {};
  int last_column = -1;
  float product = 0;
  for (int column = kPiece * at.lane; column < side.columns; column += kPiece * lanes) {
    float d[kPiece] = {};
    if (has_mapped) {
      LoadTurned<C>(d, map, at, row, C::kType, d_mapped, column, side.width, map.back == 0);
      if (C::kMap == 0 && C::kTurns != 0 && exists && side.d_cosines != nullptr) {
        StoreTurnGradients<C>(map, at, token, d_mapped, column);
      }
    }
    if (C::kMap != 0 && has_mapped) {
      // <d, turned x> = <d turned back, x>.
      float x[kPiece];
      LoadPiece<C>(x, C::kTokenType, token, column, side.columns);
#pragma unroll
      for (int n = 0; n < kPiece; ++n) {
        if (column + n < columns) product = Fma(d[n], x[n], product);
        d[n] = values.m * d[n];
      }
    }
    if (column + kPiece <= columns) {
      if (exists) StorePiece<C>(d, C::kTokenType, d_token, column, side.columns);
      continue;
    }
#pragma unroll
    for (int n = 0; n < kPiece; ++n) last[n] = d[n];
    last_column = column;
  }
  for (int mask = lanes / 2; mask > 0; mask /= 2) product += ShuffleXor(product, mask);
  if (last_column < 0 || !exists) return;
  if (C::kMap != 0) {
    float d_z = has_mapped ? values.dm * product : 0.0f;
    if (side.scalars != nullptr) {
#pragma unroll
      for (int n = 0; n < ScalarsOfMap<C>(); ++n) {
        d_z += values.d_scalar[n] * side.scalars[n * at.count + at.index];
      }
    }
#pragma unroll
    for (int n = 0; n < kPiece; ++n) {
      if (last_column + n == columns) last[n] = d_z;
    }
  }
  StorePiece<C>(last, C::kTokenType, d_token, last_column, side.columns);
}

}  // namespace gnomon::device

#endif  // GNOMON_SRC_CUDA_TOKEN_MAP_CUH_
