// The score of a query-key pair. All kernels use this code, so that scores are bitwise identical,
// except for the last rounding in the backward pass in one pass, and for products by wgmma.
#ifndef GNOMON_SRC_CUDA_PAIR_CUH_
#define GNOMON_SRC_CUDA_PAIR_CUH_

#include "cuda/primitives.cuh"
#include "cuda/tables.cuh"

namespace gnomon::device {

// The inputs of a score that come from the query.
struct Query {
  float a[3];
  float norm;
  float near;         // a squared distance below this fraction of the norms is near
  float factor;       // factor of f, including the temperature, in log2 units
  float temperature;  // factor of the added terms, likewise
  float base;
  int low, high;  // the visible keys
  int segment;
  int first_place, last_place;
  uint32 drop_first, drop_second;
};
// The inputs of a score that come from the key.
struct Key {
  float b[3];
  float norm;
  float bias, bias_low;
  int segment;
  int place;
};
// The inputs of a score that come from the head, for one block.
struct HeadInputs {
  int b, h;
  Int64 position;  // QueryOffset()
  float factor;    // c
  float t[3];
  const float* bias;             // the head's bias table
  const float* relative_scores;  // of query 0
  const float* relative_products;
  const float* relative_key_scores;  // of key 0
};

template <class F>
GNOMON_DEVICE constexpr bool IsDistance() {
  return F::kInput == PairInput::kSquaredDistance;
}
template <class F>
GNOMON_DEVICE constexpr bool ReadsTokens() {
  return F::kInput != PairInput::kNone;
}

// The partial derivatives of f.
struct Derivative {
  float g;
  float a[3];
  float b[3];
  float t[3];
};

template <class F>
concept HasBoth = requires(float number, const float* numbers, Derivative& slopes) {
  F::Both(number, numbers, numbers, numbers, slopes);
};
// Returns f and stores its derivatives.
template <class F>
GNOMON_DEVICE float ValueAndSlopes(float g, const float* a, const float* b, const float* t,
                                   Derivative& slopes) {
  if constexpr (HasBoth<F>) {
    return F::Both(g, a, b, t, slopes);
  } else {
    F::Gradient(g, a, b, t, slopes);
    return F::Value(g, a, b, t);
  }
}

template <class F, class C>
GNOMON_DEVICE HeadInputs LoadHead(const Parameters& p, int b, int h) {
  HeadInputs head{};
  head.b = b;
  head.h = h;
  head.factor = p.factor[h];
#pragma unroll
  for (int s = 0; s < F::kHeadScalars; ++s) head.t[s] = p.head_scalars[s * p.heads + h];
  if (C::kBias != 0 || C::kRelativeKeys != 0 || C::kRelativeValues != 0 ||
      C::kRelativeQueries != 0) {
    head.position = QueryOffset(p, b);
  }
  if (C::kBias != 0) {
    head.bias = p.bias + b * p.bias_batch_stride + static_cast<Int64>(h) * p.bias_size;
  }
  const Int64 first =
      ((static_cast<Int64>(b) * p.heads + h) * p.queries - p.relative_row) * p.relative_size;
  if (C::kRelativeKeys != 0) head.relative_scores = p.relative_scores + first;
  if (C::kRelativeValues != 0) head.relative_products = p.relative_products + first;
  if (C::kRelativeQueries != 0) {
    head.relative_key_scores = p.relative_key_scores + KeyTableOf(p, b, h);
  }
  return head;
}

// `factor`: c.
template <class F, class C>
GNOMON_DEVICE void SetFactors(Query& q, float factor, float temperature) {
  q.factor = factor * kLog2E;
  q.temperature = kLog2E;
  if (C::kTemperature != 0) {
    q.factor *= temperature;
    q.temperature *= temperature;
  }
  if (IsDistance<F>() && C::kOnePass == 0) q.near = NearShare(q.factor * kLn2, q.norm);
}

// Loads query i < Lq.
template <class F, class C>
GNOMON_DEVICE Query LoadQuery(const Parameters& p, const HeadInputs& head, int i) {
  Query q{};
  const Int64 row = (static_cast<Int64>(head.b) * p.heads + head.h) * p.queries + i;
  const Int64 rows = static_cast<Int64>(p.batch) * p.heads * p.queries;
  const Int64 in_batch = static_cast<Int64>(head.b) * p.queries + i;
#pragma unroll
  for (int s = 0; s < F::kRowScalars; ++s) q.a[s] = p.row_scalars[s * rows + row];
  if (IsDistance<F>()) q.norm = p.norm_x[row];
  SetFactors<F, C>(q, C::kPacked != 0 ? p.factor[head.h * p.queries + i] : head.factor,
                   C::kTemperature != 0 ? p.temperature[row] : 1.0f);
  if (C::kKeyBias == 2) q.base = p.key_bias_base[row];
  const Int64 interval = IntervalsOf(p, head.b, head.h) + i;
  q.low = p.low[interval];
  q.high = p.high[interval];
  if (C::kSegments != 0) q.segment = p.query_segments[in_batch];
  if (C::kPositions != 0) {
    q.first_place = p.first_places[in_batch];
    q.last_place = p.last_places[in_batch];
  }
  if (C::kDropout != 0) {
    q.drop_first = p.drop[row];
    q.drop_second = p.drop[rows + row];
  }
  return q;
}

// Loads key j < Lk.
template <class F, class C>
GNOMON_DEVICE Key LoadKey(const Parameters& p, int b, int h, int j) {
  Key k{};
  const Int64 key_head = static_cast<Int64>(b) * p.key_heads + h / p.group;
  const Int64 columns = static_cast<Int64>(p.batch) * p.key_heads * p.keys;
#pragma unroll
  for (int s = 0; s < F::kColumnScalars; ++s) {
    k.b[s] = p.column_scalars[s * columns + key_head * p.keys + j];
  }
  if (IsDistance<F>()) k.norm = p.norm_y[key_head * p.keys + j];
  const Int64 in_heads = (static_cast<Int64>(b) * p.heads + h) * p.keys + j;
  if (C::kKeyBias != 0) k.bias = p.key_bias[in_heads];
  if (C::kKeyBias == 2) k.bias_low = p.key_bias_low[in_heads];
  const Int64 in_batch = static_cast<Int64>(b) * p.keys + j;
  if (C::kSegments != 0) k.segment = p.key_segments[in_batch];
  if (C::kPositions != 0) k.place = p.key_places[in_batch];
  return k;
}

template <class F, class C>
GNOMON_DEVICE Key KeyOf(const unsigned char* words, int column) {
  Key k{};
  words += 4 * column;
  const auto take = [&] {
    const auto word = LoadShared<float>(words);
    words += 4 * C::kStep;
    return word;
  };
#pragma unroll
  for (int s = 0; s < F::kColumnScalars; ++s) k.b[s] = take();
  if (IsDistance<F>()) k.norm = take();
  if (C::kKeyBias != 0) k.bias = take();
  if (C::kKeyBias == 2) k.bias_low = take();
  if (C::kSegments != 0) k.segment = static_cast<int>(BitsOf(take()));
  if (C::kPositions != 0) k.place = static_cast<int>(BitsOf(take()));
  return k;
}

// Additional inputs of the backward pass that come from the query.
struct RowSoftmax {
  float shift, inverse, delta;
};
template <class F, class C>
GNOMON_DEVICE Query QueryOf(const unsigned char* words, int column, const HeadInputs& head,
                            RowSoftmax& softmax, float& temperature) {
  Query q{};
  words += 4 * column;
  const auto take = [&] {
    const auto word = LoadShared<float>(words);
    words += 4 * C::kStep;
    return word;
  };
  q.low = static_cast<int>(BitsOf(take()));
  q.high = static_cast<int>(BitsOf(take()));
  softmax.shift = take();
  if (C::kOnePass == 0) softmax.inverse = take();
  softmax.delta = take();
#pragma unroll
  for (int s = 0; s < F::kRowScalars; ++s) q.a[s] = take();
  if (IsDistance<F>()) q.norm = take();
  if (IsDistance<F>() && C::kOnePass != 0) q.near = take();
  temperature = C::kTemperature != 0 ? take() : 1.0f;
  SetFactors<F, C>(q, head.factor, temperature);
  if (C::kKeyBias == 2) q.base = take();
  if (C::kSegments != 0) q.segment = static_cast<int>(BitsOf(take()));
  if (C::kPositions != 0) {
    q.first_place = static_cast<int>(BitsOf(take()));
    q.last_place = static_cast<int>(BitsOf(take()));
  }
  if (C::kDropout != 0) {
    q.drop_first = BitsOf(take());
    q.drop_second = BitsOf(take());
  }
  return q;
}

// The number of arrays of words that are copied with tiles of keys or, with `kQueries`, of queries.
template <class F, class C, bool kQueries>
GNOMON_DEVICE constexpr int WordCount() {
  return kQueries ? cuda::QueryWords(F::kRowScalars, IsDistance<F>(), C::kKeyBias, C::kSegments,
                                     C::kPositions, C::kTemperature, C::kDropout, C::kOnePass)
                  : cuda::KeyWords(F::kColumnScalars, IsDistance<F>(), C::kKeyBias, C::kSegments,
                                   C::kPositions);
}

// Copies the words of rows [first, first + kStep), with 0 for rows outside [low, high), which are
// not read. `from`: the word of row 0, plus the lane.
template <class C>
GNOMON_DEVICE void CopyWordsByWarp(unsigned char* to, const uint32* from, int first, int low,
                                   int high) {
  const int lane = Thread() % 32;
  const bool inside = first >= low && first + C::kStep <= high;
#pragma unroll
  for (int r = 0; r < C::kStep; r += 32) {
    if (r + 32 > C::kStep && r + lane >= C::kStep) break;
    const bool exists = inside || (first + r + lane >= low && first + r + lane < high);
    CopyAsync4(to + 4 * (r + lane), from + (exists ? first + r : low - lane), exists);
  }
}

// Copies the words of consecutive tiles: the inputs of KeyOf() or, with `kQueries`, of QueryOf().
// The warps divide the arrays of words among themselves.
template <class F, class C, bool kQueries>
class TileWords {
 public:
  GNOMON_DEVICE TileWords(const Parameters& p, int b, int h) : p_(p), b_(b), h_(h) {
    if (!KeepsAddresses()) return;
    ForEachArray(h, [&](int array, const uint32* from) {
      if (array % C::kWarps == Thread() / 32) from_[array / C::kWarps] = from;
    });
  }

