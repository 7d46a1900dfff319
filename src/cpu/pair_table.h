// The engine's interface to a pair function: one table per instruction set, which holds the scalar
// counts and the functions that process rows of scores. pair_rows-inl.h builds it from a
// definition. The engine receives the table at run time, so definitions are compiled independently
// of the engine. The declarations are identical for all instruction sets and are shared with
// libraries of definitions.
#ifndef GNOMON_SRC_CPU_PAIR_TABLE_H_
#define GNOMON_SRC_CPU_PAIR_TABLE_H_

#include <cstdint>
#include <vector>

#include "gnomon/attention.h"

namespace gnomon {

// Maximum number of scalars per row, column or head.
constexpr int kMostScalars = 3;
// The size of the longest vector, in bytes and in numbers.
constexpr int kMostBytes = 64;
template <class T>
constexpr int kMostLanes = kMostBytes / sizeof(T);

// The visible part of one row of a tile, relative to the tile's first column.
struct RowSpan {
  int64_t begin = 0;
  int64_t end = 0;
};

// The columns that a row attends to: those in its span that belong to the row's segment and have a
// visible position.
struct RowView {
  RowSpan span;
  RowSpan open;                       // whole vectors that are fully visible
  const int32_t* segments = nullptr;  // segments of the columns; null if there is only one segment
  int32_t segment = 0;
  const int32_t* positions = nullptr;  // positions of the columns; null if all are visible
  int32_t low = 0;                     // positions [low, high) are visible
  int32_t high = 0;

  void FindOpen(int64_t lanes) {
    if (segments != nullptr || positions != nullptr || span.begin >= span.end) return;
    open.begin = (span.begin + lanes - 1) / lanes * lanes;
    open.end = span.end / lanes * lanes;
    if (open.end < open.begin) open.end = open.begin;
  }
};

// A near pair: its token gradients are multiples of the difference between its tokens. Near pairs
// are processed separately, because adding them to the sums over other pairs would round this
// difference. d_distance is the gradient of the pair's squared distance.
template <class T>
struct NearPairOf {
  int32_t row;     // row of the tile
  int32_t column;  // relative to the row's scalars
  T d_distance;
};

// A tile's keys in consecutive transposed panels. `data` is null if the keys are not packed, or are
// packed as bfloat16 pairs.
template <class T>
struct TilePanelsOf {
  const T* data;
  int64_t columns;  // columns per token
  int64_t first;    // the tile column to which indices are relative
};

// The inputs of one row: its scalars and, for distances only, its token and the location of the
// keys. Members are left uninitialised to save time, because the rows of a tile are short.
template <class T>
struct PairRowOf {
  T a[kMostScalars];
  T t[kMostScalars];
  T norm;  // squared norm of the token
  T near;  // NearShare
  // Computes squared distances between the row's token and the keys in columns [j, j + lanes) as
  // sums of squared differences, in lanes where `wanted` is not 0.
  void (*near_distances)(const PairRowOf<T>& row, int64_t j, const T* wanted, T* distances);
  const void* x;
  const void* y;  // key of the first column
  TilePanelsOf<T> panels;
  int64_t y_stride;  // in bytes
  TokenType type;
  int64_t dim;
  int64_t keys;  // number of keys, from the first column on
  // Receives the near pairs that the backward pass finds; their row is `index`.
  std::vector<NearPairOf<T>>* near_pairs;
  int32_t index;
};

// Turns a row's scores into weights, p = 2^(score - largest) / sum, and weights into score
// gradients, ds = p (dP - delta). top_f is f at the largest score: sums of ds (f - top_f) have no
// large terms, even if f is large. For the same reason, top_slopes are the slopes at the largest
// score, with respect to the squared distance and to each row scalar. Sums of df use slopes
// relative to these: a row's ds add up to its dlse, so the contribution of the common slope is
// known without rounding.
template <class T>
struct RowSoftmaxOf {
  T largest;
  T inverse_sum;
  T delta;
  T top_f;
  const T* top_slopes;
};

// Sums that the backward pass accumulates over one row of a tile, in addition to the tile's arrays.
// Gradients are computed from slopes relative to RowSoftmax::top_slopes.
template <class T>
struct RowSumsOf {
  T score = 0;  // ds
  T mean = 0;   // p (f - top_f)
  T norm = 0;   // gradient of the squared norm, for a distance
  T a[kMostScalars] = {};
};

// Sums over all rows of a tile, accumulated in vectors that are reduced at the end.
template <class T>
struct TileSumsOf {
  alignas(kMostBytes) T factor[kMostLanes<T>];  // ds (f - top_f)
  alignas(kMostBytes) T t[kMostScalars][kMostLanes<T>];
};

// Consecutive pairs, in arrays padded to whole vectors: scalar s of pair n is a[s * stride + n]. g
// is null if the definition does not use it.
template <class T>
struct PairArraysOf {
  const T* g;
  const T* a;
  const T* b;
  const T* t;
  int64_t stride;
};
// The derivatives of f, in the same layout. They may alias the inputs. g is not written if the
// definition does not use it.
template <class T>
struct SlopeArraysOf {
  T* g;
  T* a;
  T* b;
  T* t;
};

// Ranges of g for several rows. The rows' scalars have the same layout as in PairArrays. Scalar s
// of every key is between b_least[s] and b_most[s].
template <class T>
struct RangeArraysOf {
  const T* g_least;
  const T* g_most;
  const T* a;
  const T* t;
  int64_t stride;
  const T* b_least;
  const T* b_most;
};

template <class T>
struct PairTableOf {
  int64_t target;  // the instruction set, in Highway's numbering
  PairInput input;
  int row_scalars;
  int column_scalars;
  int head_scalars;

