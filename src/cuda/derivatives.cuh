// Forward-mode derivatives of the forward and the backward pass. A tangent is the derivative of a
// quantity in the direction of the tangents of the inputs (Parameters::tangent). The tangents of
// gradients are products with the Hessian, so these kernels also compute second derivatives.
//
// With the score s of a pair in natural units, its weight p, and dP = dO . v:
//   m = lse' = sum of p s'        o' = sum of p (s' - m) v + p v'
//   delta = sum of p dP - dlse    delta' = sum of p ((s' - m) dP + dP') - dlse'
//   dS = p (dP - delta)           dS' = p ((s' - m) (dP - delta) + dP' - delta')
// A pair function's slopes and their tangents are computed with dual numbers. Each sum is
// accumulated by a single thread in a fixed order.
#ifndef GNOMON_SRC_CUDA_DERIVATIVES_CUH_
#define GNOMON_SRC_CUDA_DERIVATIVES_CUH_

#include "cuda/backward.cuh"
#include "cuda/forward.cuh"
#include "cuda/pair.cuh"
#include "cuda/relative.cuh"
#include "cuda/tiles.cuh"

namespace gnomon::device {

using cuda::DualLayout;
using cuda::Tangents;

// The tangents of a pair's inputs (see HeadInputs, Query and Key). Null pointers mean 0.
struct HeadTangents {
  float factor;
  float t[3];
  const float* bias;
  const float* relative_scores;
  const float* relative_products;
  const float* relative_key_scores;
};
struct QueryTangents {
  float a[3];
  float norm;
  float temperature;
  float lse, delta;  // only in the passes that read them
};
struct KeyTangents {
  float b[3];
  float norm;
  float bias;
};

template <class F, class C>
GNOMON_DEVICE HeadTangents LoadHeadTangents(const Parameters& p, int b, int h) {
  const Tangents& of = p.tangent;
  HeadTangents head{};
  if (of.factor != nullptr) head.factor = of.factor[h];
#pragma unroll
  for (int s = 0; s < F::kHeadScalars; ++s) {
    if (of.head_scalars != nullptr) head.t[s] = of.head_scalars[s * p.heads + h];
  }
  if (C::kBias != 0 && of.bias != nullptr) {
    head.bias = of.bias + b * p.bias_batch_stride + static_cast<Int64>(h) * p.bias_size;
  }
  const Int64 first =
      ((static_cast<Int64>(b) * p.heads + h) * p.queries - p.relative_row) * p.relative_size;
  if (C::kRelativeKeys != 0 && of.relative_scores != nullptr) {
    head.relative_scores = of.relative_scores + first;
  }
  if (C::kRelativeValues != 0 && of.relative_products != nullptr) {
    head.relative_products = of.relative_products + first;
  }
  if (C::kRelativeQueries != 0 && of.relative_key_scores != nullptr) {
    head.relative_key_scores = of.relative_key_scores + KeyTableOf(p, b, h);
  }
  return head;
}

// read(array, n) reads the number of one key or query from an array in which that of key or query 0
// of the head has index n.
template <class F, class C, class Read>
GNOMON_DEVICE KeyTangents ReadKeyTangents(const Parameters& p, int b, int h, const Read& read) {
  const Tangents& of = p.tangent;
  const Int64 key_head = static_cast<Int64>(b) * p.key_heads + h / p.group;
  const Int64 columns = static_cast<Int64>(p.batch) * p.key_heads * p.keys;
  KeyTangents k{};
#pragma unroll
  for (int s = 0; s < F::kColumnScalars; ++s) {
    k.b[s] = read(of.column_scalars, s * columns + key_head * p.keys);
  }
  if (IsDistance<F>()) k.norm = read(of.norm_y, key_head * p.keys);
  if (C::kKeyBias != 0) {
    k.bias = read(of.key_bias, (static_cast<Int64>(b) * p.heads + h) * p.keys);
  }
  return k;
}
template <class F, class C, bool kSums, class Read>
GNOMON_DEVICE QueryTangents ReadQueryTangents(const Parameters& p, int b, int h, const Read& read) {
  const Tangents& of = p.tangent;
  const Int64 row = (static_cast<Int64>(b) * p.heads + h) * p.queries;
  const Int64 rows = static_cast<Int64>(p.batch) * p.heads * p.queries;
  QueryTangents q{};
#pragma unroll
  for (int s = 0; s < F::kRowScalars; ++s) q.a[s] = read(of.row_scalars, s * rows + row);
  if (IsDistance<F>()) q.norm = read(of.norm_x, row);
  if (C::kTemperature != 0) q.temperature = read(of.temperature, row);
  if (kSums) {
    q.lse = read(of.lse, row);
    q.delta = read(of.delta, row);
  }
  return q;
}

// Three ways to read: from global memory, from the words of a tile, and copying these words.
GNOMON_DEVICE float ReadNumber(const float* from, Int64 at) {
  return from != nullptr ? from[at] : 0.0f;
}
template <class C>
class WordReader {
 public:
  GNOMON_DEVICE WordReader(const unsigned char* words, int column) : at_(words + 4 * column) {}
  GNOMON_DEVICE float operator()(const float* from, Int64 /*at*/) const {
    const unsigned char* const at = at_;
    at_ += 4 * C::kStep;
    return from != nullptr ? LoadShared<float>(at) : 0.0f;
  }

 private:
  mutable const unsigned char* at_;
};
// Copies the words of rows [first, first + kStep), with 0 for rows outside [low, high).
template <class C>
class WordCopier {
 public:
  GNOMON_DEVICE WordCopier(unsigned char* to, int first, int low, int high)
      : to_(to), first_(first), low_(low), high_(high) {}
  GNOMON_DEVICE float operator()(const float* from, Int64 at) const {
    if (from != nullptr && warp_ % C::kWarps == Thread() / 32) {
      const uint32* const words = reinterpret_cast<const uint32*>(from) + at;
      CopyWordsByWarp<C>(to_, words + Thread() % 32, first_, low_, high_);
    }
    to_ += 4 * C::kStep;
    ++warp_;
    return 0;
  }

 private:
  mutable unsigned char* to_;
  int first_, low_, high_;
  mutable int warp_ = 0;
};

// Rows that a block owns: in shared memory or, if kOwn is 0, in global memory. The rows at or
// beyond `high`, and those before `low`, are 0.
struct OwnRows {
  bool exists;
  const unsigned char* tile;
  Head rows;
  int begin, low, high;
  int columns;
};
// Loads the warp's rows like LoadLeft().
template <class C>
GNOMON_DEVICE void LoadOwn(Operand& a, const OwnRows& own, int row_bytes, int k) {
  const int warp = Thread() / 32;
  if (C::kOwn != 0) {
    LoadLeft<C>(a, own.tile, row_bytes, 16 * warp, k);
    return;
  }
  const int lane = Thread() % 32;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int row = own.begin + 16 * warp + lane / 4 + n % 2 * 8;
    const int column = (32 * k + n / 2 * 16 + lane % 4 * 4) / Bytes<C>();
    const bool inside = row >= own.low && row < own.high;
    const Int64 at = row * own.rows.stride + column;
    a.high[n] = 0;
    if (C::kType == 0) {
      if (inside && column < own.columns) {
        a.high[n] = reinterpret_cast<const uint32*>(own.rows.data)[at];
      }
    } else {
      const auto* const from = reinterpret_cast<const uint16*>(own.rows.data);
      if (inside && column < own.columns) a.high[n] = from[at];
      if (inside && column + 1 < own.columns) {
        a.high[n] |= static_cast<uint32>(from[at + 1]) << 16;
      }
    }
  }
  Split<C>(a);
}