  // Copies the words of rows [first, first + kStep), like CopyWordsByWarp().
  GNOMON_DEVICE void Copy(unsigned char* to, int first, int low, int high) const {
    const int warp = Thread() / 32;
    if (!KeepsAddresses()) {
      ForEachArray(Fresh(h_), [&](int array, const uint32* from) {
        if (array % C::kWarps == warp)
          CopyWordsByWarp<C>(to + 4 * array * C::kStep, from, first, low, high);
      });
      return;
    }
#pragma unroll
    for (int n = 0; n < DivideUp(WordCount<F, C, kQueries>(), C::kWarps); ++n) {
      const int array = n * C::kWarps + warp;
      if (array < WordCount<F, C, kQueries>()) {
        CopyWordsByWarp<C>(to + 4 * array * C::kStep, from_[n], first, low, high);
      }
    }
  }

 private:
  // Wide heads leave no registers for addresses.
  GNOMON_DEVICE static constexpr bool KeepsAddresses() { return C::kDim <= 128; }

  // Calls use(index, address of the word of row 0, plus the lane) for each array.
  template <class Use>
  GNOMON_DEVICE void ForEachArray(int h, const Use& use) const {
    int array = 0;
    const auto add = [&](const void* from, Int64 at) {
      use(array++, static_cast<const uint32*>(from) + at + Thread() % 32);
    };
    if (kQueries) {
      const Int64 row = (static_cast<Int64>(b_) * p_.heads + h) * p_.queries;
      const Int64 rows = static_cast<Int64>(p_.batch) * p_.heads * p_.queries;
      const Int64 in_batch = static_cast<Int64>(b_) * p_.queries;
      add(p_.low, IntervalsOf(p_, b_, h));
      add(p_.high, IntervalsOf(p_, b_, h));
      add(p_.shift, row);
      add(p_.inverse, row);
      add(p_.delta, row);
#pragma unroll
      for (int s = 0; s < F::kRowScalars; ++s) add(p_.row_scalars, s * rows + row);
      if (IsDistance<F>()) add(p_.norm_x, row);
      if (C::kTemperature != 0) add(p_.temperature, row);
      if (C::kKeyBias == 2) add(p_.key_bias_base, row);
      if (C::kSegments != 0) add(p_.query_segments, in_batch);
      if (C::kPositions != 0) {
        add(p_.first_places, in_batch);
        add(p_.last_places, in_batch);
      }
      if (C::kDropout != 0) {
        add(p_.drop, row);
        add(p_.drop, rows + row);
      }
      return;
    }
    const Int64 key_head = static_cast<Int64>(b_) * p_.key_heads + h / p_.group;
    const Int64 columns = static_cast<Int64>(p_.batch) * p_.key_heads * p_.keys;
    const Int64 in_heads = (static_cast<Int64>(b_) * p_.heads + h) * p_.keys;
#pragma unroll
    for (int s = 0; s < F::kColumnScalars; ++s) {
      add(p_.column_scalars, s * columns + key_head * p_.keys);
    }
    if (IsDistance<F>()) add(p_.norm_y, key_head * p_.keys);
    if (C::kKeyBias != 0) add(p_.key_bias, in_heads);
    if (C::kKeyBias == 2) add(p_.key_bias_low, in_heads);
    if (C::kSegments != 0) add(p_.key_segments, static_cast<Int64>(b_) * p_.keys);
    if (C::kPositions != 0) add(p_.key_places, static_cast<Int64>(b_) * p_.keys);
  }

