// Certified skipping: narrows each query's interval of keys, so that the weights of the other keys
// provably sum to less than the fraction AttentionInput::tolerance of the row's total.
//
// The upper bound on the scores of a cell of keys is computed from the ranges of their norms and
// scalars, the definition's bounds on f (src/definitions/README.md), and the largest offset bias. A
// row's lower bound is its score for the key at its own position, where offset biases are usually
// largest. Cells are left out from both ends of the interval, as long as their bounds sum to at
// most half of the tolerance. Cells with non-finite keys or values are never left out, and a row
// whose own score is not finite leaves out nothing.
#ifndef GNOMON_SRC_CUDA_SKIPPING_CUH_
#define GNOMON_SRC_CUDA_SKIPPING_CUH_

#include "cuda/rows.cuh"

namespace gnomon::device {

// Safety margins for rounding errors in comparisons with a bound: one relative to the summed
// numbers, and one in log2 units.
constexpr float kBoundShare = 1.0f / 65536;
constexpr float kBoundSlack = 1.0f / 64;

// A range of numbers, for the bounds of definitions.
struct Range {
  float least, most;
};
template <class F>
concept HasBounds = requires(Range range, const float* numbers, const Range* ranges) {
  F::Bounds(range, numbers, ranges, numbers);
};

// Computes the bounds of 64 keys of a key head, with one warp. Keys hidden from the whole batch
// element are ignored.
template <class F, class C>
GNOMON_DEVICE void BoundKeys(const Parameters& p) {
  const int lane = Thread() % 32;
  const int cells = DivideUp(p.keys, cuda::kKeyCell);
  const Int64 index = static_cast<Int64>(BlockX()) * C::kWarps + Thread() / 32;
  const Int64 key_head = index / cells;
  if (key_head >= static_cast<Int64>(p.batch) * p.key_heads) return;
  const int b = static_cast<int>(key_head / p.key_heads);
  const int h = static_cast<int>(key_head % p.key_heads);
  const Interval seen = BatchKeys(p, b);
  const int begin = static_cast<int>(index % cells) * cuda::kKeyCell;
  const int first = Most(begin, static_cast<int>(seen.low));
  const int last = Least(begin + cuda::kKeyCell, static_cast<int>(seen.high));
  Range norms{Infinity(), 0.0f};
  Range scalars[3] = {};
#pragma unroll
  for (int s = 0; s < F::kColumnScalars; ++s) scalars[s] = {Infinity(), -Infinity()};
  const Head y = HeadOf<C>(p.y, b, h);
  if (!ReadsTokens<F>() && first < last) norms.least = 0;
  for (int j = first; j < last && ReadsTokens<F>(); ++j) {
    const float norm = Sqrt(SquaredNorm<C>(y, j, p.dim));
    // NaN remains.
    norms = {Min(norms.least, norm), Max(norms.most, norm)};
  }
  const Int64 columns = static_cast<Int64>(p.batch) * p.key_heads * p.keys;
  for (int j = first; j < last; ++j) {
#pragma unroll
    for (int s = 0; s < F::kColumnScalars; ++s) {
      const float scalar = p.column_scalars[s * columns + key_head * p.keys + j];
      if (!(Abs(scalar) < Infinity())) norms.most = Infinity();
      scalars[s] = {Min(scalars[s].least, scalar), Max(scalars[s].most, scalar)};
    }
  }
  if (first < last && HoldsNoNumber<C>(HeadOf<C>(p.v, b, h), first, last - first, p.value_dim)) {
    norms.most = Infinity();
  }
  if (lane != 0) return;
  float* const to = p.key_bounds + index * cuda::WordsOfKeyCell(F::kColumnScalars);
  to[0] = norms.least;
  to[1] = norms.most;
#pragma unroll
  for (int s = 0; s < F::kColumnScalars; ++s) {
    to[2 + 2 * s] = scalars[s].least;
    to[3 + 2 * s] = scalars[s].most;
  }
}

// Computes the largest bias of each cell of a table, in log2 units: -inf if all entries hide their
// pairs, and +inf if an entry is not a number. One thread runs for each cell.
template <class C>
GNOMON_DEVICE void BoundBiases(const Parameters& p) {
  const int cells = DivideUp(p.bias_size, cuda::kBiasCell);
  const Int64 index = static_cast<Int64>(BlockX()) * 32 * C::kWarps + Thread();
  const Int64 table = index / cells;
  const int tables = p.bias_batch_stride != 0 ? p.batch : 1;
  if (table >= static_cast<Int64>(tables) * p.heads) return;
  const int b = static_cast<int>(table / p.heads);
  const int h = static_cast<int>(table % p.heads);
  const float* const entries =
      p.bias + b * p.bias_batch_stride + static_cast<Int64>(h) * p.bias_size;
  const int begin = static_cast<int>(index % cells) * cuda::kBiasCell;
  float most = -Infinity();
  for (int n = begin; n < Least(begin + cuda::kBiasCell, p.bias_size); ++n) {
    const float bias = FiniteBias(entries[n]);
    most = bias <= most ? most : bias < Infinity() ? bias : Infinity();
  }
  p.bias_bounds[index] = most == -Infinity() ? most : most * kLog2E;
}

// The terms of a row's bounds.
template <class F>
struct RowBounds {
  Query query;
  float norm;
  const float* t;
  const float* keys;    // bounds of the cells of its keys
  const float* biases;  // bounds of the cells of its biases
  int first_entry;      // the bias of key 0