// Adds to s the products of the warp's own rows with the rows of a tile, as MultiplyRows() does,
// and to `tangents` the tangents of these products. `tangent_tile` is null if the tile's tangents
// are 0.
template <class C, bool kSwapped, int kTiles>
GNOMON_DEVICE void MultiplyDuals(float (&s)[kTiles][4], float (&tangents)[kTiles][4],
                                 const OwnRows& own, const OwnRows& own_tangents,
                                 const unsigned char* tile, const unsigned char* tangent_tile,
                                 int columns) {
  const int row_bytes = cuda::RowBytes(C::kType, columns);
#pragma unroll 2
  for (int k = 0; k < columns / Depth<C>(); ++k) {
    Operand left;
    Operand left_tangent{};
    LoadOwn<C>(left, own, row_bytes, k);
    if (own_tangents.exists) LoadOwn<C>(left_tangent, own_tangents, row_bytes, k);
#pragma unroll
    for (int n = 0; n < C::kStep / 16; ++n) {
      Operand right;
      LoadRight<C>(right, tile, row_bytes, 16 * n, k);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        MultiplyAdd<C, kSwapped>(s[2 * n + half], left, right, half);
        if (own_tangents.exists) {
          MultiplyAdd<C, kSwapped>(tangents[2 * n + half], left_tangent, right, half);
        }
      }
      if (tangent_tile == nullptr) continue;
      LoadRight<C>(right, tangent_tile, row_bytes, 16 * n, k);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        MultiplyAdd<C, kSwapped>(tangents[2 * n + half], left, right, half);
      }
    }
  }
}

template <class C>
GNOMON_DEVICE float LoadOrZero(const Head& from, Int64 at) {
  return from.data != nullptr ? LoadElement<C>(from.data, at) : 0.0f;
}
// The head of an array that may be absent.
template <class C>
GNOMON_DEVICE Head HeadOrNull(const Array& array, int b, int h) {
  if (array.data == nullptr) return {nullptr, 0};
  return HeadOf<C>(array, b, h);
}

// Converts the tangents of a thread's products to those of squared distances; norm(n, e) returns
// the tangent of the sum of the squared norms of pair [n][e]. The pairs `near`, which
// ToDistances() has recomputed, are recomputed from token differences.
template <class C, bool kKeys, int kTiles, class NormOfPair>
GNOMON_DEVICE void ToDistanceTangents(float (&tangents)[kTiles][4], uint32 near,
                                      const Parameters& p, const HeadInputs& head, int own,
                                      int other, const NormOfPair& norm) {
#pragma unroll
  for (int n = 0; n < C::kStep / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) tangents[n][e] = Fma(-2.0f, tangents[n][e], norm(n, e));
  }
  for (int place = 0; near != 0; ++place, near >>= 1) {
    if ((near & 1) == 0) continue;
    const Int64 mine = own + RowOf(place);
    const Int64 theirs = other + ColumnOf(place);
    const Int64 i = kKeys ? theirs : mine;
    const Int64 j = kKeys ? mine : theirs;
    const int key_head = head.h / p.group;
    const Head x = HeadOf<C>(p.x, head.b, head.h);
    const Head y = HeadOf<C>(p.y, head.b, key_head);
    const Head x_tangent = HeadOrNull<C>(p.tangent.x, head.b, head.h);
    const Head y_tangent = HeadOrNull<C>(p.tangent.y, head.b, key_head);
    float sum = 0;
#pragma unroll 1
    for (int d = 0; d < p.dim; ++d) {
      const float difference =
          LoadElement<C>(x.data, i * x.stride + d) - LoadElement<C>(y.data, j * y.stride + d);
      const float tangent = LoadOrZero<C>(x_tangent, i * x_tangent.stride + d) -
                            LoadOrZero<C>(y_tangent, j * y_tangent.stride + d);
      sum = Fma(difference, tangent, sum);
    }
#pragma unroll
    for (int n = 0; n < C::kStep / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (place == 4 * n + e) tangents[n][e] = 2.0f * sum;
      }
    }
  }
}

// The tangent of the terms that are added to c f.
template <class C>
GNOMON_DEVICE float AddedTangent(const Parameters& p, const HeadInputs& head,
                                 const HeadTangents& of, const KeyTangents& k, int i, int j) {
  float sum = 0;
  if (C::kBias == 1 && of.bias != nullptr) sum += of.bias[j - i + p.queries - 1];
  if (C::kBias == 2 && of.bias != nullptr) {
    sum += SumOfPair<C>(p, p.layout, of.bias, head, i, j);
  }
  if (C::kKeyBias != 0) sum += k.bias;
  if (C::kPairBias != 0 && p.tangent.pair_bias.data != nullptr) {
    const Array& bias = p.tangent.pair_bias;
    sum += static_cast<const float*>(
        bias.data)[head.b * bias.stride[0] + head.h * bias.stride[1] + i * bias.stride[2] + j];
  }
  if (C::kRelativeKeys != 0 && of.relative_scores != nullptr) {
    sum += SumOfPair<C>(p, p.relative_layout,
                        of.relative_scores + static_cast<Int64>(i) * p.relative_size, head, i, j);
  }
  if (C::kRelativeQueries != 0 && of.relative_key_scores != nullptr) {
    sum += NumberOfKey<C>(p, of.relative_key_scores, head, i, j);
  }
  return sum;
}

// The tangent of f, from its slopes.
template <class F>
GNOMON_DEVICE float FunctionTangent(const Derivative& slopes, float g, const HeadTangents& head,
                                    const QueryTangents& q, const KeyTangents& k) {
  float f = 0;
  if (ReadsTokens<F>()) f = slopes.g * g;
#pragma unroll
  for (int s = 0; s < F::kRowScalars; ++s) f = Fma(slopes.a[s], q.a[s], f);
#pragma unroll
  for (int s = 0; s < F::kColumnScalars; ++s) f = Fma(slopes.b[s], k.b[s], f);
#pragma unroll
  for (int s = 0; s < F::kHeadScalars; ++s) f = Fma(slopes.t[s], head.t[s], f);
  return f;
}

// The tangents of a score, in natural units; of the score without the soft cap; and of that without
// the temperature.
struct ScoreTangent {
  float plain;
  float uncapped;
  float value;
};
// `temperature` is the query's; `f_tangent` is the tangent of score.f.
template <class C>
GNOMON_DEVICE ScoreTangent ScoreTangentOf(const HeadInputs& head, const HeadTangents& of,
                                          const QueryTangents& q, float temperature,
                                          const Score& score, float f_tangent,
                                          float added_tangent) {
  ScoreTangent s{};
  s.plain = Fma(of.factor, score.f, Fma(head.factor, f_tangent, added_tangent));
  s.value = s.plain;
  if (C::kTemperature != 0) {
    const float plain = Fma(head.factor, score.f, score.added);
    s.value = Fma(temperature, s.plain, q.temperature * plain);
  }
  s.uncapped = s.value;
  if (C::kSoftcap != 0) s.value *= score.slope;
  return s;
}