  const Parameters& p_;
  int b_;
  int h_;
  const uint32* from_[GNOMON_SIZE(Most(1, DivideUp(WordCount<F, C, kQueries>(), C::kWarps)), 16)] =
      {};
};

// A pair's score in log2 units, or -inf if it is hidden.
struct Score {
  float value;
  float f;
  float g;
  float added;  // terms added to c f, without the temperature
  float slope;  // of the soft cap; only with kSoftcap
  bool seen;
};

// Adds up the entries that query i and key j read in a table.
template <class C>
GNOMON_DEVICE float SumOfPair(const Parameters& p, const LayoutParameters& layout,
                              const float* table, const HeadInputs& head, int i, int j) {
  return SumOfEntries(layout, table, QueryPosition<C>(p, head.b, head.position, i),
                      KeyPosition<C>(p, head.b, head.position, j));
}

// The number that query i and key j read in the key's table. `table`: the head's table of key 0.
template <class C>
GNOMON_DEVICE float NumberOfKey(const Parameters& p, const float* table, const HeadInputs& head,
                                int i, int j) {
  const int number = NumberInKeyTable<C>(p, head.b, head.position, i, j);
  return number < 0 ? 0.0f : table[j * KeyTableStep(p) + number];
}

GNOMON_DEVICE float FiniteBias(float bias) {
  return Abs(bias) < Infinity() ? Max(-kMostBias, Min(kMostBias, bias)) : bias;
}

// A compile-time flag for loops over pairs.
template <bool kIs>
struct Whether {
  static constexpr bool value = kIs;
};

// `g`: the pair's product or squared distance. `window`: the biases of the tile's diagonals; this
// pair's bias has index `diagonal`. `kInside`: whether the pair is guaranteed to be within the
// query's key interval.
template <class F, class C, bool kInside>
GNOMON_DEVICE Score ScoreOf(const Parameters& p, const HeadInputs& head, const Query& q,
                            const Key& k, int i, int j, float g, const unsigned char* window,
                            int diagonal) {
  Score s{};
  s.seen = kInside || (j >= q.low && j < q.high);
  if (C::kSegments != 0) s.seen = s.seen && q.segment == k.segment;
  if (C::kPositions != 0) {
    s.seen = s.seen && k.place >= q.first_place && k.place <= q.last_place;
  }
  if (C::kPairMask != 0) {
    if (s.seen) {
      const Array& mask = p.pair_mask;
      s.seen = static_cast<const unsigned char*>(
                   mask.data)[head.b * mask.stride[0] + head.h * mask.stride[1] +
                              i * mask.stride[2] + j] != 0;
    }
  }
  if (C::kBias == 1) {
    s.added = FiniteBias(LoadShared<float>(window + 4 * diagonal));
    s.seen = s.seen && s.added != -Infinity();
  }
  if (C::kBias == 2) {
    if (s.seen) s.added = FiniteBias(SumOfPair<C>(p, p.layout, head.bias, head, i, j));
    s.seen = s.seen && s.added != -Infinity();
  }
  if (C::kKeyBias != 0) {
    s.seen = s.seen && k.bias != -Infinity();
    float bias = FiniteBias(k.bias);
    // Subtracts the base first: both terms are sums over many tokens and may nearly cancel.
    if (C::kKeyBias == 2) bias = bias - q.base + k.bias_low;
    s.added += bias;
  }
  if (C::kPairBias != 0) {
    if (s.seen) {
      const Array& bias = p.pair_bias;
      const float value = static_cast<const float*>(
          bias.data)[head.b * bias.stride[0] + head.h * bias.stride[1] + i * bias.stride[2] + j];
      s.seen = value != -Infinity();
      s.added += FiniteBias(value);
    }
  }
  if (C::kRelativeKeys != 0) {
    if (s.seen) {
      s.added +=
          SumOfPair<C>(p, p.relative_layout,
                       head.relative_scores + static_cast<Int64>(i) * p.relative_size, head, i, j);
    }
  }
  if (C::kRelativeQueries != 0) {
    if (s.seen) s.added += NumberOfKey<C>(p, head.relative_key_scores, head, i, j);
  }
  s.g = g;
  s.f = F::Value(s.g, q.a, k.b, head.t);
  s.value = q.factor * s.f;
  if (C::kBias != 0 || C::kKeyBias != 0 || C::kPairBias != 0 || C::kRelativeKeys != 0 ||
      C::kRelativeQueries != 0) {
    s.value = Fma(q.temperature, s.added, s.value);
  }
  if (C::kSoftcap != 0) {
    const float part = s.value * p.softcap_inverse;
    s.value = p.softcap * Tanh(part);
    // 1 - tanh^2 would cancel.
    const float e = Exp2(-2 * kLog2E * Abs(part));
    s.slope = 4 * e / ((1 + e) * (1 + e));
  }
  if (!s.seen) s.value = -Infinity();
  return s;
}

// The row and column of one of a thread's pairs, relative to the thread's first pair in a tile.
// `place` is the pair's bit in a word: 4 n + e for pair [n][e].
GNOMON_DEVICE int RowOf(int place) { return place % 4 / 2 * 8; }
GNOMON_DEVICE int ColumnOf(int place) { return place / 4 * 8 + place % 2; }

// The norms of a pair, for its squared distance.
struct Norms {
  float sum;    // of the squared norms
  float share;  // a squared distance below this fraction of the sum is near
};
GNOMON_DEVICE Norms NormsOf(const Query& q, const Key& k) { return {q.norm + k.norm, q.near}; }
// Positive unless a squared distance is near: cancellation has lost too many digits, or the norms
// overflow. NaN counts as near.
GNOMON_DEVICE float BeyondNear(const Norms& norms, float distance) {
  return Fma(-norms.share, norms.sum, distance);
}

// Converts a thread's products in a tile to squared distances; norms(n, e) returns the Norms of
// pair [n][e]. Returns whether some of the distances are near.
template <class C, class NormsOfPair>
GNOMON_DEVICE bool ConvertProducts(float (*s)[4], const NormsOfPair& norms) {
  float least = Infinity();
#pragma unroll
  for (int n = 0; n < C::kStep / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const Norms of_pair = norms(n, e);
      s[n][e] = Fma(-2.0f, s[n][e], of_pair.sum);
      least = Min(least, BeyondNear(of_pair, s[n][e]));
    }
  }
  return !(least > 0);
}

