// Kernel parameters. Host and device share this file, so it includes nothing.
#ifndef GNOMON_SRC_CUDA_PARAMETERS_H_
#define GNOMON_SRC_CUDA_PARAMETERS_H_

namespace gnomon::cuda {

using Int64 = long long;

// An array with (batch, head, row) strides in elements; columns are contiguous.
struct Array {
  void* data;
  Int64 stride[3];
};

// The layout of a table (gnomon/table_layout.h).
struct LayoutParameters {
  enum Kind { kByOffset = 1, kByKey = 2, kOfGrid = 3 };
  static constexpr int kMostAxes = 4;

  int kind;
  int size;
  Int64 past, future;  // kByOffset
  int clips;
  int sums;  // kOfGrid: whether to sum separate entries for each axis
  int axes;
  int prefix;
  int tokens;
  int shape[kMostAxes];
  int first[kMostAxes];
  int step[kMostAxes];
};

// One matrix per head, with strides in elements. Elements have the call's type if `element` is 1,
// and are fp32 if it is 0.
struct Matrix {
  const void* data;
  Int64 batch, head, row, column;
  int element;
};

// For each head of a launch, computes to = factor * left * right, where left is (rows, depth) and
// right is (depth, columns).
struct Product {
  Matrix left, right;
  int rows, columns, depth;
  float factor;
  int heads;      // per batch element
  float* to;      // (heads of the launch, rows, columns), contiguous; not stored if null
  int adds;       // whether to add to the existing content
  Array rounded;  // the result in the call's element type; not stored if null
  int skips;      // whether zeros of `left`, whose entries no pair has read, are skipped
};

// The tangents of the inputs, and the results of derivatives.cuh that are not tangents of
// gradients. Arrays have the layout of the inputs; null means 0, except for results.
struct Tangents {
  Array x, y, v, d_o;
  const float* row_scalars;
  const float* column_scalars;
  const float* head_scalars;
  const float* factor;
  const float* bias;
  const float* key_bias;
  Array pair_bias;
  const float* temperature;
  const float* d_lse;

  // Computed from the above, like the members of Parameters with these names.
  float* norm_x;
  float* norm_y;
  int* spoiled;
  float* relative_scores;
  float* relative_products;
  float* relative_weights;
  float* d_relative_scores;
  float* relative_key_scores;
  float* d_relative_key_scores;
  float* lse;    // (B, H, Lq)
  float* delta;  // (B, H, Lq)
  float* o;      // (B, H, Lq, Dv)
};

// The tokens of q or k in a token map (token_map.cuh), with axes (B, heads, rows, columns).
struct TokenMapSide {
  int heads, rows;
  int blocks;            // per head
  int columns;           // of the given tokens
  int width;             // columns of the result
  int turned;            // number of rotated columns
  int turn_block;        // columns whose two halves form pairs
  Array tokens;          // the given tokens
  Array d_tokens;        // their gradient
  Array mapped;          // the result or, in the backward pass, its gradient; null means 0
  float* scalars;        // (S, B, heads, rows), likewise
  Array cosines, sines;  // of floats, with a column per pair
  float* d_cosines;      // (B, heads, rows, pairs), without a cone; null: not computed
  float* d_sines;        // likewise
};

struct TokenMap {
  TokenMapSide sides[2];  // q and k
  int back;               // whether to rotate by the opposite angles
  int turns_aligned;      // whether the rows of cosines and sines are 16-byte aligned
  float number;           // umbral cones: 1 / sinh(r); penumbral cones: r
  float farthest;         // see ConeMap
};

// The parameters of all kernels, in one struct. Arrays are contiguous unless they have type Array.
// Sizes: B batch, H query heads, Hkv key heads, Lq queries, Lk keys.
struct Parameters {
  int batch, heads, key_heads, group, queries, keys, dim, value_dim;

  // The input of the call.
  Array x, y, v;
  // With pages, y and v are arrays of pages: key j of batch element b is row j % 2^page_shift of
  // page page_table[b, j >> page_shift].
  const Int64* page_table;  // (B, Lk >> page_shift)
  int pages, page_shift;
  const float* row_scalars;     // (R, B, H, Lq)
  const float* column_scalars;  // (C, B, Hkv, Lk)
  const float* head_scalars;    // (S, H)
  const float* factor;          // (H)
  const float* bias;            // (1 or B, H, bias_size)
  Int64 bias_batch_stride;
  int bias_size;
  LayoutParameters layout;
  const float* key_bias;       // (B, H, Lk)
  const float* key_bias_low;   // (B, H, Lk)
  const float* key_bias_base;  // (B, H, Lq)
  Array pair_bias;             // of floats
  Array pair_mask;             // of unsigned chars
  const float* temperature;    // (B, H, Lq)
  float softcap;               // in log2 units
  float softcap_inverse;       // 1 / softcap
  const int* query_segments;   // (B, Lq)
  const int* key_segments;     // (B, Lk)