// The tangent of the score of a row's top key (see TopKey()), approximately. Sums of weights times
// tangents of scores use tangents relative to it, because a large common part would leave rounding
// errors. The columns of the row's token are split among its four lanes.
template <class F, class C>
GNOMON_DEVICE float TopTangent(const Parameters& p, const HeadInputs& head, const HeadTangents& of,
                               const Query& query, const QueryTangents& q, float temperature,
                               float score_shift, int i) {
  const int top = TopKey(p, head, i);
  float g = 0;
  float g_tangent = 0;
  if (ReadsTokens<F>()) {
    const int key_head = head.h / p.group;
    const Head x = HeadOf<C>(p.x, head.b, head.h);
    const Head y = HeadOf<C>(p.y, head.b, key_head);
    const Head x_tangent = HeadOrNull<C>(p.tangent.x, head.b, head.h);
    const Head y_tangent = HeadOrNull<C>(p.tangent.y, head.b, key_head);
    if (top >= 0) {
#pragma unroll 1
      for (int d = Thread() % 4; d < p.dim; d += 4) {
        const float a = LoadElement<C>(x.data, i * x.stride + d);
        const float b = LoadElement<C>(y.data, top * y.stride + d);
        const float of_a = LoadOrZero<C>(x_tangent, i * x_tangent.stride + d);
        const float of_b = LoadOrZero<C>(y_tangent, top * y_tangent.stride + d);
        if (IsDistance<F>()) {
          g = Fma(a - b, a - b, g);
          g_tangent = Fma(2.0f * (a - b), of_a - of_b, g_tangent);
        } else {
          g = Fma(a, b, g);
          g_tangent = Fma(of_a, b, Fma(a, of_b, g_tangent));
        }
      }
    }
    g = SumOfRow(g);
    g_tangent = SumOfRow(g_tangent);
  }
  if (top < 0) return 0;
  const Key key = LoadKey<F, C>(p, head.b, head.h, top);
  const KeyTangents k = ReadKeyTangents<F, C>(
      p, head.b, head.h, [&](const float* from, Int64 at) { return ReadNumber(from, at + top); });
  Derivative slopes{};
  F::Gradient(g, query.a, key.b, head.t, slopes);
  Score score{};
  score.f = F::Value(g, query.a, key.b, head.t);
  // This key's score is the shift, from which the added terms follow.
  float whole = score_shift * kLn2;
  if (C::kSoftcap != 0) {
    const float capped = score_shift * p.softcap_inverse;
    score.slope = 1 - capped * capped;
    // The inverse of the soft cap, in natural units.
    whole = p.softcap * (0.5f * kLn2 * kLn2) * (Log2(1 + capped) - Log2(1 - capped));
  }
  if (C::kTemperature != 0 && temperature != 0) {
    score.added = whole / temperature - head.factor * score.f;
  }
  const ScoreTangent tangent = ScoreTangentOf<C>(head, of, q, temperature, score,
                                                 FunctionTangent<F>(slopes, g_tangent, of, q, k),
                                                 AddedTangent<C>(p, head, of, k, i, top));
  return Abs(tangent.value) < Infinity() ? tangent.value : 0.0f;
}

// Applies the same scales to two tiles of weights whose products are added to the same sums.
template <class C, int kTiles>
GNOMON_DEVICE bool ScaleBoth(Scales<C>& scales, float (&first)[kTiles][4],
                             float (&second)[kTiles][4], float (&shrink)[2]) {
  if (C::kType != 2) return false;
  float both[2 * kTiles][4];
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      both[n][e] = first[n][e];
      both[kTiles + n][e] = second[n][e];
    }
  }
  const bool shrinks = scales.Apply(both, shrink);
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      first[n][e] = both[n][e];
      second[n][e] = both[kTiles + n][e];
    }
  }
  return shrinks;
}

// Computes the tangents of squared norms, 2 x . x', with one warp per row of p.product: `left` are
// the rows, `right` their tangents.
template <class C>
GNOMON_DEVICE void PrepareNormTangents(const Parameters& p) {
  const cuda::Product& product = p.product;
  const Int64 row = static_cast<Int64>(BlockX()) * C::kWarps + Thread() / 32;
  const int heads = product.columns;
  if (row >= static_cast<Int64>(p.batch) * heads * product.rows) return;
  const int i = static_cast<int>(row % product.rows);
  const int h = static_cast<int>(row / product.rows % heads);
  const int b = static_cast<int>(row / product.rows / heads);
  const auto at = [&](const Matrix& m) { return b * m.batch + h * m.head + i * m.row; };
  float sum = 0;
  for (int d = Thread() % 32; d < product.depth; d += 32) {
    sum = Fma(LoadElement<C>(product.left.data, at(product.left) + d),
              LoadElement<C>(product.right.data, at(product.right) + d), sum);
  }
  sum = SumOfWarp(sum);
  if (Thread() % 32 == 0) product.to[row] = 2.0f * sum;
}

// Writes the numbers of a thread's pairs to shared memory, in rows of kStep + 1.
template <class C, int kTiles>
GNOMON_DEVICE void StoreTile(unsigned char* to, const float (&numbers)[kTiles][4]) {
  const int lane = Thread() % 32;
#pragma unroll
  for (int n = 0; n < C::kStep / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = 16 * (Thread() / 32) + lane / 4 + e / 2 * 8;
      const int column = 8 * n + 2 * (lane % 4) + e % 2;
      StoreShared<float>(to + 4 * (row * (C::kStep + 1) + column), numbers[n][e]);
    }
  }
}