// The sum of the squares of difference(d) for d < count. Uses Kahan summation, because scores are
// large multiples of the distance.
template <class Difference>
GNOMON_DEVICE float SumOfSquares(int count, const Difference& difference_at) {
  float sum = 0;
  float beyond = 0;
#pragma unroll 1
  for (int d = 0; d < count; ++d) {
    const float difference = difference_at(d);
    const float addend = Fma(difference, difference, -beyond);
    const float next = sum + addend;
    beyond = (next - sum) - addend;
    sum = next;
  }
  return sum;
}

// Recomputes near distances from token differences if their pairs are visible. distance_of(row,
// column, g) does so for rows and columns relative to the thread's first pair, and returns whether
// the pair is visible. Returns the pairs that were recomputed, as bits 4 n + e.
template <class C, class NormsOfPair, class DistanceOfPair>
GNOMON_DEVICE uint32 RecomputeNear(float (*s)[4], const NormsOfPair& norms,
                                   const DistanceOfPair& distance_of) {
  uint32 near = 0;
#pragma unroll
  for (int n = 0; n < C::kStep / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (!(BeyondNear(norms(n, e), s[n][e]) > 0)) near |= 1u << (4 * n + e);
    }
  }
  uint32 anew = 0;
  for (int place = 0; near != 0; ++place, near >>= 1) {
    if ((near & 1) == 0) continue;
    float g = 0;
    if (!distance_of(RowOf(place), ColumnOf(place), g)) continue;
    anew |= 1u << place;
#pragma unroll
    for (int n = 0; n < C::kStep / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (place == 4 * n + e) s[n][e] = g;
      }
    }
  }
  return anew;
}