  // Relative keys and values. Tables (rows, relative_size) have one row per query of a launch; the
  // first row belongs to the query with index relative_row in (B, H, Lq).
  LayoutParameters relative_layout;
  int relative_size;
  Int64 relative_row;
  float* relative_scores;        // r_i . E_n
  float* relative_products;      // dO_i . W_n
  float* relative_weights;       // sum of the weights that use entry n, with dropout
  float* d_relative_scores;      // sum of the score gradients
  const float* relative_values;  // W: (1 or H, relative_size, Dv)
  Int64 relative_values_stride;  // between heads
  Product product;               // relative.cuh

  // Relative queries. Keys have tables (rows, relative_key_tables, relative_size), one for all
  // query heads of a key head, or one for each of them. There is one row per key of a launch; the
  // first row belongs to the key with index relative_key_row in (B, Hkv, Lk). Pairs that read entry
  // n of the layout read number relative_size - 1 - n of a table.
  int relative_key_tables;
  Int64 relative_key_row;
  float* relative_key_scores;    // r_j . F_n
  float* d_relative_key_scores;  // sum of the score gradients

  // The mask's parameters for key intervals, and the intervals that rows.cuh computes from them.
  Int64 left, right, chunk_size, chunks_before, chunks_after, query_offset;
  const Int64* query_offsets;
  const Int64* query_positions;  // (B, Lq)
  const Int64* key_positions;    // (B, Lk)
  const Int64* key_starts;
  const Int64* key_lengths;
  const Int64* key_rows;
  int interval_heads;  // H with narrowed intervals (skipping.cuh), otherwise 1
  int* low;            // (B, interval_heads, Lq): first visible key
  int* high;           // (B, interval_heads, Lq): one past the last visible key
  // With call positions, both are ascending bounds of the visible keys. Keys between them may
  // be hidden. A place is a position relative to that of the batch element's first query (origins).
  Int64* origins;     // (B)
  int* query_places;  // (B, Lq)
  int* key_places;    // (B, Lk)
  int* first_places;  // (B, Lq): the smallest position of a key that the mask allows
  int* last_places;   // (B, Lq): the largest

  // Narrowed intervals, and the bounds from which they are computed.
  float log_tolerance;  // log2
  int* narrow_low;      // (B, H, Lq)
  int* narrow_high;     // (B, H, Lq)
  float* key_bounds;    // (B, Hkv, ceil(Lk / kKeyCell), words of a cell)
  float* bias_bounds;   // (1 or B, H, ceil(bias_size / kBiasCell)): the largest entries, in log2

  unsigned long long seed;
  unsigned threshold;  // dropout threshold
  float kept;          // dropout scale
  unsigned* drop;      // (2, B, H, Lq): hash inputs per row

  // Squared norms of tokens, for distances.
  float* norm_x;  // (B, H, Lq)
  float* norm_y;  // (B, Hkv, Lk)
  // Whether any of 16 keys has a non-finite value: (B, Hkv, ceil(Lk / 16)).
  int* spoiled;

  // Forward pass.
  Array o;
  float* exact_o;     // (B, H, Lq, Dv)
  float* lse;         // (B, H, Lq)
  float* statistics;  // (3, B, H, Lq)
  int parts;          // number of parts of the keys; their results are merged
  int tiles_in_part;
  float* partial;             // (parts, B, H, Lq, Dv): sums of weights times values
  float* partial_statistics;  // (3, parts, B, H, Lq): like statistics

  // Backward pass.
  Array d_o;
  const float* d_lse;     // (B, H, Lq)
  float* shift;           // (B, H, Lq): inf if a row sees no key
  float* inverse;         // (B, H, Lq): 1 / sum
  float* delta;           // (B, H, Lq)
  float* balanced_delta;  // (B, H, Lq): corrected by the pass over the keys
  Array d_x, d_y, d_v;
  float* d_row;          // (R, B, H, Lq)
  float* d_column;       // (C, B, Hkv, Lk)
  float* d_factor_rows;  // (1 + S, B, H, Lq): per-row gradients of the factor and scalars
  float* d_temperature;  // (B, H, Lq)
  float* d_key_bias;     // (B, H, Lk)
  float* d_bias_parts;   // (B, H, bias_parts, bias_size)
  int bias_parts;
  Array d_pair_bias;
  int chunks;      // number of chunks of gradient columns
  int first_head;  // first of the launch's B x H or B x Hkv heads; then every head_step-th
  int head_step;

  // The backward pass in one pass. The four arrays are consecutive.
  float* query_sums;   // (B, H, tiles of queries, SumsOfTile()): gradients of queries
  float* query_words;  // (B, H, tiles of queries, query_word_count, kOnePassStep): see QueryOf()
  int query_word_count;
  int* turns;             // (B, H, tiles of queries): the number of blocks that have added
  int* tickets;           // one number
  Int64 query_sums_size;  // of all four arrays

  // Sums in a fixed order: to[n] = sum over k < outer and m < count of from[k * outer_stride + m *
  // stride + n], for n < size. Block y of the grid uses from + y * from_step and to + y * to_step.
  const float* sum_from;
  float* sum_to;
  Int64 sum_size, sum_count, sum_outer;
  Int64 sum_stride, sum_outer_stride, sum_from_step, sum_to_step;

  // Forward-mode derivatives (derivatives.cuh).
  Tangents tangent;

  TokenMap map;
};

}  // namespace gnomon::cuda

#endif  // GNOMON_SRC_CUDA_PARAMETERS_H_