// The tangents of o and lse. The forward pass must have stored o and its statistics.
template <class F, class C>
GNOMON_DEVICE void ForwardTangents(const Parameters& p) {
  constexpr bool kReads = ReadsTokens<F>();
  const int rows_in_block = 16 * C::kWarps;
  const int x_bytes = cuda::RowBytes(C::kType, C::kDim);
  const int v_bytes = cuda::RowBytes(C::kType, C::kValueDim);
  const int word_count =
      cuda::KeyWords(F::kColumnScalars, IsDistance<F>(), C::kKeyBias, C::kSegments, C::kPositions);
  const int tangent_words = cuda::KeyTangentWords(F::kColumnScalars, IsDistance<F>(), C::kKeyBias);
  const DualLayout at = cuda::LayoutOfDuals(
      C::kType, C::kDim, C::kValueDim, rows_in_block, C::kStep, C::kStages, C::kOwn,
      word_count + tangent_words, C::kBias, 2 * C::kRelativeValues, /*backward=*/false);
  unsigned char* const memory = SharedMemory();
  const int warp = Thread() / 32;
  const int lane = Thread() % 32;
  const int pair = 2 * (lane % 4);
  const Tangents& tangent = p.tangent;

  const int blocks = DivideUp(p.queries, rows_in_block);
  // The columns of o that this block computes.
  const int chunk = BlockX() % p.chunks;
  const int first_column = chunk * C::kColumns;
  const int begin = (blocks - 1 - BlockX() / p.chunks % blocks) * rows_in_block;
  const int index = BlockX() / p.chunks / blocks + p.first_head;
  const int b = index / p.heads;
  const int h = index % p.heads;
  const int key_head = h / p.group;
  const HeadInputs head = LoadHead<F, C>(p, b, h);
  const HeadTangents of_head = LoadHeadTangents<F, C>(p, b, h);

  const int* const lows = p.low + IntervalsOf(p, b, h);
  const int* const highs = p.high + IntervalsOf(p, b, h);
  const int end = Least(begin + rows_in_block, p.queries);
  const int low = lows[begin];
  const int high = highs[end - 1];
  const int first = low / C::kStep * C::kStep;

  const auto own_rows = [&](const Array& array, int byte) {
    OwnRows own{};
    own.exists = kReads && array.data != nullptr;
    own.tile = memory + byte;
    own.rows = HeadOrNull<C>(array, b, h);
    own.begin = begin;
    own.high = p.queries;
    own.columns = p.dim;
    if (C::kOwn != 0 && own.exists) {
      CopyRows<C>(memory + byte, own.rows, begin, rows_in_block, 0, p.queries, p.dim, C::kDim);
    }
    return own;
  };
  const OwnRows x = own_rows(p.x, at.own[0]);
  const OwnRows x_tangents = own_rows(tangent.x, at.own[1]);
  CopyCommit();
  const TileWords<F, C, false> key_words(p, b, h);
  const auto copy = [&](int start, int stage) {
    const int other = Fresh(key_head);
    const auto rows = [&](const Array& array, int byte, int columns, int padded) {
      if (array.data == nullptr) return;
      CopyRows<C>(memory + byte + stage * C::kStep * cuda::RowBytes(C::kType, padded),
                  HeadOf<C>(array, b, other), start, C::kStep, low, high, columns, padded);
    };
    if (kReads) {
      rows(p.y, at.other[0], p.dim, C::kDim);
      rows(tangent.y, at.other[1], p.dim, C::kDim);
    }
    rows(p.v, at.other[2], p.value_dim, C::kValueDim);
    rows(tangent.v, at.other[3], p.value_dim, C::kValueDim);
    unsigned char* const words =
        memory + at.words + stage * (word_count + tangent_words) * C::kStep * 4;
    key_words.Copy(words, start, low, high);
    ReadKeyTangents<F, C>(p, b, Fresh(h),
                          WordCopier<C>(words + word_count * C::kStep * 4, start, low, high));
    if (C::kBias == 1) {
      CopyWords<C>(memory + at.bias + stage * (rows_in_block + C::kStep) * 4, head.bias,
                   start - begin - rows_in_block + p.queries, rows_in_block + C::kStep - 1, 0,
                   p.bias_size);
    }
    CopyCommit();
  };

  const Int64 all = static_cast<Int64>(p.batch) * p.heads * p.queries;
  const Int64 first_row = (static_cast<Int64>(b) * p.heads + h) * p.queries;
  const int rows[2] = {begin + 16 * warp + lane / 4, begin + 16 * warp + lane / 4 + 8};
  Query query[2] = {};
  QueryTangents of_query[2] = {};
  float temperature[2] = {1, 1};
  float score_shift[2] = {Infinity(), Infinity()};
  float inverse[2] = {};
  float shift[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (rows[r] < p.queries) {
      query[r] = LoadQuery<F, C>(p, head, rows[r]);
      of_query[r] = ReadQueryTangents<F, C, false>(
          p, b, h, [&](const float* from, Int64 n) { return ReadNumber(from, n + rows[r]); });
      const float sum = p.statistics[all + first_row + rows[r]];
      if (sum != 0.0f) {
        score_shift[r] = p.statistics[first_row + rows[r]];
        inverse[r] = 1.0f / sum;
        if (C::kTemperature != 0) temperature[r] = p.temperature[first_row + rows[r]];
      }
    }
    shift[r] = TopTangent<F, C>(p, head, of_head, query[r], of_query[r], temperature[r],
                                score_shift[r], rows[r]);
  }
  float o[GNOMON_SIZE(C::kColumns / 8, 32)][4] = {};
  float mean[2] = {};  // of the scores' tangents relative to `shift`
  Scales<C> scales;
  const int weights = at.scores + cuda::ScoreBytes(rows_in_block, C::kStep);
  const bool sums_tables = C::kRelativeValues != 0 && chunk == 0;
  if (sums_tables) {
    ClearTables<C>(p, tangent.relative_weights, b, h, begin + 16 * warp);
    ClearTables<C>(p, p.relative_weights, b, h, begin + 16 * warp);
  }
  const bool any_spoiled = C::kHides != 0 && first < high;
  const auto is_spoiled = [&](const int* of_all, int start) {
    if (!any_spoiled || of_all == nullptr) return false;
    const int groups = DivideUp(p.keys, 16);
    const int* const spoiled = of_all + (static_cast<Int64>(b) * p.key_heads + key_head) * groups;
    bool found = false;
#pragma unroll
    for (int n = 0; n < C::kStep / 16; ++n) {
      if (start / 16 + n < groups) found = found || spoiled[start / 16 + n] != 0;
    }
    return found;
  };
  const auto add_tile = [&](int start, int stage) {
    const unsigned char* const y_tile = memory + at.other[0] + stage * C::kStep * x_bytes;
    const unsigned char* const y_tangents = memory + at.other[1] + stage * C::kStep * x_bytes;
    unsigned char* const v_tile = memory + at.other[2] + stage * C::kStep * v_bytes;
    unsigned char* const v_tangents = memory + at.other[3] + stage * C::kStep * v_bytes;
    const unsigned char* const words =
        memory + at.words + stage * (word_count + tangent_words) * C::kStep * 4;
    const unsigned char* const of_words = words + word_count * C::kStep * 4;
    const unsigned char* const window = memory + at.bias + stage * (rows_in_block + C::kStep) * 4;
    const auto key_tangents = [&](int column) {
      return ReadKeyTangents<F, C>(p, b, h, WordReader<C>(of_words, column));
    };
    // Products and their tangents; then the weights of values and of their tangents.
    float s[GNOMON_SIZE(C::kStep / 8, 8)][4] = {};
    float t[GNOMON_SIZE(C::kStep / 8, 8)][4] = {};
    if (kReads) {
      MultiplyDuals<C, false>(s, t, x, x_tangents, y_tile,
                              tangent.y.data != nullptr ? y_tangents : nullptr, C::kDim);
    }
    if constexpr (IsDistance<F>()) {
      const uint32 near =
          ToDistances<C, false>(s, p, head, rows[0], start + pair, [&](int n, int e) {
            return NormsOf(query[e / 2], KeyOf<F, C>(words, 8 * n + pair + e % 2));
          });
      ToDistanceTangents<C, false>(t, near, p, head, rows[0], start + pair, [&](int n, int e) {
        return of_query[e / 2].norm + key_tangents(8 * n + pair + e % 2).norm;
      });
    }
    uint32 hidden = 0;
#pragma unroll
    for (int n = 0; n < C::kStep / 8; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int column = 8 * n + pair + c;
        const Key key = KeyOf<F, C>(words, column);
        const KeyTangents of_key = key_tangents(column);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int e = 2 * r + c;
          const int j = start + column;
          const int diagonal = column - (rows[r] - begin) + rows_in_block - 1;
          const Score score =
              ScoreOf<F, C, false>(p, head, query[r], key, rows[r], j, s[n][e], window, diagonal);
          float weight = 0;
          float weight_tangent = 0;
          if (score.seen && rows[r] < p.queries) {
            weight = Exp2(score.value - score_shift[r]) * inverse[r];
            Derivative slopes{};
            F::Gradient(score.g, query[r].a, key.b, head.t, slopes);
            const float f = FunctionTangent<F>(slopes, t[n][e], of_head, of_query[r], of_key);
            const float added = AddedTangent<C>(p, head, of_head, of_key, rows[r], j);
            const float value =
                ScoreTangentOf<C>(head, of_head, of_query[r], temperature[r], score, f, added)
                    .value;
            weight_tangent = weight * (value - shift[r]);
            mean[r] += weight_tangent;
            const float kept = Kept<C>(p, query[r], j);
            weight *= kept;
            weight_tangent *= kept;
          } else {
            hidden |= 1u << (4 * n + e);
          }
          s[n][e] = weight_tangent;
          t[n][e] = weight;
        }
      }
    }
    if (sums_tables) {
      StoreTile<C>(memory + at.scores, s);
      StoreTile<C>(memory + weights, t);
      Barrier();
      AddToTables<C>(p, tangent.relative_weights, memory + at.scores, b, h, begin + 16 * warp,
                     start);
      AddToTables<C>(p, p.relative_weights, memory + weights, b, h, begin + 16 * warp, start);
    }
    float shrink[2];
    if (ScaleBoth<C>(scales, s, t, shrink)) MultiplySums(o, shrink);
    if (is_spoiled(p.spoiled, start)) {
      AddSpoiled<C>(v_tile, s, hidden, o, first_column, C::kColumns);
      ClearSpoiled<C>(v_tile);
    }
    AddRows<C>(o, s, v_tile, C::kValueDim, first_column, C::kColumns);
    if (tangent.v.data == nullptr) return;
    if (is_spoiled(tangent.spoiled, start)) {
      AddSpoiled<C>(v_tangents, t, hidden, o, first_column, C::kColumns);
      ClearSpoiled<C>(v_tangents);
    }
    AddRows<C>(o, t, v_tangents, C::kValueDim, first_column, C::kColumns);
  };
  if (C::kStages == 2 && first < high) copy(first, 0);
  int stage = 0;
  for (int start = first; start < high; start += C::kStep) {
    WaitForTile<C>(copy, start);
    RequestNextTile<C>(copy, start, high, stage);
    add_tile(start, stage);
    if (C::kStages == 2) stage ^= 1;
  }
  CopyWait<0>();

#pragma unroll
  for (int r = 0; r < 2; ++r) {
    mean[r] = SumOfRow(mean[r]);
    if (rows[r] >= p.queries) continue;
    const Int64 row = first_row + rows[r];
    const float unscaled = scales.Inverse(r);
#pragma unroll
    for (int d = 0; d < C::kColumns / 8; ++d) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int column = first_column + 8 * d + pair + c;
        if (column >= p.value_dim) continue;
        const Int64 to = row * p.value_dim + column;
        // o contains the relative values, whose tangents are added later. A row without keys has
        // an o of 0.
        tangent.o[to] = Fma(-mean[r], p.exact_o[to], unscaled * o[d][2 * r + c]);
      }
    }
    if (pair == 0 && chunk == 0 && tangent.lse != nullptr) {
      tangent.lse[row] = inverse[r] != 0 ? mean[r] + shift[r] : 0.0f;
    }
  }
}