// Converts products like ConvertProducts(), and recomputes near distances from the tokens in global
// memory. The thread's pairs combine rows `own` and own + 8 with rows other + 8 n and
// other + 8 n + 1. With `kKeys`, the block's own rows are keys. Returns the pairs that were
// recomputed, as bits 4 n + e.
template <class C, bool kKeys, class NormsOfPair>
GNOMON_DEVICE uint32 ToDistances(float (*s)[4], const Parameters& p, const HeadInputs& head,
                                 int own, int other, const NormsOfPair& norms) {
  if (!ConvertProducts<C>(s, norms)) return 0;
  const auto distance_of = [&](int own_row, int other_row, float& g) {
    const int i = kKeys ? other + other_row : own + own_row;
    const int j = kKeys ? own + own_row : other + other_row;
    if (i >= p.queries) return false;
    const Int64 interval = IntervalsOf(p, head.b, Fresh(head.h)) + i;
    if (j < p.low[interval] || j >= p.high[interval]) return false;
    const Head x = HeadOf<C>(p.x, head.b, head.h);
    const Head y = KeyRowOf<C>(p, p.y, head.b, head.h / p.group, j);
    g = SumOfSquares(p.dim, [&](int d) {
      return LoadElement<C>(x.data, i * x.stride + d) - LoadElement<C>(y.data, d);
    });
    return true;
  };
  return RecomputeNear<C>(s, norms, distance_of);
}

