// A pair function as the engine sees it: a table for each instruction set, of its counts of scalars
// and of functions on rows of scores (pair_rows-inl.h makes it of a definition). The engine takes a
// table as a value, so that a definition compiles without the engine. What follows is the same for
// all instruction sets and shared with libraries of definitions.
#ifndef GNOMON_SRC_CPU_PAIR_TABLE_H_
#define GNOMON_SRC_CPU_PAIR_TABLE_H_

#include <cstdint>
#include <vector>

#include "gnomon/attention.h"

namespace gnomon {

// Scalars of a row, a column or a head.
constexpr int kMostScalars = 3;
// Floats of the longest vector.
constexpr int kMostLanes = 16;

// The visible part of one row of a tile, relative to the tile's first column.
struct RowSpan {
  int64_t begin = 0;
  int64_t end = 0;
};

// What a row sees of some columns: those of its span that are of its segment and stand where it
// sees.
struct RowView {
  RowSpan span;
  RowSpan open;                       // of that, whole vectors of which it sees all
  const int32_t* segments = nullptr;  // of the columns; null: one segment
  int32_t segment = 0;
  const int32_t* positions = nullptr;  // of the columns; null: it sees all of the span
  int32_t low = 0;                     // sees positions [low, high)
  int32_t high = 0;

  void FindOpen(int64_t lanes) {
    if (segments != nullptr || positions != nullptr || span.begin >= span.end) return;
    open.begin = (span.begin + lanes - 1) / lanes * lanes;
    open.end = span.end / lanes * lanes;
    if (open.end < open.begin) open.end = open.begin;
  }
};

// A pair of tokens whose gradients are its difference times a number, which no sum over other pairs
// may round: d_distance, that of its squared distance.
struct NearPair {
  int32_t row;     // of the tile
  int32_t column;  // of those that the row's scalars are of
  float d_distance;
};

// A tile's keys as transposed panels, one behind the other; none where they are not packed, or as
// pairs.
struct TilePanels {
  const float* data;
  int64_t columns;  // of a token
  int64_t first;    // the tile's column that others count from
};

// What one row brings to its pairs: its scalars and, for a distance alone, its token and where the
// keys are. Without initial values: a row of a tile is short.
struct PairRow {
  float a[kMostScalars];
  float t[kMostScalars];
  float norm;  // squared, of the token
  float near;  // NearShare
  // Squared distances of the row and columns [j, j + lanes) by the differences of their tokens,
  // where `wanted` is not 0.
  void (*near_distances)(const PairRow& row, int64_t j, const float* wanted, float* distances);
  const void* x;
  const void* y;  // of the first column
  TilePanels panels;
  int64_t y_stride;  // in bytes
  TokenType type;
  int64_t dim;
  int64_t keys;  // from the first column on
  // Where the backward pass leaves pairs that are near, as those of row `index`.
  std::vector<NearPair>* near_pairs;
  int32_t index;
};

// What turns a row's scores into weights, p = 2^(score - largest) / sum, and these into gradients,
// ds = p (dP - delta); and f of the largest score: the sum of ds (f - top_f) has no large terms,
// however large f is. Likewise its slopes, by the squared distance and by each row scalar, of which
// sums of df times a slope only have the differences: a row's ds add up to its dlse, so that the
// common part of all slopes is known without rounding.
struct RowSoftmax {
  float largest;
  float inverse_sum;
  float delta;
  float top_f;
  const float* top_slopes;
};

// What the backward pass adds up over one row of a tile, besides the tiles themselves. Gradients
// are beyond those of the top slopes.
struct RowSums {
  float score = 0;  // ds
  float mean = 0;   // p (f - top_f)
  float norm = 0;   // by the squared norm of a distance
  float a[kMostScalars] = {};
};

// And over all rows of a tile, in vectors, which are summed once.
struct TileSums {
  alignas(4 * kMostLanes) float factor[kMostLanes];  // ds (f - top_f)
  alignas(4 * kMostLanes) float t[kMostScalars][kMostLanes];
};

// Pairs one after the other, in arrays that whole vectors may be read from and written to: scalar s
// of pair n is a[s * stride + n]. g is null where the definition reads none.
struct PairArrays {
  const float* g;
  const float* a;
  const float* b;
  const float* t;
  int64_t stride;
};
// f's derivatives by them, likewise; they may be the same arrays. g is not written where the
// definition reads none.
struct SlopeArrays {
  float* g;
  float* a;
  float* b;
  float* t;
};

// Ranges of g for several rows, whose scalars stand as those of pairs do, and of scalar s of all
// keys: b_least[s] to b_most[s].
struct RangeArrays {
  const float* g_least;
  const float* g_most;
  const float* a;
  const float* t;
  int64_t stride;
  const float* b_least;
  const float* b_most;
};

struct PairTable {
  int64_t target;  // the instruction set, as Highway numbers them
  PairInput input;
  int row_scalars;
  int column_scalars;
  int head_scalars;

  // A row of a tile, forward: inner products -> scores in units of log2, in place, for `columns`
  // columns, whole vectors, of which the first `open` need no mask. Scores are f times the factor
  // plus the bias, if that is not null. Returns the largest.
  float (*scores)(float* tile, int64_t columns, int64_t open, const PairRow& row,
                  const float* const* column_scalars, float factor, const float* bias,
                  const RowView& view);

  // The same row, backward. In: inner products in `tile`, dP in `gradient`. Out: weights p in
  // `tile`, the inner products' gradients in `gradient`; those of the column scalars, and last of
  // the squared norms of a distance, are added to `d_columns`, dS to `d_bias` where it is not null.
  // Whether the row's rounding is to be balanced, which takes sums of its own, `balances` says;
  // what the factor and the head scalars take of all rows is added to `totals`; `sums` are the
  // row's.
  void (*gradients)(float* tile, float* gradient, int64_t columns, int64_t open, const PairRow& row,
                    const float* const* column_scalars, float* const* d_columns, float factor,
                    const float* bias, float* d_bias, const RowSoftmax& softmax, bool balances,
                    const RowView& view, TileSums& totals, RowSums& sums);

  // f of `count` pairs, which may take the place of g; and its derivatives times `scale`.
  void (*values)(const PairArrays& pairs, int64_t count, float* f);
  void (*slopes)(const PairArrays& pairs, int64_t count, const float* scale,
                 const SlopeArrays& slopes);

  // Bounds of f for `count` rows. Null: the definition has none.
  void (*bounds)(const RangeArrays& ranges, int64_t count, float* least, float* most);

  bool has_product() const { return input != PairInput::kNone; }
  bool is_distance() const { return input == PairInput::kSquaredDistance; }
};

}  // namespace gnomon

#endif  // GNOMON_SRC_CPU_PAIR_TABLE_H_