// The partial derivatives of f, with their tangents.
template <class Number>
struct DualSlopes {
  Number g;
  Number a[3];
  Number b[3];
  Number t[3];
};
template <class F, class D, class Number>
GNOMON_DEVICE DualSlopes<Number> DualSlopesOf(float g, float g_tangent, const HeadInputs& head,
                                              const HeadTangents& of, const Query& query,
                                              const QueryTangents& q, const Key& key,
                                              const KeyTangents& k) {
  Number a[F::kRowScalars + 1];
  Number b[F::kColumnScalars + 1];
  Number t[F::kHeadScalars + 1];
#pragma unroll
  for (int s = 0; s < F::kRowScalars; ++s) a[s] = Number(query.a[s], q.a[s]);
#pragma unroll
  for (int s = 0; s < F::kColumnScalars; ++s) b[s] = Number(key.b[s], k.b[s]);
#pragma unroll
  for (int s = 0; s < F::kHeadScalars; ++s) t[s] = Number(head.t[s], of.t[s]);
  DualSlopes<Number> slopes;
  D::Gradient(Number(g, g_tangent), a, b, t, slopes);
  return slopes;
}
template <class F, class Number>
GNOMON_DEVICE Derivative ValuesOf(const DualSlopes<Number>& slopes) {
  Derivative d{};
  if (ReadsTokens<F>()) d.g = slopes.g.value;
#pragma unroll
  for (int s = 0; s < F::kRowScalars; ++s) d.a[s] = slopes.a[s].value;
#pragma unroll
  for (int s = 0; s < F::kColumnScalars; ++s) d.b[s] = slopes.b[s].value;
#pragma unroll
  for (int s = 0; s < F::kHeadScalars; ++s) d.t[s] = slopes.t[s].value;
  return d;
}

// Moves the pairs `near` (see ToDistances()) from a tile of weights to `out`, multiplied by
// differences of the rows of two arrays, as AddDifferences() does. Absent rows are 0.
template <class C, int kOutputs, int kTiles>
GNOMON_DEVICE void AddRowDifferences(float (&out)[kOutputs][4], float (&weights)[kTiles][4],
                                     uint32 near, const Head& from, const Head& others, int dim,
                                     int own, int other, int first) {
  uint32 any = near;
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) any |= BitsOf(ShuffleXor(FromBits(any), mask));
  const int lane = Thread() % 32;
  for (int place = 0; any != 0; ++place, any >>= 1) {
    if ((any & 1) == 0) continue;
    float weight = 0;
#pragma unroll
    for (int n = 0; n < C::kStep / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool is_it = place == 4 * n + e && (near & 1u << (4 * n + e)) != 0;
        weight = is_it ? weights[n][e] : weight;
        weights[n][e] = is_it ? 0.0f : weights[n][e];
      }
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float w = Shuffle(weight, lane / 4 * 4 + n);
      if (w == 0) continue;
      const Int64 theirs = (other + 2 * n + ColumnOf(place)) * others.stride;
      const Int64 mine = (own + RowOf(place)) * from.stride;
      const bool is_first = RowOf(place) == 0;
#pragma unroll
      for (int d = 0; d < C::kColumns / 8; ++d) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int column = first + 8 * d + 2 * (lane % 4) + c;
          if (column >= dim) continue;
          const float difference =
              LoadOrZero<C>(others, theirs + column) - LoadOrZero<C>(from, mine + column);
          const float sum = Fma(w, difference, is_first ? out[d][c] : out[d][2 + c]);
          out[d][c] = is_first ? sum : out[d][c];
          out[d][2 + c] = is_first ? out[d][2 + c] : sum;
        }
      }
    }
  }
}

// The three passes of the derivative of the backward pass. The first computes, for each query, the
// softmax statistics, lse', delta and delta'. The second owns queries and computes the tangents of
// the gradients of queries and factors. The third owns keys and computes those of keys, values and
// biases, for all heads of the group.
enum DualPass { kRowsPass, kQueriesPass, kKeysPass };