// The keys [low, high) that some query of heads [first_h, last_h) attends to.
struct SeenKeys {
  GNOMON_DEVICE SeenKeys(const Parameters& p, int b, int first_h, int last_h) {
    if (p.queries == 0) return;
    low = p.keys;
    for (int h = first_h; h < last_h; ++h) {
      const Int64 first = IntervalsOf(p, b, h);
      low = Least(low, p.low[first]);
      high = Most(high, p.high[first + p.queries - 1]);
      if (p.interval_heads == 1) break;
    }
  }

  int low = 0;
  int high = 0;
};

// The queries [low, high) of a head that may attend to keys [begin, end). Both ends of a query's
// range of keys are monotonic in the query. If no query attends to these keys, high may be below
// low.
struct QueryRange {
  GNOMON_DEVICE QueryRange(const Parameters& p, int b, int h, int begin, int end) {
    const int* const lows = p.low + IntervalsOf(p, b, h);
    const int* const highs = p.high + IntervalsOf(p, b, h);
    // The first query whose range ends after the first key, and the first query whose range starts
    // after the last key.
    int last = p.queries;
    while (low < last) {
      const int middle = (low + last) / 2;
      if (highs[middle] > begin) {
        last = middle;
      } else {
        low = middle + 1;
      }
    }
    last = p.queries;
    while (high < last) {
      const int middle = (high + last) / 2;
      if (lows[middle] >= end) {
        last = middle;
      } else {
        high = middle + 1;
      }
    }
  }

  int low = 0;
  int high = 0;
};

// The dropout factor of a weight (base/dropout.h).
template <class C>
GNOMON_DEVICE float Kept(const Parameters& p, const Query& q, int j) {
  if (C::kDropout == 0) return 1;
  uint32 x = static_cast<uint32>(j) + q.drop_first;
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = ((x ^ (x >> 15)) + q.drop_second) * 0x846ca68bu;
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x ^= x >> 15;
  return x < p.threshold ? 0.0f : p.kept;
}

}  // namespace gnomon::device

#endif  // GNOMON_SRC_CUDA_PAIR_CUH_
