// What kernels are given: shared by the host and the device, and so without any include.
#ifndef GNOMON_SRC_CUDA_PARAMETERS_H_
#define GNOMON_SRC_CUDA_PARAMETERS_H_

namespace gnomon::cuda {

using Int64 = long long;

// (batch, head, row) strides in elements; columns are contiguous.
struct Array {
  void* data;
  Int64 stride[3];
};

// A layout of a table (gnomon/table_layout.h).
struct LayoutParameters {
  enum Kind { kByOffset = 1, kByKey = 2, kOfGrid = 3 };
  static constexpr int kMostAxes = 4;

  int kind;
  int size;
  Int64 past, future;  // kByOffset
  int clips;
  int sums;  // kOfGrid: whether each axis has entries of its own, whose sum is taken
  int axes;
  int prefix;
  int tokens;
  int shape[kMostAxes];
  int first[kMostAxes];
  int step[kMostAxes];
};

// Numbers of heads, each (row, column), by strides in elements: of the call's element type, or
// fp32.
struct Matrix {
  const void* data;
  Int64 batch, head, row, column;
  int element;
};

// Of each head of a launch: to = factor left right, (rows, depth) times (depth, columns).
struct Product {
  Matrix left, right;
  int rows, columns, depth;
  float factor;
  float* to;      // (heads of the launch, rows, columns), contiguous; null: not kept
  int adds;       // whether it is added to what is there
  Array rounded;  // the same in the call's element type; null: not kept
  int skips;      // whether a 0 of `left` stands for what nothing has read
};

// One struct for all kernels. Arrays are contiguous unless they are an Array; B batches, H heads of
// queries, Hkv of keys, Lq queries and Lk keys.
struct Parameters {
  int batch, heads, key_heads, group, queries, keys, dim, value_dim;

  // The call's input.
  Array x, y, v;
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
  Array pair_bias;             // of float
  Array pair_mask;             // of unsigned char
  const float* temperature;    // (B, H, Lq)
  const int* query_segments;   // (B, Lq)
  const int* key_segments;     // (B, Lk)

  // Relative keys and values: tables (rows, relative_size), of which each query has one, for the
  // queries of a launch; their first belongs to row relative_row of (B, H, Lq).
  LayoutParameters relative_layout;
  int relative_size;
  Int64 relative_row;
  float* relative_scores;        // r_i . E_n
  float* relative_products;      // dO_i . W_n
  float* relative_weights;       // the sum of what n weighs, dropout included
  float* d_relative_scores;      // the sum of what the scores' gradients are
  const float* relative_values;  // W: (1 or H, relative_size, Dv)
  Int64 relative_values_stride;  // of heads
  Product product;               // relative.cuh

  // The mask's part that is an interval of keys, and what rows.cuh makes of it.
  Int64 left, right, chunk_size, chunks_before, chunks_after, query_offset;
  const Int64* query_offsets;
  const Int64* key_starts;
  const Int64* key_lengths;
  const Int64* key_rows;
  int* low;   // (B, Lq): the first key that a query sees
  int* high;  // (B, Lq): one past the last

  unsigned long long seed;
  unsigned threshold;  // of dropout
  float kept;          // what a weight that is kept is multiplied by
  unsigned* drop;      // (2, B, H, Lq): what the hash reads of a row

  // Of tokens, where they have a distance.
  float* norm_x;  // (B, H, Lq)
  float* norm_y;  // (B, Hkv, Lk)
  // Whether 16 keys have a value that is not finite: (B, Hkv, ceil(Lk / 16)).
  int* spoiled;

  // Forward.
  Array o;
  float* exact_o;     // (B, H, Lq, Dv)
  float* lse;         // (B, H, Lq)
  float* statistics;  // (3, B, H, Lq)
  int parts;          // of the keys, whose results are merged
  int tiles_in_part;
  float* partial;        // (parts, B, H, Lq, Dv): sums of weights times values
  float* partial_terms;  // (3, parts, B, H, Lq): as statistics

  // Backward.
  Array d_o;
  const float* d_lse;     // (B, H, Lq)
  float* largest;         // (B, H, Lq): inf in a row that sees no key
  float* inverse;         // (B, H, Lq): 1 / sum
  float* delta;           // (B, H, Lq)
  float* balanced_delta;  // likewise, as the pass over the keys finds that it should be
  Array d_x, d_y, d_v;
  float* d_row;     // (R, B, H, Lq)
  float* d_column;  // (C, B, Hkv, Lk)
  float*
      d_factor_rows;  // (1 + S, B, H, Lq): each row's part of the factor's and scalars' gradients
  float* d_temperature;  // (B, H, Lq)
  float* d_key_bias;     // (B, H, Lk)
  float* d_bias_parts;   // (B, H, bias_parts, bias_size)
  int bias_parts;
  Array d_pair_bias;
  int chunks;      // of the columns of gradients
  int first_head;  // of a launch over some of the B x H heads, or B x Hkv: every head_step-th on
  int head_step;

  // Sums in fixed order (sums.cuh): to[n] = sum over m < count of from[m * stride + n], n < size,
  // for each of the grid's y: from + y * from_step, to + y * to_step.
  const float* sum_from;
  float* sum_to;
  Int64 sum_size, sum_count, sum_outer;
  Int64 sum_stride, sum_outer_stride, sum_from_step, sum_to_step;
};

}  // namespace gnomon::cuda

#endif  // GNOMON_SRC_CUDA_PARAMETERS_H_