  // Forward pass of one row: replaces inner products by scores in log2 units. There are `columns`
  // columns, a multiple of the vector length; the first `open` columns need no mask. Scores are f
  // times the factor, plus the bias if it is not null. Returns the largest score.
  T (*scores)(T* tile, int64_t columns, int64_t open, const PairRowOf<T>& row,
              const T* const* column_scalars, T factor, const T* bias, const RowView& view);

  // Backward pass of the same row. Input: inner products in `tile`, dP in `gradient`. Output:
  // weights p in `tile`, gradients of the inner products in `gradient`. Adds gradients of the
  // column scalars, followed by those of the squared norms of a distance, to `d_columns`, and dS to
  // `d_bias` if it is not null. `balances` requests the sums that later correct the row's rounding
  // errors. `totals` accumulates the gradients of the factor and the head scalars over all rows;
  // `sums` holds the row's sums.
  void (*gradients)(T* tile, T* gradient, int64_t columns, int64_t open, const PairRowOf<T>& row,
                    const T* const* column_scalars, T* const* d_columns, T factor, const T* bias,
                    T* d_bias, const RowSoftmaxOf<T>& softmax, bool balances, const RowView& view,
                    TileSumsOf<T>& totals, RowSumsOf<T>& sums);

  // Compute f (which may overwrite g) and its derivatives times `scale`, for `count` pairs.
  void (*values)(const PairArraysOf<T>& pairs, int64_t count, T* f);
  void (*slopes)(const PairArraysOf<T>& pairs, int64_t count, const T* scale,
                 const SlopeArraysOf<T>& slopes);

  // Bounds of f for `count` rows; null if the definition has none.
  void (*bounds)(const RangeArraysOf<T>& ranges, int64_t count, T* least, T* most);

  bool has_product() const { return input != PairInput::kNone; }
  bool is_distance() const { return input == PairInput::kSquaredDistance; }
};

using NearPair = NearPairOf<float>;
using TilePanels = TilePanelsOf<float>;
using PairRow = PairRowOf<float>;
using RowSoftmax = RowSoftmaxOf<float>;
using RowSums = RowSumsOf<float>;
using TileSums = TileSumsOf<float>;
using PairArrays = PairArraysOf<float>;
using SlopeArrays = SlopeArraysOf<float>;
using RangeArrays = RangeArraysOf<float>;
using PairTable = PairTableOf<float>;

}  // namespace gnomon

#endif  // GNOMON_SRC_CPU_PAIR_TABLE_H_