  // An upper bound on log2 of the sum of the weights of a cell; NaN or +inf if there is none.
  GNOMON_DEVICE float OfCell(const Parameters& p, int cell) const {
    if constexpr (!HasBounds<F>) {
      return Infinity();
    } else {
      const float* const of = keys + cell * cuda::WordsOfKeyCell(F::kColumnScalars);
      const Range norms{of[0], of[1]};
      const int begin = cell * cuda::kKeyCell;
      const int end = Least(begin + cuda::kKeyCell, p.keys);
      float bias = -Infinity();
      for (int c = (first_entry + begin) / cuda::kBiasCell;
           c <= (first_entry + end - 1) / cuda::kBiasCell; ++c) {
        bias = Max(bias, biases[c]);
      }
      // Hidden keys have no weight, whatever they contain.
      if (bias == -Infinity() || norms.least > norms.most) return -Infinity();
      if (!(norms.most < Infinity())) return Infinity();
      Range g{};
      if (IsDistance<F>()) {
        // The distance is at least the gap between the spheres of the row and of the keys, minus
        // the rounding error of the norms.
        const float sum = norm + norms.most;
        const float gap = Max(norms.least - norm, norm - norms.most);
        const float near = Max(0.0f, Fma(-kBoundShare, sum, gap));
        g = {near * near * (1.0f - 1.0f / 256), sum * sum * (1.0f + kBoundShare)};
      } else if (ReadsTokens<F>()) {
        const float product = norm * norms.most * (1.0f + kBoundShare);
        g = {-product, product};
      }
      Range scalars[3] = {};
#pragma unroll
      for (int s = 0; s < F::kColumnScalars; ++s) scalars[s] = {of[2 + 2 * s], of[3 + 2 * s]};
      const Range f = F::Bounds(g, query.a, scalars, t);
      const float content = query.factor * (query.factor < 0 ? f.least : f.most);
      const float margin = kBoundShare * (Abs(content) + Abs(bias)) + kBoundSlack;
      return content + bias + margin + Log2(static_cast<float>(end - begin));
    }
  }
};

// Narrows the interval of query i of a head, with one warp.
template <class F, class C>
GNOMON_DEVICE void NarrowIntervals(const Parameters& p) {
  const int lane = Thread() % 32;
  const Int64 row = static_cast<Int64>(BlockX()) * C::kWarps + Thread() / 32;
  if (row >= static_cast<Int64>(p.batch) * p.heads * p.queries) return;
  const int i = static_cast<int>(row % p.queries);
  const int h = static_cast<int>(row / p.queries % p.heads);
  const int b = static_cast<int>(row / p.queries / p.heads);
  const int key_head = h / p.group;
  const HeadInputs head = LoadHead<F, C>(p, b, h);
  const Query query = LoadQuery<F, C>(p, head, i);
  int low = query.low;
  int high = query.high;
  const auto store = [&] {
    if (lane != 0) return;
    p.narrow_low[row] = low;
    p.narrow_high[row] = high;
  };
  if (low >= high) {
    store();
    return;
  }
  const Head x = HeadOf<C>(p.x, b, h);
  const Head y = HeadOf<C>(p.y, b, key_head);
  // The score of the key at the query's position.
  const Int64 position = Near(QueryOffset(p, b) + i);
  const int own = static_cast<int>(Most<Int64>(low, Least<Int64>(position, high - 1)));
  float g = 0;
  if (ReadsTokens<F>()) {
    for (int d = lane; d < p.dim; d += 32) {
      const float from = LoadElement<C>(x.data, i * x.stride + d);
      const float to = LoadElement<C>(y.data, own * y.stride + d);
      g = IsDistance<F>() ? Fma(from - to, from - to, g) : Fma(from, to, g);
    }
    g = SumOfWarp(g);
  }
  const Key key = LoadKey<F, C>(p, b, h, own);
  const float content = query.factor * F::Value(g, query.a, key.b, head.t);
  const int first_entry = p.queries - 1 - i;
  const float bias = FiniteBias(head.bias[first_entry + own]) * kLog2E;
  RowBounds<F> bounds;
  bounds.query = query;
  bounds.norm = ReadsTokens<F>() ? Sqrt(SquaredNorm<C>(x, i, p.dim)) : 0.0f;
  bounds.t = head.t;
  bounds.keys = p.key_bounds + (static_cast<Int64>(b) * p.key_heads + key_head) *
                                   DivideUp(p.keys, cuda::kKeyCell) *
                                   cuda::WordsOfKeyCell(F::kColumnScalars);
  bounds.biases =
      p.bias_bounds + (static_cast<Int64>(p.bias_batch_stride != 0 ? b : 0) * p.heads + h) *
                          DivideUp(p.bias_size, cuda::kBiasCell);
  bounds.first_entry = first_entry;
  const float margin = kBoundShare * (Abs(content) + Abs(bias)) + kBoundSlack;
  // Each end may leave out half of the tolerance. NaN leaves out nothing.
  const float limit = content + bias - margin + p.log_tolerance - 1.0f;
  const int first_cell = low / cuda::kKeyCell;
  const int cells = DivideUp(high, cuda::kKeyCell) - first_cell;
  // The number of cells that are left out, in the order that cell_at(n) returns.
  const auto count = [&](const auto& cell_at) {
    float total = 0;
    for (int n = 0; n < cells; n += 32) {
      float weight = n + lane < cells ? Exp2(bounds.OfCell(p, cell_at(n + lane)) - limit) : 2.0f;
      // Adds the weights of the preceding lanes.
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const float before = Shuffle(weight, Most(0, lane - distance));
        if (lane >= distance) weight += before;
      }
      const bool fits = total + weight <= 1.0f;
      const int fitting = static_cast<int>(SumOfWarp(fits ? 1.0f : 0.0f));
      if (fitting < 32) return n + fitting;
      total += Shuffle(weight, 31);
    }
    return cells;
  };
  const int before = count([&](int n) { return first_cell + n; });
  const int after = count([&](int n) { return first_cell + cells - 1 - n; });
  // The cell of the query's own key is never left out.
  low = Most(low, (first_cell + before) * cuda::kKeyCell);
  high = Least(high, (first_cell + cells - after) * cuda::kKeyCell);
  store();
}

}  // namespace gnomon::device

#endif  // GNOMON_SRC_CUDA_SKIPPING_CUH_