template <class F, class D, class Number, class C, int kPass>
GNOMON_DEVICE void BackwardTangents(const Parameters& p) {
  constexpr bool kReads = ReadsTokens<F>();
  constexpr bool kKeys = kPass == kKeysPass;
  constexpr bool kSums = kPass != kRowsPass;
  constexpr int kOwnScalars = kKeys ? F::kColumnScalars : F::kRowScalars;
  const int rows_in_block = 16 * C::kWarps;
  const int x_bytes = cuda::RowBytes(C::kType, C::kDim);
  const int y_bytes = cuda::RowBytes(C::kType, C::kValueDim);
  const int plain_words =
      kKeys ? cuda::QueryWords(F::kRowScalars, IsDistance<F>(), C::kKeyBias, C::kSegments,
                               C::kPositions, C::kTemperature, C::kDropout, 0)
            : cuda::KeyWords(F::kColumnScalars, IsDistance<F>(), C::kKeyBias, C::kSegments,
                             C::kPositions);
  const int word_count =
      plain_words + (kKeys
                         ? cuda::QueryTangentWords(F::kRowScalars, IsDistance<F>(), C::kTemperature)
                         : cuda::KeyTangentWords(F::kColumnScalars, IsDistance<F>(), C::kKeyBias));
  const bool sums_bias = kKeys && C::kBiasGradient != 0;
  const bool sums_tables = kPass == kQueriesPass && C::kRelativeSums != 0;
  const bool sums_key_tables = kKeys && C::kRelativeSums != 0;
  const int score_count = kKeys ? Most(C::kBiasGradient, 2 * C::kRelativeSums)
                          : kPass == kRowsPass || C::kRelativeSums == 0
                              ? 0
                              : 2 * (C::kRelativeKeys + C::kRelativeValues);
  const DualLayout at =
      cuda::LayoutOfDuals(C::kType, C::kDim, C::kValueDim, rows_in_block, C::kStep, C::kStages,
                          C::kOwn, word_count, C::kBias, score_count, /*backward=*/true);
  unsigned char* const memory = SharedMemory();
  const int warp = Thread() / 32;
  const int lane = Thread() % 32;
  const int pair = 2 * (lane % 4);
  const Tangents& tangent = p.tangent;

  const int own_count = kKeys ? p.keys : p.queries;
  const int blocks = DivideUp(own_count, rows_in_block);
  const int chunk = BlockX() % p.chunks;
  const int first_column = chunk * C::kColumns;
  int index = BlockX() / p.chunks;
  // The partial sums of bias gradients, as in Backward().
  const int sums = C::kBias == 2 ? C::kWarps : 1;
  const int parts = sums_bias ? p.bias_parts / sums : blocks;
  const int part = index % parts;
  index = p.first_head + index / parts;
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
    int low = 0;
    int high = 0;
    int own_low = 0;
    int own_high = own_count;
    if (kKeys) {
      // Keys that are hidden from the whole batch may contain any values.
      const SeenKeys seen(p, b, first_h, last_h);
      own_low = seen.low;
      own_high = seen.high;
    } else {
      low = lows[begin];
      high = highs[end - 1];
    }
    const int rows[2] = {begin + 16 * warp + lane / 4, begin + 16 * warp + lane / 4 + 8};

    const auto own_rows = [&](const Array& array, int byte, bool reads, int columns, int padded) {
      OwnRows own{};
      own.exists = reads && array.data != nullptr;
      own.tile = memory + byte;
      own.rows = HeadOrNull<C>(array, b, own_head);
      own.begin = begin;
      own.low = own_low;
      own.high = own_high;
      own.columns = columns;
      if (C::kOwn != 0 && own.exists) {
        CopyRows<C>(memory + byte, own.rows, begin, rows_in_block, own_low, own_high, columns,
                    padded);
      }
      return own;
    };
    const OwnRows x = own_rows(kKeys ? p.y : p.x, at.own[0], kReads, p.dim, C::kDim);
    const OwnRows x_tangents =
        own_rows(kKeys ? tangent.y : tangent.x, at.own[1], kReads, p.dim, C::kDim);
    const OwnRows y = own_rows(kKeys ? p.v : p.d_o, at.own[2], true, p.value_dim, C::kValueDim);
    const OwnRows y_tangents =
        own_rows(kKeys ? tangent.v : tangent.d_o, at.own[3], true, p.value_dim, C::kValueDim);
    CopyCommit();

    float dx[GNOMON_SIZE(kSums ? C::kColumns / 8 : 1, 32)][4] = {};
    float dy[GNOMON_SIZE(kKeys ? C::kColumns / 8 : 1, 32)][4] = {};
    float sum_w[2] = {};
    float sum_w_tangents[2] = {};
    Scales<C> x_scales;
    Scales<C> y_scales;
    float d_own[2][3] = {};

    const int own = begin + 16 * warp;
    if (sums_key_tables && chunk == 0) {
      ClearKeyTables<C>(p, p.d_relative_key_scores, b, own_head, own);
      ClearKeyTables<C>(p, tangent.d_relative_key_scores, b, own_head, own);
    }
    for (int h = first_h; h < last_h; ++h) {
      const HeadInputs head = LoadHead<F, C>(p, b, h);
      const HeadTangents of_head = LoadHeadTangents<F, C>(p, b, h);
      if (kKeys && (h == first_h || p.interval_heads > 1)) {
        const QueryRange range(p, b, h, begin, end);
        low = range.low;
        high = range.high;
      }
      const int first = low / C::kStep * C::kStep;
      const Array& x_others = kKeys ? p.x : p.y;
      const Array& x_other_tangents = kKeys ? tangent.x : tangent.y;
      const Array& y_others = kKeys ? p.d_o : p.v;
      const Array& y_other_tangents = kKeys ? tangent.d_o : tangent.v;
      const TileWords<F, C, kKeys> plain_tiles(p, b, h);
      const auto copy = [&](int start, int stage) {
        const int other = Fresh(kKeys ? h : key_head);
        const auto copy_rows = [&](const Array& array, int byte, int columns, int padded) {
          if (array.data == nullptr) return;
          CopyRows<C>(memory + byte + stage * C::kStep * cuda::RowBytes(C::kType, padded),
                      HeadOf<C>(array, b, other), start, C::kStep, low, high, columns, padded);
        };
        if (kReads) {
          copy_rows(x_others, at.other[0], p.dim, C::kDim);
          copy_rows(x_other_tangents, at.other[1], p.dim, C::kDim);
        }
        copy_rows(y_others, at.other[2], p.value_dim, C::kValueDim);
        copy_rows(y_other_tangents, at.other[3], p.value_dim, C::kValueDim);
        unsigned char* const words = memory + at.words + stage * word_count * C::kStep * 4;
        const WordCopier<C> copier(words + plain_words * C::kStep * 4, start, low, high);
        plain_tiles.Copy(words, start, low, high);
        if (kKeys) {
          ReadQueryTangents<F, C, true>(p, b, Fresh(h), copier);
        } else {
          ReadKeyTangents<F, C>(p, b, Fresh(h), copier);
        }
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
      QueryTangents own_query_tangents[2] = {};
      Key own_key[2] = {};
      KeyTangents own_key_tangents[2] = {};
      RowSoftmax own_softmax[2] = {};
      float own_temperature[2] = {1, 1};
      float shift[2] = {};
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const auto read = [&](const float* from, Int64 n) { return ReadNumber(from, n + rows[r]); };
        if (kKeys) {
          if (rows[r] >= own_low && rows[r] < own_high) {
            own_key[r] = LoadKey<F, C>(p, b, h, rows[r]);
            own_key_tangents[r] = ReadKeyTangents<F, C>(p, b, h, read);
          }
          continue;
        }
        const Int64 row = (static_cast<Int64>(b) * p.heads + h) * p.queries + rows[r];
        if (rows[r] < own_count) {
          own_query[r] = LoadQuery<F, C>(p, head, rows[r]);
          own_query_tangents[r] = ReadQueryTangents<F, C, kSums>(p, b, h, read);
          if (kPass == kRowsPass) {
            const float sum = p.statistics[query_rows + row];
            // 2^(s - inf) = 0: a row without keys gets no weights.
            own_softmax[r].shift = sum == 0.0f ? Infinity() : p.statistics[row];
            own_softmax[r].inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
          } else {
            own_softmax[r] = {p.shift[row], p.inverse[row], p.delta[row]};
          }
          if (C::kTemperature != 0 && own_softmax[r].inverse != 0) {
            own_temperature[r] = p.temperature[row];
          }
        }
        if (kPass == kRowsPass) {
          shift[r] = TopTangent<F, C>(p, head, of_head, own_query[r], own_query_tangents[r],
                                      own_temperature[r], own_softmax[r].shift, rows[r]);
        }
      }
      // Sums over the pairs of a row. In the first pass: p s', p dP, p s' dP and p dP', with s'
      // relative to `shift`. In the second: the gradients of the factor and the temperature, and
      // those of the head's scalars.
      float by[2][4] = {};
      float by_t[2][3] = {};
      float d_key_bias[2] = {};
      if (sums_tables && chunk == 0) {
        if (C::kRelativeKeys != 0) {
          ClearTables<C>(p, p.d_relative_scores, b, h, own);
          ClearTables<C>(p, tangent.d_relative_scores, b, h, own);
        }
        if (C::kRelativeValues != 0) {
          ClearTables<C>(p, p.relative_weights, b, h, own);
          ClearTables<C>(p, tangent.relative_weights, b, h, own);
        }
      }
      if (C::kStages == 2 && first < high) copy(first, 0);
      int stage = 0;
      for (int start = first; start < high; start += C::kStep) {
        WaitForTile<C>(copy, start);
        const unsigned char* const x_tile = memory + at.other[0] + stage * C::kStep * x_bytes;
        const unsigned char* const x_tangent_tile =
            x_other_tangents.data == nullptr ? nullptr
                                             : memory + at.other[1] + stage * C::kStep * x_bytes;
        const unsigned char* const y_tile = memory + at.other[2] + stage * C::kStep * y_bytes;
        const unsigned char* const y_tangent_tile =
            y_other_tangents.data == nullptr ? nullptr
                                             : memory + at.other[3] + stage * C::kStep * y_bytes;
        const unsigned char* const words = memory + at.words + stage * word_count * C::kStep * 4;
        const unsigned char* const tangent_words = words + plain_words * C::kStep * 4;
        const unsigned char* const window =
            memory + at.bias + stage * (rows_in_block + C::kStep) * 4;
        // Products and their tangents. Later, s and s_tangents are the weights of x and its
        // tangents (derivatives of scores), dp and dp_tangents those of y.
        float s[GNOMON_SIZE(C::kStep / 8, 8)][4] = {};
        float s_tangents[GNOMON_SIZE(C::kStep / 8, 8)][4] = {};
        float dp[GNOMON_SIZE(C::kStep / 8, 8)][4] = {};
        float dp_tangents[GNOMON_SIZE(C::kStep / 8, 8)][4] = {};
        if (kReads) {
          MultiplyDuals<C, kKeys>(s, s_tangents, x, x_tangents, x_tile, x_tangent_tile, C::kDim);
        }
        MultiplyDuals<C, kKeys>(dp, dp_tangents, y, y_tangents, y_tile, y_tangent_tile,
                                C::kValueDim);
        RequestNextTile<C>(copy, start, high, stage);
        // The query and key of a column and their tangents, where the block does not own them.
        const auto their_query = [&](int column, RowSoftmax& softmax, float& temperature) {
          return QueryOf<F, C>(words, column, head, softmax, temperature);
        };
        const auto their_query_tangents = [&](int column) {
          return ReadQueryTangents<F, C, true>(p, b, h, WordReader<C>(tangent_words, column));
        };
        const auto their_key_tangents = [&](int column) {
          return ReadKeyTangents<F, C>(p, b, h, WordReader<C>(tangent_words, column));
        };
        uint32 near = 0;
        if constexpr (IsDistance<F>()) {
          near = ToDistances<C, kKeys>(s, p, head, rows[0], start + pair, [&](int n, int e) {
            const int column = 8 * n + pair + e % 2;
            if constexpr (kKeys) {
              RowSoftmax softmax{};
              float temperature = 1;
              return NormsOf(their_query(column, softmax, temperature), own_key[e / 2]);
            } else {
              return NormsOf(own_query[e / 2], KeyOf<F, C>(words, column));
            }
          });
          ToDistanceTangents<C, kKeys>(
              s_tangents, near, p, head, rows[0], start + pair, [&](int n, int e) {
                const int column = 8 * n + pair + e % 2;
                if constexpr (kKeys) {
                  return their_query_tangents(column).norm + own_key_tangents[e / 2].norm;
                } else {
                  return own_query_tangents[e / 2].norm + their_key_tangents(column).norm;
                }
              });
        }
        float ds[GNOMON_SIZE(C::kStep / 8, 8)][4] = {};
        float ds_tangents[GNOMON_SIZE(C::kStep / 8, 8)][4] = {};
#pragma unroll
        for (int n = 0; n < C::kStep / 8; ++n) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int column = 8 * n + pair + c;
            Query other_query{};
            QueryTangents other_query_tangents{};
            Key other_key{};
            KeyTangents other_key_tangents{};
            RowSoftmax other_softmax{};
            float other_temperature = 1;
            if (kKeys) {
              other_query = their_query(column, other_softmax, other_temperature);
              other_query_tangents = their_query_tangents(column);
            } else {
              other_key = KeyOf<F, C>(words, column);
              other_key_tangents = their_key_tangents(column);
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              const int e = 2 * r + c;
              const Query& query = kKeys ? other_query : own_query[r];
              const QueryTangents& of_query = kKeys ? other_query_tangents : own_query_tangents[r];
              const Key& key = kKeys ? own_key[r] : other_key;
              const KeyTangents& of_key = kKeys ? own_key_tangents[r] : other_key_tangents;
              const RowSoftmax& softmax = kKeys ? other_softmax : own_softmax[r];
              const float temperature = kKeys ? other_temperature : own_temperature[r];
              const int i = kKeys ? start + column : rows[r];
              const int j = kKeys ? rows[r] : start + column;
              const int diagonal = kKeys ? rows[r] - begin - column + C::kStep - 1
                                         : column - (rows[r] - begin) + rows_in_block - 1;
              const Score score =
                  ScoreOf<F, C, false>(p, head, query, key, i, j, s[n][e], window, diagonal);
              float w = 0;
              float w_tangent = 0;
              float u = 0;
              float u_tangent = 0;
              if (score.seen && rows[r] < own_count) {
                const float weight = Exp2(score.value - softmax.shift) * softmax.inverse;
                const DualSlopes<Number> slopes = DualSlopesOf<F, D, Number>(
                    score.g, s_tangents[n][e], head, of_head, query, of_query, key, of_key);
                const float f_tangent = FunctionTangent<F>(ValuesOf<F>(slopes), s_tangents[n][e],
                                                           of_head, of_query, of_key);
                const ScoreTangent score_tangent =
                    ScoreTangentOf<C>(head, of_head, of_query, temperature, score, f_tangent,
                                      AddedTangent<C>(p, head, of_head, of_key, i, j));
                const float kept = Kept<C>(p, query, j);
                float product = dp[n][e];
                float product_tangent = dp_tangents[n][e];
                if (C::kRelativeValues != 0) {
                  const Int64 table = static_cast<Int64>(i) * p.relative_size;
                  product += SumOfPair<C>(p, p.relative_layout, head.relative_products + table,
                                          head, i, j);
                  if (of_head.relative_products != nullptr) {
                    product_tangent += SumOfPair<C>(p, p.relative_layout,
                                                    of_head.relative_products + table, head, i, j);
                  }
                }
                product *= kept;
                product_tangent *= kept;
                if (kPass == kRowsPass) {
                  const float relative = score_tangent.value - shift[r];
                  by[r][0] = Fma(weight, relative, by[r][0]);
                  by[r][1] = Fma(weight, product, by[r][1]);
                  by[r][2] = Fma(weight * relative, product, by[r][2]);
                  by[r][3] = Fma(weight, product_tangent, by[r][3]);
                  continue;
                }
                // The derivative of the score, and its tangent.
                const float change = score_tangent.value - of_query.lse;
                const float difference = product - softmax.delta;
                float tempered = weight * difference;
                float tempered_tangent =
                    weight * Fma(change, difference, product_tangent - of_query.delta);
                if (C::kSoftcap != 0) {
                  // The slope of the cap is 1 - (score / cap)^2.
                  const float slope_tangent = -2 * kLog2E * p.softcap_inverse *
                                              (score.value * p.softcap_inverse) * score.slope *
                                              score_tangent.uncapped;
                  tempered_tangent = Fma(score.slope, tempered_tangent, slope_tangent * tempered);
                  tempered *= score.slope;
                }
                ds[n][e] = tempered;
                ds_tangents[n][e] = tempered_tangent;
                if (C::kTemperature != 0) {
                  ds[n][e] = temperature * tempered;
                  ds_tangents[n][e] =
                      Fma(temperature, tempered_tangent, of_query.temperature * tempered);
                }
                const float df = head.factor * ds[n][e];
                const float df_tangent =
                    Fma(head.factor, ds_tangents[n][e], of_head.factor * ds[n][e]);
                const auto times_slope = [&](const Number& slope, float sum) {
                  return Fma(df_tangent, slope.value, Fma(df, slope.tangent, sum));
                };
                if (kReads) {
                  w = df * slopes.g.value;
                  w_tangent = times_slope(slopes.g, 0.0f);
                }
                u = weight * kept;
                u_tangent = u * change;
#pragma unroll
                for (int m = 0; m < kOwnScalars; ++m) {
                  d_own[r][m] = times_slope(kKeys ? slopes.b[m] : slopes.a[m], d_own[r][m]);
                }
                if (kKeys) {
                  if (C::kKeyBias != 0) d_key_bias[r] += ds_tangents[n][e];
                  if (C::kPairBias != 0 && chunk == 0 && p.d_pair_bias.data != nullptr) {
                    const Array& to = p.d_pair_bias;
                    static_cast<float*>(
                        to.data)[b * to.stride[0] + h * to.stride[1] + i * to.stride[2] + j] +=
                        ds_tangents[n][e];
                  }
                } else {
                  by[r][0] = Fma(ds_tangents[n][e], score.f, Fma(ds[n][e], f_tangent, by[r][0]));
                  if (C::kTemperature != 0) {
                    const float plain = Fma(head.factor, score.f, score.added);
                    by[r][1] =
                        Fma(tempered_tangent, plain, Fma(tempered, score_tangent.plain, by[r][1]));
                  }
#pragma unroll
                  for (int m = 0; m < F::kHeadScalars; ++m) {
                    by_t[r][m] = times_slope(slopes.t[m], by_t[r][m]);
                  }
                }
              }
              s[n][e] = w;
              s_tangents[n][e] = w_tangent;
              dp[n][e] = u;
              dp_tangents[n][e] = u_tangent;
            }
          }
        }
        if (kSums) {
          const int tile_bytes = cuda::ScoreBytes(rows_in_block, C::kStep);
          if (sums_tables) {
            unsigned char* to = memory + at.scores;
            if (C::kRelativeKeys != 0) {
              StoreTile<C>(to, ds);
              StoreTile<C>(to + tile_bytes, ds_tangents);
              to += 2 * tile_bytes;
            }
            if (C::kRelativeValues != 0) {
              StoreTile<C>(to, dp);
              StoreTile<C>(to + tile_bytes, dp_tangents);
            }
          }
          if (sums_bias || sums_key_tables) StoreTile<C>(memory + at.scores, ds_tangents);
          if (sums_key_tables) StoreTile<C>(memory + at.scores + tile_bytes, ds);
          float shrink[2];
          if (kReads && ScaleBoth<C>(x_scales, s, s_tangents, shrink)) {
            MultiplySums(dx, shrink);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              sum_w[r] *= shrink[r];
              sum_w_tangents[r] *= shrink[r];
            }
          }
          if (kKeys && ScaleBoth<C>(y_scales, dp, dp_tangents, shrink)) MultiplySums(dy, shrink);
          if constexpr (IsDistance<F>()) {
            const int other = kKeys ? h : key_head;
            AddRowDifferences<C>(dx, s_tangents, near, x.rows, HeadOf<C>(x_others, b, other), p.dim,
                                 rows[0], start, first_column);
            AddRowDifferences<C>(dx, s, near, x_tangents.rows,
                                 HeadOrNull<C>(x_other_tangents, b, other), p.dim, rows[0], start,
                                 first_column);
            // Rounds the weights as AddRows() does.
#pragma unroll
            for (int n = 0; n < C::kStep / 8; ++n) {
#pragma unroll
              for (int e = 0; e < 4; ++e) {
                sum_w[e / 2] += Round<C>(s[n][e]);
                sum_w_tangents[e / 2] += Round<C>(s_tangents[n][e]);
              }
            }
          }
          if (kReads) {
            AddRows<C>(dx, s_tangents, x_tile, C::kDim, first_column, C::kColumns);
            if (x_tangent_tile != nullptr) {
              AddRows<C>(dx, s, x_tangent_tile, C::kDim, first_column, C::kColumns);
            }
          }
          if constexpr (kKeys) {
            AddRows<C>(dy, dp_tangents, y_tile, C::kValueDim, first_column, C::kColumns);
            if (y_tangent_tile != nullptr) {
              AddRows<C>(dy, dp, y_tangent_tile, C::kValueDim, first_column, C::kColumns);
            }
          }
          // Other threads read this thread's scores.
          if (sums_tables || sums_bias || sums_key_tables) Barrier();
          if (sums_key_tables && chunk == 0) {
            const unsigned char* const from = memory + at.scores;
            AddToKeyTables<C>(p, tangent.d_relative_key_scores, from, b, h, own, start);
            AddToKeyTables<C>(p, p.d_relative_key_scores, from + tile_bytes, b, h, own, start);
          }
          if (sums_tables && chunk == 0) {
            const unsigned char* from = memory + at.scores;
            if (C::kRelativeKeys != 0) {
              AddToTables<C>(p, p.d_relative_scores, from, b, h, own, start);
              AddToTables<C>(p, tangent.d_relative_scores, from + tile_bytes, b, h, own, start);
              from += 2 * tile_bytes;
            }
            if (C::kRelativeValues != 0) {
              AddToTables<C>(p, p.relative_weights, from, b, h, own, start);
              AddToTables<C>(p, tangent.relative_weights, from + tile_bytes, b, h, own, start);
            }
          }
          if (sums_bias && bias_sums != nullptr) {
            float* const of_bias = bias_sums + (h - first_h) * part_step;
            if (C::kBias == 2) {
              AddEntries<C>(p, memory + at.scores, rows_in_block, b, begin, start,
                            of_bias + warp * p.bias_size);
            } else {
              AddDiagonals<C>(memory + at.scores, rows_in_block, of_bias,
                              static_cast<Int64>(begin) - start - C::kStep + p.queries,
                              p.bias_size);
            }
          }
        }
        if (C::kStages == 2) stage ^= 1;
      }
      CopyWait<0>();
      Barrier();

#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (kKeys) {
          d_key_bias[r] = SumOfRow(d_key_bias[r]);
          if (rows[r] < own_count && pair == 0 && chunk == 0 && p.d_key_bias != nullptr) {
            p.d_key_bias[(static_cast<Int64>(b) * p.heads + h) * p.keys + rows[r]] = d_key_bias[r];
          }
          continue;
        }
#pragma unroll
        for (int n = 0; n < 4; ++n) by[r][n] = SumOfRow(by[r][n]);
#pragma unroll
        for (int m = 0; m < F::kHeadScalars; ++m) by_t[r][m] = SumOfRow(by_t[r][m]);
        float d_scalars[3];
#pragma unroll
        for (int m = 0; m < 3; ++m) d_scalars[m] = SumOfRow(d_own[r][m]);
        if (rows[r] >= own_count || pair != 0 || chunk != 0) continue;
        const Int64 row = (static_cast<Int64>(b) * p.heads + h) * p.queries + rows[r];
        const bool sees = own_softmax[r].inverse != 0;
        if (kPass == kRowsPass) {
          const float d_lse = sees && p.d_lse != nullptr ? p.d_lse[row] : 0.0f;
          const float d_lse_tangent = sees && tangent.d_lse != nullptr ? tangent.d_lse[row] : 0.0f;
          p.shift[row] = own_softmax[r].shift;
          p.inverse[row] = own_softmax[r].inverse;
          p.delta[row] = by[r][1] - d_lse;
          tangent.lse[row] = sees ? by[r][0] + shift[r] : 0.0f;
          tangent.delta[row] = Fma(-by[r][0], by[r][1], by[r][2]) + by[r][3] - d_lse_tangent;
          continue;
        }
        if (p.d_row != nullptr) {
#pragma unroll
          for (int m = 0; m < F::kRowScalars; ++m) {
            p.d_row[m * query_rows + row] = d_scalars[m];
          }
        }
        if (p.d_factor_rows != nullptr) {
          p.d_factor_rows[row] = by[r][0];
#pragma unroll
          for (int m = 0; m < F::kHeadScalars; ++m) {
            p.d_factor_rows[(1 + m) * query_rows + row] = by_t[r][m];
          }
        }
        if (C::kTemperature != 0 && p.d_temperature != nullptr) p.d_temperature[row] = by[r][1];
      }
    }

    if (!kSums) continue;
    const Head to_x = HeadOrNull<C>(kKeys ? p.d_y : p.d_x, b, own_head);
    const Head to_y = HeadOrNull<C>(p.d_v, b, own_head);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum_w[r] = SumOfRow(sum_w[r]);
      sum_w_tangents[r] = SumOfRow(sum_w_tangents[r]);
      if (kKeys) {
#pragma unroll
        for (int m = 0; m < kOwnScalars; ++m) d_own[r][m] = SumOfRow(d_own[r][m]);
      }
      if (rows[r] >= own_count) continue;
      if (kReads && to_x.data != nullptr) {
        const float unscaled = x_scales.Inverse(r);
#pragma unroll
        for (int d = 0; d < C::kColumns / 8; ++d) {
          const int column = first_column + 8 * d + pair;
          float gradient[2] = {unscaled * dx[d][2 * r], unscaled * dx[d][2 * r + 1]};
          if (IsDistance<F>()) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              gradient[c] *= -2.0f;
              if (column + c >= p.dim) continue;
              // Rows without pairs may contain any values.
              if (sum_w_tangents[r] != 0) {
                gradient[c] += 2.0f * unscaled * sum_w_tangents[r] *
                               LoadElement<C>(x.rows.data, rows[r] * x.rows.stride + column + c);
              }
              if (sum_w[r] != 0) {
                gradient[c] +=
                    2.0f * unscaled * sum_w[r] *
                    LoadOrZero<C>(x_tangents.rows, rows[r] * x_tangents.rows.stride + column + c);
              }
            }
          }
          StorePair<C>(to_x.data, rows[r] * to_x.stride + column, gradient[0], gradient[1],
                       p.dim - column);
        }
      }
      if constexpr (kKeys) {
        if (to_y.data != nullptr) {
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

#endif  // GNOMON_SRC_CUDA_DERIVATIVES_CUH_
